"""Step time over link speed: lines predicted, points measured, rings at crossovers.

    step  |o                      both axes are logarithmic; a line's end says where it is faster
    time  | *o                    than the baseline: "top 1 %: predicted below 2,500 Mbit/s"
          |   (o)  *  *  *
          |         o  o  o
          +----------------- link speed

The frame has one row per measured step, with COLUMNS:

    method       "flat", "hierarchical", "topk", ..., in COLOURS' order; the first is the baseline
    link_mbit    the link's speed, Mbit/s
    step_ms      measured there; NaN if nothing was measured: a line without points
    busy_ms      of the method: a step where the link costs nothing, ms; its rows' median counts
    wire_bytes   of the method: what a step puts on the link, bytes (as in measure/crossover.py)
"""

import math

import numpy as np
from matplotlib.ticker import FuncFormatter, LogLocator

from labkit.measure.crossover import Cost, crossover, predicted
from labkit.measure.stats import paired_ratio, summary
from labkit.show import style
from labkit.show.curves import close

COLUMNS = ("method", "link_mbit", "step_ms", "busy_ms", "wire_bytes")
ALIKE = 1.12  # ratio of two step times up to which their points would cover one another
DOT = 9  # of a point with its whiskers, in typographic points
FAR = 100  # crossovers this factor beyond the measured speeds are written, not drawn


def check(frame):
    """Raise ValueError for a frame without rows or without one of COLUMNS."""
    missing = [column for column in COLUMNS if column not in frame]
    if missing or frame.empty:
        raise ValueError(
            f"step times over link speeds need rows with {', '.join(COLUMNS)}; "
            f"got {len(frame)} rows with {', '.join(frame) or 'no columns'}"
        )


def costs(frame):
    """Return {method: Cost}: medians of its rows, in COLOURS' order; the first is the baseline."""
    check(frame)
    grouped = (
        style.in_order(frame, "method")
        .groupby("method", sort=False)[["busy_ms", "wire_bytes"]]
        .median()
    )
    return {
        method: Cost(*row)
        for method, row in zip(grouped.index, grouped.to_numpy().tolist(), strict=True)
    }


def crossing(a, b):
    """Return the link speed at which both take equally long; None if one is always faster."""
    return next(
        (speed for speed in (crossover(a, b), crossover(b, a)) if 0 < speed < math.inf), None
    )


def wins(a, b):
    """Return the link speeds at which b is faster than a, in words, to two digits."""
    at = crossing(a, b)
    if at is None:
        return "at every speed" if crossover(a, b) else "at no speed"
    return (
        f"{'below' if crossover(a, b) else 'above'} {style.quantity(float(f'{at:.2g}'), 'Mbit/s')}"
    )


def faster_links(times, baseline, again="again"):
    """Return {method: ["100 Mbit/s", ...]}: links on which it is faster than the baseline.

    times: {link in words: DataFrame}, a column of step times per method, a row per round. The
    column `again`, a second run of the baseline, gives a link's noise band (stats.Ratio.verdict).
    """
    found = {}
    for link, rows in times.items():
        band = paired_ratio(rows[again], rows[baseline]).noise_band()
        for method in rows.columns.drop([baseline, again]):
            if paired_ratio(rows[method], rows[baseline]).verdict(band) == "faster":
                found.setdefault(method, []).append(link)
    return found


def reach(frame, baseline):
    """Return (lowest, highest) link speed to draw: measured ones, and crossovers near them."""
    found = costs(frame)
    low = frame["link_mbit"].min()
    high = frame["link_mbit"].max()
    crossings = [crossing(found[baseline], cost) for cost in found.values()]
    speeds = [low, high, *(at for at in crossings if at and low / FAR <= at <= high * FAR)]
    return min(speeds) / 1.5, max(speeds) * 1.5


