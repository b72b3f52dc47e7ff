"""Two costs on two axes: points on the Pareto front are filled, others hollow."""

from itertools import pairwise

from matplotlib.transforms import Bbox

from labkit.show import style

# Places for a name: offset from its point in typographic points, and the text's alignment.
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


def pareto(frame, x, y, by="variant", title=None):
    """Return a Figure with a point per `by` at the medians of x and y; lower left is better.

    Lines show the quartiles. The points of the Pareto front (see front) are filled and joined by a
    staircase. Units: by the columns' names, bytes in the unit that suits the largest. Raises
    ValueError without rows.
    """
    if frame.empty:
        raise ValueError("nothing was measured, so there is nothing to draw")
    names = list(dict.fromkeys(frame[by]))
    factors, units = zip(*(scale(frame, column) for column in (x, y)), strict=True)
    scaled = frame[[x, y]].div(list(factors)).groupby(frame[by])
    low, middle, high = (scaled.quantile(q).loc[names].values.tolist() for q in (0.25, 0.5, 0.75))
    best = front(middle)
    steps = sorted(middle[number] for number in best)
    colours = style.palette(names)
    with style.look():
        figure, axes = style.new_figure(8.0, 4.4)
        look = {"where": "post", "color": style.FAINT, "linewidth": 1.2, "zorder": 1}
        axes.step(*zip(*steps, strict=True), **look)
        for number, name in enumerate(names):
            filled = number in best
            draw_point(axes, low[number], middle[number], high[number], colours[name], filled)
        axes.set_ylim(0, 1.12 * max(height for _, height in high))
        axes.margins(x=0.12)
        axes.set_xlabel(style.axis_label(x, units[0]))
        axes.set_ylabel(style.axis_label(y, units[1]))
        axes.grid(axis="y")
        style.entitle(figure, title)
        style.note_above(axes, "filled points: nothing else is both faster and smaller")
        figure.draw_without_rendering()
        lines = staircase(steps) + level_lines(low, middle, high)
        write_names(axes, dict(zip(names, middle, strict=True)), lines)
    return figure


def draw_point(axes, low, middle, high, colour, filled):
    """Draw a point at its medians, filled or hollow, with lines between its quartiles."""
    x, y = middle
    look = {"color": colour, "linewidth": 1.2, "zorder": 2}
    axes.plot([low[0], high[0]], [y, y], **look)
    axes.plot([x, x], [low[1], high[1]], **look)
    fill = colour if filled else style.GROUND
    axes.plot(x, y, "o", markersize=9, color=colour, markerfacecolor=fill, zorder=3)


def staircase(steps):
    """Return [((x, y), (x, y))]: the lines of the staircase that joins the front's points."""
    lines = []
    for (x, y), (right, under) in pairwise(steps):
        lines.append(((x, y), (right, y)))
        lines.append(((right, y), (right, under)))
    return lines


def level_lines(low, middle, high):
    """Return [((x, y), (x, y))]: the lines between the quartiles in x."""
    points = zip(low, middle, high, strict=True)
    return [((left, y), (right, y)) for (left, _), (_, y), (right, _) in points]


def scale(frame, column):
    """Return (divisor, unit) for an axis."""
    unit = style.unit_of(column)
    return style.byte_scale(frame[column].max()) if unit == "bytes" else (1, unit)


def front(points):
    """Return indices of the (x, y) that no other beats, by at most as much in both, less in one."""
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
