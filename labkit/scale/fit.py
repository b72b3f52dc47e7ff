"""The fitted constants, and the error of what they predict on rows that no fit has seen.

    python -m labkit.scale.fit           both errors, beside the null models'
    python -m labkit.scale.fit --write   fit anew; constants.py and scores.json are written

    published rows ---- in the fit:  nanotron and llm-foundry up to 13b on 8 and 16 GPUs,
                  \\                  Megatron on V100
                   +--- kept out:    by source (torchtitan, Megatron-LM's own of 2020, OneFlow,
                                     DeepSpeed) and by size (32 GPUs and more; 30b and 70b)

Least is the mean of |log(predicted / published)|, each cut at 0.4: rows that crawl for reasons no
formula has (allocators, retries) do not pull. One constant at a time is moved by a step that
shrinks: Hooke and Jeeves, "Direct Search" Solution, JACM 1961. The null models: a constant MFU, and
16 to 18 bytes a parameter and 34 s b h of Korthikanti et al., MLSys 2023.
"""

import argparse
import csv
import json
from math import log
from pathlib import Path
from statistics import mean, median

from labkit.scale import constants
from labkit.scale.cost import predict_step
from labkit.scale.job import job_of
from labkit.scale.memory import GIB, predict_memory

ROWS = Path(__file__).with_name("published") / "training_steps.csv"
SCORES = Path(__file__).with_name("published") / "scores.json"
OTHER_SOURCES = ("torchtitan", "Megatron-LM-2020", "DLPerf-GPT-OneFlow", "DLPerf-DeepSpeed")
CUT = 0.4


def published():
    """The published rows: a list of dicts of text, each with its "job"."""
    with ROWS.open(newline="", encoding="utf-8") as file:
        return [row | {"job": job_of(row)} for row in csv.DictReader(file)]


def kept_out(row):
    """Why a row is in no fit: "source", "size", or "" for one that is in the fit."""
    if row["source"].startswith(OTHER_SOURCES):
        return "source"
    large = int(row["n_gpus"]) > 16 and not row["source"].startswith("DLPerf")
    return "size" if large or row["model"] in ("30b", "70b") else ""


def speed(job, c):
    return predict_step(job, c).tokens_per_second


def gib(job, c):
    return predict_memory(job, c).total


def loss(rows, column, predict, c):
    return mean(min(CUT, abs(log(predict(row["job"], c) / float(row[column])))) for row in rows)


def search(rows, column, predict, start, names):
    """The constants `names` of `start` that make the loss of the rows least: a dict."""
    best = dict(start)
    least = loss(rows, column, predict, best)
    step = 1.3
    while step > 1.01:
        before = least
        for name in names:
            for factor in (step, 1 / step):
                tried = best | {name: best[name] * factor}
                found = loss(rows, column, predict, tried)
                if found < least:
                    best, least = tried, found
        if before - least < 1e-5:
            step = step**0.5
    return best


def values():
    """The committed constants: name to value."""
    return {n: k.value for n, k in (constants.TIME | constants.MEMORY).items()}


def errors(rows, column, predict, c):
    """|predicted / published - 1| of the rows that have the column."""
    return [abs(predict(r["job"], c) / float(r[column]) - 1) for r in rows if r[column]]


def null_speed(job, c):
    """A constant MFU."""
    flops = 3 * job.shape.forward_flops(job.context)
    return c["mfu"] * 1e12 * job.gpu.tflops["bf16"] / flops


def null_gib(job, c):
    """18 bytes a parameter (16 without an fp32 gradient), split by ZeRO, and 34 s b h a layer."""
    held = {0: 18.0, 1: 6 + 12 / job.dp, 2: 4 + 14 / job.dp, 3: 18 / job.dp}[job.zero]
    layers = 34 * job.tokens * job.shape.hidden * job.shape.layers / job.tp
    return (held * job.shape.parameters / job.tp / job.pp + layers) / GIB


def out_of_memory(rows, fits):
    """(share of the crashed rows that are found, share of those that ran called out of memory)."""
    crashed = [fits(row["job"]) for row in rows if row["status"] == "crashed_or_oom"]
    ran = [fits(row["job"]) for row in rows if row["status"].startswith("ok")]
    return (crashed.count(False) / len(crashed) if crashed else None), ran.count(False) / len(ran)


def scores(rows, c):
    """Median errors by what was kept out, ours and the null models': a dict for JSON."""
    groups = {"in the fit": "", "kept out by size": "size", "kept out by source": "source"}
    fitted = [row for row in rows if not kept_out(row) and row["tok_s_gpu"]]
    mfu = median(float(r["tok_s_gpu"]) / null_speed(r["job"], {"mfu": 1.0}) for r in fitted)
    found = {}
    for name, why in groups.items():
        group = [row for row in rows if kept_out(row) == why]
        sources = {row["source"].split("-20")[0] for row in group}
        for part in ("all", *sorted(sources)):
            these = [r for r in group if part == "all" or r["source"].startswith(part)]
            line = {"rows": len(these)}
            for column, ours, null in (
                ("tok_s_gpu", speed, null_speed),
                ("mem_gib", gib, null_gib),
            ):
                if any(row[column] for row in these):
                    line[column] = round(median(errors(these, column, ours, c)), 4)
                    other = median(errors(these, column, null, {"mfu": mfu}))
                    line[f"{column} null"] = round(other, 4)
            hits, alarms = out_of_memory(these, lambda job: predict_memory(job, c).fits)
            if hits is not None:
                line |= {"oom found": round(hits, 4), "false alarms": round(alarms, 4)}
            found[f"{name}: {part}"] = line
    return found


def fit(rows):
    """Constants fitted to those of the rows that are in the fit."""
    fitted = [row for row in rows if not kept_out(row)]
    c = search([r for r in fitted if r["tok_s_gpu"]], "tok_s_gpu", speed, values(), constants.TIME)
    held = [name for name in constants.MEMORY if name != "limit"]
    return search([r for r in fitted if r["mem_gib"]], "mem_gib", gib, c, held)


def show(found):
    columns = ("rows", "tok_s_gpu", "tok_s_gpu null", "mem_gib", "mem_gib null", "oom found", "false alarms")
    print(f"{'':44}" + "".join(f"{name:>15}" for name in columns))
    for name, line in found.items():
        cells = [line.get(column) for column in columns]
        text = ["" if v is None else str(v) if isinstance(v, int) else f"{v:.1%}" for v in cells]
        print(f"{name:44}" + "".join(f"{cell:>15}" for cell in text))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="fit anew and write the constants")
    rows = published()
    if parser.parse_args().write:
        c = fit(rows)
        print(json.dumps(c, indent=1))
        show(scores(rows, c))
    else:
        show(scores(rows, values()))


if __name__ == "__main__":
    main()
