"""Efficiency over ranks: the picture with its ideal line, and an explorer of other worlds.

    efficiency | ------------------------ ideal      frame: scaling ("weak", "strong"), ranks,
             1 | o---o---o___                        efficiency, a row a round; predicted
               |             o  weak
             0 +--1--2--4---8---16-- ranks

    explorer: compute, gradients, link, cores, alpha and algorithm are controls; nothing is launched

The picture is a pure function of (costs, step, state); costs and step are those of
labkit/measure/scaling.py.
"""

from dataclasses import dataclass
from functools import partial
from math import inf

import pandas as pd

from labkit.measure import scaling
from labkit.show import controls, style
from labkit.show.curves import sweep
from labkit.show.explorer import explore, need_one

RANKS = tuple(2**power for power in range(11))
LINKS = (10, 100, 1000, 10_000, 100_000, inf)  # Mbit/s
FACTORS = (0.25, 0.5, 1, 2, 4, 8, 16, 32)
ALPHAS_US = (5, 50, 500)  # NCCL over NVLink or a network, gloo
ALGORITHMS = {"ring": scaling.ring, "double tree": scaling.tree}
ENOUGH = 0.8


def efficiency(frame, title=None, predicted=None):
    """Return a Figure of efficiency over ranks: a line per kind of scaling, and the ideal line.

    predicted: column of the formula's value, drawn dashed.
    """
    figure = sweep(frame, "ranks", "efficiency", "scaling", title, predicted=predicted)
    axes = figure.axes[0]
    axes.set_ylim(0, max(1.12, axes.get_ylim()[1]))
    axes.axhline(1, color=style.FAINT, linewidth=1.2, zorder=1)
    style.beside(axes, "ideal", (frame["ranks"].max(), 1), (-2, 7), ha="right", color=style.FAINT)
    return figure


@dataclass(frozen=True)
class State:
    """The values of the controls. compute, gradients: factors on those of the measured step.

    link_mbit: speed of each rank's link; inf: no link. cores: shared by all ranks; inf: one each.
    alpha_us: microseconds a message; 0: as fitted. algorithm: of the all-reduce, in ALGORITHMS.
    """

    kinds: tuple = ("weak", "strong")
    compute: float = 1
    gradients: float = 1
    link_mbit: float = inf
    cores: float = inf
    alpha_us: float = 0
    algorithm: str = "ring"


def rows(costs, step, state):
    """Return a DataFrame with scaling, ranks and predicted efficiency, for RANKS."""
    sizes = tuple(size * state.gradients for size in step.sizes)
    own = step._replace(asleep_ms=step.asleep_ms * state.compute, sizes=sizes)
    if state.alpha_us:
        costs = costs._replace(alpha_ms=state.alpha_us / 1000)
    world = {"cores": state.cores, "mbit": state.link_mbit}
    world["algorithm"] = ALGORITHMS[state.algorithm]
    alone = scaling.step_ms(costs, own, 1)
    found = []
    for kind in state.kinds:
        for n in RANKS:
            mine, ideal = (own.shared(n), n) if kind == "strong" else (own, 1)
            ms = scaling.step_ms(costs, mine, n, **world)
            found.append({"scaling": kind, "ranks": n, "efficiency": alone / ms / ideal})
    return pd.DataFrame(found)


def headline(state):
    link = "no link" if state.link_mbit == inf else f"links of {state.link_mbit:,g} Mbit/s"
    cores = "a core for each rank" if state.cores == inf else f"{state.cores:g} cores for all"
    words = f"Compute x {state.compute:g}, gradients x {state.gradients:g}, {link}, {cores}"
    alpha = f", alpha {state.alpha_us:g} us" if state.alpha_us else ""
    algorithm = "" if state.algorithm == "ring" else f", {state.algorithm}"
    return f"{words}{alpha}{algorithm}"


def draw(costs, step, state):
    need_one(state.kinds, "kind of scaling")
    return efficiency(rows(costs, step, state), f"{headline(state)}: predicted")


def takeaway(costs, step, state):
    """Return as text up to how many ranks each kind of scaling keeps an efficiency of ENOUGH."""
    words = []
    for kind, mine in rows(costs, step, state).groupby("scaling", sort=False):
        good = mine["efficiency"].round(2) >= ENOUGH  # as the table shows it
        last = mine["ranks"][good.cummin()].max()
        words.append(f"{kind} scaling keeps {ENOUGH:.0%} up to n = {last:,}")
    return f"{headline(state)}: {', '.join(words)}."


def explorer(costs, step, cores, provenance):
    """Show efficiencies up to 1,024 ranks: figure, takeaway, table, controls. Returns Explorer.

    costs: from scaling.fit(). step: the measured scaling.Step. cores: of this machine. provenance:
    begins with "predicted".
    """
    state = State()
    small = rows(costs, step, state).pivot(index="ranks", columns="scaling", values="efficiency")
    small = small[list(state.kinds)].map("{:.2f}".format).reset_index()
    factors = [(f"x {factor:g}", factor) for factor in FACTORS]
    speeds = [("none", mbit) if mbit == inf else (f"{mbit:,} Mbit/s", mbit) for mbit in LINKS]
    alphas = [("as fitted", 0), *((f"{one} us", one) for one in ALPHAS_US)]
    shared = [("one for each rank", inf), (f"{cores:g} for all", cores)]
    above = {
        "compute": controls.menu("compute", factors, state.compute),
        "gradients": controls.menu("gradients", factors, state.gradients),
        "link_mbit": controls.menu("link of a rank", speeds, state.link_mbit),
        "cores": controls.menu("cores", shared, state.cores),
        "alpha_us": controls.menu("alpha", alphas, state.alpha_us),
        "algorithm": controls.menu("all-reduce", list(ALGORITHMS), state.algorithm),
    }
    return explore(
        state,
        [above, {"kinds": controls.boxes(state.kinds)}],
        partial(draw, costs, step),
        partial(takeaway, costs, step),
        provenance,
        small.iloc[::2],
        headline(state),
        "Move a control: the prediction is drawn here.",
    )
