"""A roofline: the speed of an operation over its FLOPs per byte, under the machine's two ceilings.

    FLOP/s |        ________________   arithmetic: the FLOP/s of large matrix products
           |       /:     o tiles
           |      / :                  left of the ridge (:) memory is the lower ceiling
           |     / s:                  memory: byte/s x FLOPs per byte
           +----------------------- FLOPs per byte

Williams, Waterman, Patterson, Roofline, CACM 2009.
"""

from matplotlib.ticker import EngFormatter, NullFormatter

from labkit.show import style

MARKERS = "sovD"  # shapes tell variants apart without colours


def roofline(ceilings, points, title=None):
    """Return a Figure with a log-log roofline per machine, side by side, and a point per row.

    ceilings: DataFrame with machine, flop_per_s, bytes_per_s. points: DataFrame with machine,
    variant, flop_per_byte, flop_per_s, name (written at the lower right; "" for none). A line joins
    the points of a variant in the order of the rows.
    """
    variants = list(dict.fromkeys(points["variant"]))
    colours = style.palette(variants)
    behind = {"fc": style.GROUND, "ec": "none", "pad": 0.5}  # a name may lie on a ceiling
    with style.look():
        figure, panels = style.new_figure(9.0, 4.2, columns=len(ceilings), squeeze=False)
        for axes, roof in zip(panels[0], ceilings.itertuples(), strict=True):
            mine = points[points["machine"] == roof.machine]
            draw_roof(axes, roof, mine)
            for variant, marker in zip(variants, MARKERS, strict=False):
                rows = mine[mine["variant"] == variant]
                look = {"marker": marker, "linewidth": 1.2, "label": style.name(variant)}
                look |= {"markersize": 9 if variant == variants[0] else 6}  # the first may be below
                axes.plot(rows["flop_per_byte"], rows["flop_per_s"], color=colours[variant], **look)
            for point in mine.itertuples():
                place = point.flop_per_byte, point.flop_per_s
                style.beside(axes, point.name, place, (8, -9), bbox=behind)
        panels[0][0].set_ylabel("speed (FLOP/s)")
        handles, names = panels[0][0].get_legend_handles_labels()
        style.legend_below(figure, handles, names, handlelength=1.6)
        style.entitle(figure, title)
    return figure


def ridge(roof):
    """Return the FLOPs per byte from which arithmetic is the lower ceiling."""
    return roof.flop_per_s / roof.bytes_per_s


def rate(value, unit):
    """Return a rate as text with 3 digits: (3.12e14, "FLOP/s") -> "312 TFLOP/s"."""
    return EngFormatter(unit)(float(f"{value:.3g}"))


def draw_roof(axes, roof, points):
    """Draw the two ceilings, a thin line at the ridge, and the axes that hold all points."""
    turn = ridge(roof)
    left = min(turn, points["flop_per_byte"].min()) / 8
    right = max(turn, points["flop_per_byte"].max()) * 8
    heights = [left * roof.bytes_per_s, roof.flop_per_s, roof.flop_per_s]
    axes.plot([left, turn, right], heights, color=style.INK, linewidth=1.6)
    axes.axvline(turn, color=style.FAINT, linewidth=0.9, linestyle=(0, (3, 3)))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left, right)
    every = [*heights, *points["flop_per_s"]]
    axes.set_ylim(min(every) / 2, max(every) * 2)
    style.plain_digits(axes.xaxis)
    axes.yaxis.set_major_formatter(EngFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("FLOPs per byte of memory traffic")
    axes.grid(axis="y")
    speeds = rate(roof.flop_per_s, "FLOP/s"), rate(roof.bytes_per_s, "B/s")
    words = f"{roof.machine}: {speeds[0]}, {speeds[1]}, ridge at {style.quantity(turn)}"
    style.note_above(axes, words)
