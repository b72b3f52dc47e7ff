"""`lab test [STEP...]`: everything CI runs, with a line for each step and a summary at the end.

Each step's full output is under runs/TIME-test/. What a machine cannot test is listed with the reason.
"""

import argparse
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field

import batch
from batch import ROOT
from terminal import Line, main, say, table

BUDGET = 90  # seconds that a notebook should take; over it the summary says so
LIMIT = 360  # seconds after which it has failed
CELL_TIMEOUT = 120  # seconds for one cell under nbval
STEP_LIMIT = 1800  # seconds for a whole pytest step: far above any, so that CI never hangs
SHOWN = 60  # lines of a failing step's output that are printed


@dataclass
class Result:
    step: str
    passed: int = 0
    failed: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)  # one line each: failures, and notebooks over their budget
    untested: list[str] = field(default_factory=list)  # "what: why"


def run(command, log, line):
    """The command's exit code; its output goes to the file `log`, its progress (`[ 34%]`) to the line."""
    with log.open("w") as file:
        child = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
        try:
            while child.poll() is None:
                percent = re.findall(r"\[ *(\d+%)\]", log.read_text(errors="replace"))
                line.show(percent[-1] if percent else "")
                if line.seconds > STEP_LIMIT:
                    child.terminate()
                time.sleep(0.3)
        finally:
            if child.poll() is None:
                child.terminate()
            child.wait()
    return child.returncode


def tail(log):
    return "\n".join(log.read_text(errors="replace").splitlines()[-SHOWN:])


# The steps: each takes the folder for its logs and returns a Result.


def lint(folder):
    """ruff, on .py and .ipynb."""
    result, line = Result("ruff"), Line("ruff")
    for arguments in (["check", "."], ["format", "--check", "."]):
        log = folder / f"ruff-{arguments[0]}.log"
        if run([sys.executable, "-m", "ruff", *arguments], log, line):
            result.failed += 1
            result.notes.append(f"ruff {arguments[0]}")
            say(f"\n{tail(log)}")
        else:
            result.passed += 1
    return finish(result, line)


def run_pytest(step, folder, arguments):
    """One pytest run. The counts come from its junit file, so that no output is parsed for them."""
    result, line = Result(step), Line(step)
    log, report = folder / f"{step}.log", folder / f"{step}.xml"
    command = [sys.executable, "-m", "pytest", "--color=no", f"--junitxml={report}", *arguments]
    code = run(command, log, line)
    cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    for case in cases:
        name = f"{case.get('classname')}::{case.get('name')}"
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            result.failed += 1
            result.notes.append(name)
        elif skipped is not None:
            result.untested.append(f"{name}: {skipped.get('message')}")
        else:
            result.passed += 1
    if code not in (0, 5) and not result.failed:  # 5: pytest found no test
        result.failed += 1
        result.notes.append(f"pytest ended with {code}")
    if result.failed:
        say(f"\n{tail(log)}")
    return finish(result, line)


def tests(folder):
    """tests/, but for the browser."""
    return run_pytest("tests", folder, ["tests", "-m", "not browser"])


def nbval(folder):
    """Every cell of every notebook runs, and the verdict cells print what is committed."""
    paths = [*batch.course(), *sorted((batch.NOTEBOOKS / "solutions").glob("*.ipynb"))]
    if not paths:
        return Result("nbval", untested=["notebooks: there are none"])
    limits = [f"--nbval-cell-timeout={CELL_TIMEOUT}", f"--timeout={LIMIT}"]
    return run_pytest("nbval", folder, ["--nbval-lax", "--nbval-current-env", *limits, *map(str, paths)])


def smoke(folder):
    """Every notebook as a batch job, on 4 ranks where its default is 2, else on 2: nbval has just run the default.

    Nor does it have to measure: it repeats as little as it can.
    """
    result, line = Result("papermill"), Line("papermill")
    for path in batch.course():
        notebook = batch.read(path)
        default = batch.defaults(notebook).get(batch.RANKS)
        if default is None:
            result.untested.append(f"{path.stem} on other numbers of ranks: it has no parameter {batch.RANKS}")
            continue
        ranks = 2 if default == 4 else 4
        name = f"{path.stem}, {ranks} ranks"
        line.show(name)
        values = {batch.RANKS: ranks, **batch.few(notebook)}
        outcome = batch.execute(path, folder / path.stem, values, timeout=LIMIT, progress=False)
        if outcome.interrupted:
            raise KeyboardInterrupt
        result.passed, result.failed = result.passed + (not outcome.error), result.failed + bool(outcome.error)
        if outcome.error:
            result.notes.append(f"{name}: {outcome.error}")
        elif outcome.seconds > BUDGET:
            result.notes.append(f"{name}: {outcome.seconds:.0f} s, over its budget of {BUDGET} s")
    return finish(result, line)


def browser(folder):
    """JupyterLab in a real browser."""
    return run_pytest("browser", folder, ["tests", "-m", "browser"])


STEPS = {"ruff": lint, "tests": tests, "nbval": nbval, "papermill": smoke, "browser": browser}


def finish(result, line):
    result.seconds = line.seconds
    line.close(f"{result.passed} passed, {result.failed} failed")
    return result


def summary(results, seconds):
    rows = [(r.step, r.passed, r.failed, len(r.untested), f"{r.seconds:.0f}") for r in results]
    say(f"\n{table(rows, header=('step', 'passed', 'failed', 'not tested', 'seconds'))}\n")
    for result in results:
        for note in result.notes:
            say(f"{'FAILED' if result.failed and 'budget' not in note else 'SLOW'}: {result.step}: {note}")
        for reason in result.untested:
            say(f"NOT TESTED: {reason}")
    say(f"{seconds:.0f} s in all")
    passed, failed = sum(r.passed for r in results), sum(r.failed for r in results)
    say(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


def run_all(arguments):
    parser = argparse.ArgumentParser(prog="lab test", description=__doc__)
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"{', '.join(STEPS)} (all, in this order)")
    options = parser.parse_args(arguments)
    unknown = [step for step in options.steps if step not in STEPS]
    if unknown:
        parser.error(f"unknown step {unknown[0]!r}; there are: {', '.join(STEPS)}")
    started = time.monotonic()
    folder = batch.new_folder("test")
    say(f"logs: {folder.relative_to(ROOT)}")
    results = [STEPS[step](folder) for step in options.steps or STEPS]
    return summary(results, time.monotonic() - started)


if __name__ == "__main__":
    sys.exit(main(run_all, sys.argv[1:]))
