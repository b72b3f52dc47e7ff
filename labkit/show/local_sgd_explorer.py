"""Explorer of local SGD: the time to a loss, predicted for a link of another speed.

    link speed v                            controls: they re-plot saved rows and launch nothing
    [x] every step [x] H = 4 [x] H = 16 ...

    seconds = busy + 8 x bytes / link       losses over steps and bytes do not change with the link

The picture is a pure function of (frame, target, state). The frame is that of
labkit/show/time_to_loss_curves.py, with a column busy_ms: the time of the run so far, in ms, on a
link that costs no time.
"""

from dataclasses import dataclass
from functools import partial

import pandas as pd

from labkit.measure.crossover import predicted
from labkit.show import controls, style
from labkit.show.explorer import explore, need_one
from labkit.show.time_to_loss_curves import race, reached

SPEEDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10_000, 100_000)


@dataclass(frozen=True)
class State:
    """The values of the controls. link_mbit: 10^6 bits a second."""

    runs: tuple
    link_mbit: float


def on_link(frame, state):
    """Return the chosen runs' rows, seconds predicted for the link. ValueError without a run."""
    need_one(state.runs, "run")
    chosen = frame[frame["run"].isin(state.runs)]
    return chosen.assign(
        seconds=predicted(chosen["busy_ms"], chosen["sent_bytes"], state.link_mbit) / 1000
    )


def headline(state):
    return f"A link of {style.quantity(state.link_mbit, 'Mbit/s')}, predicted"


def first_of(ends):
    """Return the row of the run that is first at the target, or None. ends: as of reached()."""
    there = ends.dropna(subset=["seconds"])
    return None if there.empty else there.loc[there["seconds"].idxmin()]


def draw(frame, target, state):
    rows = on_link(frame, state)
    best = first_of(reached(rows, target))
    named = [] if best is None else [best["run"]]
    return race(rows, target, f"{headline(state)}: until the loss is {target:g}", named)


def takeaway(frame, target, state):
    """Return one sentence: the first run to reach the loss, and its gain over the first chosen."""
    ends = reached(on_link(frame, state), target)
    best = first_of(ends)
    if best is None:
        return f"{headline(state)}: none of them reaches a loss of {target:g}."
    base = ends.iloc[0]
    words = f"{headline(state)}: {best['run']} is first at a loss of {target:g}, after "
    words += style.quantity(best["seconds"], "s")
    if best["run"] != base["run"] and pd.notna(base["seconds"]):
        words += f", {base['seconds'] / best['seconds']:.3g} times sooner than {base['run']}"
    return words + "."


def small(frame, target, speeds):
    """Return a DataFrame of texts: a row per run, seconds to the target by link speed (Mbit/s)."""
    columns = {}
    for speed in speeds:
        ends = reached(on_link(frame, State(tuple(frame["run"]), speed)), target)
        columns["run"] = ends["run"]
        words = [
            "not reached" if pd.isna(seconds) else style.quantity(seconds, "s")
            for seconds in ends["seconds"]
        ]
        columns[style.quantity(speed, "Mbit/s")] = words
    return pd.DataFrame(columns)


def explorer(frame, target, link_mbit, provenance, speeds=(10, 100, 1000)):
    """Show the time to the loss on a link: figure, takeaway, table, controls. Returns Explorer.

    frame: see above. provenance: begins with "predicted". speeds: columns of the table, Mbit/s.
    """
    state = State(tuple(dict.fromkeys(frame["run"])), link_mbit)
    speed = controls.speeds(sorted({*SPEEDS, link_mbit}), link_mbit)
    return explore(
        state,
        [{"link_mbit": speed}, {"runs": controls.boxes(state.runs)}],
        partial(draw, frame, target),
        partial(takeaway, frame, target),
        provenance,
        small(frame, target, speeds),
        f"time until a loss of {target:g}",
        "Move the link speed: the times to the loss are drawn here, from the saved rows.",
    )
