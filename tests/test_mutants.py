"""The list of mutants stays fit to be run: `python tests/mutants.py` does run it."""

import ast

import pytest
from mutants import ROOT, Mutant, chosen, read_list

MUTANTS = read_list()


def test_there_are_many_and_each_has_its_name():
    assert len(MUTANTS) >= 40
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_has_one_place_compiles_and_names_tests(mutant):
    source = (ROOT / mutant.file).read_text(encoding="utf-8")
    wrong = mutant.applied(source)
    assert ast.dump(ast.parse(wrong)) != ast.dump(ast.parse(source))  # not only another comment
    for test in mutant.tests.split():
        path, _, function = test.partition("::")
        statements = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
        functions = {statement.name for statement in statements if isinstance(statement, ast.FunctionDef)}
        assert not function or function.partition("[")[0] in functions


def test_a_snippet_that_is_not_there_once_is_told():
    mutant = Mutant("lost", "a.py", old="x = 1", new="x = 2", tests="tests/test_a.py")
    assert mutant.applied("x = 1\ny = 1") == "x = 2\ny = 1"
    for source, times in (("y = 1", 0), ("x = 1\nx = 1", 2)):
        with pytest.raises(ValueError, match=f"lost: {times} times in a.py, not once: 'x = 1'"):
            mutant.applied(source)


def test_mutants_are_chosen_by_name_or_pattern():
    some = [Mutant(name, "a.py", "1", "2", "") for name in ("zero-a", "zero-b", "clip")]
    assert chosen(some, []) == some
    assert chosen(some, ["clip", "*-b"]) == [some[1], some[2]]
    with pytest.raises(ValueError, match="no mutant is called 'clop'"):
        chosen(some, ["clop"])
