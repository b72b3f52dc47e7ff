"""`lab test [quick | STEP...]`: run everything that CI runs, and print a summary of failures and times.

`image`, which runs only when it is named, builds scripts/Dockerfile with podman or docker and runs a notebook in it.
`quick` is for use after a change: ruff and the fast cases of every test file, no notebook. The full output is under
runs/TIME-test/. Cases that a machine cannot run are listed with the reason.
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import batch
import framework_packages
import kernels
import psutil
from batch import NOTEBOOKS, ROOT
from terminal import Line, main, say, table

from labkit.measure import machine

KINDS = ("tests", "nbval", "papermill", "browser")
STEPS = ("ruff", *KINDS)
IMAGE = "image"  # a step that takes minutes and a network: only when it is named
DOCKERFILE = "scripts/Dockerfile"
TAG = "lab-test"
NOTEBOOK = "15_attention"  # runs in the container
SPARE = 1  # workers more than cores, because cases also wait for sleeps, links and other ranks
CELL_LIMIT = 600  # seconds for one cell under nbval, also on a busy machine
STEP_LIMIT = 4500  # seconds for all cases, so that CI never hangs
SHOWN = 100  # lines of a failing step's output that are printed
SLOWEST = 10


def run(command, log, line, environment=None):
    """Run the command and return its exit code. Write its output to `log`; show its progress (`[ 34%]`)."""
    with log.open("w") as file:
        child = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            while child.poll() is None:
                line.show(progress(log.read_text(errors="replace"), line.seconds))
                if line.seconds > STEP_LIMIT:
                    child.terminate()
                time.sleep(0.3)
        finally:
            if child.poll() is None:
                child.terminate()
            child.wait()
    return child.returncode


def progress(output, seconds):
    percents = re.findall(r"\[ *(\d+)%\]", output)
    done = int(percents[-1]) if percents else 0  # of the cases; the longest come first
    return f"{done} %, at most {seconds * (100 - done) / done:.0f} s left" if done else ""


def tail(log):
    return "\n".join(log.read_text(errors="replace").splitlines()[-SHOWN:])


# Each step takes the folder for its logs and returns its cases: dicts of kind, name, outcome, seconds, why.


def lint(folder):
    """Run ruff on .py and .ipynb, and hadolint on the Dockerfile."""
    cases = []
    line = Line("ruff")
    place = Path(sys.prefix, "bin")
    for tool, *arguments in (["ruff", "check", "."], ["ruff", "format", "--check", "."], ["hadolint", DOCKERFILE]):
        name = f"{tool} {arguments[0]}"
        if not (place / tool).exists():
            cases.append(case("ruff", name, "skipped", why=f"there is no {tool} for this machine"))
            continue
        log = folder / f"{len(cases)}-{tool}.log"
        start = line.seconds
        failed = run([place / tool, *arguments], log, line)
        if failed:
            say(f"\n{tail(log)}")
        cases.append(case("ruff", name, "failed" if failed else "passed", line.seconds - start))
    return finish(line, cases)


def frameworks(folder):
    """Install the frameworks that tests compare with into .frameworks, unless they are there."""
    if framework_packages.is_ready():
        return []
    line = Line("pip, .frameworks")
    log = folder / "frameworks.log"
    failed = framework_packages.install(lambda command, environment: run(command, log, line, environment))
    if failed:
        say(f"\n{tail(log)}")
    return finish(line, [case("tests", "pip install, .frameworks", "failed" if failed else "passed", line.seconds)])


def image(folder, options):
    """Build the Dockerfile, with further options of `build`, and run a notebook as a user without rights or network."""
    tool = next(filter(shutil.which, ("podman", "docker")), None)
    if tool is None:
        return [case(IMAGE, "build", "skipped", why="there is neither podman nor docker on this machine")]
    build = [tool, "build", "--file", DOCKERFILE, *options]
    commands = {"build": [*build, "--tag", TAG, "."]}
    if tool == "podman":  # before 4.4, it does not take ${BASE} for a stage
        first = [*build, "--target", "cpu", "--tag", f"{TAG}-base", "."]
        second = [*build, "--build-arg", f"BASE={TAG}-base", "--tag", TAG, "."]
        commands = {"build the base": first, "build": second}
    commands["run"] = [tool, "run", "--rm", "--network", "none", "--cap-drop", "ALL", TAG, "run", NOTEBOOK]
    cases = []
    line = Line(f"{tool}, {DOCKERFILE}")
    for name, command in commands.items():
        log = folder / f"image-{len(cases)}.log"
        start = line.seconds
        failed = run(command, log, line)
        cases.append(case(IMAGE, name, "failed" if failed else "passed", line.seconds - start))
        if failed:
            say(f"\n{tail(log)}")
            break
    return finish(line, cases)


def case(kind, name, outcome, seconds=0.0, why=""):
    return {"kind": kind, "name": name, "outcome": outcome, "seconds": seconds, "why": why}


def queue(folder, kinds, quick, workers):
    """Run tests/, the notebooks under nbval and as jobs, and the browser tests, in one queue for all workers."""
    line = Line(", ".join(kinds))
    log = folder / "pytest.log"
    report = folder / "cases.jsonl"
    paths = paths_of(kinds)
    if not paths:
        return [case("nbval", "notebooks", "skipped", why="there are none")]
    command = [sys.executable, "-m", "pytest", "--color=no", "-p", "one_queue", f"--kinds={','.join(kinds)}"]
    command += [f"--cases={report}", f"--numprocesses={workers}", "--dist=load", *["--quick"] * quick]
    # A killed process removes nothing, so all of them use one temporary folder, which is removed at the end.
    place = tempfile.TemporaryDirectory(prefix="labkit-test-", ignore_cleanup_errors=True)
    notebooks = {*KINDS[1:]} & {*kinds}
    with place as scratch, kernels.nursery() if notebooks else contextlib.nullcontext() as kernel:
        added = {"PYTHONPATH": with_scripts(), "LABKIT_JOBS": str(folder), "TMPDIR": scratch}
        added["PYTHONDONTWRITEBYTECODE"] = ""  # hundreds of processes start: each would compile labkit anew
        if kernel:
            command += ["--nbval-lax", f"--nbval-kernel-name={kernel}", f"--nbval-cell-timeout={CELL_LIMIT}"]
        code = run([*command, *paths], log, line, os.environ | added)
    cases = [json.loads(text) for text in report.read_text().splitlines()] if report.exists() else []
    if code not in (0, 5) and not any(case["outcome"] == "failed" for case in cases):  # 5: pytest found no test
        cases.append(case("tests", f"pytest ended with {code}", "failed"))
    if code not in (0, 5):
        say(f"\n{tail(log)}")
    return finish(line, cases)


def paths_of(kinds):
    """Return the paths for pytest that have these kinds of cases."""
    notebooks = [*batch.course(), *sorted((NOTEBOOKS / "solutions").glob("*.ipynb"))]
    paths = {
        "tests": ["tests"],
        "browser": ["tests"],
        "nbval": notebooks,
        "papermill": ["scripts/jobs.py"][: len(notebooks)],
    }
    return list(dict.fromkeys(str(path) for kind in kinds for path in paths[kind]))


def with_scripts():
    return os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))


def finish(line, cases):
    outcomes = Counter(case["outcome"] for case in cases)
    line.close(f"{outcomes['passed']} passed, {outcomes['failed']} failed")
    return cases


def summary(cases, seconds, cores):
    rows = []
    for kind in (*STEPS, IMAGE):
        ours = [case for case in cases if case["kind"] == kind]
        outcomes = Counter(case["outcome"] for case in ours)
        spent = sum(case["seconds"] for case in ours)
        if ours:
            rows.append((kind, outcomes["passed"], outcomes["failed"], outcomes["skipped"], f"{spent:.0f}"))
    say(f"\n{table(rows, header=('step', 'passed', 'failed', 'not tested', 'seconds of its cases'))}\n")
    say(f"the {SLOWEST} slowest cases:")
    slowest = sorted(cases, key=lambda case: -case["seconds"])[:SLOWEST]
    say(table([(f"{case['seconds']:.1f} s", case["name"]) for case in slowest]))
    say()
    for case in cases:
        if case["outcome"] == "failed":
            say(f"FAILED: {case['kind']}: {case['name']}: {case['why']}")
        elif case["outcome"] == "skipped":
            say(f"NOT TESTED: {case['name']}: {case['why']}")
    say(f"{seconds:.0f} s in all; {cores}")
    outcomes = Counter(case["outcome"] for case in cases)
    say(f"{outcomes['passed']} passed, {outcomes['failed']} failed")
    return 1 if outcomes["failed"] or not outcomes["passed"] else 0


def time_of_cores(before, after):
    """Return how busy the machine's cores were in between, with all processes."""
    spent = {name: getattr(after, name) - getattr(before, name) for name in after._fields}
    whole = max(sum(spent.values()), 1e-9)
    idle = spent["idle"] + spent.get("iowait", 0.0)
    kernel = spent["system"] + spent.get("irq", 0.0) + spent.get("softirq", 0.0)
    return f"the cores were idle {100 * idle / whole:.0f} % of it, and {100 * kernel / whole:.0f} % in the kernel"


