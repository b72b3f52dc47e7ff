"""`lab figures [NAME...]`: run the course and redraw figures/ from what it measured on this machine.

A notebook saves its pictures through labkit.show.plots.save, which writes NAME.svg and NAME.json (the data, host,
versions, commit and parameters) into the folder that LABKIT_FIGURES names. Here that is figures/ itself.
"""

import argparse
import os
import sys
import time

import batch
from batch import ROOT
from terminal import UserError, main, say, table

FIGURES = ROOT / "figures"


def figures(arguments):
    parser = argparse.ArgumentParser(prog="lab figures", description=__doc__)
    parser.add_argument("names", nargs="*", help="notebooks (all)")
    parser.add_argument("--timeout", type=float, default=900, help="seconds that one notebook may take (900)")
    options = parser.parse_args(arguments)
    paths = [batch.find(name) for name in options.names] or batch.course()
    if not paths:
        raise UserError("there is no notebook in notebooks/")
    folder = ROOT / "runs" / f"{time.strftime('%Y%m%d-%H%M%S')}-figures"
    os.environ["LABKIT_FIGURES"] = str(FIGURES)
    rows, failed = [], 0
    for path in paths:
        started = time.time()
        outcome = batch.execute(path, folder / path.stem, {}, timeout=options.timeout)
        if outcome.interrupted:
            raise KeyboardInterrupt
        written = sorted(p.name for p in FIGURES.glob("*.svg") if p.stat().st_mtime >= started)
        failed += bool(outcome.error)
        rows.append((path.stem, f"{outcome.seconds:.1f}", outcome.error or ", ".join(written) or "saves no figure"))
    say(table(rows, header=("notebook", "seconds", "figures written")))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(figures, sys.argv[1:]))
