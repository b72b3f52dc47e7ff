"""Fit the constants, and report the prediction error on held-out rows.

    python -m labkit.scale.fit           the errors, and those of the null models
    python -m labkit.scale.fit --scores  the errors that a user cares for: scores.py
    python -m labkit.scale.fit --write   fit again; writes constants.csv and scores.json

published_rows.py says which rows are in the fit, kept out of it, and left out.

The fit minimizes the mean of d^2 / (1 + d^2), d = log(predicted / published) / width, with width
0.3 and then 0.1, so outliers (slow allocators, retries) have little weight. A constant that no row
determines keeps its first guess. Constants change one at a time by a step that shrinks, and then
together: Hooke and Jeeves, "Direct Search" Solution, JACM 1961.
Null models: for time a constant MFU; for memory 16 to 18 bytes a parameter and 34 s b h per layer
(Korthikanti et al., MLSys 2023).
"""

import argparse
import json
from dataclasses import replace
from math import log
from pathlib import Path
from statistics import mean, median

from labkit.scale import constants
from labkit.scale.memory_model import GIB
from labkit.scale.published_rows import (
    GROUPS,
    errors,
    gib,
    kept_out,
    leave_out,
    published,
    runs,
    speed,
    with_figure,
)
from labkit.scale.scores import show_scores

SCORES = Path(__file__).with_name("published") / "scores.json"
SET_BY_HAND = ("fits", "given")  # columns of constants that the fit does not change
WIDTHS = (0.3, 0.1)
DOUBT = 2e-2


def loss(rows, column, predict, c, width=WIDTHS[-1]):
    """Return the loss of the rows, from 0 to 1; a row that is off by the width counts a half."""
    far = [log(predict(row["job"], c) / float(row[column])) / width for row in rows]
    return mean(d * d / (1 + d * d) for d in far)


def search(rows, column, predict, start, names):
    """Return `start` with the constants `names` changed so that the loss is least: a dict."""
    if not rows:
        return start

    def far(c, width):
        doubt = sum(log(c[name] / start[name]) ** 2 for name in names)
        return loss(rows, column, predict, c, width) + DOUBT * doubt

    best = dict(start)
    for width in WIDTHS:
        least, step = far(best, width), 1.3
        while step > 1.01:
            before, since = least, best
            for name in names:
                for factor in (step, 1 / step):
                    tried = best | {name: best[name] * factor}
                    found = far(tried, width)
                    if found < least:
                        best, least = tried, found
            onward = {name: best[name] / since[name] for name in names}
            while (found := far(tried := along(best, onward), width)) < least:
                best, least = tried, found
            if before - least < 1e-5:
                step = step**0.5
    return best


def along(c, factors):
    """Repeat the last change of all constants together."""
    return c | {name: c[name] * factor for name, factor in factors.items()}


def null_speed(job, c):
    """Return tokens per second for a constant MFU."""
    flops = 3 * job.shape.forward_flops(job.context)
    return c["mfu"] * 1e12 * job.gpu.tflops["bf16"] / flops


def null_gib(job, c):
    """Return GiB for 18 bytes a parameter, sharded by ZeRO, and 34 s b h a layer."""
    held = {0: 18.0, 1: 6 + 12 / job.dp, 2: 4 + 14 / job.dp, 3: 18 / job.dp}[job.zero]
    layers = 34 * job.tokens * job.shape.hidden * job.shape.layers / job.tp
    return (held * job.shape.parameters / job.tp / job.pp + layers) / GIB


def null_fits(job, c):
    return null_gib(job, c) <= job.gpu.memory_gib


def out_of_memory(rows, fits, c):
    """Return the share of crashed rows predicted as crashes, and of running rows predicted so."""
    crashed = [fits(row["job"], c) for row in rows if row["status"] == "crashed_or_oom"]
    ran = [fits(row["job"], c) for row in rows if row["status"].startswith("ok")]
    return (crashed.count(False) / len(crashed) if crashed else None), ran.count(False) / len(ran)


