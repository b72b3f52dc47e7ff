"""The list of mutants stays fit to be run: `python tests/mutants.py` does run it."""

import ast

import pytest
from mutants import ROOT, Mutant, chosen, read_list

MUTANTS = read_list()


def test_there_are_not_too_many_and_each_has_its_name():
    assert 40 <= len(MUTANTS) <= 150
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_has_one_place_compiles_and_names_tests(mutant):
    file, wrong = mutant.applied()
    source = (ROOT / file).read_text(encoding="utf-8")
    assert ast.dump(ast.parse(wrong)) != ast.dump(ast.parse(source))  # not only another comment
    assert mutant.cases()


def test_an_expression_is_found_however_it_is_laid_out():
    source = "def f(a, b):\n    return 2 * (  # twice\n        a\n        + b\n    )\n"
    mutant = Mutant("sum", "f", old="a+b", new="a - b", tests="")
    assert (
        mutant.replaced(source, ast.parse(source))
        == "def f(a, b):\n    return 2 * (  # twice\n        (a - b)\n    )\n"
    )


def test_a_statement_behind_letters_of_several_bytes_is_replaced():
    source = 'word = "ä"; x = 1\ny = 1\n'
    mutant = Mutant("x", "f", old="x = 1", new="x = 2", tests="")
    assert mutant.replaced(source, ast.parse(source)) == 'word = "ä"; x = 2\ny = 1\n'


@pytest.mark.parametrize(("source", "times"), [("y = 1", 0), ("x = 1\nx = 1", 2)])
def test_what_is_not_there_once_is_an_error(source, times):
    mutant = Mutant("lost", "f", old="x = 1", new="x = 2", tests="")
    with pytest.raises(ValueError, match=f"lost: {times} times in f, not once: 'x = 1'"):
        mutant.replaced(source, ast.parse(source))


@pytest.mark.slow
def test_a_function_or_test_that_is_not_there_once_is_an_error():
    mutant = Mutant("lost", "no_such_function", old="x = 1", new="x = 2", tests="test_of_nothing")
    with pytest.raises(ValueError, match="lost: 0 functions are called 'no_such_function', not one"):
        mutant.applied()
    with pytest.raises(ValueError, match="lost: 0 test functions are called 'test_of_nothing', not one"):
        mutant.cases()


def test_mutants_are_chosen_by_name_or_pattern():
    some = [Mutant(name, "f", "1", "2", "") for name in ("zero-a", "zero-b", "clip")]
    assert chosen(some, []) == some
    assert chosen(some, ["clip", "*-b"]) == [some[1], some[2]]
    with pytest.raises(ValueError, match="no mutant is called 'clop'"):
        chosen(some, ["clop"])