def run_all(arguments):
    parser = argparse.ArgumentParser(prog="lab test", description=__doc__)
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"quick, {IMAGE}, or of {', '.join(STEPS)} (all)")
    usual = machine.usable_cores() + SPARE
    parser.add_argument("--workers", type=int, default=usual, help=f"cases to run in parallel ({usual})")
    parser.add_argument("--build", default="", metavar="OPTIONS", help="image: of `build`, such as '--network host'")
    options = parser.parse_args(arguments)
    unknown = [step for step in options.steps if step not in (*STEPS, IMAGE, "quick")]
    if unknown:
        parser.error(f"unknown step {unknown[0]!r}; choose from quick, {IMAGE}, {', '.join(STEPS)}")
    quick = "quick" in options.steps
    steps = ["ruff", "tests"] if quick else options.steps or STEPS
    started = time.monotonic()
    before = psutil.cpu_times()
    folder = batch.new_folder("test")
    say(f"logs: {folder.relative_to(ROOT)}")
    cases = lint(folder) if "ruff" in steps else []
    kinds = [kind for kind in KINDS if kind in steps]
    if "tests" in kinds and not quick:
        cases += frameworks(folder)
    if kinds:
        cases += queue(folder, kinds, quick, options.workers)
    if IMAGE in steps:
        cases += image(folder, shlex.split(options.build))
    return summary(cases, time.monotonic() - started, time_of_cores(before, psutil.cpu_times()))


if __name__ == "__main__":
    sys.exit(main(run_all, sys.argv[1:]))
