"""labkit's all-reduces, built from send and recv, against gloo's own, in place on one float32 tensor."""

import torch
import torch.distributed as dist

from benchmarks.protocol import Comparison
from labkit.measure.interleaved_timing import columns, time_variants
from labkit.run import launch

SIZES_MIB = {4: (None, None), 16: (1.0, None), 64: (0.80, None)}  # size -> (at_most, upper)


def times(context, mib, repetitions):
    """Time the variants on every rank."""
    from labkit.allreduce import PipelinedRing, halving_doubling, ring

    tensor = torch.zeros(mib * 2**20 // 4)
    pipelined = PipelinedRing(dist.new_group())
    variants = {
        "pipelined": lambda: pipelined(tensor),
        "ring": lambda: ring(tensor),
        "halving_doubling": lambda: halving_doubling(tensor),
        "gloo": lambda: dist.all_reduce(tensor),
        "gloo again": lambda: dist.all_reduce(tensor),
    }
    time_variants(context, variants, repetitions=repetitions)


def run(repetitions):
    """Yield the rows and the raw milliseconds of each run: (rows, {"columns": ...})."""
    for mib, (at_most, upper) in SIZES_MIB.items():
        measured = launch("benchmarks.all_reduce:times", nproc=2, device="cpu", mib=mib, repetitions=repetitions)
        values = columns(measured.records)
        comparisons = [
            Comparison("pipelined ring / gloo", "pipelined", "gloo", at_most, upper),
            Comparison("ring / gloo", "ring", "gloo"),
            Comparison("halving-doubling / gloo", "halving_doubling", "gloo"),
            Comparison("A/A: gloo / gloo", "gloo again", "gloo"),
        ]
        yield [comparison.row(f"all-reduce {mib} MiB", 2, values) for comparison in comparisons], values
