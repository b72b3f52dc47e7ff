"""Benchmarks that one rank can run, on a GPU if there is one: attention, recomputation, mixed precision (`lab gpu`)."""

import torch

from benchmarks import amp, attention, recompute


def run(repetitions):
    """Yield the rows and the raw milliseconds of each run. Targets are for a CPU: a GPU's rows only name them."""
    for benchmark in (attention, recompute, amp):
        for rows, raw in benchmark.alone(repetitions):
            yield (list(map(on_a_gpu, rows)) if torch.cuda.is_available() else rows), raw


def on_a_gpu(row):
    """Return the row without a verdict."""
    return row | {"target": f"{row['target']} on a CPU" if row["target"] else "", "verdict": ""}
