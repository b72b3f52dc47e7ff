"""Pipelines drawn: a band per schedule, a row per rank, a box per action with its micro-batch.

    GPipe                                                       bubble 20.0% of 330 ms
    rank 0  [0][1][2][3]            [ 0  ][ 1  ][ 2  ][ 3  ]
    rank 1     [0][1][2][3]   [ 0  ][ 1  ][ 2  ][ 3  ]              blue F, orange B, purple W;
                                                                    pale: a later stage of the rank
A frame has rank, kind, stage, micro_batch, start_ms, end_ms, duration_ms, lane: a Timeline.frame()
of watch_pipeline, or from played().
"""

import pandas as pd
from matplotlib.patches import Patch

from labkit.measure.timeline_analysis import bubble
from labkit.pipeline.pipeline_schedules import routes
from labkit.pipeline.schedule_validation import play
from labkit.show import style
from labkit.show.gantt import box, canvas, finish, from_zero, head, legend

KINDS = {"F": "forward", "B": "backward", "W": "weights"}
WORDS = {
    "F": "F: forward",
    "B": "B: backward, of the input if there is a W",
    "W": "W: weights",
}
BOX = 0.86  # of one row's height
BAND = 1.1  # between two schedules, in rows


def played(schedule, forward_ms=1.0, input_ms=None, weights_ms=None, message_ms=0.0):
    """Return the frame of a simulated schedule. input_ms, weights_ms: by default forward_ms.

    The times of an F, a B and a W are those of all stages of a rank together; each stage takes an
    equal share. message_ms: time from the end on one rank to the beginning on another.
    """
    share = len(routes(schedule)[0]) / len(schedule)  # stages of the model per rank
    lengths = (forward_ms, input_ms or forward_ms, weights_ms or forward_ms)
    cost = dict(zip("FBW", (length / share for length in lengths), strict=True))
    times, owner = play(schedule, cost, message_ms)
    rows = [
        {"rank": owner[a.stage], "lane": "compute", **a._asdict(), "start_ms": b, "end_ms": e}
        for a, (b, e) in times.items()
    ]
    return pd.DataFrame(rows).assign(duration_ms=lambda rows: rows["end_ms"] - rows["start_ms"])


def actions(frame):
    """Return the actions of a frame, from 0 ms on."""
    return from_zero(frame[frame["lane"] == "compute"].dropna(subset=["kind"]))


def pipelines(frames, title=None):
    """Return a Figure with a band per schedule. frames: {name: frame of one step}.

    Raises ValueError without frames, or for an empty one.
    """
    if not frames or any(frame.empty for frame in frames.values()):
        raise ValueError("a pipeline without actions cannot be drawn")
    frames = {name: actions(frame) for name, frame in frames.items()}
    rows = sum(frame["rank"].nunique() + BAND for frame in frames.values())
    end = max(frame["end_ms"].max() for frame in frames.values())
    with style.look():
        figure, axes = canvas(8.6, 1.2 + 0.27 * rows, end, -0.3, rows - 0.4)
        top = 0.0
        ticks = {}
        for name, frame in frames.items():
            draw_band(axes, name, frame, top, ticks, end)
            top += frame["rank"].nunique() + BAND
        seen = [kind for kind in KINDS if any((f["kind"] == kind).any() for f in frames.values())]
        shown = [Patch(color=style.COLOURS[KINDS[kind]], label=WORDS[kind]) for kind in seen]
        if any((f.groupby("rank")["stage"].nunique() > 1).any() for f in frames.values()):
            pale = style.lighter(style.COLOURS["forward"], 0.5)
            shown.append(Patch(color=pale, label="pale: the rank's later stages"))
        legend(figure, shown)
        finish(figure, axes, ticks, title)
    return figure


def draw_band(axes, name, frame, top, ticks, end):
    """Draw one schedule: its name and bubble above its ranks."""
    length = frame["end_ms"].max()
    words = f"bubble {bubble(frame):.1%} of {style.quantity(length, 'ms')}"
    head(axes, top + 0.35, end, name, words)
    for row, rank in enumerate(sorted(frame["rank"].unique())):
        mine = frame[frame["rank"] == rank]
        y = top + BAND + row
        ticks[y] = f"rank {rank}"
        box(axes, y, 0, length, BOX, color=style.lighter(style.GREY, 0.72), linewidth=0)
        first = mine["stage"].min()
        for action in mine.itertuples():
            colour = style.COLOURS[KINDS[action.kind]]
            face = style.lighter(colour, 0.5) if action.stage != first else colour
            start = action.start_ms
            stop = action.end_ms
            box(axes, y, start, stop, BOX, color=face, edgecolor=style.GROUND, linewidth=0.6)
            if stop - start > 0.013 * end:
                middle = (start + stop) / 2
                look = {"ha": "center", "va": "center_baseline", "size": 7.5}
                axes.text(middle, y, int(action.micro_batch), color=style.text_on(face), **look)
