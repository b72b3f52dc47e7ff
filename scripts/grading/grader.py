"""Grade submissions in sandboxes, several at a time; keep the results, so that a second call grades only what is new.

A run is one answer on one number of ranks. Its share of points:

    all ranks came to the checker's end     cases passed / cases tried, over all ranks
    a rank stopped earlier                  its cases passed / the cases that the course's own answer has on that rank
    never run: no such function, a hang     0

An exercise's points are the mean share of its runs.
"""

import functools
import hashlib
import json
import os
import re
import threading
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass

from grading import cases, exercises
from grading.sandbox import ROOT, Ended, Sandbox

SECONDS = 20  # wall-clock limit of a run
CPU_SECONDS = 8  # of the CPU that a rank may use
COLLECTIVE = 10  # seconds that a collective waits for other ranks
START = 40  # seconds that a sandbox may take to start
NOTHING = {"finished": False, "passed": 0, "tried": 0, "failed": [], "rank": 0, "seconds": 0.0}
ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}")


@dataclass(frozen=True)
class Row:
    """The grade of one exercise of a submission, or why there is none.

    points: from 0 to 1; None if the file could not be read. message: the first misconception, in the checker's words;
    line: of the submission; runs: {ranks: result of worker.py}; answer: source.
    """

    file: str
    notebook: str
    exercise: str
    points: float | None
    message: str
    line: str = ""
    seconds: float = 0.0
    runs: dict | None = None
    answer: str = ""


@functools.cache
def code_digest():
    """Return the SHA-256 of the code that grades: labkit, and this package but for the page."""
    found = hashlib.sha256()
    for folder in (ROOT / "labkit", ROOT / "scripts" / "grading"):
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts and path.name != "report.py":
                found.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return found.hexdigest()


@functools.cache
def course(notebook):
    """Return (Exercises of a notebook, the SHA-256 of them and the code that grades)."""
    found = exercises.in_notebook(exercises.NOTEBOOKS / f"{notebook}.ipynb")
    words = [code_digest(), *((one.name, one.checker, one.source, sorted(one.options.items())) for one in found)]
    return found, hashlib.sha256(json.dumps(words).encode()).hexdigest()


class Store:
    """The results on disk: a file for each submission and course, complete or not there."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, submission):
        key = submission.sha256 + course(submission.notebook)[1]
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"

    def get(self, submission):
        """Return {exercise: {ranks: result}} of a submission, or None."""
        try:
            found = json.loads(self.path(submission).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return {name: {int(ranks): result for ranks, result in runs.items()} for name, runs in found.items()}

    def put(self, submission, results):
        path = self.path(submission)
        beside = path.with_suffix(f".{threading.get_ident()}")
        beside.write_text(json.dumps(results), encoding="utf-8")
        os.replace(beside, path)


class Box:
    """The sandbox of a submission, started again after an answer has ended it."""

    def __init__(self):
        self.sandbox = None

    def ask(self, request, stopping):
        start = time.monotonic()
        if self.sandbox is None:
            self.sandbox = Sandbox()
        try:
            return valid(self.sandbox.ask(request, SECONDS + START, stopping))
        except Ended as error:
            self.close()
            seconds = round(time.monotonic() - start, 2)
            return NOTHING | {"ended": True, "error": str(error), "seconds": seconds}

    def close(self):
        if self.sandbox is not None:
            self.sandbox.close()
            self.sandbox = None


def valid(result):
    """Return a result of worker.py. Raises Ended if it has other types: a learner's code may have written it."""
    types = {"finished": bool, "error": str, "line": str, "answer": str, "seconds": (int, float), "by_rank": list}
    types |= {"passed": int, "tried": int, "rank": int, "failed": list}
    known = result if isinstance(result, dict) and NOTHING.keys() <= result.keys() else {"": None}
    fits = all(isinstance(value, types.get(name, ())) for name, value in known.items())
    if not fits or not all(isinstance(why, str) for why in result["failed"]):
        raise Ended("the sandbox wrote something else than results to the grader")
    if not 0 <= result["passed"] <= result["tried"]:
        raise Ended("the sandbox wrote impossible results to the grader")
    return result


