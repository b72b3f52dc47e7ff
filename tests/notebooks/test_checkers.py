"""The checkers of the notebooks' exercises: right answers pass, and the wrong ones beside the solutions do not.

notebooks/solutions/NOTEBOOK.yaml has, for each exercise, wrong answers, each named by its mistake, with words that the
checker must say, and right answers that are not the solution's. In the bug museum the reader's function is a wrong
program that runs; it is listed as the first wrong answer.
"""

import ast
import functools
import importlib.util
import textwrap

import pytest
import yaml
from grading import exercises

from labkit.measure.machine import ROOT
from labkit.run.exercise import check

NOTEBOOKS = ROOT / "notebooks"
MUSEUM = "90_bug_museum"
RANKS = {"01_collectives": 8, "20_slow_networks": 6}
LISTED = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((NOTEBOOKS / "solutions").glob("*.yaml"))}


EXERCISES = [
    (path.stem, exercise.name, exercise.checker)
    for path in exercises.notebooks()
    for exercise in exercises.in_notebook(path)
]


def cases(kind):
    """[(exercise, name)] of the listed answers of a kind, "wrong" or "right"."""
    listed = [(case, LISTED.get(case[0], {}).get(case[1], {}).get(kind, {})) for case in EXERCISES]
    return [(case, name) for case, answers in listed for name in answers]


def listed(case, kind, name):
    return LISTED[case[0]][case[1]][kind][name]


@functools.cache
def functions(notebook):
    """{name: source} of the functions of a notebook's cells."""
    return exercises.functions(exercises.read(NOTEBOOKS / f"{notebook}.ipynb"))


def source_of(notebook, name):
    """The source of the function of this name in a notebook's cells."""
    return functions(notebook)[name]


def with_body(stub, body):
    """The source of a function with another body, below its docstring."""
    function = ast.parse(stub).body[0]
    first = function.body[0]
    kept = first.end_lineno if ast.get_docstring(function) is not None else first.lineno - 1
    return "\n".join([*stub.splitlines()[:kept], textwrap.indent(textwrap.dedent(body), "    ")])


def answered(tmp_path, notebook, solution, checker, body):
    """What check() returns for an answer with this body; None: the answer of the solutions."""
    stub = source_of(notebook, solution)
    answer = source_of(f"solutions/{notebook}", solution)
    if body is not None:
        answer = with_body(stub, body)
    path = tmp_path / f"{notebook}.py"
    path.write_text(f"{answer}\n\n\n{source_of(notebook, checker)}\n")
    found = importlib.util.spec_from_file_location(f"answer_{tmp_path.name}", path)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    options = {"nproc": RANKS.get(notebook, 2), "device": "cpu"}
    return check(getattr(module, solution), getattr(module, checker), **options)


@pytest.mark.parametrize("case", EXERCISES, ids=lambda case: case[1])
def test_an_exercise_lists_two_wrong_answers(case):
    assert len(LISTED.get(case[0], {}).get(case[1], {}).get("wrong", {})) >= 2


def test_every_list_belongs_to_an_exercise():
    known = {(notebook, solution) for notebook, solution, _ in EXERCISES}
    assert {(notebook, solution) for notebook, answers in LISTED.items() for solution in answers} <= known


@pytest.mark.slow
@pytest.mark.parametrize("case", EXERCISES, ids=lambda case: case[1])
def test_the_solution_passes(case, tmp_path):
    assert answered(tmp_path, *case, None)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "name"), cases("wrong"), ids=str)
def test_a_wrong_answer_is_refused(case, name, tmp_path, capsys):
    wrong = listed(case, "wrong", name)
    assert not answered(tmp_path, *case, wrong["answer"])
    assert wrong["says"] in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("case", "name"), cases("right"), ids=str)
def test_another_right_answer_passes(case, name, tmp_path):
    assert answered(tmp_path, *case, listed(case, "right", name)["answer"])


@pytest.mark.parametrize("case", [case for case in EXERCISES if case[0] == MUSEUM], ids=lambda case: case[1])
def test_an_exhibit_is_its_own_first_wrong_answer(case):
    notebook, solution, _ = case
    stub = source_of(notebook, solution)
    first = next(iter(LISTED[notebook][solution]["wrong"].values()))["answer"]
    assert ast.dump(ast.parse(with_body(stub, first))) == ast.dump(ast.parse(stub))


@pytest.mark.parametrize("case", EXERCISES, ids=lambda case: case[1])
def test_the_solutions_have_the_same_checker(case):
    notebook, _, checker = case
    assert source_of(notebook, checker) == source_of(f"solutions/{notebook}", checker)
