"""Two costs on two axes: points on the Pareto front are filled, others hollow."""

from itertools import pairwise

from matplotlib.transforms import Bbox

from labkit.show import style

# Places for a name: offset from its point in typographic points, and the text's side there.
SPOTS = (
    *(((9, 8), "left"), ((-9, 8), "right"), ((9, -9), "left"), ((-9, -9), "right")),
    *(
        ((0, 17), "center"),
        ((0, -17), "center"),
        ((9, 20), "left"),
        ((9, -21), "left"),
        ((-9, -21), "right"),
    ),
)


def pareto(frame, x, y, by="form", title=None):
    """Figure: a point per `by` at the medians of x and y, quartiles as lines; lower left is better.

    The front, points than which no other is lower in x and at most as high in y, is filled and
    joined by a staircase: any point on or above it can be had. Units: by the columns' names, bytes
    in the unit that suits the largest.
    """
    if frame.empty:
        raise ValueError("nothing was measured, so there is nothing to draw")
    names = list(dict.fromkeys(frame[by]))
    grouped = frame.groupby(by)[[x, y]]
    middle, low, high = (grouped.quantile(q).loc[names] for q in (0.5, 0.25, 0.75))
    factors, units = zip(*(scale(frame, column) for column in (x, y)), strict=True)
    middle, low, high = (
        [[row[x] / factors[0], row[y] / factors[1]] for _, row in f.iterrows()]
        for f in (middle, low, high)
    )
    best = front(middle)
    colours = style.palette(names)
    with style.look():
        figure, axes = style.new_figure(8.0, 4.4)
        steps = sorted(middle[number] for number in best)
        axes.step(
            *zip(*steps, strict=True), where="post", color=style.FAINT, linewidth=1.2, zorder=1
        )
        for number, name in enumerate(names):
            (at, height) = middle[number]
            (left, under) = low[number]
            (right, over) = high[number]
            axes.plot([left, right], [height, height], color=colours[name], linewidth=1.2, zorder=2)
            axes.plot([at, at], [under, over], color=colours[name], linewidth=1.2, zorder=2)
            fill = colours[name] if number in best else style.GROUND
            axes.plot(
                at, height, "o", markersize=9, color=colours[name], markerfacecolor=fill, zorder=3
            )
        axes.set_ylim(0, 1.12 * max(height for _, height in high))
        axes.margins(x=0.12)
        axes.set_xlabel(style.axis_label(x, units[0]))
        axes.set_ylabel(style.axis_label(y, units[1]))
        axes.grid(axis="y")
        style.entitle(figure, title)
        note = {"xycoords": "axes fraction", "va": "bottom", "size": 9, "color": style.FAINT}
        axes.annotate("filled: nothing else is both faster and smaller", (0, 1), **note)
        figure.draw_without_rendering()
        treads = [((x, y), (end, y)) for (x, y), (end, _) in pairwise(steps)]
        risers = [((x, y), (x, under)) for (_, y), (x, under) in pairwise(steps)]
        spreads = [
            ((left, y), (right, y))
            for (left, _), (_, y), (right, _) in zip(low, middle, high, strict=True)
        ]
        write_names(axes, dict(zip(names, middle, strict=True)), [*treads, *risers, *spreads])
    return figure


def scale(frame, column):
    """Return (divisor, unit) for an axis."""
    unit = style.unit_of(column)
    return style.byte_scale(frame[column].max()) if unit == "bytes" else (1, unit)


def front(points):
    """Numbers of the (x, y) points that no other beats: at most as large in both, less in one."""
    return [
        number
        for number, (x, y) in enumerate(points)
        if not any(a <= x and b <= y and (a, b) != (x, y) for a, b in points)
    ]


def write_names(axes, points, lines):
    """Write each name next to its point, covering no point or name, and no line if possible.

    points: name -> (x, y). lines: [((x, y), (x, y))], along one axis each. All in the data's units.
    """
    around = 6 * axes.figure.dpi / 72
    pixels = axes.transData.transform(list(points.values()))
    taken = [Bbox.from_bounds(x - around, y - around, 2 * around, 2 * around) for x, y in pixels]
    drawn = [Bbox(axes.transData.transform(line)) for line in lines]
    drawn = [Bbox.from_extents(b.xmin - 1, b.ymin - 1, b.xmax + 1, b.ymax + 1) for b in drawn]
    for name, point in points.items():
        spots = []
        for offset, side in SPOTS:
            look = {"ha": side, "va": "center", "weight": "bold"}
            text = style.beside(axes, style.name(name), point, offset, **look)
            box = text.get_window_extent()
            inside = box.x0 >= axes.bbox.x0 and box.x1 <= axes.bbox.x1 and box.y1 <= axes.bbox.y1
            covered = (
                100 * box.count_overlaps(taken) + box.count_overlaps(drawn) + 1000 * (not inside)
            )
            spots.append((covered, len(spots), text, box))
        _, best, text, box = min(spots, key=lambda spot: spot[:2])
        taken.append(box)
        for _, number, other, _ in spots:
            if number != best:
                other.remove()
