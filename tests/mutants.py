"""Mutants: small wrong versions of the code, made one at a time; each must be caught by a test that is named beside it.

    python tests/mutants.py                         all of tests/mutants.yaml
    python tests/mutants.py 'zero-*' clip-local     those of these names; patterns are allowed

    working tree  --- copied once --->  sandbox     1  unchanged: all the tests that are named pass
                                                    2  one file changed: pytest -x of its tests, in a new process
                                                    3  the file as it was, and the next mutant

The working tree is only read, and the sandbox goes whatever happens. Ranks find the sandbox's labkit as pytest itself
does, by PYTHONPATH. Exit code 1 where a mutant survives or cannot be applied, or where tests fail without one.
DeMillo, Lipton and Sayward, Hints on Test Data Selection, IEEE Computer 1978.
"""

import argparse
import contextlib
import fnmatch
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import psutil
import yaml

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tests" / "mutants.yaml"
COPIED = ("labkit", "scripts", "tests")
LIMIT = 300  # seconds for one mutant; for the tests without any, ten times as many


@dataclass(frozen=True)
class Mutant:
    """file: relative to the root. old: a text that occurs there exactly once; new: what stands in its place.

    tests: ids for pytest, separated by blanks; the narrowest that see the difference.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str

    def applied(self, source):
        """The source with the mistake in it. Raises ValueError where there is not exactly one place for it."""
        if source.count(self.old) != 1:
            raise ValueError(f"{self.name}: {source.count(self.old)} times in {self.file}, not once: {self.old!r}")
        return source.replace(self.old, self.new)


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
        # No .pyc: one whose source changed twice within a second, to the same length, would be taken for fresh.
        self.environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
        self.here = {"cwd": folder, "env": self.environment}
        found = subprocess.check_output([sys.executable, "-c", "import labkit; print(labkit.__file__)"], **self.here)
        if not Path(found.decode().strip()).is_relative_to(folder):
            raise RuntimeError(f"tests would run on {found.decode().strip()}, not on the copy in {folder}")

    def pytest(self, *arguments, limit):
        """(exit code, None where it took longer than limit; names of the cases that failed; the end of its output)."""
        report, log = self.folder / "report.xml", self.folder / "pytest.log"
        report.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *arguments]
        try:
            with log.open("w") as output:
                done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, timeout=limit, **self.here)
            code = done.returncode
        except subprocess.TimeoutExpired:
            code = None
        finally:
            self.end_processes()
        cases = ElementTree.parse(report).iter("testcase") if report.exists() else ()
        failed = [f"{case.get('classname')}::{case.get('name')}" for case in cases if case.find("failure") is not None]
        return code, failed, "\n".join(log.read_text(errors="replace").splitlines()[-25:])

    def end_processes(self):
        """Ranks that a mutant has left alive: what was started here has the sandbox in its environment."""
        for process in psutil.process_iter(["environ"]):
            if (process.info["environ"] or {}).get("PYTHONPATH") == str(self.folder):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    def hold(self, mutants):
        """Whether all the tests pass without a mutant."""
        tests = dict.fromkeys(test for mutant in mutants for test in mutant.tests.split())
        code, failed, told = self.pytest(*tests, limit=10 * LIMIT)
        if code:
            print(f"the tests do not pass as the code is: {', '.join(failed) or f'pytest ended with {code}'}\n{told}")
        return code == 0

    def catches(self, mutant):
        """Run the mutant's tests against it: (whether one failed, in words)."""
        path = self.folder / mutant.file
        source = path.read_text(encoding="utf-8")
        path.write_text(mutant.applied(source), encoding="utf-8")
        try:
            code, failed, told = self.pytest("-x", *mutant.tests.split(), limit=LIMIT)
        finally:
            path.write_text(source, encoding="utf-8")
        if code == 0:
            return False, f"SURVIVED {mutant.tests}"
        if code == 1 and failed:
            return True, f"caught by {failed[0].removeprefix('tests.')}"
        return False, f"NOT DECIDED: {'too slow' if code is None else f'pytest ended with {code}'}\n{told}"


def run(mutants):
    """A line for each mutant; the exit code."""
    with tempfile.TemporaryDirectory(prefix="labkit-mutants-", ignore_cleanup_errors=True) as folder:
        sandbox = Sandbox(Path(folder).resolve())
        started = time.monotonic()
        print(f"without mutants: the tests of {len(mutants)}", flush=True)
        if not sandbox.hold(mutants):
            return 1
        print(f"without mutants: all pass, {time.monotonic() - started:.0f} s", flush=True)
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
            mutant.applied((ROOT / mutant.file).read_text(encoding="utf-8"))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    try:
        return run(mutants)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
