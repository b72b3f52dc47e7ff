"""Explorer of the capacity factor: the share of recorded rows beyond a capacity.

    run v   capacity factor v                 controls: they re-plot saved rows and launch nothing

The frame is labkit/show/expert_load.py's. The capacity cuts the load summed over all ranks: a rank
whose own rows are less even drops more.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd

from labkit.show import controls, style
from labkit.show.curves import close
from labkit.show.expert_load import shares
from labkit.show.explorer import explore

CAPACITIES = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0)  # and the number of experts


@dataclass(frozen=True)
class State:
    """The values of the controls. capacity: of an expert, in even shares."""

    run: str
    capacity: float


def dropped(load, capacity):
    """Return the share of the rows beyond the capacity, [steps]. load: [steps, experts]."""
    return np.clip(load - capacity, 0, None).sum(1) / load.shape[1]


def draw(frame, state):
    """Return a Figure of the share of rows beyond the capacity, the chosen run in front."""
    with style.look():
        figure, axes = style.new_figure(8.0, 3.4)
        ends = []
        for run, load in shares(frame).items():
            chosen = run == state.run
            colour = style.BLUE if chosen else style.GREY
            lost = 100 * dropped(load, state.capacity)
            width = 2.2 if chosen else 1.2
            axes.plot(lost, color=colour, linewidth=width, zorder=3 if chosen else 2)
            ends.append((len(lost) - 1, lost[-1], run, colour))
        axes.set_xlabel("step")
        axes.set_ylabel("rows beyond the capacity (%)")
        axes.set_ylim(bottom=0)
        axes.margins(x=0.01)
        close(figure, axes, ends, takeaway(frame, state).rstrip("."))
    return figure


def takeaway(frame, state):
    """Return one sentence: the share of the rows of the chosen run beyond the capacity."""
    lost = dropped(shares(frame)[state.run], state.capacity).mean()
    return (
        f"Run {state.run}: {100 * lost:.1f} % of the recorded rows are beyond a capacity factor of "
        f"{state.capacity:g}."
    )


def small(frame, capacities):
    """Return a DataFrame of texts: a row per run, the share beyond each capacity."""
    runs = shares(frame)
    columns = {
        f"capacity {one:g}": [f"{100 * dropped(load, one).mean():.1f} %" for load in runs.values()]
        for one in capacities
    }
    return pd.DataFrame({"run": list(runs), **columns})


def offered(frame, capacity):
    """Return the capacities of the menu, in order: the last one, all rows, drops none."""
    experts = max(load.shape[1] for load in shares(frame).values())
    return sorted({one for one in CAPACITIES if one < experts} | {capacity, float(experts)})


def explorer(frame, run, provenance, capacity=1.0, capacities=(1.0, 1.25, 2.0)):
    """Show the rows beyond a capacity: figure, takeaway, table, controls. Returns the Explorer."""
    names = list(dict.fromkeys(frame["run"]))
    options = [(f"{one:g}", one) for one in offered(frame, capacity)]
    row = {
        "run": controls.menu("run", names, run),
        "capacity": controls.menu("capacity factor", options, capacity),
    }
    return explore(
        State(run, capacity),
        [row],
        partial(draw, frame),
        partial(takeaway, frame),
        provenance,
        small(frame, capacities),
        "rows beyond the capacity",
        "Choose a capacity factor: the rows beyond it are drawn here, from the saved loads.",
    )
