"""A training step of sharded parameters: ours and PyTorch's fully_shard on the same units, and the memory of both.

fully_shard has its default settings, with gloo's reduce-scatter. All variants start from the same weights and use the
same batch. Memory is the peak of one step, including shards, gradients and optimizer states.
"""

import copy

import torch

from benchmarks.data_parallel import share, training_step
from benchmarks.protocol import Comparison
from labkit import models
from labkit.measure.interleaved_timing import columns, time_variants
from labkit.run import launch

AT_MOST = {"mlp": 0.70, "gpt": 0.70, "resnet": 0.78}  # ours / fully_shard


def comparisons(model):
    return [
        Comparison("ours / fully_shard", "ours", "torch", at_most=AT_MOST[model]),
        Comparison("ours, grad_op / fully_shard", "grad_op", "torch"),
        Comparison("A/A: fully_shard / fully_shard", "torch again", "torch"),
    ]


def sharded_by_torch(module, unit):
    from torch.distributed.fsdp import fully_shard

    is_unit = (lambda part: isinstance(part, unit)) if isinstance(unit, type) else unit
    for part in [part for part in module.modules() if part is not module and is_unit(part)]:
        fully_shard(part)
    return fully_shard(module)


def variants_of(module, name):
    from labkit.fsdp import FSDP

    unit = models.unit(name)
    return {
        "ours": FSDP(copy.deepcopy(module), unit),
        "grad_op": FSDP(copy.deepcopy(module), unit, shard="grad_op"),
        "torch": sharded_by_torch(copy.deepcopy(module), unit),
        "torch again": sharded_by_torch(copy.deepcopy(module), unit),
    }


def times(context, model, size, repetitions):
    """Measure on every rank."""
    torch.manual_seed(0)
    module = models.build(model, size).to(context.device)
    batch = share(context, model)
    variants = {
        name: training_step(wrapped, models.loss(model), *batch) for name, wrapped in variants_of(module, model).items()
    }
    time_variants(context, variants, repetitions=repetitions)


def peaks(context, model, size):
    """Measure on every rank."""
    from labkit.memory.memory_tracker import MemoryTracker

    torch.manual_seed(0)
    module = models.build(model, size).to(context.device)
    batch = share(context, model)
    for name, wrapped in variants_of(module, model).items():
        step = training_step(wrapped, models.loss(model), *batch)
        step()
        with MemoryTracker(wrapped) as memory:
            step()
        context.record(variant=name, peak=memory.peak_total, **memory.peak)


def peak_row(model, nproc, records):
    """Count memory; one run is enough. Returns the rank with the largest ratio of ours to fully_shard's."""
    wide = records.pivot(index="rank", columns="variant", values="peak")
    ratio = float((wide["ours"] / wide["torch"]).max())
    ours = int(wide["ours"].max())
    theirs = int(wide["torch"].max())
    return {
        "benchmark": f"FSDP, {model}",
        "row": f"peak tracked memory: {ours:,} of {theirs:,} bytes",
        "ranks": nproc,
        "ratio": ratio,
        "low": None,
        "high": None,
        "pairs": None,
        "interval": "exact",
        "target": "at most 1.00",
        "verdict": "holds" if ratio <= 1 else "missed",
    }


def run(repetitions):
    """Yield the rows and the raw milliseconds, or bytes, of each run."""
    for model in ("mlp", "resnet", "gpt"):
        for nproc in (2, 4):
            parameters = {"model": model, "size": "small"}
            held = launch("benchmarks.fsdp:peaks", nproc=nproc, quiet=True, **parameters).records
            yield [peak_row(model, nproc, held)], held.to_dict("list")
            measured = launch("benchmarks.fsdp:times", nproc=nproc, repetitions=repetitions, **parameters)
            values = columns(measured.records)
            yield [comparison.row(f"FSDP, {model}", nproc, values) for comparison in comparisons(model)], values
