"""Explorer of FSDP: memory and step time of each unit, mode and prefetch.

    unit v   mode v   ahead v             controls: they re-plot what was measured, measure nothing
    step  |  o                            every choice a point; the controls' choice has a ring
    time  |      o (o)
          |           o   o
          +------------------- parameters held

The picture is a pure function of (frame, state).
"""

from dataclasses import dataclass
from functools import partial

import pandas as pd
from matplotlib.lines import Line2D

from labkit.measure.timeline import Timeline
from labkit.show import controls, style
from labkit.show.explorer import explore
from labkit.show.unit_residency import residency

COLUMNS = ("unit", "mode", "prefetch", "held_bytes", "step_ms", "exposed_ms")
MARKERS = {"full": "o", "grad_op": "s"}
MODES = {"full": "full sharding", "grad_op": "parameters kept"}


@dataclass(frozen=True)
class State:
    """The values of the controls: one of each of the first three COLUMNS."""

    unit: str
    mode: str
    prefetch: int


def chosen(frame, state):
    """Return the rows of this choice, one per step."""
    which = (
        (frame["unit"] == state.unit)
        & (frame["mode"] == state.mode)
        & (frame["prefetch"] == state.prefetch)
    )
    return frame[which]


def medians(frame):
    """Return one row per choice, in the frame's order: medians of the numbers over its steps."""
    return frame.groupby(list(COLUMNS[:3]), sort=False)[list(COLUMNS[3:])].median().reset_index()


def words_of(state):
    ahead = "nothing ahead" if state.prefetch == 0 else f"{state.prefetch} ahead"
    return f"units of {state.unit}, {mode_name(state.mode)}, {ahead}"


def mode_name(mode):
    return MODES.get(mode, mode)


def draw(frame, state):
    """Return a Figure of step time over the most parameter bytes held; the choice has a ring."""
    points = medians(frame)
    mine = medians(chosen(frame, state)).iloc[0]
    colours = style.palette(dict.fromkeys(points["unit"]))
    divisor, unit = style.byte_scale(points["held_bytes"].max())
    with style.look():
        figure, axes = style.new_figure(8.0, 4.4)
        for (part, mode), rows in points.groupby(["unit", "mode"], sort=False):
            ours = (part, mode) == (state.unit, state.mode)
            colour = colours[part] if ours else style.lighter(colours[part])
            look = {"marker": marker(mode), "linewidth": 0.8 + ours, "zorder": 2 + ours}
            held = rows["held_bytes"] / divisor
            axes.plot(held, rows["step_ms"], color=colour, markersize=6.5, **look)
            if ours:
                name_points(axes, held, rows, 0.06 * points["step_ms"].max())
        ring = {"facecolors": "none", "edgecolors": style.RED, "linewidths": 2.2, "zorder": 5}
        axes.scatter(mine["held_bytes"] / divisor, mine["step_ms"], s=230, **ring)
        axes.set_xlim(0, points["held_bytes"].max() / divisor * 1.08)
        axes.set_ylim(0, points["step_ms"].max() * 1.1)
        axes.set_xlabel(f"parameters held at most, shards included ({unit})")
        axes.set_ylabel("step time (ms)")
        axes.grid(axis="both")
        draw_legend(figure, colours, dict.fromkeys(points["mode"]))
        step, held = (style.quantity(mine[c], style.unit_of(c)) for c in ("step_ms", "held_bytes"))
        style.entitle(figure, f"{words_of(state)}: {step} a step, at most {held} held")
    return figure


def marker(mode):
    return MARKERS.get(mode, "D")


def name_points(axes, held, rows, gap):
    """Write each point's prefetch beside it; at least a gap apart if points share a place in x."""
    crowded = held.nunique() < len(held)
    heights = style.spread_apart(list(rows["step_ms"]), gap if crowded else 0)
    offset, va = ((11, 0), "center") if crowded else ((11, 5), "bottom")
    for x, y, ahead in zip(held, heights, rows["prefetch"], strict=True):
        style.beside(axes, f"{ahead} ahead", (x, y), offset, va=va, size=9, zorder=6)


def draw_legend(figure, colours, modes):
    """Explain the colours of the units and the markers of the modes."""
    shown = {
        f"units of {unit}": Line2D([], [], color=colour, linewidth=3)
        for unit, colour in colours.items()
    }
    look = {"color": style.INK, "linewidth": 0}
    shown |= {mode_name(mode): Line2D([], [], marker=marker(mode), **look) for mode in modes}
    style.legend_below(figure, shown.values(), shown, handlelength=1.2)


def takeaway(frame, state):
    """Return one sentence: this choice's memory and step time, and how many choices hold less."""
    points = medians(frame)
    mine = medians(chosen(frame, state)).iloc[0]
    held, step, bare = (style.quantity(mine[c], style.unit_of(c)) for c in COLUMNS[3:])
    less = int((points["held_bytes"] < mine["held_bytes"]).sum())
    return (
        f"{words_of(state)}: at most {held} of parameters on a rank, "
        f"a step in {step}, of which {bare} exposed; "
        f"of the other {len(points) - 1} choices {less} hold less."
    )


def bands(frame, state):
    """Return [Figure] of the choice's step of median length, unit by unit; [] without spans."""
    rows = chosen(frame, state).sort_values("step_ms")
    if "spans" not in rows:
        return []
    spans = rows["spans"].iloc[len(rows) // 2]
    return [residency({words_of(state): Timeline.from_rows(spans).frame()})]


def small(frame):
    """Return a DataFrame of texts: a row per unit and mode, memory and step time by prefetch."""
    points = medians(frame)
    rows = []
    for (unit, mode), mine in points.groupby(["unit", "mode"], sort=False):
        row = {"unit": unit, "mode": mode_name(mode)}
        for column, short in (("held_bytes", "held"), ("step_ms", "step")):
            for _, point in mine.iterrows():
                row[f"{short}, {point['prefetch']} ahead"] = style.quantity(
                    point[column], style.unit_of(column)
                )
        rows.append(row)
    return pd.DataFrame(rows)


def explorer(frame, provenance, state=None):
    """Show a sweep over unit, mode, prefetch: figure, takeaway, table, controls. Returns Explorer.

    frame: a row per choice and step with COLUMNS; optionally spans, Timeline.rows(), lane "whole".
    Raises ValueError if a column is missing.
    """
    if missing := [column for column in COLUMNS if column not in frame]:
        raise ValueError(
            f"a sweep needs the columns {', '.join(COLUMNS)}; missing: {', '.join(missing)}"
        )
    state = state or State(*frame.iloc[0][list(COLUMNS[:3])])
    row = {}
    for column, words in zip(COLUMNS[:3], ("unit", "mode", "units ahead"), strict=True):
        values = list(dict.fromkeys(frame[column]))
        options = [(MODES.get(value, value), value) for value in values]
        row[column] = controls.menu(words, options, getattr(state, column))
    return explore(
        state,
        [row],
        partial(draw, frame),
        partial(takeaway, frame),
        provenance,
        small(frame),
        "parameters held at most, and step time",
        "Move a control: your choice is drawn here, from the saved rows.",
        more=partial(bands, frame),
    )
