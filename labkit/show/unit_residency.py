"""Residency: which units of a sharded model are whole on a rank, below compute and network.

one unit ahead   13 messages
  compute  [ forward  0 | 1 | 2 ][ backward  2 | 1 | 0 ][opt]                             72 ms
  gather   [root][0][1][2]       [1][0]                                            exposed 5 ms
  reduce                               [2][1][0][root]
  root     [==================================]
  0             [====]                  [=======]
  1                [====]            [=====]                          at most 3 whole: 4.1 MiB
  2                   [=======================]
"""

from matplotlib import patheffects

from labkit.measure.timeline_analysis import LANES, exposed, length
from labkit.show import style
from labkit.show.gantt import BAR, draw_span, fit
from labkit.show.schedules import FINEST, draw_heading, from_zero, in_turn

LANE = "whole"  # the lane of the spans in which a unit is whole
THIN = 0.5  # height of a unit's row, in rows
HEAD, GAP = 0.9, 0.6  # of a band's name, and below the band


def residency(frames, title=None):
    """Figure: a band per schedule: compute, gathers, reductions (schedules()), a thin row per unit.

    frames: {name: Timeline.frame() of one rank and one step} with the lanes compute, network
        ("gather NAME", "reduce NAME") and whole: a span named after a unit for each time that it is
        whole, payload_bytes: its size.
    Units stand in the order of being first whole. Raises ValueError for a frame without them.
    """
    if not frames or any(LANE not in set(frame["lane"]) for frame in frames.values()):
        raise ValueError(
            f"residency needs spans in the lane {LANE!r}, one for each time that a unit is whole"
        )
    frames = {name: from_zero(frame) for name, frame in frames.items()}
    heights = [HEAD + 3 + THIN * len(units_of(frame)) + GAP for frame in frames.values()]
    with style.look():
        figure, axes = style.new_figure(9.5, 0.9 + 0.36 * sum(heights))
        axes.set_xlim(0, max(frame["end_ms"].max() for frame in frames.values()) * 1.005)
        axes.set_ylim(sum(heights) - GAP - 0.4, -0.4)
        labels, ticks, y = [], {}, 0.0
        for (name, frame), height in zip(frames.items(), heights, strict=True):
            labels += draw_work(axes, name, frame, y, ticks)
            draw_units(axes, frame, y + HEAD + 3, ticks)
            y += height
        axes.set_yticks(list(ticks), list(ticks.values()), size=9)
        axes.set_xlabel("time since the step began (ms)")
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.grid(axis="x")
        style.entitle(figure, title)
        figure.draw_without_rendering()
        for label in labels:
            fit(label, axes)
    return figure


def units_of(frame):
    """Names of the units, in the order in which they are first whole."""
    return list(dict.fromkeys(frame[frame["lane"] == LANE].sort_values("start_ms")["name"]))


def draw_work(axes, name, frame, top, ticks):
    """The band's name, and rows compute, gather, reduce; returns texts that may need shortening."""
    work = frame[frame["lane"].isin(LANES)]
    bare = exposed(work, work["rank"].iloc[0])
    seen = [piece for piece in bare if length([piece]) > axes.get_xlim()[1] / FINEST]
    inner = work["unit"].fillna(False).astype(bool) if "unit" in work else work["rank"] < 0
    network, row = work["lane"] == "network", top + HEAD
    labels = []
    for place, part in enumerate(("compute", "gather", "reduce")):
        mine = (
            in_turn(work[network & work["name"].str.startswith(part)])
            if place
            else work[~inner & ~network]
        )
        ticks[row + place] = part
        for _, span in mine.iterrows():
            labels += draw_span(axes, span, row + place, seen)
    for x in (*work[inner]["start_ms"], *work[inner]["end_ms"]):
        axes.plot([x, x], [row - BAR / 2, row + BAR / 2], color=style.GROUND, linewidth=0.9)
    draw_heading(axes, name, top, int(network.sum()))
    write(axes, work["end_ms"].max(), row, style.quantity(work["end_ms"].max(), "ms"), style.INK)
    words = f"exposed {style.quantity(length(bare), 'ms')}" if bare else "nothing exposed"
    write(axes, work.loc[network, "end_ms"].max(), row + 1.5, words, style.RED)
    return labels


def draw_units(axes, frame, top, ticks):
    """A thin row per unit, and how much is whole at most."""
    spans, colour = frame[frame["lane"] == LANE], style.COLOURS["parameters"]
    rows = {unit: top + THIN * (place - 0.3) for place, unit in enumerate(units_of(frame))}
    for _, span in spans.iterrows():
        axes.barh(
            rows[span["name"]],
            span["duration_ms"],
            THIN * 0.72,
            left=span["start_ms"],
            color=colour,
            linewidth=0,
        )
    ticks |= {y: unit for unit, y in rows.items()}
    count, size = most_whole(spans)
    words = f"at most {count} whole:\n{style.quantity(size, 'bytes')}"
    write(axes, spans["end_ms"].max(), sum(rows.values()) / len(rows), words, colour)


def most_whole(spans):
    """(units, bytes) at the moment when most bytes are whole."""
    moments = [spans[(spans["start_ms"] <= t) & (t < spans["end_ms"])] for t in spans["start_ms"]]
    return max(
        ((len(now), now["payload_bytes"].sum()) for now in moments), key=lambda found: found[1]
    )


def write(axes, x, y, words, colour):
    """Words to the right of what ends at x."""
    rim = [patheffects.withStroke(linewidth=3, foreground=style.GROUND)]
    look = {"va": "center", "weight": "bold", "color": colour, "path_effects": rim}
    style.beside(axes, words, (x, y), (7, 0), annotation_clip=False, **look)
