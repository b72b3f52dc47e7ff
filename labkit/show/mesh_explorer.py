"""Explorer of meshes: what each rank holds, and the groups that communicate.

    node 0   [ rank 0   ]---[ rank 1   ]     a box a rank: its samples, tokens, layers, part of the
             [ tp 0     ]   [ tp 1     ]     matrices; a line for each group along the chosen axis,
    node 1   [ rank 2   ]---[ rank 3   ]     red if it crosses the link between the nodes

    pp v  cp v  tp v  across the nodes v  axis v        controls: they count, and launch nothing

The picture is a pure function of (model, state). model: {"samples", "tokens", "layers": total
number}; matrices are complete or sharded.
"""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from math import prod

import pandas as pd
from matplotlib.patches import FancyBboxPatch

from labkit.show import controls, style
from labkit.show.explorer import explore

CUTS = {"pp": "layers", "dp": "samples", "cp": "tokens", "tp": "matrices"}
# of a box
WIDE = 2.0
HIGH = 1.35
ROW = 2.1  # from one row of boxes to the next


@dataclass(frozen=True)
class State:
    """The values of the controls. sizes: ((axis, ranks along it), ...), for all of CUTS.

    first: the axis across the nodes. axis: the one whose groups are drawn.
    """

    sizes: tuple
    first: str
    axis: str

    @property
    def axes(self):
        """Return {axis: size} in the order of the mesh."""
        sizes = dict(self.sizes)
        return {self.first: sizes[self.first]} | sizes


def coordinates(axes):
    """Return [{axis: coordinate}], one per rank; the last axis varies fastest."""
    return [dict(zip(axes, at, strict=True)) for at in product(*map(range, axes.values()))]


def lines(axes, axis):
    """Return the groups along an axis, as lists of ranks."""
    found = {}
    for rank, at in enumerate(coordinates(axes)):
        rest = tuple(place for one, place in at.items() if one != axis)
        found.setdefault(rest, []).append(rank)
    return list(found.values())


