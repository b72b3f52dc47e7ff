"""The same without and with an option, on two axes: hollow, then filled, an arrow between.

loss |     o            o  without error feedback
     |     |            |
     |     v            v
     | - - * - - - - - -* - - -   *  with it; the dashed line is the reference, which needs neither
     +------------------------
       bytes sent (log)
"""

import numpy as np
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from labkit.show import style
from labkit.show.pareto import write_names

HEADROOM = 1.35  # times the highest finite value: the place of diverged runs
FAR = 1.03  # ratio of two heights from which on an arrow between them can be seen


def switched(frame, x, y, by, switch, reference=None, title=None):
    """Return a Figure of y over x, log-log, a point per row; arrows lead from switch off to on.

    frame: one row per `by` and switch, which is bool. reference: a `by` whose y is drawn across.
    Where y is NaN (the training diverged) a triangle stands at the top. Units: by the columns'
    names. Raises ValueError without rows.
    """
    if frame.empty:
        raise ValueError("nothing was measured, so there is nothing to draw")
    colours = style.palette(frame[by])
    top = HEADROOM * frame[y].max()
    with style.look():
        figure, axes = style.new_figure(9.0, 5.0)
        axes.set_xscale("log")
        axes.set_yscale("log")
        names = {}
        lines = []
        for one, rows in frame.groupby(by, sort=False):
            ends = []
            for row in rows.sort_values(switch).itertuples():
                on = getattr(row, switch)
                diverged = np.isnan(getattr(row, y))
                ends.append((getattr(row, x), top if diverged else getattr(row, y)))
                look = {
                    "color": colours[one],
                    "markerfacecolor": colours[one] if on else style.GROUND,
                    "zorder": 3,
                }
                axes.plot(*ends[-1], "^" if diverged else "o", markersize=9, **look)
            if len(ends) == 2 and not 1 / FAR < ends[0][1] / ends[1][1] < FAR:
                arrow = {
                    "arrowstyle": "-|>",
                    "color": colours[one],
                    "linewidth": 1.6,
                    "shrinkA": 5,
                    "shrinkB": 5,
                }
                axes.annotate("", ends[1], ends[0], arrowprops=arrow, zorder=2)
                lines.append(tuple(ends))
            names[one] = ends[-1]
        if reference is not None:
            axes.axhline(
                names[reference][1],
                color=colours[reference],
                linewidth=1.2,
                linestyle=(0, (4, 3)),
                zorder=1,
            )
        axes.margins(x=0.12, y=0.14)
        label(axes, style.unit_of(x))
        axes.set_xlabel(style.name(x))
        axes.set_ylabel(style.axis_label(y))
        axes.grid(axis="y")
        style.entitle(figure, title)
        words = f"hollow: without {style.name(switch)}   filled: with it, or without need of it"
        words += "   triangle: diverged" if frame[y].isna().any() else ""
        style.note_above(axes, words)
        figure.draw_without_rendering()
        write_names(axes, names, lines)
    return figure


def label(axes, x_unit):
    """Label with plain digits: x in steps of four if it counts bytes, y in ones, twos and fives."""
    axes.xaxis.set_major_locator(LogLocator(base=4 if x_unit == "bytes" else 10))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: style.quantity(value, x_unit)))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    style.plain_digits(axes.yaxis)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())
