"""Mutants: small wrong versions of the code, made one at a time; each must be caught by a test named with it.

    python tests/mutants.py                         all of tests/mutants.yaml
    python tests/mutants.py 'zero-*' clip-local     those of these names; patterns are allowed

    working tree  --- copied once --->  sandbox     1  unchanged: all the tests that are named pass
                                                    2  one file changed: pytest -x of its tests, in new processes
                                                    3  the file as it was, and the next mutant

The working tree is only read. The sandbox is always removed, with all files of the tests. This process
imports torch once and nothing of labkit; each pytest is a fork of it, so a mutant costs a second or two. On the CPU:
forks cannot share CUDA.
Exit code 1 where a mutant survives or cannot be applied, or where tests fail without one.
DeMillo, Lipton and Sayward, Hints on Test Data Selection, IEEE Computer 1978.
"""

import argparse
import ast
import contextlib
import fnmatch
import importlib.util
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tests" / "mutants.yaml"
COPIED = ("labkit", "scripts", "tests")
IMPORTED_ONCE = ("torch", "torch._dynamo", "numpy", "pandas")
FORK = multiprocessing.get_context("fork")
LIMIT = 300  # seconds for one mutant; for the tests without any, ten times as many


@dataclass(frozen=True)
class Mutant:
    """function: a qualified name, `Mesh.__init__`, of labkit or scripts; no file, so that a file may move.

    Where several have that name, a folder or file stands before it: `ddp:Reducer.arrive`; `lab:` is all of scripts/lab.
    old: an expression or a statement that occurs in the function exactly once; new: the text in its place.
    tests: names of test functions, separated by blanks, each with `test_file.py::` where several have it, and with
    `[parameters]` where one case will do; the narrowest that see the difference.
    """

    name: str
    function: str
    old: str
    new: str
    tests: str

    def place(self):
        """(its file relative to the root, the function). Raises ValueError where there is not exactly one."""
        family, _, wanted = self.function.rpartition(":")
        found = [
            (file, node)
            for file in sources()
            if not family or family in file.with_suffix("").parts
            for name, node in functions(file)
            if name == wanted
        ]
        if len(found) != 1:
            raise ValueError(f"{self.name}: {len(found)} functions are called {self.function!r}, not one")
        return found[0]

    def applied(self):
        """(its file, the source with the mistake in it). Raises ValueError where there is not exactly one place."""
        file, function = self.place()
        return file, self.replaced((ROOT / file).read_text(encoding="utf-8"), function)

    def replaced(self, source, function):
        """The source with new for old in function, a part of the source's tree."""
        old = ast.dump(parsed(self.old))
        found = [node for node in ast.walk(function) if ast.dump(node) == old]
        if len(found) != 1:
            raise ValueError(f"{self.name}: {len(found)} times in {self.function}, not once: {self.old!r}")
        new = f"({self.new})" if isinstance(found[0], ast.expr) and is_expression(self.new) else self.new
        begin = offset(source, found[0].lineno, found[0].col_offset)
        end = offset(source, found[0].end_lineno, found[0].end_col_offset)
        return (source.encode()[:begin] + new.encode() + source.encode()[end:]).decode()

    def cases(self):
        """Its tests as ids for pytest. Raises ValueError where there is not exactly one function of that name."""
        return [case_of(self.name, test) for test in self.tests.split()]


def parsed(text):
    """The node of one expression, or of one statement."""
    (statement,) = ast.parse(text).body
    return statement.value if isinstance(statement, ast.Expr) else statement


def offset(source, line, column):
    """The number of bytes before a place, as the nodes of a tree give it."""
    return sum(map(len, source.encode().splitlines(keepends=True)[: line - 1])) + column


def is_expression(text):
    return isinstance(parsed(text), ast.expr)


@cache
def sources():
    """Files of labkit and scripts, relative to the root."""
    files = [*ROOT.glob("labkit/**/*.py"), *ROOT.glob("scripts/**/*.py"), ROOT / "scripts" / "lab"]
    return [file.relative_to(ROOT) for file in files]


