"""Pictures of predictions: compared with published figures, and time over money.

published |         . /     on the line: predicted as published; the band: 20 % to either side
          |      ./.
          |   ./
          +-------------- predicted
"""

import numpy as np

from labkit.show import style
from labkit.show.pareto import front

BAND = 0.2
SHAPES = "osD^vP"


def against_published(frame, title=None):
    """Return a Figure with a point per row, log-log, and a colour and a shape for each group.

    frame: `group` (six at most), `predicted` and `published`, in tokens per second and GPU. Raises
    ValueError for more groups.
    """
    if frame["group"].nunique() > len(SHAPES):
        raise ValueError(f"{len(SHAPES)} groups at most can be drawn; merge some of them")
    colours = style.palette(frame["group"])
    values = frame[["predicted", "published"]].to_numpy()
    ends = np.array([values.min() / 1.3, values.max() * 1.3])
    with style.look():
        figure, axes = style.new_figure(7.0, 6.2)
        look = {"color": style.GREY, "alpha": 0.25, "linewidth": 0, "label": f"± {BAND:.0%}"}
        axes.fill_between(ends, ends * (1 - BAND), ends * (1 + BAND), **look)
        axes.plot(ends, ends, color=style.FAINT, linewidth=1.2)
        for shape, (group, rows) in zip(SHAPES, frame.groupby("group", sort=False), strict=False):
            look = {"linestyle": "none", "color": colours[group], "markeredgecolor": style.GROUND}
            look |= {"markersize": 6.5, "markeredgewidth": 0.6}
            name = f"{group}, {len(rows)} rows"
            axes.plot(rows["predicted"], rows["published"], shape, label=name, **look)
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
        axes.set_xlabel("predicted (tokens/s of a GPU, log)")
        axes.set_ylabel("published (tokens/s of a GPU, log)")
        axes.legend(loc="upper left", frameon=False)
        style.entitle(figure, title)
    return figure


def time_and_money(frame, error, title=None):
    """Return a Figure of GPU-hours over days, a point per number of GPUs; the front is filled.

    frame: `gpus`, `days`, `gpu_hours`. error: relative error of a prediction, drawn as vertical
    lines.
    """
    rows = frame.sort_values("days")
    points = list(zip(rows["days"], rows["gpu_hours"] / 1000, strict=True))
    best = front(points)
    with style.look():
        figure, axes = style.new_figure(8.0, 4.4)
        steps = list(zip(*(points[number] for number in best), strict=True))
        axes.step(*steps, where="post", color=style.FAINT, linewidth=1.2)
        for number, ((x, y), gpus) in enumerate(zip(points, rows["gpus"], strict=True)):
            spread = [y / (1 + error), y / (1 - error)]
            axes.plot([x, x], spread, color=style.BLUE, alpha=0.5, linewidth=1.2)
            fill = style.BLUE if number in best else style.GROUND
            look = {"markersize": 8, "color": style.BLUE, "markerfacecolor": fill}
            axes.plot(x, y, "o", **look)
            style.beside(axes, f"{gpus:,}", (x, y), (7, 9), weight="bold")
        axes.set_xscale("log")
        axes.margins(x=0.1)
        days = [
            d for d in (1, 2, 5, 10, 20, 50, 100, 200, 500) if steps[0][0] <= d <= points[-1][0]
        ]
        axes.set_xticks(days, [str(d) for d in days])
        axes.xaxis.minorticks_off()
        axes.set_xlabel("days (log)")
        axes.set_ylabel("GPU-hours (thousands)")
        axes.grid(axis="y")
        words = f"numbers of GPUs; filled points: none is faster and cheaper; lines: ± {error:.1%}"
        style.note_above(axes, words)
        style.entitle(figure, title)
    return figure
