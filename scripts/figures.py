"""`lab figures [NAME...] [--stale [--list]]`: run the course and the dashboard's sweep, and store what they measure.

A notebook saves its pictures through labkit.show.plots.save, which writes NAME.svg and NAME.json (the data, host,
versions, commit and parameters). After a run without error these go to figures/, the outputs into the notebook, and its
seconds into figures/course.json, which fills README's table of the course and its pictures. README's table of labkit
has the first docstring lines of its files. Notebooks and figures carry a fingerprint of the code that ran.

Results of older code are stale. --stale renews only those, one after the other: notebooks, and the sweep that ships
with the dashboard. After Ctrl-C, the same command continues with what is still stale. If only the text of a displayed
function has changed, that text is stored without a run.
"""

import argparse
import ast
import html
import json
import re
import sys

import batch
from batch import ROOT
from stored import COMMAND, GRIDS, Stored, saved_figures
from terminal import UserError, main, say, table

from labkit.measure import machine

FIGURES = ROOT / "figures"
README = ROOT / "README.md"
COURSE = FIGURES / "course.json"
SWEEP = ROOT / "runs" / "sweep-that-ships"  # the new sweep, until it is complete
SWEEP_SECONDS = 360.0
MARKS = ("<!-- the course, written by ./scripts/lab figures -->\n", "<!-- end of the course -->")
LARGE_MARKS = ("<!-- pictures, written by ./scripts/lab figures -->\n", "<!-- end of pictures -->")
# notebooks whose main picture README shows; the site has a page of all
LARGE = ("02_data_parallel", "10_memory", "21_compression", "30_checkpoint_and_resume", "42_pipeline", "44_mesh")
LARGE += ("50_thousand_gpus", "51_planner")
TREE_MARKS = ("<!-- labkit, written by ./scripts/lab figures -->\n", "<!-- end of labkit -->")
ROOMS = ("models", "run", "measure", "show", "scale", "cluster")  # folders without algorithms


def question(notebook):
    """Return the notebook's question: the first bold question of its opening, else its title."""
    opening = notebook.cells[0].source
    bold = re.search(r"\*\*([^*]+\?)\*\*", opening.replace("\n", " "))
    title = re.sub(r"^#\s*(\d+\s*·\s*)?", "", opening.splitlines()[0])
    return bold.group(1) if bold else title


def picture(figure):
    """Return the HTML of a saved figure in README, with its alt text."""
    words = html.escape(json.loads((FIGURES / f"{figure}.json").read_text())["alt"])
    return f'<img src="figures/{figure}.svg" alt="{words}" width="800">'


def gallery(course):
    """Return README's large pictures, each with its notebook and question. course: {name: facts of course.json}."""
    lines = [""]
    for name in (name for name in LARGE if name in course):
        facts = course[name]
        lines += [f"**[{name}](notebooks/{name}.ipynb)**: {facts['question']}", ""]
        lines += [picture(facts["figures"][0]), ""]
    return "\n".join([*lines, ""])


def course_table(course):
    """Return README's table: notebook, question, time. course: {name: facts of course.json}."""
    lines = ["| notebook | question | time |", "| :-- | :-- | --: |"]
    for name, facts in sorted(course.items()):
        link = f"[{name}](notebooks/{name}.ipynb)"
        lines.append(f"| {link} | {facts['question']} | {facts['seconds']:.0f} s |")
    hosts = sorted({facts["host"] for facts in course.values()})
    return "\n".join(
        [*lines, "", f"Times of a complete run with the default parameters, measured on {'; '.join(hosts)}.", ""]
    )


def first_line(path):
    """Return the first docstring line of a file or folder."""
    source = path / "__init__.py" if path.is_dir() else path
    return ast.get_docstring(ast.parse(source.read_text())).splitlines()[0]


def tree():
    """Return README's table of labkit: ideas and its files, then a line per file or folder, the rooms last."""
    labkit = ROOT / "labkit"
    ideas = labkit / "ideas"
    folders = {path.parent for path in labkit.glob("*/__init__.py")}
    entries = {*folders, *labkit.glob("[a-z]*.py"), *ideas.glob("[a-z]*.py")}
    lines = ["| file or folder | what it is |", "| :-- | :-- |"]
    for path in sorted(entries, key=lambda path: (ideas not in (path, path.parent), path.name in ROOMS, path)):
        name = f"{path.relative_to(labkit)}{'/' * path.is_dir()}"
        lines.append(f"| [{name}]({path.relative_to(ROOT)}) | {first_line(path)} |")
    return "\n".join([*lines, ""])


def write_between(marks, text):
    """Replace the text between two marks of README."""
    before, rest = README.read_text().split(marks[0])
    README.write_text(before + marks[0] + text + marks[1] + rest.split(marks[1])[1])


def write_course(measured):
    """Add results to figures/course.json, remove missing notebooks, and write README's table."""
    kept = json.loads(COURSE.read_text()) if COURSE.exists() else {}
    names = {path.stem for path in batch.course()}
    course = {name: facts for name, facts in sorted({**kept, **measured}.items()) if name in names}
    FIGURES.mkdir(exist_ok=True)
    COURSE.write_text(json.dumps(course, indent=1) + "\n")
    write_between(MARKS, course_table(course))
    write_between(LARGE_MARKS, gallery(course))


