"""Explorer of schedules: the bubble of a schedule, predicted and, if it ran, measured.

    schedule v   ranks v   micro-batches v        controls: they play the schedule anew, on no rank
    [ figure ]   bubble 15.8 % predicted, 16.9 % measured
    [ Run it ]                                    the only control that launches

The picture is a pure function of (state, measured rows).
"""

from dataclasses import dataclass

import pandas as pd

from labkit.measure.timeline_analysis import bubble
from labkit.pipeline import pipeline
from labkit.pipeline.pipeline_schedules import routes
from labkit.pipeline.schedule_validation import most_held
from labkit.show import controls, style
from labkit.show.explorer import Explorer
from labkit.show.notebook import table
from labkit.show.pipelines import pipelines, played
from labkit.show.publish import as_html

STAGES_OF_A_RANK = {
    "gpipe": 1,
    "one_f_one_b": 1,
    "interleaved": 2,
    "zero_bubble": 1,
    "v_shaped": 2,
    "dual_pipe": 2,
}


@dataclass(frozen=True)
class State:
    """The values of the controls. schedule: a function of labkit.pipeline.pipeline."""

    schedule: str
    ranks: int
    micro_batches: int

    def written(self):
        """Return the schedule: for each rank a list of actions."""
        write = getattr(pipeline, self.schedule)
        stages = STAGES_OF_A_RANK[self.schedule] * self.ranks
        return write(stages, self.micro_batches, self.ranks)


def compared(frames, states, unit_ms):
    """Return a DataFrame, a row per schedule: predicted and measured bubble, ratio, held.

    frames: {name: Timeline.frame() of one step}; states: {name: State}. unit_ms: a rank's forward
    of a micro-batch. held: the most micro-batches whose activations each rank holds, as text.
    """
    rows = []
    for name, frame in frames.items():
        schedule = states[name].written()
        predicted = bubble(played(schedule, unit_ms))
        measured = bubble(frame)
        share = len(routes(schedule)[0]) / len(schedule)  # stages of the model per rank
        held = ", ".join(f"{count / share:g}" for count in most_held(schedule))
        rows.append((name, predicted, measured, measured / predicted, held))
    columns = ["schedule", "predicted_bubble", "measured_bubble", "ratio", "held"]
    return pd.DataFrame(rows, columns=columns)


def show_compared(frame, caption):
    """Show a frame of compared() as a table of texts."""
    words = frame.assign(
        predicted_bubble=frame["predicted_bubble"].map("{:.1%}".format),
        measured_bubble=frame["measured_bubble"].map("{:.1%}".format),
        ratio=frame["ratio"].map("{:.2f}".format),
    )
    titles = {"ratio": "measured / predicted", "held": "held at most, rank by rank"}
    table(words.rename(columns=titles), caption)


def takeaway(state, measured):
    """Return one sentence on the bubble. measured: {State: bubble} of the steps that ran."""
    predicted = bubble(played(state.written()))
    words = f"{style.name(state.schedule)}, {state.ranks} ranks, {state.micro_batches} "
    words += f"micro-batches: a bubble of {predicted:.1%} predicted"
    return words + (f", {measured[state]:.1%} measured." if state in measured else ".")


def picture(state, measured, unit_ms):
    """Return the widget's image as HTML with alt text. ValueError if there is no such schedule."""
    frame = played(state.written(), unit_ms)
    return as_html(takeaway(state, measured), pipelines({style.name(state.schedule): frame}))


def explorer(state, measured, unit_ms, launch):
    """Show the controls; return the Explorer.

    measured: {State: bubble} of the steps that ran. unit_ms: as in compared(). launch: function
    State -> Timeline.frame() of one step on ranks, called by the button.
    """
    measured = dict(measured)

    def run(state):
        measured[state] = bubble(launch(state))
        return "measured"

    names = [(style.name(name), name) for name in STAGES_OF_A_RANK]
    counts = sorted({2, 4, 6, 8, 12, 16, 24, state.micro_batches})
    row = {
        "schedule": controls.menu("schedule", names, state.schedule),
        "ranks": controls.menu("ranks", sorted({1, 2, 3, 4, 8, state.ranks}), state.ranks),
        "micro_batches": controls.menu("micro-batches", counts, state.micro_batches),
    }
    hint = "Change a control: the schedule is played here."
    words = "Run it on ranks"

    def shown(state):
        return picture(state, measured, unit_ms)

    return Explorer(state, [row], shown, hint, run=run, words=words).show()
