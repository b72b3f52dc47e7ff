"""Bars: values with their spread, memory stacked by kind, the measured against the predicted."""

import numpy as np
from matplotlib.axes import Axes

from labkit.measure.stats import summary
from labkit.memory.memory_tracker import KINDS
from labkit.show import style

THICK = 0.72


def grouped_bars(frame, value, category="strategy", group=None, title=None, unit=None):
    """Return a Figure with a bar per category and group: the median of `value`, with quartiles.

    frame: long form, several rows (rounds, ranks) per bar; unit: by default the column's.
    Categories and groups keep their order of appearance; every bar shows its value. Raises
    ValueError if there is no value.
    """
    unit = style.unit_of(value) if unit is None else unit
    categories = list(dict.fromkeys(frame[category]))
    groups = list(dict.fromkeys(frame[group])) if group else [None]
    colours = style.palette(groups if group else categories)
    bars = []  # (y, label of the bar, Summary, colour)
    y = 0.0
    heads = []
    for one in categories:
        first = y
        for part in groups:
            rows = frame[(frame[category] == one) & ((frame[group] == part) if group else True)]
            values = rows[value].dropna()
            if len(values):
                bars.append((y, style.name(part), summary(values), colours[part if group else one]))
                y += 1
        heads.append(((first + y - 1) / 2, style.name(one)))
        y += 0.6 if group else 0
    if not bars:
        raise ValueError(f"no values of {value!r} to draw")
    with style.look():
        figure, axes = style.new_figure(8.0, 1.25 + 0.42 * y)
        draw_bars(axes, bars, unit)
        axes.set_yticks([at for at, _ in heads], [words for _, words in heads])
        axes.set_xlabel(style.axis_label(value, axes.value_unit))
        if group:
            label_groups(axes, bars)
        finish(figure, axes, title)
    return figure


def draw_bars(axes, bars, unit):
    """Draw bars with whiskers and their values; set axes.value_unit to the unit of the axis.

    bars: [(y, label, Summary or None, colour)]; None: not measured.
    """
    largest = max((s.high for _, _, s, _ in bars if s is not None), default=0)
    divisor, axes.value_unit = style.byte_scale(largest) if unit == "bytes" else (1, unit)
    for y, _, spread, colour in bars:
        if spread is None:
            style.beside(axes, "not measured", (0, y), color=style.FAINT)
            continue
        median = spread.median / divisor
        axes.barh(y, median, THICK, color=colour)
        if spread.high > spread.low:
            reach = [[median - spread.low / divisor], [spread.high / divisor - median]]
            axes.errorbar(
                median, y, xerr=reach, color=style.INK, capsize=3, capthick=1.2, elinewidth=1.2
            )
        words = style.quantity(spread.median, unit)
        style.beside(axes, words, (spread.high / divisor, y), weight="bold")
    axes.set_xlim(0, (largest / divisor or 1) * 1.16)
    axes.set_ylim(bars[-1][0] + 0.6, -0.6)


def stack(axes, places, parts, thick=THICK, draw=Axes.barh, **look):
    """Draw bars cut into parts, one after the other; return where they end, [bars].

    parts: {key: (sizes [bars], colour)}; the key's name is the label of its pieces.
    """
    left = np.zeros(len(places))
    for key, (sizes, colour) in parts.items():
        sizes = np.asarray(sizes, dtype=float)
        draw(axes, places, sizes, thick, left=left, color=colour, label=style.name(key), **look)
        left = left + sizes
    return left


def kinds_of(frame):
    """Return {kind: (bytes [rows], colour)} of the kinds in use. ValueError if there is none."""
    kinds = [kind for kind in KINDS if kind in frame and frame[kind].max() > 0]
    if not kinds:
        raise ValueError(f"no bytes to draw: none of the columns {', '.join(KINDS)} holds any")
    return {kind: (frame[kind].to_numpy(float), style.COLOURS[kind]) for kind in kinds}


def label_groups(axes, bars):
    """Write the group's name into its bar, or after the value if the bar is too short."""
    axes.figure.draw_without_rendering()
    for (y, words, _, colour), bar in zip(bars, axes.patches, strict=True):
        text = style.beside(axes, words, (0, y), size=9, color=style.text_on(colour))
        if text.get_window_extent().width + 10 > bar.get_window_extent().width:
            text.remove()
            value = next(t for t in axes.texts if t.xy[1] == y)
            value.set_text(f"{value.get_text()}   {words}")


def finish(figure, axes, title):
    axes.grid(axis="x")
    style.hide_axis_of_rows(axes)
    style.entitle(figure, title)