def renew(stored, path, folder, timeout, values=None):
    """Run a notebook and store its results; return (error or "", seconds). A failed run changes nothing."""
    code = stored.of_notebook(path)  # before the run: a change of the code meanwhile makes the outputs stale
    pictures = folder / "saved"
    outcome = batch.execute(path, folder, values or {}, timeout=timeout, figures=pictures)
    if outcome.interrupted:
        raise KeyboardInterrupt
    if not outcome.error:
        stored.keep(path, folder / path.name, pictures, code)
        notebook = batch.read(path)
        facts = {"question": question(notebook), "seconds": round(outcome.seconds, 1)}
        facts |= {"figures": saved_figures(notebook), "host": machine.host_class()}
        write_course({path.stem: facts})
    return outcome.error, outcome.seconds


def renew_sweep(stored, folder, timeout):
    """Measure the dashboard's sweep, which ships. An interrupted sweep continues."""
    SWEEP.mkdir(parents=True, exist_ok=True)
    stored.forget(SWEEP)
    path = batch.find(batch.MAIN_JOB)
    values = {**batch.check_parameters(path, batch.MAIN_VALUES), "folder": str(SWEEP), "grid": " ".join(GRIDS)}
    outcome = batch.execute(path, folder, values, timeout=timeout)
    if outcome.interrupted:
        raise KeyboardInterrupt
    if not outcome.error:
        stored.keep_sweep(SWEEP)
    return outcome.error, outcome.seconds


def in_order(jobs):
    """Return the jobs, each once, the sweep before the dashboard that shows it."""
    shown = {batch.MAIN_JOB} if "sweep" in jobs else set()
    return sorted(jobs | shown, key=lambda job: (job == batch.MAIN_JOB, job))


def expected(jobs):
    """Return the seconds of each job's last run; unknown jobs get the mean of the others."""
    course = json.loads(COURSE.read_text()) if COURSE.exists() else {}
    known = {name: facts["seconds"] for name, facts in course.items()} | {"sweep": SWEEP_SECONDS}
    usual = sum(known.values()) / len(known)
    return {job: known.get(job, usual) for job in jobs}


def run_all(stored, jobs, timeout):
    """Run the jobs one after the other; return rows (job, seconds, result), and the number of failures."""
    if batch.MAIN_JOB in jobs and list((ROOT / "runs" / batch.MAIN_JOB).glob("*.csv")):
        raise UserError("runs/dashboard has a sweep of yours, which the dashboard would show: move it away first")
    folder = batch.new_folder("figures")
    seconds = expected(jobs)
    rows = []
    failed = 0
    for number, job in enumerate(jobs):
        left = sum(seconds[other] for other in jobs[number:])
        say(f"{number + 1} of {len(jobs)}  {job}, about {seconds[job]:.0f} s; total left: {left / 60:.0f} min")
        if job == "sweep":
            error, took = renew_sweep(stored, folder / job, timeout)
        else:
            error, took = renew(stored, batch.find(job), folder / job, timeout)
        saved = [] if job == "sweep" else saved_figures(batch.read(batch.find(job)))
        rows.append((job, f"{took:.1f}", error or ", ".join(saved) or "saves no figure"))
        failed += bool(error)
    return rows, failed


def report(records):
    """Return a report of the stale records and the reasons."""
    lines = [table([(record.name, record.why()) for record in records], header=("stale", "why"))]
    lines += ["", "Stale: stored results of older code. To run it again and store the results:"]
    jobs = in_order({record.job for record in records})
    return "\n".join([*lines, f"  {COMMAND}   ({len(jobs)} runs, about {sum(expected(jobs).values()) / 60:.0f} min)"])


def figures(arguments):
    parser = argparse.ArgumentParser(prog="lab figures", description=__doc__)
    parser.add_argument("names", nargs="*", help="notebooks (all)")
    parser.add_argument("--stale", action="store_true", help="run only notebooks with results of older code")
    parser.add_argument("--list", action="store_true", help="with --stale: list them, and run nothing")
    parser.add_argument("--timeout", type=float, default=900, help="seconds that one notebook may take (900)")
    options = parser.parse_args(arguments)
    if options.list and not options.stale:
        parser.error("--list needs --stale")
    if (ROOT / "labkit").exists() and machine.ROOT != ROOT:  # else an installed one is meant
        raise UserError(f"labkit is imported from {machine.ROOT}, not from {ROOT}: unset PYTHONPATH")
    paths = [batch.find(name) for name in options.names] or batch.course()
    if not paths:
        raise UserError("there is no notebook in notebooks/")
    jobs = {path.stem for path in paths}
    if batch.MAIN_JOB in jobs and (options.stale or not options.names):
        jobs.add("sweep")
    stored = Stored()
    if not options.list:
        write_between(TREE_MARKS, tree())
    if options.stale:
        if not options.list:
            for path in paths:
                stored.renew_source(path)
        old = [record for record in stored.stale() if record.job in jobs]
        say(report(old) if old else "nothing is stale: all stored results were made by today's code")
        for words in [] if options.names else stored.about_gpu():
            say(words)
        if options.list or not old:
            return 0
        jobs = {record.job for record in old}
    rows, failed = run_all(stored, in_order(jobs), options.timeout)
    say(table(rows, header=("run", "seconds", "figures written")))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(figures, sys.argv[1:]))
