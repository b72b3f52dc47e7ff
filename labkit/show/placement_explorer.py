"""Placements and queues drawn: who holds which GPU, what that is worth, and an explorer of both.

    round robin                         held 90 %, useful 40 %
    node 0  |==0==|====3====|           blue: as fast as on the best placement
            |==1==|==2==|               orange: slowed by messages between nodes or leaves
    node 1  |==0==|====3====|

    explorer: load, policy, backfill, nodes of a leaf: useful, wasted and free GPUs over time

Pictures are pure functions of simulated outcomes (labkit.cluster.job_queue). Nothing is launched.
"""

from dataclasses import dataclass
from functools import lru_cache, partial
from math import inf

import numpy as np
import pandas as pd
from matplotlib.patches import Patch, Rectangle

from labkit.cluster.job_queue import run_queue
from labkit.cluster.job_trace import trace
from labkit.cluster.placement import POLICIES, Slowdown, Topology
from labkit.show import controls, style
from labkit.show.explorer import explore

BAND, GAP = 1.6, 0.35  # between two bands and between two nodes, in GPUs
SLOWED = 1.02  # from this factor on, a run is drawn as slowed
BINS = 160  # moments of a picture over time
LOADS = (0.5, 0.7, 0.9, 1.0, 1.2, 1.5)
LEAVES = (2, 4, 8, 16)
USEFUL, WASTED, FREE = "useful", "held, not useful", "free"


def gantt(outcomes, topology, title=None, until=None):
    """Return a Figure with a band per outcome and a row per GPU, over minutes.

    outcomes: {name: Outcome}. until: seconds that are shown; None: until the last end.
    """
    if not outcomes:
        raise ValueError("without an outcome there is nothing to draw")
    end = until or max(run.end for one in outcomes.values() for run in one.runs)
    node_height = topology.gpus_per_node + GAP
    band = topology.nodes * node_height + BAND
    with style.look():
        figure, axes = style.new_figure(9.0, 1.3 + 0.15 * band * len(outcomes))
        places, names = [], []
        for number, (name, outcome) in enumerate(outcomes.items()):
            top = number * band + BAND
            look = {"va": "center_baseline", "size": 10}
            axes.text(0, top - 0.8, name, weight="bold", **look)
            words = f"{outcome.since / 60:.0f} to {outcome.until / 60:.0f} min: "
            words += f"held {outcome.held:.0%}, useful {outcome.useful:.0%}"
            axes.text(end / 60, top - 0.8, words, ha="right", **look)
            for node in range(topology.nodes):
                places.append(top + node * node_height + topology.gpus_per_node / 2)
                names.append(f"node {node}")
            for run, node, first, height in boxes(outcome.runs, topology):
                if run.start < end:
                    draw_box(axes, run, top + node * node_height + first, height, end)
        style.name_rows(axes, places, names, size=9)
        axes.set_xlim(0, end / 60)
        axes.set_ylim(len(outcomes) * band, 0)
        axes.set_xlabel("time since the first gang arrived (min)")
        colours = (style.BLUE, style.ORANGE)
        words = ("as fast as on the best placement", "slowed by its placement")
        patches = [Patch(color=colour) for colour in colours]
        style.legend_below(figure, patches, words)
        style.entitle(figure, title)
    return figure


def boxes(runs, topology):
    """Yield (run, node, first GPU, GPUs) of each box: free GPUs of a node that lie side by side."""
    held = [[-inf] * topology.gpus_per_node for _ in range(topology.nodes)]  # until when
    for run in runs:
        for node, count in run.placement.items():
            free = [gpu for gpu, end in enumerate(held[node]) if end <= run.start + 1e-9][:count]
            for gpu in free:
                held[node][gpu] = run.end
            parts = np.split(free, np.flatnonzero(np.diff(free) > 1) + 1)
            for part in parts:
                yield run, node, int(part[0]), len(part)


def draw_box(axes, run, y, height, end):
    colour = style.ORANGE if run.slowdown >= SLOWED else style.BLUE
    start, width = run.start / 60, (min(run.end, end) - run.start) / 60
    look = {"facecolor": colour, "edgecolor": style.GROUND, "linewidth": 0.8}
    axes.add_patch(Rectangle((start, y + 0.04), width, height - 0.08, **look))
    if width > 0.03 * end / 60:
        words = {"ha": "center", "va": "center_baseline", "size": 8, "color": style.text_on(colour)}
        axes.text(start + width / 2, y + height / 2, str(run.gang.number), **words)


def held_and_useful(frame, title=None):
    """Return a Figure with a row per way: GPUs held (pale), useful (full), a dot per seed.

    frame: way, seed, held, useful (shares), hours (mean completion).
    """
    if frame.empty:
        raise ValueError("without a simulated queue there is nothing to draw")
    means = frame.groupby("way", sort=False)[["held", "useful", "hours"]].mean()
    with style.look():
        figure, axes = style.new_figure(8.0, 1.5 + 0.42 * len(means))
        for y, (way, row) in enumerate(means.iterrows()):
            axes.barh(y, 100 * row["held"], 0.72, color=style.lighter(style.BLUE))
            axes.barh(y, 100 * row["useful"], 0.72, color=style.BLUE)
            mine = 100 * frame.loc[frame["way"] == way, "useful"]
            axes.plot(mine, [y] * len(mine), ".", color=style.INK, markersize=4)
            words = f"{row['useful']:.0%}; jobs take {style.quantity(row['hours'], 'h')}"
            style.beside(axes, words, (100 * max(row["held"], row["useful"]), y), (7, 0))
        axes.set_xlim(0, 140)
        axes.set_xticks(range(0, 101, 20))
        axes.set_ylim(len(means) - 0.4, -0.6)
        axes.set_xlabel("share of all GPU-hours (%)")
        style.name_rows(axes, range(len(means)), list(means.index))
        patches = [Patch(color=style.BLUE), Patch(color=style.lighter(style.BLUE))]
        style.legend_below(figure, patches, ("useful", "held"))
        style.entitle(figure, title)
    return figure


