"""`lab run [NOTEBOOK...|all] [-p name value]... [--grid FILE]`: run notebooks as batch jobs on real ranks.

Papermill executes a notebook in a new kernel. Results are written to runs/TIME-NAME/: the executed notebook, an HTML
page of it, and its figures; its table is printed. Several notebooks (`all`: the course) or a grid of parameters get one
such folder per job, with a common index.html and summary.csv. --out names the folder; with an existing one, only
missing and failed jobs run.
"""

import argparse
import csv
import sys
from pathlib import Path

import at_once
import batch
import grid
import index
import results
from batch import ROOT
from terminal import UserError, main, say, table


def options_from(arguments):
    parser = argparse.ArgumentParser(prog="lab run", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NOTEBOOK", help=f"names, paths, or all ({batch.MAIN_JOB})")
    parser.add_argument(
        "-p", dest="given", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), help="set a parameter"
    )
    parser.add_argument("--nproc", type=int, help=f"number of ranks: the parameter {batch.RANKS}")
    parser.add_argument("--grid", metavar="FILE", help="YAML, parameters with lists of values: runs their product")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="notebooks to run in parallel (1)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder for the results (runs/TIME-NAME)")
    parser.add_argument("--timeout", type=float, default=900, help="seconds that one notebook may take (900)")
    options = parser.parse_intermixed_args(arguments)
    if not options.timeout > 0:
        raise UserError(f"--timeout {options.timeout:g}: must be more than 0")
    if options.jobs < 1:
        raise UserError(f"--jobs {options.jobs}: must be at least 1")
    options.given = dict(options.given)
    if options.nproc is not None:
        options.given[batch.RANKS] = str(options.nproc)
    return options


def notebooks(names):
    """Return the paths of the named notebooks, each once."""
    groups = [batch.course() if name == "all" else [batch.find(name)] for name in names]
    return list(dict.fromkeys(path for paths in groups for path in paths))


def run_one(job, timeout):
    """Run a single notebook in its own folder, and print its table."""
    outcome = batch.execute(job.path, batch.new_folder(job.path.stem), job.values, timeout=timeout)
    report(outcome)
    if outcome.interrupted:
        raise KeyboardInterrupt
    return 1 if outcome.error else 0


def report(outcome):
    """Print the notebook's table and sentences, then the paths of what it leaves; its page is last."""
    executed = outcome.folder / f"{outcome.name}.ipynb"
    if outcome.error:
        say(f"{outcome.name} failed after {outcome.seconds:.0f} s: {outcome.error}")
    elif executed.exists():
        for text in batch.tables(executed):
            say(f"\n{text}")
    say()
    tables = sorted(outcome.folder.glob("figures/*.csv"))
    if outcome.figures:
        say(f"  {len(outcome.figures)} pictures in {outcome.figures[0].parent.relative_to(ROOT)}")
    for path in [*tables, executed, executed.with_suffix(".html")]:
        if path.exists():
            say(f"  {path.relative_to(ROOT)}")


def run_jobs(jobs, folder, limit, timeout):
    """Run all unfinished jobs of the folder; write index.html and summary.csv, and print the table of all jobs."""
    with results.claim(folder):
        records = {job.name: record for job in jobs if (record := results.finished(folder, job))}
        if records:
            say(f"{len(records)} of {len(jobs)} jobs are finished in {shown(folder)}")
        try:
            waiting = [job for job in jobs if job.name not in records]
            if waiting:
                at_once.run(waiting, folder, limit, timeout, records)
        finally:
            sum_up(jobs, folder, records)
    return 1 if any(record["error"] for record in records.values()) else 0


def sum_up(jobs, folder, records):
    names = grid.varying(jobs)
    header = ("notebook", *names, "result", "seconds", "first failing line")
    rows = [(job.path.stem, *(job.values.get(name, "") for name in names), *result(job, records)) for job in jobs]
    with (folder / "summary.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    (folder / "index.html").write_text(index.page(jobs, records), encoding="utf-8")
    say(f"\n{table([(*row[:-1], row[-1][:100]) for row in rows], header=header)}")
    ok = sum(not record["error"] for record in records.values())
    seconds = sum(record["seconds"] for record in records.values())
    say(f"\n{index.beside(records)}".rstrip())
    if ok < len(jobs):
        say(f"To run the remaining jobs, use the same command with --out {shown(folder)}.")
    say(f"{ok} of {len(jobs)} jobs ok, {seconds:.0f} s; {shown(folder / 'index.html')}")


def result(job, records):
    if job.name not in records:
        return "not run", "", ""
    record = records[job.name]
    return "failed" if record["error"] else "ok", f"{record['seconds']:.1f}", record["error"]


def shown(path):
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def run(arguments):
    options = options_from(arguments)
    names = options.names or [batch.MAIN_JOB]
    if not options.names:
        options.given = batch.MAIN_VALUES | options.given
    paths = notebooks(names)
    if not paths:
        raise UserError("there is no notebook in notebooks/")
    jobs = grid.plan(paths, options.given, grid.read(options.grid) if options.grid else {})
    if len(names) == 1 and names != ["all"] and not options.grid and not options.out:
        return run_one(jobs[0], options.timeout)
    folder = options.out.resolve() if options.out else batch.new_folder("all" if "all" in names else paths[0].stem)
    return run_jobs(jobs, folder, options.jobs, options.timeout)


if __name__ == "__main__":
    sys.exit(main(run, sys.argv[1:]))
