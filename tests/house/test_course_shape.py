"""Every notebook of the course by one plan: how it begins, where its picture is, how long its cells are."""

import ast
import re

import batch
import pytest
from IPython.core.inputtransformer2 import TransformerManager

COURSE = [path for path in batch.course() if path.stem != batch.MAIN_JOB]
LONGEST = 20  # lines of a code cell that is not folded
FIRST_PICTURE = 10  # the last place of the first picture, counted from 0
WORDS = 1800
CELLS = 40


def names(path):
    return path.stem


def code(path):
    return [cell for cell in batch.read(path).cells if cell.cell_type == "code"]


def folded(cell):
    return bool(cell.metadata.get("jupyter", {}).get("source_hidden"))


@pytest.mark.parametrize("path", batch.course(), ids=names)
def test_it_begins_by_asking_for_labkit(path):
    first, usual = code(path)[0], code(COURSE[0])[0]
    assert folded(first) and first.source == usual.source
    assert 'find_spec("labkit")' in first.source


@pytest.mark.parametrize("path", COURSE, ids=names)
def test_its_first_picture_comes_early(path):
    cells = batch.read(path).cells
    shown = [i for i, cell in enumerate(cells) for one in cell.get("outputs", []) if "image/png" in one.get("data", {})]
    assert min(shown) <= FIRST_PICTURE


@pytest.mark.parametrize("path", COURSE, ids=names)
def test_what_is_long_is_folded(path):
    assert [cell.id for cell in code(path) if not folded(cell) and len(cell.source.splitlines()) > LONGEST] == []


@pytest.mark.parametrize("path", COURSE, ids=names)
def test_it_has_two_exercises(path):
    plain = TransformerManager().transform_cell  # without magics
    trees = [ast.parse(plain(cell.source)) for cell in code(path)]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert sum(ast.unparse(call.func) == "check" and len(call.args) == 2 for call in calls) >= 2


@pytest.mark.parametrize("path", batch.course(), ids=names)
def test_it_is_not_longer_than_an_evening(path):
    cells = batch.read(path).cells
    text = " ".join(cell.source for cell in cells if cell.cell_type == "markdown")
    words = [word for word in re.sub("<[^>]+>", "", text).split() if re.search(r"\w", word)]
    assert len(words) <= WORDS and len(cells) <= CELLS
