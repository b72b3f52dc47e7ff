"""The published rows: which are in the fit, which are kept out of it, and which are left out.

    published/training_steps.csv  --->  in the fit       nanotron up to 32 GPUs, llm-foundry,
                                                         Megatron on V100; every second row of the
                                                         fused stacks and of 64 and 128 GPUs
                                  --->  kept out         by source, by size, every second row
                                  --->  left out         a cluster's own trouble, by one rule

The rule: a step is left out if another published step of the same model, batch, tp, pp and
recomputation, with no more data-parallel ranks, took less than 2/3 of its time, and still does
after it is lengthened by the ratio of the numbers of micro-batches. In no model of cost is a step
longer because its batch is divided over more ranks, or more than k times as long because it has
k times as many micro-batches. These are 158 rows of one cluster: pipelines that wait about half a
second for each hand-over, and most layouts on 512 GPUs.
"""

import csv
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

from labkit.scale.cost import predict_step
from labkit.scale.job_config import job_of
from labkit.scale.memory_model import predict_memory

ROWS = Path(__file__).with_name("published") / "training_steps.csv"
OTHER_SOURCES = ("torchtitan", "Megatron-LM-2020", "DLPerf-GPT-OneFlow", "DLPerf-DeepSpeed")
FUSED = ("NeMo-24.07", "flash-attention", "llm.c", "llmq")
GROUPS = {
    "in the fit": "",
    "kept out by size": "size",
    "kept out by source": "source",
    "kept out, every second": "half",
}
SLOWER = 1.5


@cache
def published():
    """Return the published rows: a tuple of dicts of text, each with its "job" and "trouble"."""
    with ROWS.open(newline="", encoding="utf-8") as file:
        rows = [row | {"job": job_of(row), "line": n} for n, row in enumerate(csv.DictReader(file))]
    mark_trouble(rows)
    return tuple(rows)


def mark_trouble(rows):
    """Set row["trouble"]: whether the rule of this module leaves the row out."""
    alike = defaultdict(list)
    for row in rows:
        job, row["trouble"] = row["job"], False
        if row["tok_s_gpu"]:
            sizes = job.context, row["global_batch"], job.tp, job.pp, job.cp
            settings = row["recompute"], row["precision"], row["compile"]
            alike[row["source"], row["model"], row["gpu"], *sizes, *settings].append(row)
    for group in alike.values():
        for row in group:
            row["trouble"] = any(much_faster(other, row) for other in group)


def much_faster(other, row):
    """Return whether `other` shows that a cluster's trouble slowed the row."""
    mine, its = row["job"], other["job"]
    more = max(1, its.micro_batch / mine.micro_batch)
    return its.dp <= mine.dp and step_seconds(row) > SLOWER * more * step_seconds(other)


def step_seconds(row):
    """Return the published seconds of a step."""
    return row["job"].step_tokens / row["job"].n_gpus / float(row["tok_s_gpu"])


def kept_out(row, column):
    """Return why a row is not in the fit of a column: a value of GROUPS, "" if it is in."""
    if row["source"].startswith(OTHER_SOURCES):
        return "source"
    if row["source"] in FUSED:
        return "half" if row["line"] % 2 else ""
    job = row["job"]
    if column == "mem_gib":
        return "size" if job.n_gpus > 16 else ""
    if job.shape.parameters > 4e9 or job.context >= 32768 or job.n_gpus > 128:
        return "size"
    return "half" if job.n_gpus > 32 and row["line"] % 2 else ""


def with_figure(rows, column):
    """Return the rows that have the column, without trouble where it is a speed."""
    return [row for row in rows if row[column] and not (column == "tok_s_gpu" and row["trouble"])]


def speed(job, c):
    return predict_step(job, c).tokens_per_second


def gib(job, c):
    return predict_memory(job, c).shown


def runs(job, c):
    return predict_memory(job, c).fits


def errors(rows, column, predict, c):
    """Return |predicted / published - 1| of the rows that have the column."""
    return [abs(predict(row["job"], c) / float(row[column]) - 1) for row in rows if row[column]]


def leave_out(rows):
    """Yield (name, function row -> bool) for each large source, model and number of GPUs."""
    for column in ("source", "model", "n_gpus"):
        for value, count in Counter(row[column] for row in rows).items():
            if count > len(rows) / 15:
                yield f"{column} {value}", lambda row, c=column, v=value: row[c] == v