def grade(submission, stopping):
    """Return {exercise: {ranks: result}} of a submission. KeyboardInterrupt when the Event `stopping` is set."""
    box = Box()
    try:
        return {one.name: graded(submission, one, box, stopping) for one in course(submission.notebook)[0]}
    finally:
        box.close()


def graded(submission, exercise, box, stopping):
    """Return {ranks: result}. An answer that hangs or ends its sandbox is not tried on more ranks.

    One that did not come to its end may have filled the disk or left a process: the next gets another sandbox.
    """
    request = {"cells": submission.cells, "name": exercise.name}
    known = box.ask(request, stopping)
    if not known["finished"]:
        return {exercise.ranks[0]: known}
    request |= {"checker": exercise.checker, "source": cases.as_cases(exercise.source)}
    request["cpu_seconds"] = CPU_SECONDS
    request |= {"options": {"timeout": SECONDS, "collective_timeout": COLLECTIVE}}
    results = {}
    for ranks in exercise.ranks:
        result = box.ask(request | {"ranks": ranks}, stopping)
        results[ranks] = {"line": known.get("line", ""), "answer": known.get("answer", "")} | result
        if not result["finished"] and hangs(result):
            break
    if not all(result["finished"] for result in results.values()):
        box.close()
    return results


def hangs(result):
    """Return whether an unfinished run would cost as much time on other numbers of ranks."""
    return result.get("ended") or result["seconds"] >= COLLECTIVE or cases.SLOW in result.get("error", "")


def run_all(waiting, store, jobs, show):
    """Grade the submissions that the store lacks. show(done, total) is called while they run.

    KeyboardInterrupt ends all sandboxes first; what is graded is kept.
    """
    stopping = threading.Event()

    def work(submission):
        store.put(submission, grade(submission, stopping))

    with ThreadPoolExecutor(jobs) as pool:
        left = {pool.submit(work, one) for one in waiting}
        try:
            while left:
                show(len(waiting) - len(left), len(waiting))
                done, left = wait(left, timeout=0.5, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()
        except BaseException:
            stopping.set()
            pool.shutdown(cancel_futures=True)
            raise


def rows(submission, results, reference):
    """Return the Rows of a submission. results, reference: {exercise: {ranks: result}}, also of the course's answer."""
    if submission.problem:
        return [Row(submission.file, submission.notebook or "", "", None, submission.problem)]
    every = course(submission.notebook)[0]
    return [row(submission, one, results[one.name], reference.get(one.name, {})) for one in every]


def row(submission, exercise, runs, reference):
    runs = {ranks: run | {"failed": list(map(clean, run["failed"]))} for ranks, run in runs.items()}
    points = sum(share(run, reference.get(ranks, {})) for ranks, run in runs.items()) / len(exercise.ranks)
    wrong = [run for run in runs.values() if not is_right(run)]
    first = wrong[0] if wrong else {"line": ""}
    message = (first.get("failed") or [first.get("error", "")])[0]
    seconds = sum(run["seconds"] for run in runs.values())
    answer = next(iter(runs.values())).get("answer", "")
    points = int(1000 * points) / 1000 if wrong else 1.0  # rounded down: 1 is for right answers only
    given = (submission.file, submission.notebook, exercise.name, points, clean(message), clean(first.get("line", "")))
    return Row(*given, round(seconds, 1), runs, clean(answer))


def is_right(run):
    return run["finished"] and run["passed"] == run["tried"]


def share(run, reference):
    """Return the share of points of a run, as above. reference: the run of the course's own answer."""
    if run["finished"]:
        return run["passed"] / run["tried"] if run["tried"] else 1.0
    if not run["tried"]:
        return 0.0
    usual = reference.get("by_rank", [])
    expected = usual[run["rank"]] if 0 <= run["rank"] < len(usual) else 0
    return run["passed"] / max(expected, run["tried"] + 1)


def clean(text):
    """Return a learner's text without control characters and addresses, which differ from run to run."""
    text = ADDRESS.sub("0x...", text)
    return "".join(one if one.isprintable() or one == "\n" else "�" for one in text.replace("\t", "    "))
