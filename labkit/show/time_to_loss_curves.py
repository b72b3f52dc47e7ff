"""Time to a loss: when each run reached it, and below, on the same axis, its loss.

    DDP        ------------------o 4.3 s       ------------------o 50 MiB   a column per price:
    local SGD  ----o 0.9 s                     -----o 5 MiB                 seconds, bytes (log)
    loss  |\\  \\__                              |\\      \\
          |.\\....\\__.... target                |_\\......\\__.....
          | |     DDP                           |  |       DDP              curves end above names
          | local SGD                           |  local SGD
           seconds                               bytes

The first run, which is the base, and the named runs are in colour; the others are grey.

The frame has one row per evaluation, with COLUMNS: run, its name; family, whose colour it takes
(several named runs of one family go from pale to dark); seconds and sent_bytes so far; loss.
"""

import math

import pandas as pd
from matplotlib.ticker import LogLocator, NullFormatter

from labkit.show import style
from labkit.show.curves import draw_runs

COLUMNS = ("run", "family", "seconds", "sent_bytes", "loss")
OTHER = style.lighter(style.FAINT, 0.5)  # of runs that are neither the base nor named
ROW = 14  # points from one name below the curves to the next
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


def colours_of(frame, named):
    """Return {run: colour}: ink for the first run, shades for named runs, OTHER for the rest."""
    base = frame["run"].iloc[0]
    chosen = frame[frame["run"].isin(named) & (frame["run"] != base)]
    return dict.fromkeys(frame["run"].unique(), OTHER) | shades(chosen) | {base: style.INK}


def race(frame, target, title=None, named=()):
    """Return a Figure: seconds and bytes until each run reached the target, its loss over both.

    named: runs that have a colour and a name at their curve, as the first run has.
    """
    ends = reached(frame, target)
    colours = colours_of(frame, named)
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
        make_room(grid[1, 0], sum(colour != OTHER for colour in colours.values()))
        for axes, price in zip(grid[1], PRICES, strict=True):
            write_names(axes, ends_of(frame, ends, price), colours)
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
    there = shown[shown["loss"] <= target].groupby("run").head(1)
    grey = {run: colour for run, colour in colours.items() if colour == OTHER}
    rest = {run: colour for run, colour in colours.items() if colour != OTHER}
    for runs, width, size, zorder in ((grey, 1.2, 4, 2), (rest, 2.2, 7, 3)):
        widths = [width] * len(runs)
        look = {"factor": factor, "zorder": zorder}
        draw_runs(axes, shown, price, "loss", "run", runs, widths, **look)
        look |= {"marker": "o", "linestyle": "", "markersize": size}
        draw_runs(axes, there, price, "loss", "run", runs, **look)
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
        weight = {"color": style.FAINT} if colour == OTHER else {"weight": "bold"}
        style.beside(axes, words, (at, place), (9, 0), annotation_clip=False, **weight)
    axes.tick_params(axis="x", labelbottom=False)


def ends_of(frame, ends, price):
    """Return [(run, whether it reached the target, x, y)]: last points of the curves."""
    factor = style.byte_scale(frame[price].max())[0] if price == "sent_bytes" else 1
    found = []
    for row in ends.to_dict("records"):
        there = not math.isnan(row[price])
        last = row if there else frame[frame["run"] == row["run"]].iloc[-1]
        if price == "seconds" or last[price] > 0:  # else it has no curve
            found.append((row["run"], there, last[price] / factor, last["loss"]))
    return found


def make_room(axes, names):
    """Extend the axis of losses (logarithmic) downwards, for `names` names below the curves."""
    low, high = axes.get_ylim()
    height = axes.bbox.height * 72 / axes.figure.dpi  # points
    part = min(0.6, (ROW * names + 6) / height)
    axes.set_ylim(bottom=high * (low / high) ** (1 / (1 - part)))


def write_names(axes, ends, colours):
    """Name the coloured curves, below those that reached the target; and all that did not."""
    pixel = axes.figure.dpi / 72
    places = {run: axes.transData.transform((x, y)) for run, _, x, y in ends}
    rest = [run for run, there, *_ in ends if not there]
    heights = style.spread_apart([places[run][1] for run in rest], ROW * pixel)
    moved = dict(zip(rest, heights, strict=True))
    left, right = axes.bbox.x0, axes.bbox.x1
    below = [run for run, there, *_ in ends if there and colours[run] != OTHER]
    # Curves that end near an edge have the lowest names: their lines cross no other name.
    below.sort(key=lambda run: min(places[run][0] - left, right - places[run][0]))
    moved |= {run: axes.bbox.y0 + (8 + ROW * row) * pixel for row, run in enumerate(below)}
    for run, there, x, y in ends:
        if run in moved:
            leftwards = there and places[run][0] > left + 0.65 * (right - left)
            offset = (
                -4 if leftwards else 4 if there else 10,
                (moved[run] - places[run][1]) / pixel,
            )
            write_name(axes, run, (x, y), offset, colours[run])


def write_name(axes, run, end, offset, colour):
    """Write the run's name at an offset (points) from its end, with a thin line to it."""
    leftwards = offset[0] < 0
    leader = {"arrowstyle": "-", "linewidth": 0.9, "color": colour, "shrinkA": 0, "shrinkB": 3}
    leader["relpos"] = (float(leftwards), 0.5)
    look = {"ha": "right" if leftwards else "left", "va": "center", "size": 9, "zorder": 5}
    look["bbox"] = {"fc": style.GROUND, "ec": "none", "pad": 0.5}
    look |= {"color": style.FAINT, "zorder": 2.5} if colour == OTHER else {"weight": "bold"}
    style.beside(axes, style.name(run), end, offset, arrowprops=leader, **look)


def finish(grid, ends, target):
    above, below = grid[:, 0]
    above.set_yticks(range(len(ends)), [style.name(run) for run in ends["run"]])
    above.invert_yaxis()
    above.set_ylim(len(ends) - 0.4, -0.6)
    below.set_yscale("log")
    below.set_ylim(bottom=min(below.get_ylim()[0], target / 1.7))
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
