import math
import os.path as paths

import nbformat
import pytest
import torch
from repository import ROOT

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


def uses_alias(tensor):
    return tensor + len(paths.sep)


def uses_math(tensor):
    return tensor * math.ceil(1)


def uses_function(tensor):
    return averaged(tensor)


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
def test_a_name_of_the_notebook_that_the_ranks_lack(capsys):
    inside = "inside the function: the ranks are other processes"
    cures = {
        uses_math: "write `import math`",
        uses_alias: "write `import posixpath as paths`",
        uses_function: "define or import averaged",
    }
    for solution, words in cures.items():
        assert not check(solution, is_average)
        told = capsys.readouterr().out
        assert "NameError" in told and told.endswith(f"; {words} {inside}\n")


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


def cell_of(notebook, name):
    """The source of the cell of a notebook that begins with this function."""
    cells = nbformat.read(ROOT / "notebooks" / notebook, as_version=4).cells
    return next(cell.source for cell in cells if cell.source.startswith(f"def {name}("))


NO_1F1B = {
    "the number of micro-batches is a guess": ("ahead = min(", "micro_batches = 2 * ranks\n    ahead = min("),
    "the number of ranks is that of this run": ("ranks - rank", "world_size - rank"),
    "one more is held": ("ranks - rank", "ranks - rank + 1"),
    "GPipe": ("ranks - rank", "micro_batches"),
    "no backwards at the end": ("range(micro_batches):", "range(micro_batches - ahead):"),
    "a backward in two parts": ('("B", m))', '("B", m))\n        program += [("W", m)] * (rank == 0)'),
}


@pytest.mark.parametrize("case", NO_1F1B)
def test_the_checker_of_1f1b_refuses(case):
    right = cell_of("solutions/42_pipeline.ipynb", "program_of")
    assert right.count(NO_1F1B[case][0]) == 1
    cells = {"world_size": 4, "rank": 0, "torch": torch}
    exec(cell_of("42_pipeline.ipynb", "is_one_f_one_b"), cells)
    exec(right.replace(*NO_1F1B[case]), cells)
    with pytest.raises((AssertionError, ValueError)) as told:
        cells["is_one_f_one_b"](cells["program_of"])
    assert "needs a process group" not in str(told.value)  # the message for a right answer without a process group
