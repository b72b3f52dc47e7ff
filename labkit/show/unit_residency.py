"""Residency: when each unit of a sharded model is unsharded on a rank, below compute and network.

one unit ahead   13 messages
  compute  [ forward  0 | 1 | 2 ][ backward  2 | 1 | 0 ][opt]                             72 ms
  gather   [root][0][1][2]       [1][0]                                            exposed 5 ms
  reduce                               [2][1][0][root]
  root     [==================================]
  0             [====]                  [=======]
  1                [====]            [=====]                          at most 3 complete: 4.1 MiB
  2                   [=======================]
"""

from labkit.measure.timeline_analysis import LANES
from labkit.show import style
from labkit.show.gantt import box, canvas, finish, from_zero, inner
from labkit.show.schedules import draw_heading, draw_work, in_turn, write_end

LANE = "whole"  # the lane of the spans in which a unit is unsharded
THIN = 0.5  # height of a unit's row, in rows
# of a band's name, and below the band
HEAD = 0.9
GAP = 0.6


def residency(frames, title=None):
    """Return a Figure: per schedule compute, gathers, reductions, and a thin row per unit.

    frames: {name: Timeline.frame() of one rank and one step} with the lanes compute, network
        ("gather NAME", "reduce NAME") and whole: a span named after a unit for each time that it is
        unsharded, payload_bytes: its size.
    Units are in the order of their first span. Raises ValueError for a frame without such spans.
    """
    if not frames or any(LANE not in set(frame["lane"]) for frame in frames.values()):
        raise ValueError(
            f"residency needs spans in the lane {LANE!r}, one for each time that a unit is whole"
        )
    frames = {name: from_zero(frame) for name, frame in frames.items()}
    heights = [HEAD + 3 + THIN * len(units_of(frame)) + GAP for frame in frames.values()]
    with style.look():
        end = max(frame["end_ms"].max() for frame in frames.values())
        bottom = sum(heights) - GAP - 0.4
        figure, axes = canvas(9.5, 0.9 + 0.36 * sum(heights), end, -0.4, bottom)
        labels = []
        ticks = {}
        y = 0.0
        for (name, frame), height in zip(frames.items(), heights, strict=True):
            labels += draw_lanes(axes, name, frame, y, ticks)
            draw_units(axes, frame, y + HEAD + 3, ticks)
            y += height
        axes.grid(axis="x")
        finish(figure, axes, ticks, title, labels)
    return figure


def units_of(frame):
    """Return the names of the units, in the order in which they are first unsharded."""
    return list(dict.fromkeys(frame[frame["lane"] == LANE].sort_values("start_ms")["name"]))


def draw_lanes(axes, name, frame, top, ticks):
    """Draw the rows compute, gather, reduce; return texts that may have to be shortened."""
    work = frame[frame["lane"].isin(LANES)]
    network = work["lane"] == "network"
    row = top + HEAD
    rows = {row: work[~inner(work) & ~network]}
    for place, part in enumerate(("gather", "reduce"), start=1):
        rows[row + place] = in_turn(work[network & work["name"].str.startswith(part)])
    ticks |= dict(zip(rows, ("compute", "gather", "reduce"), strict=True))
    draw_heading(axes, name, top, int(network.sum()))
    return draw_work(axes, work, rows, row + 1.5)


def draw_units(axes, frame, top, ticks):
    """Draw a thin row per unit, and the most bytes that are unsharded at once."""
    spans = frame[frame["lane"] == LANE]
    colour = style.COLOURS["parameters"]
    rows = {unit: top + THIN * (place - 0.3) for place, unit in enumerate(units_of(frame))}
    for _, span in spans.iterrows():
        row = rows[span["name"]]
        look = {"color": colour, "linewidth": 0}
        box(axes, row, span["start_ms"], span["end_ms"], THIN * 0.72, **look)
    ticks |= {y: unit for unit, y in rows.items()}
    count, size = most_whole(spans)
    words = f"at most {count} complete:\n{style.quantity(size, 'bytes')}"
    middle = sum(rows.values()) / len(rows)
    write_end(axes, spans["end_ms"].max(), middle, words, va="center", color=colour)


def most_whole(spans):
    """Return (units, bytes) at the moment when most bytes are unsharded."""
    moments = [spans[(spans["start_ms"] <= t) & (t < spans["end_ms"])] for t in spans["start_ms"]]
    return max(
        ((len(now), now["payload_bytes"].sum()) for now in moments), key=lambda found: found[1]
    )
