"""Curves: loss over steps, cost over sizes, memory over time, each named at its end."""

import numpy as np
from matplotlib.ticker import MaxNLocator

from labkit.memory.memory_tracker import KINDS
from labkit.show import style


def loss_curves(frame, x="step", y="loss", by="strategy", title=None, log_y=False, nested=True):
    """Return a Figure of y over x, a line per `by`: medians of the rows that share an x, quartiles.

    nested: equal runs cover each other, so the first is drawn broad and each later one narrower.
    log_y: a logarithmic axis, for losses of different orders of magnitude (a run that diverges).
    """
    groups = list(dict.fromkeys(frame[by]))
    colours = style.palette(groups)
    with style.look():
        figure, axes = style.new_figure(8.0, 4.0)
        widths = line_widths(groups, step=1.5 * nested)
        ends = []
        for one, width in zip(groups, widths, strict=True):
            xs, middle = draw_line(
                axes, frame[frame[by] == one], x, y, colours[one], linewidth=width
            )
            ends.append((xs[-1], middle[-1], style.name(one), colours[one]))
        if log_y:
            make_log(axes)
        axes.set_xlabel(style.axis_label(x))
        axes.set_ylabel(style.axis_label(y))
        axes.margins(x=0.01)
        if np.issubdtype(frame[x].dtype, np.integer):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        close(figure, axes, ends, title)
    return figure


def sweep(frame, x, y, by="strategy", title=None, x_unit=None, y_unit=None, predicted=None,
          log_y=False, dashed="predicted"):  # fmt: skip
    """Return a Figure of y over x (logarithmic), a line per `by`, quartiles shaded.

    predicted: column with the formula's value, drawn dashed; dashed: its name. x_unit, y_unit: by
    default those of the columns' names.
    """
    x_unit = style.unit_of(x) if x_unit is None else x_unit
    y_unit = style.unit_of(y) if y_unit is None else y_unit
    groups = list(dict.fromkeys(frame[by]))
    colours = style.palette(groups)
    values = [*frame[y], *(frame[predicted] if predicted else [])]
    factor, shown_unit = style.byte_scale(max(values)) if y_unit == "bytes" else (1, y_unit)
    with style.look():
        figure, axes = style.new_figure(8.0, 4.2)
        ends = []
        for one in groups:
            mine = frame[frame[by] == one]
            xs, middle = draw_line(axes, mine, x, y, colours[one], factor=factor, marker="o")
            ends.append((xs[-1], middle[-1], style.name(one), colours[one]))
            if predicted:
                formula = mine.groupby(x)[predicted].median() / factor
                axes.plot(
                    formula.index, formula, color=colours[one], linestyle=(0, (4, 2)), linewidth=1.4
                )
        axes.set_xscale("log", base=2)
        label_sizes(axes, sorted(frame[x].unique()), x_unit)
        if log_y:
            make_log(axes)
        else:
            axes.set_ylim(0, max(values) / factor * 1.06)
        axes.set_xlabel(style.name(x))
        axes.set_ylabel(style.axis_label(y, shown_unit))
        note = f"dashed: {dashed}" if predicted else None
        close(figure, axes, ends, title, note)
    return figure


def make_log(axes):
    axes.set_yscale("log")
    style.plain_digits(axes.yaxis)


def line_widths(groups, thin=1.6, step=1.5):
    """Return widths of lines that may cover each other: the first is the broadest."""
    return np.linspace(thin + step * (len(groups) - 1), thin, len(groups))


def draw_line(axes, rows, x, y, colour, factor=1, **look):
    """Draw the median over x and its quartiles; return both coordinates of the line."""
    grouped = rows.dropna(subset=[y]).groupby(x)[y]
    middle, low, high = (grouped.quantile(q) / factor for q in (0.5, 0.25, 0.75))
    if (high > low).any():
        axes.fill_between(middle.index, low, high, color=colour, alpha=0.18, linewidth=0)
    axes.plot(middle.index, middle, color=colour, **look)
    return middle.index.to_numpy(), middle.to_numpy()


def draw_runs(axes, frame, x, y, by, colours, widths=None, words=style.name, factor=1, **look):
    """Draw y over x / factor, one line for each run in {run: colour}, labelled with words(run).

    by: the column that names the run. widths: of the lines, in points; None: as in the style file.
    """
    widths = [None] * len(colours) if widths is None else widths
    for (run, colour), width in zip(colours.items(), widths, strict=True):
        mine = frame[frame[by] == run]
        look |= {"color": colour, "linewidth": width, "label": words(run)}
        axes.plot(mine[x] / factor, mine[y], **look)


