"""Explorer of compressors: the gradient, what arrives, the residual, and how sums catch up.

    compressor v   feedback v   step v        controls: they re-plot what was recorded, send nothing
    transmitted    a window of the gradient in one step, by element; beneath: waiting or missing
    catching_up    the error of a step, and of the sums over all: with feedback the second falls

The picture is a pure function of (frame, state). The frame has one row per variant and step: a row
of labkit.measure.compressor_probe.Watched, and two columns that name the variant:

    compressor   a key of labkit.compression.COMPRESSORS
    knob         text, "ratio 0.1", "rank 2", ..., or "" for the registry's own setting

One launch records all rows, with a Watched for each compressor and feedback (True, False).
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd

from labkit.show import controls, style
from labkit.show.curves import close
from labkit.show.explorer import Explorer
from labkit.show.notebook import table
from labkit.show.publish import as_html, present
from labkit.show.time_vs_bandwidth import label_decades

FORM = ("compressor", "knob", "feedback")
NUMBERS = ("momentum", "elements", "sent_bytes", "plain_bytes", "error", "sum_error")
NUMBERS += ("waiting", "first")
VECTORS = ("gradient", "arrived", "residual")
COLUMNS = (*FORM, "step", *NUMBERS, *VECTORS)
# compressors with a setting
FAMILIES = {"topk": "top-k", "randomk": "random-k", "dgc": "DGC", "powersgd": "PowerSGD"}


@dataclass(frozen=True)
class State:
    """The values of the controls: one of each of the first four COLUMNS."""

    compressor: str
    knob: str
    feedback: bool
    step: int


def initial(frame, compressor=None):
    """Return the first State: the last step of the first variant, or of that compressor's first.

    Variants with feedback come first. Raises ValueError for a frame without rows or without one of
    COLUMNS.
    """
    missing = [column for column in COLUMNS if column not in frame]
    if missing or frame.empty:
        raise ValueError(
            f"an explorer of compressors needs rows with {', '.join(COLUMNS)}; "
            f"got {len(frame)} rows, without {', '.join(missing) or 'any content'}"
        )
    mine = frame[frame["compressor"] == (compressor or frame["compressor"].iloc[0])]
    first = mine.sort_values("feedback", ascending=False, kind="stable").iloc[0]
    step = int(frame["step"].max())
    return State(first["compressor"], first["knob"], bool(first["feedback"]), step)


def form_name(compressor, knob):
    name = style.name(compressor)
    return f"{FAMILIES.get(compressor, name)}, {knob}" if knob else name


def words_of(state):
    feedback = "with feedback" if state.feedback else "without feedback"
    return f"{form_name(state.compressor, state.knob)}, {feedback}"


def steps_of(frame, state):
    """Return the rows of the chosen variant, sorted by step."""
    which = (frame["compressor"] == state.compressor) & (frame["knob"] == state.knob)
    return frame[which & (frame["feedback"] == state.feedback)].sort_values("step")


def row_of(frame, state):
    """Return the chosen row. Raises ValueError if none was recorded."""
    rows = steps_of(frame, state)
    rows = rows[rows["step"] == state.step]
    if rows.empty:
        raise ValueError(f"nothing recorded for {words_of(state)}, step {state.step}")
    return rows.iloc[0]


def transmitted(frame, state):
    """Return a Figure: a window of the gradient, what arrived, and below what waits or is missing.

    Raises ValueError if the choice was not recorded.
    """
    row = row_of(frame, state)
    colour = style.palette(frame["compressor"])[state.compressor]
    gradient, arrived, residual = (np.array(row[name], dtype=float) for name in VECTORS)
    places = row["first"] + np.arange(len(gradient))
    with style.look():
        layout = {"sharex": True, "gridspec_kw": {"height_ratios": [3, 2]}}
        figure, (above, below) = style.new_figure(9.5, 4.6, rows=2, **layout)
        if state.feedback:
            owed = {"color": style.lighter(colour, 0.7), "label": "that + what had waited"}
            above.bar(places, arrived + residual, 0.9, **owed)
        name = "gradient, with momentum" if row["momentum"] else "gradient"
        above.bar(places, gradient, 0.42, color=style.INK, label=name)
        dot = {"color": colour, "markeredgecolor": style.INK, "markersize": 5.5}
        above.plot(places, arrived, "o", label="arrived", **dot)
        if state.feedback:
            below.bar(places, residual, 0.9, color=style.lighter(colour, 0.35))
            below.set_ylabel("waits")
        else:
            below.bar(places, gradient - arrived, 0.9, color=style.RED)
            below.set_ylabel("missing")
        for axes in (above, below):
            axes.axhline(0, color=style.FAINT, linewidth=0.8)
            axes.grid(axis="y")
        above.set_ylabel("gradient")
        below.set_xlabel(f"element, {len(gradient)} of {row['elements']:,}; means over the ranks")
        above.margins(x=0.01)
        figure.align_ylabels()
        handles, labels = above.get_legend_handles_labels()
        beneath = {"loc": "outside lower left", "ncols": 3, "handlelength": 1.2}
        figure.legend(handles[::-1], labels[::-1], **beneath)
        style.entitle(figure, f"Step {state.step}: {words_of(state)}")
    return figure


def catching_up(frame, state):
    """Return a Figure of the errors over the steps: of each step alone, and of the sums so far."""
    colour = style.palette(frame["compressor"])[state.compressor]
    ends = []
    with style.look():
        figure, axes = style.new_figure(9.5, 3.4)

        def draw(rows, column, words, colour, **look):
            axes.plot(rows["step"], 100 * rows[column], color=colour, **look)
            ends.append((rows["step"].iloc[-1], 100 * rows[column].iloc[-1], words, colour))

        for feedback, words in ((True, "sums, with feedback"), (False, "sums, without")):
            rows = steps_of(frame, State(state.compressor, state.knob, feedback, state.step))
            if len(rows):
                look = (colour, 2.6) if feedback == state.feedback else (style.INK, 1.2)
                draw(rows, "sum_error", words, look[0], linewidth=look[1])
        mine = steps_of(frame, state)
        draw(mine, "error", "each step alone", style.FAINT, linewidth=1.2, linestyle=(0, (2, 1.5)))
        row = row_of(frame, state)
        ring = {"markersize": 12, "color": style.INK, "markerfacecolor": "none"}
        axes.plot(row["step"], 100 * row["sum_error"], "o", **ring)
        axes.set_yscale("log")
        label_decades(axes.yaxis)
        axes.margins(x=0.02)
        axes.set_xlabel("step")
        axes.set_ylabel("error (% of the gradient's norm)")
        title = f"The sums of what arrived and of the gradients: {words_of(state)}"
        close(figure, axes, ends, title)
    return figure


def percent(share):
    return style.quantity(100 * share, "%")


def takeaway(frame, state):
    """Return a step's bytes, its error, the error of the sums, and the size of the residual."""
    row = row_of(frame, state)
    sent, plain = (style.quantity(row[column], "bytes") for column in ("sent_bytes", "plain_bytes"))
    words = f"{words_of(state)}: a rank sends {sent} a step in place of {plain}"
    words += f", {times_less(row)} times less. " if row["sent_bytes"] else ". "
    words += f"In step {state.step} what arrives misses the gradient by {percent(row['error'])} "
    words += f"of its norm; since step 0 the sums differ by {percent(row['sum_error'])}"
    if row["feedback"]:
        words += f", and {row['waiting']:.3g} times the gradient's norm waits"
    return words + "."


