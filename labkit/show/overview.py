"""The overview: what every strategy costs, side by side, and whether all of them learn the same.

strategy      step time   exposed   sent   memory       each panel its own unit, whiskers: quartiles
single        ====        |         |      ========
DDP, naive    ========    ====      ====   ====
loss          one line for all strategies that agree, and a named line for each other one
"""

import numpy as np
from matplotlib.ticker import MaxNLocator

from labkit.measure.stats import summary
from labkit.show import style
from labkit.show.bars import draw_bars
from labkit.show.curves import close

PANELS = ("step_ms", "exposed_comm_ms", "sent_bytes", "peak_bytes")
AGREES = 0.02  # part of the first strategy's range: a smaller difference is not visible


def overview(frame, title=None, panels=PANELS):
    """Return a Figure of compare()'s records: bars by strategy for each metric, and the losses."""
    frame = style.in_order(frame, "strategy")
    strategies = list(dict.fromkeys(frame["strategy"]))
    colours = style.palette(strategies)
    places = list(range(len(strategies)))
    with style.look():
        height = 2.9 + 0.42 * len(strategies)
        ratios = (0.18 * len(strategies) + 0.5, 1)
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
        ends = draw_losses(grid[1], mean_losses(frame), colours)
        grid[1].set_title(agreement(frame), loc="left", size=9.5, weight="normal")
        style.entitle(figure, title)
        if ends:  # a run that diverges may have none
            close(figure, grid[1], ends, title=None)
    return figure


def mean_losses(frame):
    """Return the losses, means over ranks: DataFrame [steps, strategies], in the order of the bars.

    NaN: not finite.
    """
    frame = style.in_order(frame, "strategy")
    means = frame.groupby(["step", "strategy"])["loss"].mean().unstack()
    return means.where(np.isfinite(means))[list(dict.fromkeys(frame["strategy"]))]


def agreeing(losses):
    """Return the strategies whose loss is at each step near the first one's; [] if only itself is.

    losses: as of mean_losses(). Near: a difference of at most AGREES of the first one's range.
    """
    first = losses.iloc[:, 0]
    apart = losses.sub(first, axis=0).abs().max(skipna=False)
    near = list(apart.index[apart <= AGREES * (first.max() - first.min())])
    return near if len(near) > 1 else []


def agreement(frame):
    """Return how near the losses are: "training loss: all 6 agree within 3e-07 nats"."""
    losses = mean_losses(frame)
    near = agreeing(losses)
    if not near:
        return "training loss"
    within = losses[near].max(axis=1) - losses[near].min(axis=1)
    others = losses.drop(columns=near)
    how_many = f"{len(near)} of {losses.shape[1]}" if len(others.columns) else f"all {len(near)}"
    words = f"training loss: {how_many} agree within {within.max():.1g} nats"
    apart = others.sub(losses[near[0]], axis=0).abs().max().dropna()
    if len(apart):
        words += f"; {style.name(apart.idxmax())} differs most, by {apart.max():.2g}"
    return words


def draw_losses(axes, losses, colours):
    """Draw one dark line for the strategies that agree, and one for each other; return their ends.

    losses: as of mean_losses(). An end is (x, y, words, colour), as curves.close() takes it.
    """
    near = agreeing(losses)
    lines = [(name, style.name(name), colours[name]) for name in losses if name not in near]
    if near:
        words = f"the other {len(near)}" if lines else f"all {len(near)}"
        lines.insert(0, (near[0], words, style.INK))
    ends = []
    for name, words, colour in lines:
        line = losses[name].dropna()
        if len(line):
            axes.plot(line.index, line, color=colour, linewidth=2)
            ends.append((line.index[-1], line.iloc[-1], words, colour))
    axes.set_xlabel("step")
    axes.set_ylabel(style.axis_label("loss"))
    axes.margins(x=0.01)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return ends