@cache
def functions(file):
    """(qualified name, node) of all functions and classes of a file, and of the file itself, whose name is empty."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return [("", tree), *named(tree, "")]


def named(node, prefix):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            yield prefix + child.name, child
            yield from named(child, f"{prefix}{child.name}.")
        else:
            yield from named(child, prefix)


def case_of(mutant, test):
    """`test_file.py::test_name[parameters]`, the file optional, as an id for pytest."""
    wanted, bracket, parameters = test.rpartition("::")[2].partition("[")
    found = [f"{file}::{wanted}" for file, names in tests_by_file() if wanted in names and test_is_of(test, file)]
    if len(found) != 1:
        raise ValueError(f"{mutant}: {len(found)} test functions are called {test!r}, not one")
    return found[0] + bracket + parameters


def test_is_of(test, file):
    named_file, separator, _ = test.partition("[")[0].rpartition("::")
    return not separator or named_file == file.name


@cache
def tests_by_file():
    """[(file relative to the root, the names of its test functions)]."""
    files = [file.relative_to(ROOT) for file in ROOT.glob("tests/**/test_*.py")]
    return [(file, {name for name, _ in functions(file)}) for file in files]


def read_list():
    return [Mutant(**fields) for fields in yaml.safe_load(LIST.read_text(encoding="utf-8"))]


def chosen(mutants, patterns):
    """Those whose name matches a pattern, all without one. Raises ValueError for a pattern that matches nothing."""
    for pattern in patterns:
        if not fnmatch.filter([mutant.name for mutant in mutants], pattern):
            raise ValueError(f"no mutant is called {pattern!r}")
    return [m for m in mutants if not patterns or any(fnmatch.fnmatch(m.name, pattern) for pattern in patterns)]


class Sandbox:
    """A copy of the tree, in which tests run on the copied labkit."""

    def __init__(self, folder):
        self.folder = folder
        for name in COPIED:
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)

    def pytest(self, *arguments, limit):
        """(exit code, -9 where it took longer than limit; names of the cases that failed; the end of its output)."""
        report, log = self.folder / "report.xml", self.folder / "pytest.log"
        report.unlink(missing_ok=True)
        process = FORK.Process(target=run_pytest, args=(self.folder, [f"--junitxml={report}", *arguments], log))
        process.start()
        try:
            process.join(limit)
        finally:
            self.end(process)
        cases = ElementTree.parse(report).iter("testcase") if report.exists() else ()
        failed = [f"{case.get('classname')}::{case.get('name')}" for case in cases if case.find("failure") is not None]
        return process.exitcode, failed, "\n".join(log.read_text(errors="replace").splitlines()[-25:])

    def end(self, process):
        """End it and its ranks. Those that a mutant has left alive have the sandbox in their environment."""
        left = psutil.Process(process.pid).children(recursive=True) if process.is_alive() else []
        left += [p for p in psutil.process_iter(["environ"]) if self.folder_of(p) == str(self.folder)]
        process.kill()
        process.join()
        for one in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()

    @staticmethod
    def folder_of(process):
        return (process.info["environ"] or {}).get("PYTHONPATH")

    def hold(self, mutants):
        """Whether all the tests pass without a mutant."""
        tests = dict.fromkeys(case for mutant in mutants for case in mutant.cases())
        code, failed, told = self.pytest(*tests, limit=10 * LIMIT)
        if code:
            print(f"the tests do not pass as the code is: {', '.join(failed) or f'pytest ended with {code}'}\n{told}")
        return code == 0

    def catches(self, mutant):
        """Run the mutant's tests against it: (whether one failed, in words)."""
        file, wrong = mutant.applied()
        path = self.folder / file
        source = path.read_text(encoding="utf-8")
        path.write_text(wrong, encoding="utf-8")
        try:
            code, failed, told = self.pytest("-x", *mutant.cases(), limit=LIMIT)
        finally:
            path.write_text(source, encoding="utf-8")
        if code == 0:
            return False, f"SURVIVED {mutant.tests}"
        if code == 1 and failed:
            return True, f"caught by {failed[0].removeprefix('tests.')}"
        return False, f"NOT DECIDED: pytest ended with {code}\n{told}"


def run_pytest(folder, arguments, log):
    """In a fork: pytest on the tree in folder, as if nothing of it had ever been imported."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(folder)
    scratch = folder / "tmp"
    scratch.mkdir(exist_ok=True)
    # No .pyc: one whose source changed twice within a second, to the same length, would be taken for fresh.
    os.environ |= {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(scratch)}
    tempfile.tempdir = None  # it has been looked up for the sandbox
    sys.dont_write_bytecode, sys.path[0] = True, str(folder)
    if not Path(importlib.util.find_spec("labkit").origin).is_relative_to(folder):
        raise RuntimeError("the tests would not run on the copied labkit")
    # Ranks of tests/pool.py are forks of this process: a server of their own would import torch again.
    multiprocessing.get_context = lambda method: FORK
    sys.exit(int(pytest.main(["-q", "-p", "no:cacheprovider", *arguments])))


def run(mutants):
    """A line for each mutant; the exit code."""
    for name in IMPORTED_ONCE:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="labkit-mutants-", ignore_cleanup_errors=True) as folder:
        sandbox = Sandbox(Path(folder).resolve())
        print(f"the tests of {len(mutants)} mutants, without any ...", flush=True)
        if not sandbox.hold(mutants):
            return 1
        started, alive = time.monotonic(), []
        for number, mutant in enumerate(mutants, start=1):
            before = time.monotonic()
            caught, words = sandbox.catches(mutant)
            now = time.monotonic()
            place = f"{number}/{len(mutants)}, {(now - started) / number * (len(mutants) - number):.0f} s left"
            alive += [] if caught else [mutant.name]
            print(f"[{place}] {mutant.name}  {now - before:.1f} s  {words}", flush=True)
    print(f"{len(mutants) - len(alive)} of {len(mutants)} caught, {time.monotonic() - started:.0f} s")
    if alive:
        print(f"NOT CAUGHT: {', '.join(alive)}")
    return 1 if alive else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="names of mutants, or patterns (all)")
    try:
        mutants = chosen(read_list(), parser.parse_args().names)
        for mutant in mutants:
            mutant.applied()
            mutant.cases()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        return run(mutants)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
