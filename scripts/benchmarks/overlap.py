"""How well our DDP hides communication behind compute: a step compared with two lower bounds.

    compute   |---- forward ----|-- first --|------------- backward -------------|
    network                                 | first bucket | ...... |  ........  | last bucket |
              |<------- ready ------------->|<----- all communication ----- ...
              |<-------------------------- all compute ------------------------->|

bound   = the longer of compute and communication, + first bucket + last bucket: the claim is about this
soonest = the later of (ready + communication) and (compute + last bucket): stricter, shown as well
Each part is measured alone in the same repetition.
Compute is emulated by sleeping, so that two ranks do not compete for the processor; the messages are real.
"""

import copy
import time

import torch
import torch.distributed as dist

from benchmarks.protocol import Comparison
from labkit import models
from labkit.measure.interleaved_timing import columns, time_variants
from labkit.run import launch

FORWARD_MS = 10.0  # of each of the 6 blocks; backward is twice that
BUCKET_CAP_MB = 7  # about one block


def times(context, repetitions):
    """Measure on every rank."""
    from labkit.ddp import DDP
    from labkit.models.emulated import emulate

    torch.manual_seed(0)
    module = emulate(models.build("gpt", "medium"), models.unit("gpt"), FORWARD_MS)
    tokens = torch.randint(256, (1, 64), generator=torch.Generator().manual_seed(1))
    ours = DDP(copy.deepcopy(module), bucket_cap_mb=BUCKET_CAP_MB)
    alone = copy.deepcopy(module)
    clock = FirstBucket(alone, ours)
    messages = [torch.zeros(bucket.numel) for bucket in ours.buckets]

    def step(model):
        model.zero_grad()
        models.loss("gpt")(model(tokens), tokens).backward()

    def compute():
        clock.start()
        step(alone)
        return {"ready_ms": clock.ready_ms}

    variants = {
        "step": lambda: step(ours),
        "step again": lambda: step(ours),
        "compute": compute,
        "communication": lambda: [dist.all_reduce(message) for message in messages] and None,
        "first bucket": lambda: dist.all_reduce(messages[0]),
        "last bucket": lambda: dist.all_reduce(messages[-1]),
    }
    time_variants(context, variants, repetitions=repetitions)


class FirstBucket:
    """Time, on a model without communication, when all gradients of the first bucket would be ready."""

    def __init__(self, model, wrapped):
        names = {id(p): name for name, p in wrapped.module.named_parameters()}
        first = {names[id(p)] for p in wrapped.buckets[0].parameters()}
        for name, p in model.named_parameters():
            if name in first:
                p.register_post_accumulate_grad_hook(self.arrived)

    def start(self):
        self.started = time.perf_counter()

    def arrived(self, parameter):
        self.ready_ms = 1000 * (time.perf_counter() - self.started)


def run(repetitions):
    """Yield the rows and the raw milliseconds."""
    measured = launch("benchmarks.overlap:times", nproc=2, device="cpu", repetitions=repetitions)
    values = columns(measured.records)
    values["ready"] = columns(measured.records, "ready_ms")["compute"]
    parts = ("compute", "communication", "first bucket", "last bucket", "ready")
    alone = list(zip(*(values[part] for part in parts), strict=True))
    values["bound"] = [max(compute, network) + first + last for compute, network, first, last, _ in alone]
    values["soonest"] = [max(ready + network, compute + last) for compute, network, _, last, ready in alone]
    comparisons = [
        Comparison("step / bound", "step", "bound", at_most=1.10),
        Comparison("step / soonest possible", "step", "soonest"),
        Comparison("no overlap at all / soonest possible", "one after the other", "soonest"),
        Comparison("A/A: step / step", "step again", "step"),
    ]
    both = zip(values["compute"], values["communication"], strict=True)
    values["one after the other"] = [compute + network for compute, network in both]
    yield [comparison.row("overlap, emulated compute", 2, values) for comparison in comparisons], values