def label_sizes(axes, sizes, unit):
    """Put ticks at the measured sizes, nine at most; bytes in KiB and MiB."""
    every = -(-len(sizes) // 9)
    axes.set_xticks(sizes[::every], [style.quantity(size, unit) for size in sizes[::every]])
    axes.set_xticks([], minor=True)


def close(figure, axes, ends, title, note=None):
    """Name lines at their ends, apart where they meet, with thin leaders; then title and grid."""
    axes.grid(axis="y")
    style.entitle(figure, title)
    if note:
        style.note_above(axes, note)
    figure.draw_without_rendering()
    heights = [axes.transData.transform((x, y))[1] for x, y, _, _ in ends]
    pixels_per_point = figure.dpi / 72
    frame_top = axes.bbox.y1
    moved = style.spread_apart(heights, 15 * pixels_per_point)
    excess = max(0.0, max(moved) - frame_top) + min(
        0.0, min(moved) - axes.bbox.y0 - 6 * pixels_per_point
    )
    right = axes.bbox.x1
    for (x, y, words, colour), height, wanted in zip(ends, heights, moved, strict=True):
        start = axes.transData.transform((x, y))[0]
        offset = (
            (right - start) / pixels_per_point + 16,
            (wanted - excess - height) / pixels_per_point,
        )
        leader = {
            "arrowstyle": "-",
            "color": colour,
            "linewidth": 0.9,
            "shrinkA": 1,
            "shrinkB": 3,
            "relpos": (0, 0.5),
        }
        look = {"va": "center", "weight": "bold", "annotation_clip": False}
        style.beside(axes, words, (x, y), offset, arrowprops=leader, **look)


def mark_peak(axes, samples, divisor, **look):
    """Mark the largest sum of all kinds with a dot and its value; samples: MemoryTracker's."""
    totals = [sum(sizes.values()) for _, sizes in samples]
    peak = max(totals)
    moment = totals.index(peak) + 1
    axes.plot(moment, peak / divisor, "o", color=style.RED, zorder=5)
    part = moment / len(totals)
    side = "left" if part < 0.2 else "right" if part > 0.8 else "center"
    look |= {"ha": side, "va": "baseline", "size": 10, "weight": "bold", "color": style.RED}
    words = f"peak {style.quantity(peak, 'bytes')}"
    style.beside(axes, words, (moment, peak / divisor), (0, 8), **look)


def memory_over_time(samples, title=None, phases=None, predicted=None):
    """Return a Figure of MemoryTracker.samples as areas by kind, with the peak marked.

    The axis counts allocations and releases, not seconds, so every machine gives the same picture.
    phases: {"forward": its first change, ...}, in order. predicted: samples of an estimate, drawn
    as a line over them. Raises ValueError without samples.
    """
    if not samples:
        raise ValueError("no samples to draw")
    moments = np.arange(1, len(samples) + 1)
    kinds = [kind for kind in KINDS if any(sizes[kind] for _, sizes in samples)]
    table = np.array([[sizes[kind] for kind in kinds] for _, sizes in samples], dtype=float)
    divisor, unit = style.byte_scale(table.sum(axis=1).max())
    with style.look():
        figure, axes = style.new_figure(8.0, 4.0)
        colours = [style.COLOURS[kind] for kind in kinds]
        names = [style.name(kind) for kind in kinds]
        axes.stackplot(
            moments, table.T / divisor, step="post", colors=colours, labels=names, linewidth=0
        )
        mark_peak(axes, samples, divisor, bbox={"fc": style.GROUND, "ec": "none", "pad": 1})
        if predicted is not None:
            line = [sum(sizes.values()) / divisor for _, sizes in predicted]
            look = {
                "color": style.INK,
                "linewidth": 1.1,
                "linestyle": (0, (2, 1.5)),
                "label": "predicted sum",
            }
            axes.step(np.arange(1, len(line) + 1), line, where="post", **look)
        axes.set_ylim(0, table.sum(axis=1).max() / divisor * (1.24 if phases else 1.14))
        axes.margins(x=0)
        draw_phases(axes, phases or {}, len(samples))
        axes.set_xlabel("allocations and releases so far")
        axes.set_ylabel(f"live tensors of this rank ({unit})")
        wide = {} if predicted is None else {"handlelength": 1.4}
        handles, names = axes.get_legend_handles_labels()
        style.legend_below(figure, handles, names, ncols=min(6, len(names)), **wide)
        axes.grid(axis="y")
        style.entitle(figure, title)
    return figure


def draw_phases(axes, phases, end):
    """Draw a thin line where each phase begins, and its name at the top of its part."""
    starts = [*phases.values(), end]
    for name, start, stop in zip(phases, starts[:-1], starts[1:], strict=True):
        axes.axvline(start, color=style.FAINT, linewidth=0.9, linestyle=(0, (3, 3)))
        place = {
            "xycoords": ("data", "axes fraction"),
            "ha": "center",
            "va": "top",
            "size": 10,
            "color": style.FAINT,
        }
        axes.annotate(name, ((start + stop) / 2, 0.985), **place)