def over_time(outcome, topology):
    """Return a DataFrame of equal parts of the time until outcome.until.

    hour: the middle; useful, held: GPUs, means of the part. The cluster has topology.gpus.
    """
    edges = np.linspace(0, outcome.until, BINS + 1)
    useful, held = np.zeros(BINS), np.zeros(BINS)
    for run in outcome.runs:
        if run.end > run.start:
            inside = np.diff(np.clip(edges, run.start, run.end)) * run.gang.gpus
            held += inside
            useful += inside * run.work / (run.end - run.start)
    width = outcome.until / BINS
    hours = (edges[:-1] + width / 2) / 3600
    return pd.DataFrame({"hour": hours, "useful": useful / width, "held": held / width})


def areas(frame, gpus, title=None):
    """Return a Figure of over_time(): useful GPUs, GPUs held for nothing, and free ones."""
    colours = {USEFUL: style.BLUE, WASTED: style.ORANGE, FREE: style.lighter(style.GREY, 0.7)}
    with style.look():
        figure, axes = style.new_figure(8.0, 3.4)
        parts = [frame["useful"], frame["held"] - frame["useful"], gpus - frame["held"]]
        axes.stackplot(frame["hour"], parts, colors=colours.values(), linewidth=0)
        axes.set_xlim(frame["hour"].iloc[0], frame["hour"].iloc[-1])
        axes.set_ylim(0, gpus)
        axes.set_xlabel("time (h)")
        axes.set_ylabel("GPUs")
        style.legend_below(figure, [Patch(color=one) for one in colours.values()], list(colours))
        style.entitle(figure, title)
    return figure


@dataclass(frozen=True)
class Job:
    """The data of the explorer. cluster: of the trace. jobs: of a trace. gpus: of the cluster."""

    cluster: str = "Helios"
    jobs: int = 800
    nodes: int = 16
    oversubscription: float = 2.0

    @property
    def gpus(self):
        return 8 * self.nodes


@dataclass(frozen=True)
class State:
    """The values of the controls. leaf: nodes of a leaf."""

    policy: str = "best fit by leaf"
    backfill: bool = True
    load: float = 1.0
    leaf: int = 4


@lru_cache(maxsize=64)
def outcome_of(job, state):
    """Return the Outcome of a queue, simulated once for each state."""
    topology = Topology(job.nodes, leaf=state.leaf, oversubscription=job.oversubscription)
    gangs = trace(job.cluster, job.jobs, job.gpus, state.load)
    policy, slowdown = POLICIES[state.policy], Slowdown(topology)
    return run_queue(topology, gangs, policy, slowdown, backfill=state.backfill)


def draw(job, state):
    outcome = outcome_of(job, state)
    title = f"Useful: {outcome.useful:.0%} of the GPU-hours; held: {outcome.held:.0%} (simulated)"
    topology = Topology(job.nodes, leaf=state.leaf)
    return areas(over_time(outcome, topology), topology.gpus, title)


def takeaway(job, state):
    """Return a sentence on the queue of a state."""
    outcome = outcome_of(job, state)
    how = "with backfill" if state.backfill else "first in, first out"
    hours = style.quantity(outcome.mean_completion / 3600, "h")
    leaves = f"leaves of {state.leaf} nodes"
    return (
        f"{state.policy.capitalize()}, {how}, load {state.load:g}, {leaves}: {outcome.held:.0%} of "
        f"the GPU-hours are held, {outcome.useful:.0%} are useful; a job takes {hours} on average, "
        "waiting included."
    )


def explorer(job, state, provenance):
    """Show a simulated queue over time: figure, takeaway, table, controls. Returns Explorer.

    provenance: begins with "simulated".
    """
    rows = []
    for name in POLICIES:
        one = outcome_of(job, State(name, state.backfill, state.load, state.leaf))
        hours = style.quantity(one.mean_completion / 3600, "h")
        rows.append([name, f"{one.held:.0%}", f"{one.useful:.0%}", hours])
    shown = pd.DataFrame(rows, columns=["policy", "held", "useful", "mean completion"])
    how = [("first in, first out", False), ("backfill", True)]
    leaves = [leaf for leaf in LEAVES if leaf <= job.nodes]
    row = {
        "policy": controls.menu("policy", list(POLICIES), state.policy),
        "backfill": controls.menu("queue", how, state.backfill),
        "load": controls.menu("load", list(LOADS), state.load),
        "leaf": controls.menu("nodes of a leaf", leaves, state.leaf),
    }
    return explore(
        state,
        [row],
        partial(draw, job),
        partial(takeaway, job),
        provenance,
        shown,
        f"{job.gpus} GPUs, sizes and run times of {job.cluster}, load {state.load:g}",
        "Move a control: the queue is simulated and drawn here.",
    )