def scores(rows, c):
    """Return median errors by group of rows, ours and the null models': a dict for JSON."""
    fitted = [row for row in with_figure(rows, "tok_s_gpu") if not kept_out(row, "tok_s_gpu")]
    mfu = median(float(r["tok_s_gpu"]) / null_speed(r["job"], {"mfu": 1.0}) for r in fitted)
    found = {"tok_s_gpu": {}, "mem_gib": {}, "fits": {}}
    for column, ours, null in (("tok_s_gpu", speed, null_speed), ("mem_gib", gib, null_gib)):
        for name, why in GROUPS.items():
            group = [row for row in with_figure(rows, column) if kept_out(row, column) == why]
            if not group:
                continue
            for part in ("all", *sorted({row["source"] for row in group})):
                these = [row for row in group if part in ("all", row["source"])]
                error = median(errors(these, column, ours, c))
                other = median(errors(these, column, null, {"mfu": mfu}))
                line = {"rows": len(these), "error": round(error, 4), "null": round(other, 4)}
                found[column][f"{name}: {part}"] = line
    for name, why in GROUPS.items():
        group = [row for row in rows if row["status"] and kept_out(row, "mem_gib") == why]
        if not group:
            continue
        for by, fits in (("", runs), (", null", null_fits)):
            share, alarms = out_of_memory(group, fits, c)
            if share is not None:
                line = {"rows": len(group), "found": round(share, 4), "false": round(alarms, 4)}
                found["fits"][f"{name}{by}"] = line
    return found


def errors_kept_out():
    """Return the stored {(quantity, reason for holding out): median error}."""
    found = json.loads(SCORES.read_text())
    return {
        (what, why): found[column][f"kept out by {why}: all"]["error"]
        for what, column in (("time", "tok_s_gpu"), ("memory", "mem_gib"))
        for why in ("size", "source")
    }


def fit(rows, start):
    """Fit the constants, from their guesses, to the rows in the fit; return {name: value}."""
    c = {k.name: k.value if k.column in SET_BY_HAND else k.guess for k in start}
    for column, predict in (("tok_s_gpu", speed), ("mem_gib", gib)):
        names = [k.name for k in start if k.column == column]
        these = [row for row in with_figure(rows, column) if not kept_out(row, column)]
        c = search(these, column, predict, c, names)
    return c


def refit(rows):
    """Fit again; return the constants with their spread, and the errors on the rows left out."""
    start = constants.read()
    best = fit(rows, start)
    spread, found = {name: [value] for name, value in best.items()}, {}
    for name, of_it in leave_out(rows):
        c = fit([row for row in rows if not of_it(row)], start)
        for constant in spread:
            spread[constant].append(c[constant])
        left = [row for row in rows if of_it(row)]
        found[name] = {
            column: round(median(errors(with_figure(left, column), column, predict, c)), 4)
            for column, predict in (("tok_s_gpu", speed), ("mem_gib", gib))
            if with_figure(left, column)
        }
    table = [
        k
        if k.column in SET_BY_HAND
        else replace(k, value=best[k.name], low=min(spread[k.name]), high=max(spread[k.name]))
        for k in start
    ]
    return table, found


def show(found):
    """Print the scores, one line for each group of rows."""
    for column, lines in found.items():
        first, second = list(next(iter(lines.values())))[1:]
        print(f"{column:48}{'rows':>8}{first:>10}{second:>10}")
        for name, (rows, one, two) in ((n, line.values()) for n, line in lines.items()):
            print(f"  {name:46}{rows:>8}{one:>10.1%}{two:>10.1%}")


def main():
    parser = argparse.ArgumentParser(
        prog="python -m labkit.scale.fit", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--write", action="store_true", help="fit again and store the result")
    parser.add_argument("--scores", action="store_true", help="print the scores of scores.py")
    asked, rows = parser.parse_args(), published()
    if asked.scores:
        return show_scores(constants.values())
    if asked.write:
        table, left_out = refit(rows)
        constants.write(table)
        found = scores(rows, constants.values())
        SCORES.write_text(json.dumps(found | {"left out of a fit": left_out}, indent=1) + "\n")
    show(scores(rows, constants.values()))


if __name__ == "__main__":
    main()
