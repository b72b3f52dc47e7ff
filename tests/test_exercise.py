import pytest

from labkit.run import exercise
from labkit.run.exercise import check


def average(tensor):
    raise NotImplementedError


def summed(tensor):
    comm.all_reduce(tensor)  # noqa: F821
    return tensor


def averaged(tensor):
    comm.all_reduce(tensor)  # noqa: F821
    return tensor / world_size  # noqa: F821


def is_average(solution):
    found = solution(torch.tensor([float(rank)])).item()  # noqa: F821
    assert found == (world_size - 1) / 2, f"rank {rank} has {found}"  # noqa: F821


@pytest.mark.slow
def test_the_three_verdicts(capsys):
    assert not check(average, is_average)
    assert not check(summed, is_average)
    assert check(averaged, is_average, nproc=3)
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "average: not solved yet"
    assert told[1].startswith("summed: not right yet: rank ") and "has 1.0" in told[1]
    assert told[2] == "averaged: solved, on 3 ranks"


@pytest.mark.slow
def test_a_checker_runs_on_nodes(capsys):
    assert check(averaged, is_average, nodes=2, nproc=2)
    assert not check(summed, is_average, nodes=2, nproc=2)
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "averaged: solved, on 2 nodes of 2 ranks"
    assert "has 6.0" in told[1]  # 0 + 1 + 2 + 3: those of the other node are in it


def test_an_untouched_stub_starts_no_ranks(capsys, monkeypatch):
    monkeypatch.setattr(exercise, "launch", None)
    assert not check(average, is_average)
    assert capsys.readouterr().out == "average: not solved yet\n"
    assert exercise.is_stub("def f(x):\n    'the mean'\n    raise NotImplementedError()")
    assert not exercise.is_stub("def f(x):\n    y = 1\n    raise NotImplementedError")
    assert not exercise.is_stub("def f(x):\n    x = 0")
