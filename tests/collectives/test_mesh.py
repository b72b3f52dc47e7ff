import dataclasses
import time
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from labkit.mesh import Mesh


def describe(rank, world_size, axes):
    mesh = Mesh(axes)
    sums = {}
    for axis in mesh.axes:
        total = torch.tensor([10**rank])
        dist.all_reduce(total, group=mesh.group(axis))
        sums[axis] = total.item()
        assert mesh.rank(axis) == dist.get_rank(mesh.group(axis))
        assert mesh.size(axis) == dist.get_world_size(mesh.group(axis)) == axes[axis]
        assert mesh.ranks(axis)[mesh.rank(axis)] == rank
    return {axis: (mesh.rank(axis), mesh.ranks(axis), sums[axis]) for axis in axes}, str(mesh)


def test_two_by_two(ranks):
    results = ranks(4, describe, axes={"data": 2, "model": 2})
    assert [r[0] for r in results] == [
        {"data": (0, (0, 2), 101), "model": (0, (0, 1), 11)},
        {"data": (0, (1, 3), 1010), "model": (1, (0, 1), 11)},
        {"data": (1, (0, 2), 101), "model": (0, (2, 3), 1100)},
        {"data": (1, (1, 3), 1010), "model": (1, (2, 3), 1100)},
    ]
    assert results[3][1].splitlines() == [
        "       model 0  model 1",
        "data 0    0        1",
        "data 1    2       [3]",
    ]


@pytest.mark.parametrize(
    "axes", [{"data": 4}, {"data": 1, "model": 4}, {"data": 4, "model": 1}, {"pipe": 2, "data": 1, "model": 2}]
)
def test_axes_of_any_number_and_size(ranks, axes):
    for rank, (places, picture) in enumerate(ranks(4, describe, axes=axes)):
        coordinates = [places[axis][0] for axis in axes]
        row_major = 0
        for position, size in zip(coordinates, axes.values(), strict=True):
            row_major = row_major * size + position
        assert row_major == rank, f"rank {rank}"  # the last axis varies fastest
        for _, members, total in places.values():
            assert total == sum(10**member for member in members), f"rank {rank}"  # the group really holds those ranks
        assert picture.count(f"[{rank}]") == 1 and picture.count("[") == 1, f"rank {rank}"


def opened_and_returned(rank, world_size):
    """(when the last group of this rank was open, when its mesh was there)."""
    make, opened = dist.new_group, []

    def slowly(*args, **kwargs):
        group = make(*args, **kwargs)
        time.sleep(0.5 * (rank == 0))
        opened.append(time.monotonic())
        return group

    with patch.object(dist, "new_group", slowly):
        Mesh({"data": 2, "model": 1})
        Mesh({"data": 2}, backend="gloo")
    return opened[-1], time.monotonic()


def test_nobody_goes_on_before_all_have_opened_the_group(ranks):
    """Who leaves then closes connections that a slower rank is still opening: seen on busy cores."""
    opened, returned = zip(*ranks(2, opened_and_returned), strict=True)
    assert min(returned) > max(opened)


def test_three_axes_draw_one_sheet_each(ranks):
    assert ranks(4, describe, axes={"pipe": 2, "data": 1, "model": 2})[0][1].splitlines() == [
        "pipe 0:",
        "       model 0  model 1",
        "data 0   [0]       1",
        "pipe 1:",
        "       model 0  model 1",
        "data 0    2        3",
    ]


def refusal(rank, world_size, axes):
    try:
        Mesh(axes)
    except ValueError as error:
        return str(error)


def test_a_wrong_shape_names_both_numbers(ranks):
    assert (
        ranks(2, refusal, axes={"data": 2, "model": 3})
        == ["mesh data 2 x model 3 needs 6 ranks, but the world size is 2"] * 2
    )


@pytest.mark.parametrize("axes", [{}, {"data": 0}, {"data": -2, "model": -1}, {"data": 2.0}, {"data": True, "b": 2}])
def test_sizes_that_are_none(ranks, axes):
    for rank, message in enumerate(ranks(2, refusal, axes=axes)):
        assert "sizes of 1 or more" in message, f"rank {rank}"


def unknown_axis(rank, world_size):
    mesh = Mesh({"data": world_size})
    with pytest.raises(ValueError, match="no axis 'model', only data"):
        mesh.group("model")
    with pytest.raises(dataclasses.FrozenInstanceError):
        mesh.axes = {}
    with pytest.raises(TypeError):
        mesh.axes["data"] = 3


def test_unknown_axis_and_frozen(ranks):
    ranks(1, unknown_axis)
