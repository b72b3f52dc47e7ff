"""Time to a loss: when each run reached it, and below, on the same axis, its loss.

    1 · DDP        ------------------o 4.3 s       ------------------o 50 MiB   a column per price:
    2 · local SGD  ----o 0.9 s                     -----o 5 MiB                 seconds, bytes (log)
    loss  |\\  \\__                                 |\\      \\
          |.\\....\\__.... target                   |_\\......\\__.....
          | 2     1                                |  2       1                curves end above 1, 2
           seconds                                 bytes

The frame has one row per evaluation, with COLUMNS: run, its name; family, whose colour it takes
(several runs of one family go from pale to dark); seconds and sent_bytes so far; loss.
"""

import math

import pandas as pd
from matplotlib.ticker import LogLocator, NullFormatter

from labkit.show import style
from labkit.show.curves import draw_runs

COLUMNS = ("run", "family", "seconds", "sent_bytes", "loss")
PRICES = {"seconds": "seconds of training", "sent_bytes": "bytes that a rank has sent"}


def reached(frame, target):
    """Return a DataFrame with a row per run: its first row with loss <= target, or NaN.

    Runs keep their order of appearance. Additional column: lowest, the run's lowest loss. Raises
    ValueError for a frame without COLUMNS or rows.
    """
    missing = [column for column in COLUMNS if column not in frame]
    if missing or frame.empty:
        raise ValueError(
            f"times to a loss need rows with {', '.join(COLUMNS)}; "
            f"missing: {', '.join(missing) or 'any row'}"
        )
    rows = []
    for run, mine in frame.groupby("run", sort=False):
        there = mine[mine["loss"] <= target]
        first = there.iloc[0].to_dict() if len(there) else {}
        rows.append(
            {"run": run, "family": mine["family"].iloc[0], "lowest": mine["loss"].min(), **first}
        )
    return pd.DataFrame(rows, columns=[*frame.columns, "lowest"])


def shades(frame):
    """Return {run: colour}: its family's; several runs of a family from pale to dark, in order."""
    families = frame.groupby("family", sort=False)["run"].unique()
    base = style.palette(families.index)
    found = dict.fromkeys(frame["run"])
    for family, runs in families.items():
        for place, run in enumerate(runs):
            found[run] = style.lighter(
                base[family], 0.62 * (len(runs) - 1 - place) / max(1, len(runs) - 1)
            )
    return found


def race(frame, target, title=None):
    """Return a Figure: seconds and bytes until each run reached the target, its loss over both."""
    ends = reached(frame, target)
    colours = shades(frame)
    with style.look():
        figure, grid = style.new_figure(
            11.0,
            3.9 + 0.3 * len(ends),
            2,
            2,
            sharex="col",
            sharey="row",
            height_ratios=(0.1 * len(ends) + 0.2, 1),
        )
        for column, (price, words) in enumerate(PRICES.items()):
            above, below = grid[:, column]
            factor, unit = (
                style.byte_scale(frame[price].max()) if price == "sent_bytes" else (1, "s")
            )
            left = start_of(frame, price) / factor
            draw_losses(below, frame, target, price, factor, colours)
            if price == "sent_bytes":
                make_log(below, left, frame[price].max() / factor)
            else:
                below.set_xlim(0, 1.15 * frame[price].max())
            draw_ends(above, ends, price, factor, left, colours)
            below.set_xlabel(f"{words} ({unit})")
        finish(grid, ends, target)
        style.entitle(figure, title)
        figure.draw_without_rendering()
        for axes, price in zip(grid[1], PRICES, strict=True):
            write_numbers(axes, ends_of(frame, ends, price), colours)
    return figure


def start_of(frame, price):
    """Return the start of the axis: 0, or for bytes (logarithmic) half of the smallest."""
    if price == "seconds":
        return 0.0
    sent = frame.loc[frame[price] > 0, price]
    return sent.min() / 2 if len(sent) else 1.0


def make_log(axes, left, right):
    axes.set_xscale("log")
    axes.set_xlim(left, max(right, 2 * left) * 4)
    axes.xaxis.set_major_locator(LogLocator(10))
    style.plain_digits(axes.xaxis)
    axes.xaxis.set_minor_formatter(NullFormatter())


