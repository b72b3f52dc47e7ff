"""Schedules compared: the same work in several orders, one band each, on one clock.

                                              without messages: 60 ms
naive    76 messages                                :
  compute  [forward][block 3|block 2|block 1|block 0|///////// waits /////////][opt]  120 ms
  network                                           :[####### exposed ########]       exposed 60 ms
bucketed  4 messages                                :
  compute  [forward][block 3|block 2|block 1|block 0|///////][opt]  72 ms
  network                   [   0  ][   1  ][   2  ]:[## 3 #]       exposed 8 ms
"""

import pandas as pd
from matplotlib import patheffects

from labkit.measure.timeline_analysis import LANES, exposed, length
from labkit.show import style
from labkit.show.gantt import BAR, draw_span, fit

BAND = 3.55  # height of one schedule, in rows
NAMED = 20  # at most as many messages carry their names
FINEST = 2000  # an exposed moment shorter than this part of the width is counted, but not drawn


def schedules(frames, title=None, floor_ms=None, floor_words="without messages"):
    """Figure: a band per schedule, compute above network; exposed time is hatched and summed.

    frames: {name: Timeline.frame() of one rank and one step}. floor_ms: a time to mark, that of a
    step which sends nothing. Spans with unit=True become seams within forward and backward.
    Messages that are in flight together are drawn one after the other, each from the end of the one
    before: a message that waits its turn moves no bytes.
    """
    if not frames or any(frame.empty for frame in frames.values()):
        raise ValueError("an empty timeline cannot be drawn")
    frames = {name: from_zero(frame[frame["lane"].isin(LANES)]) for name, frame in frames.items()}
    total = max(frame["end_ms"].max() for frame in frames.values())
    with style.look():
        figure, axes = style.new_figure(9.5, 1.15 + 0.4 * BAND * len(frames))
        axes.set_xlim(0, total * 1.005)
        axes.set_ylim(BAND * len(frames) - 0.75, -0.95)
        axes.grid(axis="x")
        if floor_ms is not None:
            mark(axes, floor_ms, floor_words)
        labels = []
        for index, (name, frame) in enumerate(frames.items()):
            labels += draw_band(axes, name, frame, BAND * index)
        lanes = [
            (BAND * index + row, lane)
            for index in range(len(frames))
            for row, lane in enumerate(LANES, 1)
        ]
        axes.set_yticks([y for y, _ in lanes], [words for _, words in lanes], size=9)
        axes.set_xlabel("time since the step began (ms)")
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        style.entitle(figure, title)
        figure.draw_without_rendering()
        for label in labels:
            fit(label, axes)
    return figure


def from_zero(frame):
    origin = frame["start_ms"].min()
    return frame.assign(start_ms=frame["start_ms"] - origin, end_ms=frame["end_ms"] - origin)


def draw_band(axes, name, frame, top):
    """One schedule; returns the texts in its bars, which may have to be shortened to fit."""
    rank = frame["rank"].iloc[0]
    bare = exposed(frame, rank)
    seen = [piece for piece in bare if length([piece]) > axes.get_xlim()[1] / FINEST]
    inner = frame["unit"].fillna(False).astype(bool) if "unit" in frame else frame["rank"] < 0
    network = frame["lane"] == "network"
    labels, count = [], int(network.sum())
    for _, span in pd.concat([frame[~inner & ~network], in_turn(frame[network])]).iterrows():
        row = 1 + LANES.index(span["lane"])
        words = draw_span(axes, span, top + row, seen)
        if row == 2 and count > NAMED:
            for text in words:
                text.remove()
        else:
            labels += words
    for _, span in frame[inner].iterrows():
        for x in (span["start_ms"], span["end_ms"]):
            axes.plot(
                [x, x], [top + 1 - BAR / 2, top + 1 + BAR / 2], color=style.GROUND, linewidth=0.9
            )
    end = frame["end_ms"].max()
    draw_heading(axes, name, top, count)
    at_end = {"weight": "bold", "annotation_clip": False}
    at_end["path_effects"] = [patheffects.withStroke(linewidth=3, foreground=style.GROUND)]
    style.beside(axes, style.quantity(end, "ms"), (end, top + 1), (7, 0), size=10.5, **at_end)
    if count:
        last, sum_of = frame.loc[network, "end_ms"].max(), length(bare)
        words = f"exposed {style.quantity(sum_of, 'ms')}" if sum_of else "nothing exposed"
        style.beside(axes, words, (last, top + 2), (7, 0), size=9, color=style.RED, **at_end)
    return labels


def draw_heading(axes, name, top, count):
    """The name of a band, and how many messages it has."""
    look = {"va": "center_baseline", "ha": "left"}
    heading = axes.annotate(name, (0, top), weight="bold", size=10.5, **look)
    words = f"   {count} message{'' if count == 1 else 's'}"
    axes.annotate(words, (1, 0.5), xycoords=heading, size=9.5, color=style.FAINT, **look)


def in_turn(messages):
    """The same messages, each cut to begin when all earlier ones have ended, without empty ones.

    A message that waited in a queue was blocked on no longer than it is drawn: `waited` stays.
    """
    messages = messages.sort_values(["start_ms", "end_ms"])
    before = messages["end_ms"].cummax().shift(fill_value=0.0)
    messages = messages.assign(start_ms=messages["start_ms"].clip(lower=before))
    return messages[messages["start_ms"] < messages["end_ms"]]


def mark(axes, x, words):
    axes.axvline(x, color=style.FAINT, linewidth=1.1, linestyle=(0, (4, 3)), zorder=0.9)
    place = {
        "xycoords": ("data", "axes fraction"),
        "textcoords": "offset points",
        "ha": "left",
        "va": "bottom",
    }
    axes.annotate(
        f"{words}: {style.quantity(x, 'ms')}",
        (x, 1),
        xytext=(-2, 1),
        size=9,
        color=style.FAINT,
        **place,
    )
