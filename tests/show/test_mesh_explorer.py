"""Ranks of a mesh on their nodes: coordinates, groups, what crosses, what is held, and the controls."""

import pytest

from labkit.show import mesh_explorer
from labkit.show.mesh_explorer import State
from labkit.show.publish import png

MODEL = {"samples": 16, "tokens": 32, "layers": 4}


def state(first="pp", axis="tp", **sizes):
    return State(tuple((one, sizes.get(one, 1)) for one in mesh_explorer.CUTS), first, axis)


def test_the_last_axis_varies_fastest():
    places = mesh_explorer.coordinates({"dp": 2, "tp": 4})
    assert places[0] == {"dp": 0, "tp": 0} and places[6] == {"dp": 1, "tp": 2} and len(places) == 8


@pytest.mark.parametrize(
    ("axes", "crossing"),
    [
        ({"dp": 2, "tp": 4}, {"dp": 4, "tp": 0}),
        ({"tp": 4, "dp": 2}, {"tp": 2, "dp": 0}),
        ({"pp": 2, "dp": 2, "tp": 2}, {"pp": 4, "dp": 0, "tp": 0}),
        ({"dp": 8}, {"dp": 1}),
    ],
)
def test_groups_that_span_two_nodes_of_four(axes, crossing):
    assert mesh_explorer.crossing(axes, 4) == crossing


def test_groups_along_an_axis():
    assert mesh_explorer.lines({"tp": 2, "dp": 4}, "tp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert mesh_explorer.lines({"tp": 2, "dp": 4}, "dp") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    table = mesh_explorer.small(state("tp", tp=2, dp=4), 4)
    assert dict(zip(table["axis"], table["groups of ranks"], strict=True))["tp"] == "0 4; 1 5; 2 6; 3 7"


def test_what_a_rank_holds():
    own = mesh_explorer.holdings({"dp": 2, "cp": 2, "tp": 2}, MODEL)[7]
    assert own == {"samples": (8, 15), "tokens": ((8, 15), (16, 23)), "layers": (0, 3), "matrices": (1, 2)}
    own = {what: mesh_explorer.words(what, held, MODEL) for what, held in own.items()}
    assert own["tokens"] == "tokens 8-15, 16-23" and own["layers"] == "all layers"
    assert mesh_explorer.holdings({"pp": 4, "tp": 2}, MODEL)[2]["layers"] == (1, 1)
    assert mesh_explorer.words("layers", (1, 1), MODEL) == "layer 1"


@pytest.mark.parametrize(("sizes", "local"), [({"dp": 2, "tp": 4}, 4), ({"pp": 2, "tp": 2}, 2), ({"dp": 2}, 1)])
@pytest.mark.parametrize("axis", mesh_explorer.CUTS)
def test_it_is_drawn(sizes, local, axis):
    assert png(mesh_explorer.draw(MODEL, state(axis=axis, **sizes), local), dpi=40)


def test_the_controls_leave_dp_what_is_left():
    board = mesh_explorer.explorer({"dp": 2, "tp": 4}, MODEL, 4)
    board.controls["tp"].value = 2
    assert dict(board.state.sizes) == {"pp": 1, "dp": 4, "cp": 1, "tp": 2}
    board.controls["first"].value = "tp"
    assert next(iter(board.state.axes)) == "tp" and "tp 2 x dp 4" in board.image.value
    assert "4 of them across the nodes" in mesh_explorer.takeaway(MODEL, board.state, 4)
    board.controls["pp"].value = 8
    assert "make one smaller" in board.image.value