def memory_bars(frame, title=None, label="strategy", up_to=0):
    """Return a Figure with one stacked bar per `label`: memory by kind.

    frame: bytes in columns named after KINDS, or peak_KIND_bytes as from compare(). If a label has
    several rows, the largest value of each kind counts. A segment shows its size if it fits, else
    the number alone (in the axis' unit) if that fits; a bar shows its sum. Unused kinds are left
    out. up_to: the least range of the axis, in bytes.
    """
    frame = frame.rename(columns={f"peak_{kind}_bytes": kind for kind in KINDS})
    kinds = list(kinds_of(frame))
    frame = frame.groupby(label, sort=False)[kinds].max().reset_index()
    totals = frame[kinds].sum(axis=1)
    divisor, unit = style.byte_scale(totals.max())
    with style.look():
        figure, axes = style.new_figure(8.0, 1.6 + 0.5 * len(frame))
        places = range(len(frame))
        parts = {k: (sizes / divisor, colour) for k, (sizes, colour) in kinds_of(frame).items()}
        stack(axes, places, parts, edgecolor=style.GROUND, linewidth=0.5)
        written = write_sizes(axes, frame[kinds], divisor)
        for y, total in zip(places, totals, strict=True):
            style.beside(axes, style.quantity(total, "bytes"), (total / divisor, y), weight="bold")
        axes.set_xlim(0, max(totals.max(), up_to) / divisor * 1.14)
        axes.set_yticks(places, [style.name(one) for one in frame[label]])
        axes.invert_yaxis()
        axes.set_xlabel(f"memory per rank at its peak ({unit})")
        style.legend_below(figure, *axes.get_legend_handles_labels())
        finish(figure, axes, title)
        figure.get_layout_engine().execute(figure)  # places the axes, without drawing
        fit(axes, written, divisor)
    return figure


def write_sizes(axes, frame, divisor):
    """Write each piece's size in its middle; return [(text, bytes)]. frame: [bars, kinds]."""
    written = []
    for kind in frame:
        ends = frame.loc[:, :kind].sum(axis=1)
        ink = {"ha": "center", "va": "center_baseline", "size": 9}
        ink["color"] = style.text_on(style.COLOURS[kind])
        for y, (size, end) in enumerate(zip(frame[kind], ends, strict=True)):
            middle = (end - size / 2) / divisor
            written.append((axes.text(middle, y, style.quantity(size, "bytes"), **ink), size))
    return written


def fit(axes, written, divisor):
    """Shorten sizes that do not fit into their pieces, or drop them."""
    (origin, _), (one, _) = axes.transData.transform([(0, 0), (1 / divisor, 0)])
    for text, size in written:
        for words in (text.get_text(), f"{size / divisor:.3g}", ""):
            text.set_text(words)
            if not words or text.get_window_extent().width + 4 <= size * (one - origin):
                break


def measured_against_predicted(frame, title=None):
    """Return a Figure with measured / predicted of every row on one axis, and both values.

    frame: quantity, unit, predicted, measured; optionally low, high (quartiles in the row's unit).
    """
    ratios = frame["measured"] / frame["predicted"]
    with style.look():
        figure, axes = style.new_figure(8.0, 1.3 + 0.42 * len(frame))
        axes.axvline(1, color=style.FAINT, linewidth=1.2, zorder=1)
        edges = [1.0, *ratios]
        for y, (ratio, row) in enumerate(zip(ratios, frame.to_dict("records"), strict=True)):
            axes.plot([1, ratio], [y, y], color=style.BLUE, linewidth=2, zorder=2)
            axes.plot(ratio, y, "o", color=style.BLUE, markersize=8, zorder=3)
            if "low" in row and np.isfinite(row["low"]):
                ends = [row["low"] / row["predicted"], row["high"] / row["predicted"]]
                axes.plot(
                    ends, [y, y], color=style.INK, linewidth=1.2, marker="|", markersize=8, zorder=4
                )
                edges += ends
            measured, predicted = (
                style.quantity(row[which], row["unit"]) for which in ("measured", "predicted")
            )
            beside(axes, y, style.ratio_text(ratio), f"{measured} of {predicted}")
        beside(axes, -0.75, "ratio", "measured of predicted", color=style.FAINT)
        reach = max(0.1, 1.15 * max(abs(edge - 1) for edge in edges))
        axes.set_xlim(max(0, 1 - reach), 1 + reach)
        axes.set_ylim(len(frame) - 0.5, -0.6)
        axes.set_yticks(range(len(frame)), list(frame["quantity"]))
        axes.set_xlabel("measured / predicted (1: as predicted)")
        finish(figure, axes, title)
    return figure


def beside(axes, y, ratio, values, **look):
    """Write two columns of text at the right of the axes."""
    for words, offset in ((ratio, 10), (values, 54)):
        place = {"xycoords": ("axes fraction", "data"), "annotation_clip": False}
        style.beside(axes, words, (1, y), (offset, 0), **place, **look)
