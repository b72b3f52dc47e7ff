"""From the cell to the first finished all-reduce on two ranks: our warm launch against a bare torchrun."""

import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.protocol import Comparison
from labkit.run import launch

BARE = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
os.write(1, f"{time.time()}\\n".encode())
dist.destroy_process_group()
"""


def first_all_reduce(context):
    """Measure on every rank."""
    dist.all_reduce(torch.ones(1))
    context.record(time=time.time())


def warm_seconds(script):
    started = time.time()
    run = launch("benchmarks.launching:first_all_reduce", nproc=2, device="cpu", quiet=True)
    return run.records["time"].max() - started


def bare_seconds(script):
    started = time.time()
    with tempfile.TemporaryDirectory() as private:
        meeting = ["--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file", "--rdzv-endpoint", f"{private}/meeting"]
        command = [sys.executable, "-m", "torch.distributed.run", *meeting, "--nproc-per-node", "2", script]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return max(map(float, printed.split())) - started


def run(repetitions):
    """Yield the rows and the raw seconds. The first warm launch starts the agent and is not counted."""
    variants = {"warm": warm_seconds, "torchrun": bare_seconds, "torchrun again": bare_seconds}
    values = {name: [] for name in variants}
    order = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "bare.py")
        script.write_text(BARE)
        warm_seconds(script)
        for _ in range(repetitions):
            for name in order.sample(list(variants), len(variants)):
                values[name].append(variants[name](script))
    comparisons = [
        Comparison("warm / torchrun", "warm", "torchrun", at_most=0.10),
        Comparison("A/A: torchrun / torchrun", "torchrun again", "torchrun"),
    ]
    yield [comparison.row("launch", 2, values) for comparison in comparisons], values
