"""Schedules compared: the same work in several orders, one band each, on one clock.

                                              without messages: 60 ms
naive    76 messages                                :
  compute  [forward][block 3|block 2|block 1|block 0|///////// waits /////////][opt]  120 ms
  network                                           :[####### exposed ########]       exposed 60 ms
bucketed  4 messages                                :
  compute  [forward][block 3|block 2|block 1|block 0|///////][opt]  72 ms
  network                   [   0  ][   1  ][   2  ]:[## 3 #]       exposed 8 ms
"""

from matplotlib import patheffects

from labkit.measure.timeline_analysis import LANES, exposed, length
from labkit.show import style
from labkit.show.gantt import BAR, canvas, draw_span, finish, from_zero, inner

BAND = 3.55  # height of one schedule, in rows
NAMED = 20  # messages are named if a band has at most this many
FINEST = 2000  # an exposed moment shorter than this part of the width is counted, but not drawn


def schedules(frames, title=None, floor_ms=None, floor_words="without messages"):
    """Return a Figure: a band per schedule, compute above network, exposed time hatched and summed.

    frames: {name: Timeline.frame() of one rank and one step}. floor_ms: a time to mark, that of a
    step without messages. Spans with unit=True become seams within forward and backward.
    Messages that are in flight together are drawn one after the other, each from the end of the one
    before, because a queued message moves no bytes. Raises ValueError without spans.
    """
    if not frames or any(frame.empty for frame in frames.values()):
        raise ValueError("an empty timeline cannot be drawn")
    frames = {name: from_zero(frame[frame["lane"].isin(LANES)]) for name, frame in frames.items()}
    total = max(frame["end_ms"].max() for frame in frames.values())
    with style.look():
        height = 1.15 + 0.4 * BAND * len(frames)
        figure, axes = canvas(9.5, height, total, -0.95, BAND * len(frames) - 0.75)
        axes.grid(axis="x")
        if floor_ms is not None:
            mark(axes, floor_ms, floor_words)
        labels = []
        rows = {}
        for index, (name, frame) in enumerate(frames.items()):
            top = BAND * index
            labels += draw_band(axes, name, frame, top)
            rows |= {top + row: lane for row, lane in enumerate(LANES, 1)}
        finish(figure, axes, rows, title, labels)
    return figure


def draw_band(axes, name, frame, top):
    """Draw one schedule; return the texts in its bars, which may have to be shortened to fit."""
    network = frame["lane"] == "network"
    rows = {
        top + 1: frame[~inner(frame) & ~network],
        top + 2: in_turn(frame[network]),
    }
    named = network.sum() <= NAMED
    draw_heading(axes, name, top, int(network.sum()))
    return draw_work(axes, frame, rows, top + 2, named)


def draw_work(axes, frame, rows, exposed_at, named=True):
    """Draw the rows {y: spans} of one step, compute first; return the texts in its bars.

    exposed_at: y of the sum of exposed time. named: whether messages are named.
    """
    bare = exposed(frame, frame["rank"].iloc[0])
    seen = [piece for piece in bare if length([piece]) > axes.get_xlim()[1] / FINEST]
    first, *_ = rows
    labels = []
    for y, spans in rows.items():
        for _, span in spans.iterrows():
            words = draw_span(axes, span, y, seen)
            if y == first or named:
                labels += words
            else:
                for text in words:
                    text.remove()
    units = frame[inner(frame)]
    for x in (*units["start_ms"], *units["end_ms"]):
        edges = [first - BAR / 2, first + BAR / 2]
        axes.plot([x, x], edges, color=style.GROUND, linewidth=0.9)
    end = frame["end_ms"].max()
    write_end(axes, end, first, style.quantity(end, "ms"), size=10.5)
    network = frame["lane"] == "network"
    if network.any():
        total = length(bare)
        words = f"exposed {style.quantity(total, 'ms')}" if total else "nothing exposed"
        last = frame.loc[network, "end_ms"].max()
        write_end(axes, last, exposed_at, words, size=9, color=style.RED)
    return labels


def write_end(axes, x, y, words, **look):
    """Write words to the right of a bar that ends at x, with a rim over lines behind them."""
    look |= {"path_effects": [patheffects.withStroke(linewidth=3, foreground=style.GROUND)]}
    style.beside(axes, words, (x, y), (7, 0), weight="bold", annotation_clip=False, **look)


def draw_heading(axes, name, top, count):
    """Write the name of a band, and its number of messages."""
    look = {"va": "center_baseline", "ha": "left"}
    heading = axes.annotate(name, (0, top), weight="bold", size=10.5, **look)
    words = f"   {count} message{'' if count == 1 else 's'}"
    axes.annotate(words, (1, 0.5), xycoords=heading, size=9.5, color=style.FAINT, **look)


def in_turn(messages):
    """Return the messages, each cut to begin when all earlier ones have ended; none is empty.

    `waited` stays: a rank waits for a queued message no longer than it is drawn.
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