def crossing(axes, local):
    """Return {axis: how many of its groups have ranks on several nodes}; local: ranks of a node."""
    return {
        axis: sum(line[0] // local != line[-1] // local for line in lines(axes, axis))
        for axis in axes
    }


def holdings(axes, model):
    """Return for each rank {"samples": (first, last), ..., "matrices": (part, number of parts)}.

    With cp > 1 a rank has two chunks of tokens (labkit.attention.context_parallel), each as (first,
    last).
    """
    found = []
    for at in coordinates(axes):
        own = {}
        for axis, what in CUTS.items():
            size = axes.get(axis, 1)
            place = at.get(axis, 0)
            if axis == "tp":
                own[what] = place, size
            elif axis == "cp" and size > 1:
                part = model[what] // (2 * size)
                chunks = (place, 2 * size - 1 - place)
                own[what] = tuple((n * part, (n + 1) * part - 1) for n in chunks)
            else:
                part = model[what] // size
                own[what] = place * part, (place + 1) * part - 1
        found.append(own)
    return found


def words(what, held, model):
    """Return one line of a box."""
    if what == "matrices":
        return "complete matrices" if held[1] == 1 else f"part {held[0]} of {held[1]} of matrices"
    if isinstance(held[0], tuple):
        return "tokens " + ", ".join(f"{first}-{last}" for first, last in held)
    first, last = held
    if last - first + 1 == model[what]:
        return f"all {what}"
    return f"{what[:-1]} {first}" if first == last else f"{what} {first}-{last}"


def draw(model, state, local):
    """Return a Figure of the ranks on nodes, joined along one axis. local: ranks of a node."""
    axes = state.axes
    ranks = prod(dict(state.sizes).values())
    across = min(local, 4)  # boxes in a row
    rows = -(-local // across)
    nodes = ranks // local

    def spot(rank):
        node, place = divmod(rank, local)
        return place % across * 2.75, -(node * (rows * ROW + 0.45) + place // across * ROW)

    with style.look():
        figure, plot = style.new_figure(9.0, 0.6 + 0.68 * nodes * (rows * ROW + 0.45))
        for node in range(nodes):
            x, y = spot(node * local)
            plot.text(x - 0.25, y - HIGH / 2, f"node {node}", ha="right", va="center", size=10)
        for line in lines(axes, state.axis):
            for one, other in pairwise(line):
                colour = style.RED if one // local != other // local else style.INK
                join(plot, spot(one), spot(other), colour)
        for rank, own in enumerate(holdings(axes, model)):
            x, y = spot(rank)
            look = {"boxstyle": "round,pad=0,rounding_size=0.1", "zorder": 3}
            look |= {"facecolor": style.lighter(style.BLUE, 0.8), "edgecolor": style.INK}
            plot.add_patch(FancyBboxPatch((x, y - HIGH), WIDE, HIGH, **look))
            said = [words(what, held, model) for what, held in own.items()]
            text = "\n".join(said)
            plot.text(
                x + 0.1, y - 0.16, f"rank {rank}", va="center", size=9, weight="bold", zorder=4
            )
            plot.text(x + 0.1, y - 0.3, text, va="top", size=8, linespacing=1.25, zorder=4)
        plot.set_xlim(-1.1, (across - 1) * 2.75 + WIDE + 0.3)
        plot.set_ylim(spot(ranks - 1)[1] - HIGH - 0.1, 0.75)
        plot.axis("off")
        style.entitle(figure, headline(state))
    return figure


def join(plot, one, other, colour):
    """Draw a line between two boxes; an arc if others may be in between."""
    (x, y) = one
    (u, v) = other
    begin = (x + WIDE / 2, y)
    end = (u + WIDE / 2, v)
    if y == v:
        bend = -0.25 if u - x > 3 else 0.0
        begin, end = ((x + WIDE, y - HIGH / 2), (u, v - HIGH / 2)) if not bend else (begin, end)
    else:
        bend = 0.0
        begin = (x + WIDE / 2, y - HIGH)
        end = (u + WIDE / 2, v)
    look = {"arrowstyle": "-", "linewidth": 2.2, "color": colour}
    look |= {"connectionstyle": f"arc3,rad={bend}"}
    plot.annotate("", end, begin, arrowprops=look, zorder=2)


def headline(state):
    mesh = " x ".join(f"{axis} {size}" for axis, size in state.axes.items() if size > 1)
    return f"{mesh or 'one rank'}: groups along {state.axis}, which cuts {CUTS[state.axis]}"


def order(state):
    """Return one sentence: the axis that lies across the nodes, if any."""
    if state.axes[state.first] == 1:
        return f"{state.first} has one rank: it cannot lie across the nodes."
    return f"The first axis, {state.first}, lies across the nodes."


def takeaway(model, state, local):
    """Return the number of groups, their ranks, and how many groups cross the nodes."""
    groups = lines(state.axes, state.axis)
    passing = crossing(state.axes, local)[state.axis]
    if len(groups[0]) == 1:
        return f"{headline(state)}. One rank along it: no communication. {order(state)}"
    said = f"{len(groups)} group{'s' * (len(groups) > 1)} of {len(groups[0])} ranks"
    return f"{headline(state)}. {said}, {passing} of them across the nodes. {order(state)}"


def small(state, local):
    """Return a DataFrame of texts: a row an axis, its groups, and how many cross the nodes."""
    axes = {axis: size for axis, size in state.axes.items() if size > 1}
    rows = [
        {
            "axis": axis,
            "cuts": CUTS[axis],
            "groups of ranks": "; ".join(" ".join(map(str, line)) for line in lines(axes, axis)),
            "across the nodes": passing,
        }
        for axis, passing in crossing(axes, local).items()
    ]
    return pd.DataFrame(rows, columns=["axis", "cuts", "groups of ranks", "across the nodes"])


def read(state, first, axis, **sizes):
    """Return the State of the controls: dp gets the remaining ranks. ValueError if none fits."""
    ranks = prod(dict(state.sizes).values())
    taken = prod(sizes.values())
    if ranks % taken:
        words = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise ValueError(f"{words} do not fit {ranks} ranks: make one smaller.")
    return State(tuple((one, sizes.get(one, ranks // taken)) for one in CUTS), first, axis)


def explorer(axes, model, local, axis="tp"):
    """Show a mesh: figure, takeaway, table, controls. Returns Explorer.

    axes: {axis: size}, in the order of the mesh. model: see above. local: ranks of a node.
    """
    state = State(tuple((one, axes.get(one, 1)) for one in CUTS), next(iter(axes)), axis)
    powers = [size for size in (1, 2, 4, 8) if prod(axes.values()) % size == 0]
    row = {one: controls.menu(one, powers, axes.get(one, 1)) for one in ("pp", "cp", "tp")}
    row["first"] = controls.menu("across the nodes", list(CUTS), state.first)
    row["axis"] = controls.menu("draw groups along", list(CUTS), state.axis)
    return explore(
        state,
        [row],
        partial(draw, model, local=local),
        partial(takeaway, model, local=local),
        "counted",
        small(state, local),
        "ranks that communicate along an axis; groups with ranks on several nodes",
        "Change a control: the mesh is drawn here.",
        read=read,
    )
