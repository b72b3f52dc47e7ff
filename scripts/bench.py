"""`lab bench [NAME...] [--quick]`: compare labkit with PyTorch, in pairs, as ratios with a 95 % interval.

The protocol is in benchmarks/protocol.py. Prints a table, and writes the rows, all single times, the machine card and
versions to runs/bench-TIME.json. `one_rank` has the rows of one rank, on a GPU if there is one. Exits with 1 if a
target is missed.
"""

import argparse
import importlib
import json
import sys
import time
from pathlib import Path

from benchmarks.protocol import REPETITIONS
from terminal import main, say, table

from labkit.measure import machine
from labkit.run import LaunchError

ROOT = Path(__file__).resolve().parent.parent
NAMES = (
    *("exact", "launching", "all_reduce", "data_parallel", "overlap"),
    *("zero", "fsdp", "amp", "memory", "recompute", "compression", "network", "slow_link", "survival"),
    *("attention", "tensor_parallel", "pipeline", "experts", "simulated"),
)
ONE_RANK = "one_rank"  # has only rows that are in other benchmarks, too
QUICK = 5


def printed(row):
    ratio = f"{row['ratio']:.3f}"
    claim = row["target"] or "-", row["verdict"] or "-"
    return row["benchmark"], row["row"], row["ranks"], ratio, row["interval"], *claim


def bench(arguments):
    parser = argparse.ArgumentParser(
        prog="lab bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(NAMES)} (all)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file for the results (runs/bench-TIME.json)")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} repetitions: a first impression, no verdict")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in (*NAMES, ONE_RANK)]
    if unknown:
        parser.error(f"unknown benchmark {unknown[0]!r}; choose from {', '.join(NAMES)}")
    repetitions = QUICK if options.quick else REPETITIONS
    started = time.strftime("%Y%m%d-%H%M%S")
    say(machine.describe())
    rows = []
    raw = []
    broken = []
    path = (options.out or ROOT / "runs" / f"bench-{started}.json").resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {"time": started, "commit": machine.commit(), "host": machine.card(), "repetitions": repetitions}
    try:
        for name in options.names or NAMES:
            say(f"\n{name}: {repetitions} repetitions")
            try:
                for new, values in importlib.import_module(f"benchmarks.{name}").run(repetitions):
                    rows += new
                    raw.append({"benchmark": name, "values": values})
                    for row in new:
                        say("  " + "  ".join(str(cell) for cell in printed(row)))
            except LaunchError as error:  # the results of the other benchmarks remain
                broken.append(name)
                say(f"{name} failed: {error}")
    finally:  # also what was measured before it was interrupted
        path.write_text(json.dumps({**facts, "rows": rows, "raw": raw}, indent=1))
    header = ("benchmark", "row", "ranks", "ratio", "95 % interval, if not named", "target", "verdict")
    say(f"\n{table(map(printed, rows), header=header)}\n")
    missed = sum(row["verdict"] == "missed" for row in rows)
    failed = f"; failed: {', '.join(broken)}" if broken else ""
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    say(f"{shown}: {missed} of {len(rows)} rows missed their target{failed}")
    return 1 if missed or broken else 0


if __name__ == "__main__":
    sys.exit(main(bench, sys.argv[1:]))
