"""Explorer of link speeds: each method's step time, the fastest, and the speed where that changes.

    link speed v                              controls: they re-plot the frame and measure nothing
    [x] no compression [x] top 1 % [x] ...
    step  |o   :                              the dashed line: the chosen link speed; beneath it
    time  | *o :                              bars: a method's work, and its bytes on the link
          |   (o)  *  *
          +----:-------- link speed

The picture is a pure function of (frame, state). The frame is that of
labkit/show/time_vs_bandwidth.py.
"""

import math
from dataclasses import dataclass
from functools import partial

import pandas as pd

from labkit.measure.crossover import predicted
from labkit.show import controls, style
from labkit.show.bars import stack
from labkit.show.explorer import explore, need_one
from labkit.show.time_vs_bandwidth import costs, reach, step_over_link, wins

EQUAL = 1.05  # predicted steps that differ by less have no fastest among them


@dataclass(frozen=True)
class State:
    """The values of the controls. baseline: the method that the others are compared with."""

    methods: tuple
    link_mbit: float
    baseline: str


def initial(frame, baseline=None):
    """Return the first State: all methods, the slowest link, baseline or the lab's first method."""
    methods = tuple(costs(frame))
    return State(methods, float(frame["link_mbit"].min()), baseline or methods[0])


def at_speed(frame, state):
    """Return a DataFrame with method, busy_ms, step_ms, wire_ms: predicted for this speed."""
    rows = [
        (one, cost.busy_ms, predicted(*cost, state.link_mbit))
        for one, cost in costs(frame).items()
        if one in state.methods
    ]
    found = pd.DataFrame(rows, columns=["method", "busy_ms", "step_ms"])
    return found.assign(wire_ms=found["step_ms"] - found["busy_ms"])


def headline(state):
    return f"A link of {style.quantity(state.link_mbit, 'Mbit/s')}"


def draw(frame, state):
    """Return a Figure of step times over link speed, with the chosen speed marked.

    Raises ValueError if no method is chosen.
    """
    need_one(state.methods, "method")
    return step_over_link(frame, state.baseline, headline(state), state.methods, state.link_mbit)


def bars(frame, state):
    """Return a Figure of the predicted steps at this speed: work dark, bytes on the link pale."""
    rows = at_speed(frame, state)
    colours = style.palette(costs(frame))
    with style.look():
        figure, axes = style.new_figure(9.5, 1.3 + 0.34 * len(rows))
        dark = [colours[method] for method in rows["method"]]
        pale = [style.lighter(colour, 0.6) for colour in dark]
        parts = {"work": (rows["busy_ms"], dark), "on the link": (rows["wire_ms"], pale)}
        stack(axes, range(len(rows)), parts)
        for place, ms in enumerate(rows["step_ms"]):
            style.beside(axes, style.quantity(ms, "ms"), (ms, place), weight="bold")
        style.name_rows(axes, range(len(rows)), [style.name(one) for one in rows["method"]])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(0, rows["step_ms"].max() * 1.16)
        axes.set_xlabel("predicted step time (ms); dark: work, pale: bytes on the link")
        axes.grid(axis="x")
    return figure


def takeaway(frame, state):
    """Return the fastest method, its gain, and where others beat the baseline, as text."""
    rows = at_speed(frame, state)
    found = costs(frame)
    best = rows.loc[rows["step_ms"].idxmin()]
    base = predicted(*found[state.baseline], state.link_mbit)
    equal = rows[(rows["step_ms"] <= EQUAL * best["step_ms"]) & (rows["method"] != best["method"])]
    as_fast = ", ".join(map(style.name, equal["method"]))
    words = f"{headline(state)}: a step of {style.name(best['method'])}"
    words += f" (as fast within 5 %: {as_fast})" if as_fast else ", the fastest,"
    words += f" is predicted to take {style.quantity(best['step_ms'], 'ms')}"
    if best["method"] != state.baseline:
        words += f", {base / best['step_ms']:.3g} times as fast as {style.name(state.baseline)}"
        words += f" ({style.quantity(base, 'ms')})"
    others = [
        f"{style.name(one)} {wins(found[state.baseline], found[one])}"
        for one in rows["method"]
        if one != state.baseline
    ]
    if not others:
        return words + "."
    return f"{words}. Predicted faster than {style.name(state.baseline)}: {'; '.join(others)}."


def small(frame, baseline, faster):
    """Return a DataFrame of texts: per method work, bytes, and where it beats the baseline.

    faster: of faster_links(), or None if nothing was measured.
    """
    found = costs(frame)
    rows = []
    for method, cost in found.items():
        row = {"method": style.name(method), "work": style.quantity(cost.busy_ms, "ms")}
        row["on the link"] = style.quantity(cost.wire_bytes, "bytes")
        row |= {"faster, predicted": "", "faster, measured": ""}
        if method != baseline:
            row["faster, predicted"] = wins(found[baseline], cost)
        if method != baseline and faster is not None:
            row["faster, measured"] = ", ".join(faster.get(method, ["on no link"]))
        rows.append(row)
    return pd.DataFrame(rows)


def offered(frame, baseline):
    """Return the menu's link speeds, Mbit/s: 1, 2, 5, ... within the picture, and the measured."""
    low, high = reach(frame, baseline)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = [digit * 10.0**power for power in decades for digit in (1, 2, 5)]
    return sorted(
        {*(one for one in steps if low <= one <= high), *map(float, frame["link_mbit"].unique())}
    )


def explorer(frame, provenance, baseline=None, faster=None):
    """Show step times over link speeds: figure, takeaway, table, then controls. Returns Explorer.

    frame: see above. provenance: as in present(). baseline: as in step_over_link(). faster: as in
    small().
    """
    state = initial(frame, baseline)
    speed = controls.speeds(offered(frame, state.baseline), state.link_mbit)
    return explore(
        state,
        [{"link_mbit": speed}, {"methods": controls.boxes(state.methods)}],
        partial(draw, frame),
        partial(takeaway, frame),
        provenance,
        small(frame, state.baseline, faster),
        "a step's work and bytes, and where each is faster; measured: beyond the noise band",
        "Move the link speed: the picture for it is drawn here, from the saved rows.",
        more=lambda state: [bars(frame, state)],
    )
