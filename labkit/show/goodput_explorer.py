"""Explorer of goodput: what failures and saves take from a run, by the number of GPUs.

      1,024 GPUs |s|c|r                      saves, computed again, detection, restart:
     16,384 GPUs |saves|again|d|restart|     per cent of the days, from one seeded run a bar
    100,000 GPUs |saves|again|det|  restart  |

    explorer: whose failure rate, a save, in the background or not, a restart, how often

The picture is a pure function of (job, state). Nothing is launched; a run takes milliseconds.
"""

from dataclasses import dataclass
from functools import partial

import pandas as pd

from labkit.scale import goodput
from labkit.show import controls, style
from labkit.show.explorer import explore
from labkit.show.stacked_bars import stacked_bars

NAMES = {"saves": "saves", "lost": "computed again", "detection": "detection", "restart": "restart"}
SAVES = (3, 10, 30, 120)  # s
RESTARTS = (30, 120, 300, 600, 1800)  # s
SHARES = (0.25, 0.5, 1, 2, 4)  # of Young's interval
COPY = 0.1  # share of a save that training waits for if the rest is written in the background


@dataclass(frozen=True)
class Job:
    """The data of the explorer. sizes: numbers of GPUs. rates: {source: failures per GPU-hour}.

    days: length of a run. detection: seconds.
    """

    sizes: tuple
    rates: dict
    days: float
    detection: float


@dataclass(frozen=True)
class State:
    """The values of the controls. save, restart: seconds. share: of Young's interval."""

    rate: str
    save: float = 30
    background: bool = False
    restart: float = 600
    share: float = 1


def runs(job, state):
    """Return {number of GPUs: goodput.Survived} of one simulated run each."""
    found = {}
    for gpus in job.sizes:
        waits, write = (COPY * state.save, state.save) if state.background else (state.save, 0.0)
        costs = {"save": waits, "write": write, "detection": job.detection}
        fleet = goodput.Fleet(gpus, job.rates[state.rate], restart=state.restart, **costs)
        interval = max(write, state.share * goodput.young(fleet.save, fleet.between))
        found[gpus] = goodput.survive(fleet, interval, job.days * goodput.DAY)
    return found


def rows(job, state):
    """Return a DataFrame with gpus, kind, lost (% of the days), seed."""
    found = []
    for gpus, run in runs(job, state).items():
        for kind, words in NAMES.items():
            lost = 100 * run.seconds[kind] / (job.days * goodput.DAY)
            found.append({"gpus": f"{gpus:,} GPUs", "kind": words, "lost": lost, "seed": 0})
    return pd.DataFrame(found)


def headline(state):
    how = " in the background" if state.background else ""
    often = "" if state.share == 1 else f", at {state.share:g} x Young's interval"
    save = f"a save of {state.save:g} s{how}"
    restart = f"restarts of {state.restart:g} s"
    return f"Rate of {state.rate}, {save}, {restart}{often}"


def ends(job, state):
    """Return [(number of GPUs, Survived)] of the smallest and the largest size."""
    return list(runs(job, state).items())[:: max(1, len(job.sizes) - 1)]


def draw(job, state):
    losses = (f"{1 - run.goodput:.1%} on {gpus:,} GPUs" for gpus, run in ends(job, state))
    title = f"A simulated run loses {', '.join(losses)}"
    figure = stacked_bars(rows(job, state), "lost", "gpus", "kind", "seed", title, unit="%")
    figure.axes[0].set_xlabel(f"lost, of {job.days:g} days (%)")
    return figure


def takeaway(job, state):
    """Return the loss of one run at the smallest and the largest size, and its largest part."""
    words = []
    for gpus, run in ends(job, state):
        most = max(NAMES, key=run.seconds.get)
        part = run.seconds[most] / sum(run.seconds.values())
        largest = f"largest part: {NAMES[most]}, {part:.1%}"
        words.append(f"with {gpus:,} GPUs {1 - run.goodput:.1%} is lost ({largest})")
    return f"{headline(state)}, one run each: {', '.join(words)}."


def explorer(job, state, provenance):
    """Show what a run loses: figure, takeaway, table, controls. Returns Explorer.

    provenance: begins with "simulated".
    """
    shown = rows(job, state).pivot(index="gpus", columns="kind", values="lost")
    shown = shown.loc[[f"{gpus:,} GPUs" for gpus in job.sizes], list(NAMES.values())]
    saves = [(style.quantity(seconds, "s"), seconds) for seconds in SAVES]
    where = [("training waits", False), ("in the background", True)]
    restarts = [(style.quantity(seconds, "s"), seconds) for seconds in RESTARTS]
    often = [(f"{share:g} x Young's interval", share) for share in SHARES]
    row = {
        "rate": controls.menu("failure rate of", list(job.rates), state.rate),
        "save": controls.menu("a save", saves, state.save),
        "background": controls.menu("while it is written", where, state.background),
        "restart": controls.menu("a restart", restarts, state.restart),
        "share": controls.menu("saved every", often, state.share),
    }
    return explore(
        state,
        [row],
        partial(draw, job),
        partial(takeaway, job),
        provenance,
        shown.map("{:.1f} %".format).reset_index(),
        headline(state),
        "Move a control: the runs are drawn here.",
    )