def draw_losses(axes, frame, target, price, factor, colours):
    """Draw the loss of each run over a price, and a point where it reaches the target."""
    shown = frame[frame[price] > 0] if price == "sent_bytes" else frame
    widths = [1.8] * len(colours)
    draw_runs(axes, shown, price, "loss", "run", colours, widths, factor=factor)
    there = shown[shown["loss"] <= target].groupby("run").head(1)
    point = {"marker": "o", "linestyle": "", "markersize": 7, "zorder": 4}
    draw_runs(axes, there, price, "loss", "run", colours, factor=factor, **point)
    axes.axhline(target, color=style.RED, linewidth=1.1, linestyle=(0, (4, 3)), zorder=1)


def draw_ends(axes, ends, price, factor, left, colours):
    """Draw a line to the point where a run reached the target, and the value, or "not reached"."""
    for place, row in enumerate(ends.to_dict("records")):
        at = left
        words = "not reached"
        colour = colours[row["run"]]
        if not math.isnan(row[price]):
            at = max(row[price] / factor, left)
            words = style.quantity(row[price], "s" if price == "seconds" else "bytes")
            axes.plot([left, at], [place, place], color=colour, linewidth=3, solid_capstyle="butt")
            axes.plot(at, place, "o", color=colour, markersize=8, clip_on=False)
        weight = {"weight": "bold"} if words != "not reached" else {"color": style.FAINT}
        style.beside(axes, words, (at, place), (9, 0), annotation_clip=False, **weight)
    axes.tick_params(axis="x", labelbottom=False)


def ends_of(frame, ends, price):
    """Return [(run, number, whether it reached the target, x, y)]: last points of the curves."""
    factor = style.byte_scale(frame[price].max())[0] if price == "sent_bytes" else 1
    found = []
    for number, row in enumerate(ends.to_dict("records"), start=1):
        there = not math.isnan(row[price])
        mine = frame[frame["run"] == row["run"]]
        last = row if there else mine.iloc[-1]
        if price == "seconds" or last[price] > 0:  # else it has no curve
            found.append((row["run"], number, there, last[price] / factor, last["loss"]))
    return found


def write_numbers(axes, ends, colours):
    """Write each curve's row number, at the bottom if the curve ends there, else at its end."""
    pixel = axes.figure.dpi / 72
    points = axes.transData.transform([(x, y) for *_, x, y in ends]) if ends else []
    there = [place for place, end in enumerate(ends) if end[2]]
    rest = [place for place, end in enumerate(ends) if not end[2]]
    moved = {place: list(points[place]) for place in there + rest}
    for place, x in zip(
        there, style.spread_apart([points[i][0] for i in there], 15 * pixel), strict=True
    ):
        moved[place] = [x, axes.bbox.y0 + 8 * pixel]
    for place, y in zip(
        rest, style.spread_apart([points[i][1] for i in rest], 14 * pixel), strict=True
    ):
        moved[place] = [points[place][0] + 12 * pixel, y]
    for place, (run, number, _, x, y) in enumerate(ends):
        offset = [(a - b) / pixel for a, b in zip(moved[place], points[place], strict=True)]
        leader = {"arrowstyle": "-", "linewidth": 0.9, "shrinkA": 0, "shrinkB": 3}
        leader["color"] = colours[run]
        look = {"ha": "center", "va": "center", "size": 9, "weight": "bold", "zorder": 5}
        style.beside(axes, str(number), (x, y), offset, arrowprops=leader, **look)


def finish(grid, ends, target):
    above, below = grid[:, 0]
    names = [f"{number} · {style.name(run)}" for number, run in enumerate(ends["run"], start=1)]
    above.set_yticks(range(len(ends)), names)
    above.invert_yaxis()
    above.set_ylim(len(ends) - 0.4, -0.6)
    below.set_yscale("log")
    low, high = below.get_ylim()
    low = min(low, target / 1.7)
    # space for the numbers below the curves
    below.set_ylim(bottom=low * (low / high) ** 0.14)
    style.plain_digits(below.yaxis)
    below.yaxis.set_minor_formatter(NullFormatter())
    below.set_ylabel("loss (nats)", loc="top")  # above the words of the target
    # Left of the axis and its numbers, because a curve may end anywhere right of it.
    look = {"ha": "right", "va": "center", "size": 9, "color": style.RED}
    look["xycoords"] = ("axes fraction", "data")
    style.beside(below, f"target: {target:g}", (0, target), (-26, 0), **look)
    for axes in grid[0]:
        style.hide_axis_of_rows(axes)
    for axes in grid.flat:
        axes.grid(axis="x")
    for axes in grid[1]:
        axes.grid(axis="y")
