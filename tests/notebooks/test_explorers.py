"""Which cells are explorers, and which statements of a notebook they need: the notebooks that test_browser.py moves."""

import re

import explorers
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

COURSE = sorted(explorers.batch.NOTEBOOKS.glob("*.ipynb"))
SHOWN = new_output("display_data", {explorers.WIDGET: {"model_id": "1"}})


@pytest.mark.parametrize("path", COURSE, ids=lambda path: path.stem)
def test_whoever_calls_an_explorer_has_stored_its_widget(path):
    for cell in explorers.batch.code_cells(explorers.batch.read(path)):
        calls = re.search(r"\b(explorer|comparison)\($", cell.source, re.MULTILINE) or "explorer(" in cell.source
        assert explorers.shows_a_widget(cell) or not calls or "def " in cell.source


def needed(*sources):
    cells = [new_code_cell(source) for source in sources[:-1]]
    cells.append(new_code_cell(sources[-1], outputs=[SHOWN]))
    return "\n".join(cell.source for cell in explorers.needed(new_notebook(cells=cells)).cells).splitlines()


@pytest.mark.parametrize(
    ("sources", "kept"),
    [
        (("a = 1\nb = 2", "show(a)"), ["a = 1"]),
        (("a = 1\na = 2", "show(a)"), ["a = 2"]),
        (("a = 1\na += 2", "show(a)"), ["a = 1", "a += 2"]),
        (("a = []\na.append(1)\nprint(a)", "show(a)"), ["a = []", "a.append(1)"]),
        (("a = {}\na['x'] = 1", "show(a)"), ["a = {}", "a['x'] = 1"]),
        (("def f():\n    return a", "a = 1", "show(f())"), ["def f():", "    return a", "a = 1"]),
        (("i = 0", "a = [i for i in range(2)]", "show(a)"), ["a = [i for i in range(2)]"]),
        (
            ("i = 0", "a = []\nfor i in range(2):\n    a.append(i)", "show(a)"),
            ["a = []", "for i in range(2):", "    a.append(i)"],
        ),
        (("import os, sys", "import re", "show(os)"), ["import os, sys"]),
    ],
)
def test_what_is_kept(sources, kept):
    assert needed(*sources) == [*kept, sources[-1]]


def test_a_magic_sets_its_name_and_reads_its_options():
    lines = needed("n = 2\nm = 3", "%%torchrun --nproc $n --into run\nx = 1", "show(run)")
    assert lines[0] == "n = 2" and "run_cell_magic('torchrun', '--nproc $n --into run'" in lines[1] and len(lines) == 3
