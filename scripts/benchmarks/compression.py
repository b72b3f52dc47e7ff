"""Compression: our hooks against PyTorch's on PyTorch's DDP, one bucket, and the sampled selection against torch.topk.

PyTorch has hooks only for PowerSGD and fp16, so only these are compared. On an unshaped loopback compression saves no
time, and no such claim is made: both sides compress. No hook can be faster than a step without communication; that
lower bound has its own row.
"""

import copy
import random
import time

import torch

from benchmarks.data_parallel import share, training_step
from benchmarks.protocol import Comparison, exact_row
from labkit import models
from labkit.measure.interleaved_timing import columns, time_variants
from labkit.run import launch

ELEMENTS = 10_000_000
RATIO = 0.01
RANK = 4
ONE_BUCKET_MB = 1000  # PyTorch's PowerSGD has a data race with several buckets


def times(context, model, size, repetitions):
    """Measure on every rank."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    from labkit.compression import Cast, PowerSGD

    torch.manual_seed(0)
    module = models.build(model, size).to(context.device)
    batch = share(context, model)

    def step(state, hook):
        wrapped = DistributedDataParallel(
            copy.deepcopy(module), gradient_as_bucket_view=True, bucket_cap_mb=ONE_BUCKET_MB
        )
        wrapped.register_comm_hook(state, hook)
        return training_step(wrapped, models.loss(model), *batch)

    def theirs():
        return powerSGD_hook.PowerSGDState(None, RANK, start_powerSGD_iter=2)

    variants = {
        "power ours": step(None, PowerSGD(RANK).hook),
        "power torch": step(theirs(), powerSGD_hook.powerSGD_hook),
        "fp16 ours": step(None, Cast(torch.float16).hook),
        "fp16 torch": step(None, default_hooks.fp16_compress_hook),
        "fp16 torch again": step(None, default_hooks.fp16_compress_hook),
        "floor": training_step(copy.deepcopy(module), models.loss(model), *batch),
    }
    time_variants(context, variants, repetitions=repetitions)


def selection(repetitions):
    """Time both selections in interleaved rounds (ms), and count what the sampled one selected."""
    from labkit.compression.select import top_indices

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gradient = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(0)) ** 3
    k, found, order = int(RATIO * ELEMENTS), [], random.Random(0)
    variants = {
        "sampled": lambda: found.append(len(top_indices(gradient, k))),
        "topk": lambda: torch.topk(gradient.abs(), k, sorted=False),
    }
    values = {name: [] for name in variants}
    for number in range(repetitions + 1):
        for name in order.sample(list(variants), len(variants)):
            started = time.perf_counter()
            variants[name]()
            if number:
                values[name].append(1000 * (time.perf_counter() - started))
    torch.set_num_threads(threads)
    return values, k, found


def run(repetitions):
    """Yield the rows and the raw milliseconds."""
    values, k, found = selection(repetitions)
    rows = [
        Comparison("sampled threshold / torch.topk", "sampled", "topk", at_most=1 / 3).row(
            "top 1 % of 10 M", 1, values
        ),
        exact_row("top 1 % of 10 M", "found", 1, min(found), k, "elements"),
    ]
    yield rows, values
    comparisons = [
        Comparison("PowerSGD: ours / powerSGD_hook", "power ours", "power torch", at_most=0.70),
        Comparison("fp16: ours / fp16_compress_hook", "fp16 ours", "fp16 torch", at_most=0.97),
        Comparison("no communication / powerSGD_hook", "floor", "power torch"),
        Comparison("no communication / fp16_compress_hook", "floor", "fp16 torch"),
        Comparison("A/A: fp16_compress_hook / itself", "fp16 torch again", "fp16 torch"),
    ]
    for model, size in (("mlp", "medium"), ("gpt", "medium")):
        measured = launch("benchmarks.compression:times", nproc=2, model=model, size=size, repetitions=repetitions)
        values = columns(measured.records)
        yield [comparison.row(f"hooks, {model} {size}", 2, values) for comparison in comparisons], values
