"""`lab grade FOLDER`: grade the exercises in a folder of submissions, and write a page and a CSV.

    ./scripts/lab grade submissions                         results in runs/grades-submissions
    ./scripts/lab grade submissions --out runs/monday       in another folder
    ./scripts/lab grade submissions --jobs 1                one at a time

A submission is a notebook or a .py file whose name contains the name of a notebook of the course. The rest of the name,
and the folders above it, say whose it is:

    submissions/alice/13_fsdp.ipynb      submissions/bob/13_fsdp.py      submissions/carol_13_fsdp (1).ipynb

Only the functions that the exercises ask for are taken from it, and the imports, functions, classes and constants of
its top level that they use. A constant may be computed, as `float("inf")` or `2 * SIZE`. Its other statements
are not run. A .py file may have cells: `# %%` begins one.

Each answer runs on 2, 3 and 4 ranks, or on those that its checker allows. The assertions of the checker are cases,
but for a passed test of a type or None; the points are the share that passed. Every submission has a sandbox without a
network and without files but Python and labkit; it limits time, memory, processes and output. Without bubblewrap only
these limits hold.

grades.html shows each answer's source: look at it. The sandbox protects the machine and the other grades, but an answer
that rewrites the checker can give itself full marks.

The folder of --out keeps results: the same command grades only what is new or changed, also after Ctrl-C.
"""

import argparse
import sys
from pathlib import Path

from grading import grader, report, sandbox, submissions
from terminal import Line, UserError, main, say

from labkit.measure.machine import usable_cores

ROOT = Path(__file__).resolve().parent.parent
MOST_JOBS = 8  # by default; a sandbox may use 4 GB
WAITING = 1  # jobs more than cores: an answer that hangs, or waits for its ranks to end, uses no core


def parser():
    found = argparse.ArgumentParser(
        prog="lab grade", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("folder", type=Path, metavar="FOLDER", help="the submissions")
    found.add_argument("--out", type=Path, metavar="FOLDER", help="for the results (runs/grades-NAME)")
    usual = min(usable_cores() + WAITING, MOST_JOBS)
    found.add_argument("--jobs", type=positive, default=usual, metavar="N", help=f"submissions in parallel ({usual})")
    return found


def positive(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def grade(words):
    given = parser().parse_args(words)
    if not given.folder.is_dir():
        raise UserError(f"no folder {given.folder}")
    out = (given.out or ROOT / "runs" / f"grades-{given.folder.resolve().name}").resolve()
    found = submissions.find(given.folder, out)
    if not found:
        raise UserError(f"no files in {given.folder}")
    reason = sandbox.refusal()
    if reason:
        say(f"limits only, no sandbox: {reason}")
    store = grader.Store(out / "results")
    references = grade_new(found, store, given.jobs)
    rows = [row for one in found for row in rows_of(one, store, references)]
    about = [in_short(found, rows), *([f"Graded without a sandbox: {reason}."] if reason else [])]
    about += [f"Unsure: {words}." for words in unsure(references, store)]
    write(out, f"Grades of {given.folder.resolve().name}", about, rows)
    for line in about:
        say(line)
    say(f"{shown(out / 'grades.html')}\n{shown(out / 'grades.csv')}")
    return 0


def grade_new(found, store, jobs):
    """Grade what the store lacks, first the course's own answers; return {notebook: Submission of those}."""
    gradable = [one for one in found if not one.problem]
    references = {stem: submissions.solution(stem) for stem in sorted({one.notebook for one in gradable})}
    right = [one for one in references.values() if not one.problem]
    every = {store.path(one): one for one in [*right, *gradable]}
    waiting = [one for one in every.values() if store.get(one) is None]
    line = Line("grade")
    try:
        grader.run_all(waiting, store, jobs, lambda done, total: line.show(progress(done, total, line.seconds)))
    finally:
        line.clear()
    return references


def progress(done, total, seconds):
    """Return `12 of 30 submissions, about 40 s left`; without a time until one is done."""
    left = f", about {(total - done) * seconds / done:.0f} s left" if done else ""
    return f"{done} of {total} submissions{left}"


def rows_of(submission, store, references):
    if submission.problem:
        return grader.rows(submission, {}, {})
    return grader.rows(submission, store.get(submission), store.get(references[submission.notebook]) or {})


def unsure(references, store):
    """Yield a sentence for each answer of the course that is not right here, as on a machine that is too busy."""
    for submission in references.values():
        for row in rows_of(submission, store, references):
            if row.points != 1:
                yield f"the course's own answer {row.exercise} does not get all points on this machine: {row.message}"


def in_short(found, rows):
    graded = [row for row in rows if row.points is not None]
    unread = sum(bool(one.problem) for one in found)
    right = sum(row.points == 1 for row in graded)
    files = f"{len(found)} files, {unread} of them not graded" if unread else f"{len(found)} files"
    return f"{files}: {len(graded)} answers, {right} right"


def write(out, title, about, rows):
    pages = {"grades.html": report.page(title, about, rows), "grades.csv": report.as_csv(rows)}
    for name, text in pages.items():
        beside = out / f".{name}"
        beside.write_text(text, encoding="utf-8", errors="replace")
        beside.replace(out / name)


def shown(path):
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


if __name__ == "__main__":
    sys.exit(main(grade, sys.argv[1:]))
