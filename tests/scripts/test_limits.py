"""What a parameter may be: each name's demand, and that the course's own defaults keep them."""

import batch
import limits
import pytest


@pytest.mark.parametrize(
    ("name", "default", "right", "wrong", "words"),
    [
        ("warmup_epochs", 8, 0, -1, "at least 0"),
        ("timed_steps", 8, 2, 1, "at least 2"),
        ("nodes", 2, 3, 1, "at least 2"),
        ("picture_ranks", 4, 8, 9, "at most 8"),
        ("until", 4, 13, 1, "at least 2"),
        ("block_ms", 5.0, 0, -1, "at least 0"),
        ("device", "auto", "cpu", "gpu", "one of auto, cpu, cuda"),
        ("strategy", "fsdp", "zero1", "zero9", "one of single, "),
        ("compared", ["none"], ["topk"], ["topk", "zip"], "a list of values one of none, "),
        ("model", "a name of its own", "another", None, None),
    ],
)
def test_what_a_name_demands(name, default, right, wrong, words):
    assert limits.demand(name, right, default) is None
    if words:
        assert limits.demand(name, wrong, default).startswith(words)


def test_the_course_keeps_its_own_limits():
    known = [batch.defaults(batch.read(path)) for path in batch.course()]
    wrong = [(name, value) for names in known for name, value in names.items() if limits.demand(name, value, value)]
    assert wrong == []
    assert set(limits.BOUNDS) <= set().union(*known)


@pytest.mark.parametrize("path", sorted(batch.NOTEBOOKS.rglob("*.ipynb")), ids=lambda path: path.stem)
def test_no_stored_output_shows_a_place_of_one_machine(path):
    for cell in batch.code_cells(batch.read(path)):
        told = str(cell.outputs)
        assert "PosixPath(" not in told and str(batch.ROOT) not in told, cell.id
