"""The overview: what every strategy costs, side by side, and that all of them learn the same.

strategy      step time   exposed   sent   memory       each panel its own unit, whiskers: quartiles
single        ====        |         |      ========
DDP, naive    ========    ====      ====   ====
loss          curves that lie on one another
"""

import numpy as np
from matplotlib.ticker import MaxNLocator

from labkit.measure.stats import summary
from labkit.show import style
from labkit.show.bars import draw_bars
from labkit.show.curves import draw_runs

PANELS = ("step_ms", "exposed_comm_ms", "sent_bytes", "peak_bytes")
BROADEST = 9.0  # points, of the first loss curve


def overview(frame, title=None, panels=PANELS):
    """Return a Figure of compare()'s records: bars by strategy for each metric, and the losses."""
    frame = style.in_order(frame, "strategy")
    strategies = list(dict.fromkeys(frame["strategy"]))
    colours = style.palette(strategies)
    places = list(range(len(strategies)))
    with style.look():
        height = 2.9 + 0.42 * len(strategies)
        ratios = (0.12 * len(strategies) + 0.5, 1)
        figure, grid = style.new_figure(11.0, height, rows=2, columns=1, height_ratios=ratios)
        specification = grid[0].get_subplotspec().subgridspec(1, len(panels), wspace=0.06)
        grid[0].remove()
        for column, metric in enumerate(panels):
            axes = figure.add_subplot(specification[0, column])
            bars = []
            for place, strategy in zip(places, strategies, strict=True):
                values = frame.loc[frame["strategy"] == strategy, metric].dropna()
                spread = summary(values) if len(values) else None
                bars.append((place, style.name(strategy), spread, colours[strategy]))
            draw_bars(axes, bars, style.unit_of(metric))
            axes.set_xlim(0, axes.get_xlim()[1] * 1.22)
            names = [style.name(strategy) for strategy in strategies]
            style.name_rows(axes, places, names if column == 0 else [""] * len(names))
            axes.set_title(
                style.axis_label(metric, axes.value_unit), loc="left", size=9.5, weight="normal"
            )
            axes.grid(axis="x")
        draw_losses(grid[1], frame, colours)
        style.entitle(figure, title)
    return figure


def draw_losses(axes, frame, colours):
    """Draw the mean loss over ranks at each step; the first strategy's line is the broadest."""
    means = frame.groupby(["strategy", "step"], as_index=False)["loss"].mean()
    widths = np.linspace(BROADEST, 1.2, len(colours))
    draw_runs(axes, means, "step", "loss", "strategy", colours, widths)
    axes.set_xlabel("step")
    axes.set_ylabel(style.axis_label("loss"))
    axes.grid(axis="y")
    axes.set_title("training loss (colours as above)", loc="left", size=9.5, weight="normal")
    axes.margins(x=0.01)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
