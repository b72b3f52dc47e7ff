"""Pictures of the dashboard, drawn fast: few artists, and a layout by arithmetic.

    label  ====|=====|==|   12 ms         bars: a row per cell, or parts of it
    label  ===|===|=|    8 ms
    loss   \\__                           lines: loss over time or bytes; throughput over ranks

Each is a function (rows, curves, most, title) -> Figure. rows: of summary(), in the order to be
drawn. A picture has at most `most` bars, or LINES lines.
"""

import textwrap
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from labkit.measure.stats import FEWEST, interval_name
from labkit.memory.memory_tracker import KINDS
from labkit.show import style
from labkit.show.bars import stack
from labkit.show.curves import draw_runs

# how many can be distinguished, and drawn in 200 ms
BARS = 12
LINES = 6
TICKS = (0.05, 0.1, 0.2, 0.5, 0.8, 1, 1.25, 2, 5, 10, 20)  # of ratios
VERDICTS = {"faster": style.BLUE, "slower": style.ORANGE}  # other bars of ratios are grey
CUT = 3  # medians: a bar that is longer is cut, so that the others can be read
# inches: of a figure, a bar's row, a letter of a label
WIDTH = 8.6
ROW = 0.25
LETTER = 0.074
LINE = 0.22  # of a title
TITLE = 84  # letters in a line of a title
PHASES = {"forward_ms": "forward", "backward_ms": "backward", "optimizer_ms": "optimizer"}


def frame(labels, rest, title):
    """Return (figure, axes) with room for the labels at the left, and the title above.

    rest: inches above and below the bars, without the title.
    """
    lines = textwrap.wrap(title, TITLE)
    top = 0.2 + LINE * len(lines)
    height = ROW * len(labels) + rest + top
    figure = Figure(figsize=(WIDTH, height))
    FigureCanvasAgg(figure)
    left = (LETTER * max(map(len, labels)) + 0.3) / WIDTH
    figure.subplots_adjust(left, 0.55 / height, 0.9, 1 - (top + 0.05) / height)
    style.entitle(figure, "\n".join(lines))
    return figure, figure.subplots()


def bars(rows, curves, most, title, column, low=None, high=None):
    """Return a Figure with a bar per cell. low, high: columns of whiskers."""
    rows = rows.head(most)
    unit = style.unit_of(column)
    top = rows[high or column].max() or 1
    divisor, shown = style.byte_scale(top) if unit == "bytes" else (1, unit)
    colours = [style.GREY if own else style.BLUE for own in rows["cell"] == rows["base"]]
    values = rows[column].fillna(0) / divisor
    with style.look():
        figure, axes = frame(rows["label"], 0.6, title)
        add_bars(axes, range(len(rows)), values.to_numpy(), 0.74, color=colours)
        ends = rows[high] / divisor if high else values
        if low:
            axes.hlines(range(len(rows)), rows[low] / divisor, ends, color=style.INK, linewidth=1.2)
        cut = write_ends(axes, ends, [said(value, unit) for value in rows[column]])
        grey = "; grey: the base" if (rows["cell"] == rows["base"]).any() else ""
        finish(axes, rows["label"], style.axis_label(column, shown) + grey + cut)
    return figure


def ratios(rows, curves, most, title):
    """Return a Figure of step times over the base's, on a logarithmic axis: bars begin at 1."""
    others = rows[rows["cell"] != rows["base"]]
    rows = (rows if others.empty else others).head(most)
    with style.look():
        figure, axes = frame(["", *rows["label"]], 0.6, title)
        axes.set_xscale("log")
        colours = [VERDICTS.get(verdict, style.GREY) for verdict in rows["verdict"]]
        places = range(len(rows))
        add_bars(axes, places, rows["ratio"].to_numpy() - 1, 0.74, left=1.0, color=colours)
        axes.hlines(places, rows["ratio_low"], rows["ratio_high"], color=style.INK, linewidth=1.2)
        axes.axvline(1, color=style.FAINT, linewidth=1)
        limits = min(0.8, 0.9 * rows["ratio_low"].min()), max(1.25, 1.1 * rows["ratio_high"].max())
        axes.set_xlim(limits)
        at_edge = axes.get_yaxis_transform()
        for place, ratio in enumerate(rows["ratio"]):
            axes.text(1.01, place, f"{ratio:.2f}", va="center", size=9, transform=at_edge)
        grey = "unclear" if rows["pairs"].min() >= FEWEST else "cannot tell"
        words = f"blue: faster, orange: slower, grey: {grey}"
        lines = f"lines: {interval_name(*rows['pairs'])}"
        finish(axes, rows["label"], f"step time / that of the base ({words}; {lines})")
        ticks = [tick for tick in TICKS if limits[0] <= tick <= limits[1]]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
    return figure


def stacked(rows, curves, most, title, parts, total, words):
    """Return a Figure with a bar per cell, cut into parts; the rest of `total` is "other".

    parts: {column: key of its colour}.
    """
    rows = rows.head(most)
    unit = style.unit_of(total)
    divisor, shown = style.byte_scale(rows[total].max()) if unit == "bytes" else (1, unit)
    sizes = {key: rows[column] / divisor for column, key in parts.items() if column in rows}
    rest = (rows[total] / divisor - sum(sizes.values())).clip(lower=0)
    with style.look():
        figure, axes = frame(rows["label"], 0.9, title)
        figure.subplots_adjust(bottom=0.85 / figure.get_figheight())
        colours = style.COLOURS | {"other": style.lighter(style.GREY)}
        sizes["other"] = rest
        least = 0.005 * rows[total].max() / divisor
        parts = {key: (size, colours[key]) for key, size in sizes.items() if size.max() > least}
        left = stack(axes, range(len(rows)), parts, 0.74, draw=add_bars)
        cut = write_ends(axes, left, [said(value, unit) for value in rows[total]])
        finish(axes, rows["label"], f"{words} ({shown}){cut}")
        look = {"ncols": 7, "handlelength": 0.9, "columnspacing": 1.2, "handletextpad": 0.5}
        figure.legend(loc="lower left", fontsize=9, **look)
    return figure


