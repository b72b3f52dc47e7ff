"""`lab run [NAME|all] [-p name value]... [--nproc N]`: notebooks as batch jobs on real ranks.

A notebook is executed with papermill in a fresh kernel. Under runs/TIME-NAME/ it leaves the executed notebook, the
same as an HTML page, and its figures; its table is printed here. `all` runs the whole course and sums it up.
"""

import argparse
import signal
import sys

import batch
from batch import ROOT
from terminal import UserError, main, say, table


def options_from(arguments):
    parser = argparse.ArgumentParser(prog="lab run", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("name", nargs="?", default=batch.MAIN_JOB, help="a notebook, a path, or all (04_compare)")
    parser.add_argument(
        "-p", dest="given", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), help="set a parameter"
    )
    parser.add_argument("--nproc", type=int, help=f"how many ranks: the parameter {batch.RANKS}")
    parser.add_argument("--timeout", type=float, default=900, help="seconds that one notebook may take (900)")
    options = parser.parse_args(arguments)
    if not options.timeout > 0:
        raise UserError(f"--timeout {options.timeout:g}: it must be more than 0")
    options.given = dict(options.given)
    if options.nproc is not None:
        options.given[batch.RANKS] = str(options.nproc)
    return options


def jobs(options):
    """[(path, checked values)]. With `all`, a notebook gets the parameters that it declares; one must declare each."""
    if options.name != "all":
        path = batch.find(options.name)
        return [(path, batch.check_parameters(path, options.given))]
    known = {path: batch.defaults(batch.read(path)) for path in batch.course()}
    for name in options.given:
        if not any(name in names for names in known.values()):
            there = ", ".join(sorted(set().union(*known.values()))) or "none"
            raise UserError(f"no notebook has a parameter {name!r}; there are: {there}")
    return [
        (path, batch.check_parameters(path, {k: v for k, v in options.given.items() if k in names}))
        for path, names in known.items()
    ]


def report(outcome):
    """The notebook's table and where its pages are."""
    executed = outcome.folder / f"{outcome.name}.ipynb"
    if outcome.error:
        say(f"{outcome.name} failed after {outcome.seconds:.0f} s: {outcome.error}")
    elif executed.exists():
        for text in batch.tables(executed):
            say(f"\n{text}")
    say()
    for path in [executed, executed.with_suffix(".html"), *outcome.figures]:
        if path.exists():
            say(f"  {path.relative_to(ROOT)}")


def summary(outcomes):
    rows = [(o.name, "failed" if o.error else "ok", f"{o.seconds:.1f}", o.error[:100]) for o in outcomes]
    failed = sum(bool(outcome.error) for outcome in outcomes)
    say(f"\n{table(rows, header=('notebook', 'result', 'seconds', 'first failing line'))}")
    say(f"\n{len(outcomes) - failed} of {len(outcomes)} notebooks ok, {sum(o.seconds for o in outcomes):.0f} s")


def run(arguments):
    options = options_from(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a batch system's stop ends the ranks, too
    planned = jobs(options)
    if not planned:
        raise UserError("there is no notebook in notebooks/")
    label = "all" if options.name == "all" else planned[0][0].stem
    folder = batch.new_folder(label)
    outcomes = []
    for path, values in planned:
        place = folder / path.stem if options.name == "all" else folder
        outcome = batch.execute(path, place, values, timeout=options.timeout)
        outcomes.append(outcome)
        if options.name != "all":
            report(outcome)
        else:
            say(f"{outcome.name}  {outcome.error or 'ok'}  {outcome.seconds:.1f} s")
        if outcome.interrupted:
            break
    if options.name == "all":
        summary(outcomes)
    if outcomes[-1].interrupted:
        raise KeyboardInterrupt
    return 1 if any(outcome.error for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main(run, sys.argv[1:]))