def times_less(row):
    """Return how many times less is sent, as text; "" if nothing is sent."""
    return f"{row['plain_bytes'] / row['sent_bytes']:.3g}" if row["sent_bytes"] else ""


def small(frame):
    """Return a DataFrame of texts: a row per variant, at its last step."""
    rows = []
    for (compressor, knob, feedback), mine in frame.groupby(list(FORM), sort=False):
        last = mine.sort_values("step").iloc[-1]
        row = {"compressor": form_name(compressor, knob), "feedback": "yes" if feedback else "no"}
        row["sent a step"] = style.quantity(last["sent_bytes"], "bytes")
        row["times less"] = times_less(last)
        row["error of the last step"] = percent(last["error"])
        row["of the sums"] = percent(last["sum_error"])
        rows.append(row)
    return pd.DataFrame(rows)


def picture(frame, state):
    """Return the widget's images as HTML with alt text; a sentence if nothing was recorded."""
    if steps_of(frame, state).empty:
        return f"<p>Not recorded: {words_of(state)}.</p>"
    return as_html(takeaway(frame, state), transmitted(frame, state), catching_up(frame, state))


def read(state, form, feedback, step):
    """Return the state that the controls show; form: (compressor, knob)."""
    return State(*form, feedback, step)


def explorer(frame, provenance, compressor=None):
    """Show recorded compressors: figures, takeaway, table, then the controls. Returns Explorer.

    frame: see above. provenance: as in present(). compressor: the one to show first.
    """
    state = initial(frame, compressor)
    words = takeaway(frame, state)
    present(transmitted(frame, state), words, provenance, words)
    caption = "How far what arrived is from the gradients: "
    caption += "each step alone, and the sums over all steps so far"
    present(catching_up(frame, state), caption, provenance, caption)
    table(small(frame), f"after the last step; {provenance}")
    forms = list(dict.fromkeys(zip(frame["compressor"], frame["knob"], strict=True)))
    named = [(form_name(*form), form) for form in forms]
    choices = [("with", True), ("without", False)]
    steps = sorted(frame["step"].unique().tolist())
    row = {
        "form": controls.menu("compressor", named, (state.compressor, state.knob)),
        "feedback": controls.menu("feedback", choices, state.feedback),
        "step": controls.menu("step", steps, state.step),
    }
    hint = "Change a control: your choice is drawn here, from the recorded steps."
    return Explorer(state, [row], partial(picture, frame), hint, read=read).show()
