"""Memory over a step: runs side by side on one scale.

MiB |  all unsharded        |  a unit at a time
    | ____________________  |
    | ####################  |    /|/|/|/|\\|\\|\\|\\         each tooth: a unit gathered, then freed
    | ####################  |  _|#######################|__
    +---------------------- +---------------------------
"""

import math

import numpy as np

from labkit.memory.memory_tracker import KINDS
from labkit.show import style
from labkit.show.curves import mark_peak

COLUMNS = 2
FINEST = 0.004  # a change by a smaller part of the peak is not drawn


def memory_timelines(runs, title=None):
    """Return a Figure with a panel per run: MemoryTracker.samples by kind, the peak marked.

    runs: {name: samples}. Each panel counts its own allocations and releases from left to right, as
    memory_over_time() does; all share the axis of bytes. ValueError if a run has no samples.
    """
    if not runs or not all(runs.values()):
        raise ValueError("no samples to draw")
    present = [
        kind
        for kind in KINDS
        if any(sizes[kind] for samples in runs.values() for _, sizes in samples)
    ]
    top = max(sum(sizes.values()) for samples in runs.values() for _, sizes in samples)
    divisor, unit = style.byte_scale(top)
    columns = min(COLUMNS, len(runs))
    rows = math.ceil(len(runs) / columns)
    with style.look():
        figure, grid = style.new_figure(
            9.0, 1.2 + 2.5 * rows, rows, columns, sharey=True, squeeze=False
        )
        for axes, (name, samples) in zip(grid.flat, runs.items(), strict=False):
            handles = draw(axes, samples, present, divisor)
            axes.set_ylim(0, top / divisor * 1.16)
            axes.set_title(name, loc="left", weight="bold", size=10.5)
            mark_peak(axes, samples, divisor)
        for axes in grid.flat[len(runs) :]:
            axes.set_visible(False)
        for axes in grid[:, 0]:
            axes.set_ylabel(f"live tensors ({unit})")
        for axes in grid.flat[max(0, len(runs) - columns) : len(runs)]:
            axes.set_xlabel("allocations and releases so far")
        names = [style.name(kind) for kind in present]
        style.legend_below(figure, handles, names)
        style.entitle(figure, title)
    return figure


def thinned(samples):
    """Return [(number of the change, bytes by kind)]: samples that differ visibly from the last.

    All samples would make a picture of megabytes. The peak is always included.
    """
    table = np.array([[sizes[kind] for kind in KINDS] for _, sizes in samples], float)
    totals = table.sum(axis=1)
    kept = [0]
    least = totals.max() * FINEST
    for position, row in enumerate(table):
        if np.abs(row - table[kept[-1]]).max() > least:
            kept.append(position)
    return [
        (place + 1, samples[place][1])
        for place in sorted({*kept, int(totals.argmax()), len(table) - 1})
    ]


def draw(axes, samples, kinds, divisor):
    shown = thinned(samples)
    moments = [number for number, _ in shown]
    table = np.array([[sizes[kind] for kind in kinds] for _, sizes in shown], float)
    colours = [style.COLOURS[kind] for kind in kinds]
    axes.margins(x=0)
    axes.grid(axis="y")
    return axes.stackplot(moments, table.T / divisor, step="post", colors=colours, linewidth=0)