def said(value, unit):
    return "not known" if np.isnan(value) else style.quantity(value, unit)


def add_bars(axes, places, sizes, thick, left=0.0, **look):
    """Draw horizontal bars as one artist, which is faster than barh() with one artist per bar."""
    left = np.broadcast_to(left, len(sizes))
    lows = np.asarray(places) - thick / 2
    xs = np.stack([left, left, left + sizes, left + sizes], axis=1)
    ys = np.stack([lows, lows + thick, lows + thick, lows], axis=1)
    axes.add_collection(PolyCollection(np.stack([xs, ys], axis=2), **look), autolim=False)


def write_ends(axes, ends, words):
    """Write values at the ends of bars; return a remark if a bar far longer than most is cut."""
    usual = CUT * np.median(ends)
    limit = usual if usual and max(ends) > 1.5 * usual else max(ends)
    edge = axes.get_yaxis_transform()  # a bar that is cut has its value beyond the picture's edge
    for place, (end, text) in enumerate(zip(ends, words, strict=True)):
        at, of = ((1, place), edge) if end > limit else ((end, place), "data")
        axes.annotate(text, at, (4, 0), of, "offset points", va="center", size=9)
        if end > limit:
            axes.text(0.97, place, "//", ha="right", va="center", transform=edge, weight="bold")
    axes.set_xlim(0, (limit or 1) * 1.02)
    return "; //: a longer bar, cut" if limit < max(ends) else ""


def finish(axes, labels, words):
    beside = axes.get_yaxis_transform()
    for place, label in enumerate(labels):
        axes.text(-0.01, place, label, ha="right", va="center", transform=beside)
    axes.set_yticks([])
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.set_xlabel(words)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")


def with_base(rows):
    """Return the first LINES rows; the base replaces the last if it is a later row."""
    base = rows[rows["cell"] == rows["base"]]
    first = rows.head(LINES)
    if base.empty or first["cell"].isin(base["cell"]).any():
        return first
    return pd.concat([first.iloc[:-1], base.head(1)])


def losses(rows, curves, most, title, x, words):
    """Return a Figure of the loss over seconds, or over the bytes that a rank has sent."""
    rows = with_base(rows)
    mine = curves[curves["cell"].isin(rows["cell"])]
    divisor, unit = style.byte_scale(mine[x].max()) if x == "sent_bytes" else (1, "s")
    with style.look():
        figure, axes = frame(["0.000"], 3.4, title)
        colours = dict(zip(rows["cell"], style.CYCLE, strict=False))
        labels = dict(zip(rows["cell"], rows["label"], strict=True))
        look = {"words": labels.get, "factor": divisor, "marker": "o", "markersize": 3}
        draw_runs(axes, mine[mine[x] > 0], x, "loss", "cell", colours, **look)
        if x == "sent_bytes" and mine[x].max() > 0:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel(f"{words} ({unit})")
        axes.set_ylabel(style.axis_label("training_loss"))
        axes.grid(axis="y")
        figure.subplots_adjust(right=0.64)
        axes.legend(fontsize=9, loc="upper left", bbox_to_anchor=(1.01, 1))
    return figure


def scaled(rows):
    """Return [frame], one per line: rows of one machine that differ only in the number of ranks."""
    rows = rows[rows["nodes"] == 1].sort_values("ranks")
    names = rows["model"] + rows["strategy"] + rows["changes"].map(str)
    return [group for _, group in rows.groupby(names, sort=False) if len(group) > 1]


def scaling(rows, curves, most, title):
    """Return a Figure of throughput over the ranks of one machine, with the lines of scaled()."""
    lines = scaled(rows)
    with style.look():
        figure, axes = frame(["0,000"], 3.4, title)
        for place, group in enumerate(lines[:LINES]):
            first = group.iloc[0]
            words = f"{style.name(first['model'])}, {first['short']}"
            colour = style.CYCLE[place]
            axes.plot(group["ranks"], group["samples_per_s"], "o-", color=colour, label=words)
            ideal = first["samples_per_s"] * group["ranks"] / first["ranks"]
            look = {"color": colour, "linewidth": 1, "linestyle": (0, (4, 3))}
            axes.plot(group["ranks"], ideal, **look)
        if lines:
            axes.legend(fontsize=9, loc="upper left", title="dashed: ideal", title_fontsize=9)
            axes.set_xticks(sorted({n for group in lines for n in group["ranks"]}))
            axes.set_ylim(0)
        else:
            axes.text(0.5, 0.5, "measured on one number of ranks only", ha="center")
        axes.set_xlabel("ranks")
        axes.set_ylabel("throughput (samples/s)")
        axes.grid(axis="y")
    return figure


MEMORY = {f"peak_{kind}_bytes": kind for kind in KINDS}
PICTURES = {
    "step time by phase": partial(stacked, parts=PHASES, total="step_ms", words="step time"),
    "step time and its spread": partial(bars, column="step_ms", low="step_low", high="step_high"),
    "ratio to the base": ratios,
    "exposed communication": partial(bars, column="exposed_comm_ms"),
    "sent bytes": partial(bars, column="sent_bytes"),
    "memory by kind": partial(stacked, parts=MEMORY, total="peak_bytes", words="peak memory"),
    "loss against time": partial(losses, x="seconds", words="time of the timed steps"),
    "loss against bytes": partial(losses, x="sent_bytes", words="sent per rank"),
    "scaling": scaling,
}