def step_over_link(frame, baseline=None, title=None, methods=None, at=None):
    """Return a Figure of step time over link speed, log-log; line ends say where a method wins.

    frame: see above. baseline: a method, by default the first in COLOURS' order. methods: those to
    draw, by default all. at: a link speed to mark, Mbit/s. Points are medians with quartiles, side
    by side if they are nearly equal. Raises ValueError for a frame without rows or columns.
    """
    found = costs(frame)
    colours = style.palette(found)
    baseline = baseline or next(iter(found))
    speeds = np.geomspace(*reach(frame, baseline), 100)
    shown = [one for one in found if methods is None or one in methods or one == baseline]
    with style.look():
        figure, axes = style.new_figure(9.5, 3.2 + 0.2 * len(shown))
        ends = []
        rings = []
        beside = side_by_side(axes, frame[frame["method"].isin(shown)], speeds)
        for method in shown:
            cost = found[method]
            colour = colours[method]
            words = style.name(method)
            times = predicted(*cost, speeds)
            axes.plot(speeds, times, color=colour, linewidth=2.6 if method == baseline else 1.8)
            draw_points(axes, frame[frame["method"] == method], colour, beside)
            if method != baseline:
                words += f": predicted {wins(found[baseline], cost)}"
                rings += draw_ring(axes, found[baseline], cost, speeds, colour)
            ends.append((speeds[-1], times[-1], words, colour))
        if at is not None:
            axes.axvline(
                at, 0, 0.96, color=style.INK, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(speeds[0], speeds[-1])
        for axis in (axes.xaxis, axes.yaxis):
            label_decades(axis)
        axes.set_xlabel("link speed (Mbit/s)")
        axes.set_ylabel("step time (ms)")
        base = style.name(baseline)
        note = (
            f"line: predicted    point: measured{f'    ring: as fast as {base}' if rings else ''}"
        )
        note += f"    at the end: faster than {base}" if len(shown) > 1 else ""
        close(figure, axes, ends, title, note)
    return figure


def side_by_side(axes, frame, speeds):
    """Return {(method, link speed): x of its point}; points that would cover others are moved."""
    medians = (
        frame.dropna(subset=["step_ms"])
        .groupby(["link_mbit", "method"], sort=False)["step_ms"]
        .median()
    )
    # of a point, in logarithms
    width = math.log(speeds[-1] / speeds[0]) / (0.6 * axes.figure.get_figwidth() * 72)
    found = {}
    for speed, times in medians.groupby(level=0, sort=False):
        crowd = []
        for (_, method), time in times.sort_values().items():
            if crowd and time > crowd[-1][1] * ALIKE:
                found |= spread(crowd, speed, width)
                crowd = []
            crowd.append((method, time))
        found |= spread(crowd, speed, width)
    return found


def spread(crowd, speed, width):
    """Return {(method, speed): place}: side by side around the speed, as broad as a point each."""
    middle = (len(crowd) - 1) / 2
    return {
        (method, speed): speed * math.exp(DOT * width * (place - middle))
        for place, (method, _) in enumerate(crowd)
    }


def draw_points(axes, rows, colour, beside):
    """Draw the measured medians with their quartiles. beside: from side_by_side()."""
    for (method, speed), times in rows.dropna(subset=["step_ms"]).groupby(["method", "link_mbit"])[
        "step_ms"
    ]:
        found = summary(times)
        x = beside[method, speed]
        around = [[found.median - found.low], [found.high - found.median]]
        axes.errorbar(
            x, found.median, yerr=around, color=colour, capsize=2.5, elinewidth=1.2, zorder=3
        )
        look = {"markersize": 6, "markeredgecolor": style.GROUND, "zorder": 4}
        axes.plot(x, found.median, "o", color=colour, **look)


def draw_ring(axes, a, b, speeds, colour):
    """Draw a ring where the lines of a and b cross, and a line down to the speed; return [ring]."""
    at = crossing(a, b)
    if at is None or not speeds[0] <= at <= speeds[-1]:
        return []
    height = predicted(*a, at)
    axes.plot([at, at], [0, height], color=colour, linewidth=0.9, linestyle=(0, (1, 2)), zorder=1)
    return [
        axes.scatter(at, height, s=95, facecolors="none", edgecolors=colour, linewidths=2, zorder=5)
    ]


def label_decades(axis):
    """Label powers of ten in plain digits, with more numbers between them on a shorter axis."""
    low, high = axis.get_view_interval()
    between = (1,) if high / low > 2000 else (1, 2, 5) if high / low > 12 else (1, 1.5, 2, 3, 5, 7)
    axis.set_major_locator(LogLocator(subs=between))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(FuncFormatter(lambda *_: ""))
