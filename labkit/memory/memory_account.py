"""An account: bytes by kind at every moment of a rehearsed step, under one strategy.

    rehearsal's log     + 32 KiB | ... | gradient 3 is in | - 32 KiB | unit 1 begins backward | ...
    strategy's holding                   to its bucket                 gather it: + parameters
    samples             bytes of activations, gradients ... after each; the largest is the peak

Activations do not depend on the strategy, and what a strategy holds does not depend on the batch:
one rehearsal serves for all. Kinds, and bytes, are those of labkit.measure.MemoryTracker.
Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020,
section 3.
"""

from dataclasses import dataclass

import torch

from labkit.fsdp.wrap_policy import split_units
from labkit.memory import gathered, holdings
from labkit.memory.rehearsal import rehearse, rehearse_optimizer

KINDS = ("parameters", "gradients", "optimizer_states", "buffers", "communication", "activations")
HOLDINGS = {
    "single": holdings.Single,
    "ddp_naive": holdings.Separate,
    "ddp_overlapped": holdings.Separate,
    "ddp_bucketed": holdings.DDP,
    "zero1": holdings.ZeRO1,
    "zero2": holdings.ZeRO2,
    "fsdp": gathered.FSDP,
    "fsdp_grad_op": gathered.FSDPGradOp,
    "fsdp_offload": gathered.FSDPOffload,
}
OPTIMIZERS = {"sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "adamw": torch.optim.AdamW}
# Dtype of the weights, and the one that autocast computes in.
PRECISIONS = {
    "fp64": (torch.float64, None),
    "fp32": (torch.float32, None),
    "bf16": (torch.float32, torch.bfloat16),
    "fp16": (torch.float32, torch.float16),
}


@dataclass(frozen=True)
class Estimate:
    """What one rank will hold during a step that is not the first (optimizer states are there).

    samples: bytes by kind after every change, as in MemoryTracker.samples, with the position for
    the time. held: bytes by kind after backward, and so between steps. moment: where the peak is:
    "forward", "backward" or "optimizer". padding: bytes that flat buffers add, contained in the
    other numbers. host: bytes in host memory. rank: whose.
    """

    strategy: str
    world_size: int
    samples: list
    held: dict
    moment: str
    padding: int = 0
    host: int = 0
    rank: int = 0

    @property
    def peak(self):
        """Bytes by kind at the moment when their sum is largest."""
        return max((kinds for _, kinds in self.samples), key=lambda kinds: sum(kinds.values()))

    @property
    def peak_total(self):
        return sum(self.peak.values())


def rehearse_step(
    module, input, loss=None, target=None, precision="fp32", unit=None, recompute=None, device=None
):
    """A Rehearsal to be accounted for under several strategies.

    input: a tensor or a tuple, one rank's batch. loss(output, target), or loss(output) without a
    target; None: the output's sum. All of them may be on the meta device. precision: a key of
    PRECISIONS; bf16 and fp16: autocast. unit: what FSDP gathers together: a class, a tuple of them,
    a function module -> bool, or None. recompute: labkit.recompute.checkpoint, or another function
    that runs a unit and computes it again in backward; None: what the module does itself. device:
    what to rehearse for, by default where the module is.
    """
    dtype, low = known("precision", precision, PRECISIONS)
    return rehearse(
        module, input, loss, target, dtype, low, device, split_units(module, unit), recompute
    )


def account(
    rehearsal,
    strategy="single",
    world_size=1,
    optimizer="adamw",
    rank=0,
    bucket_cap_mb=25,
    prefetch=1,
):
    """The Estimate of a rehearsed step under a strategy, for one rank (others may hold less).

    strategy: a key of HOLDINGS. optimizer: "adamw", "sgd" (with momentum), or a function parameters
    -> Optimizer. Raises ValueError, with what is known, for another.
    """
    rule = known("strategy", strategy, HOLDINGS)
    make = known("optimizer", optimizer, OPTIMIZERS) if isinstance(optimizer, str) else optimizer
    holding = rule(rehearsal, world_size, rank, int(bucket_cap_mb * 2**20), prefetch)
    start = dict.fromkeys(KINDS, 0) | holding.start()
    states, temporaries = rehearse_optimizer(holding.stepped(), make)
    if holding.offload:
        holding.host += states
        states, temporaries = 0, []
    start |= {
        "optimizer_states": states,
        "buffers": sum(b.nbytes for b in rehearsal.buffers.values()),
    }
    samples, backward_at = walk(rehearsal, holding, start)
    held, step_at = samples[-1], len(samples)
    samples += [held | {"activations": held["activations"] + more} for more in temporaries]
    totals = [sum(kinds.values()) for kinds in samples]
    position = totals.index(max(totals))
    moment = (
        "optimizer" if position >= step_at else "forward" if position < backward_at else "backward"
    )
    besides = holding.padding, holding.host, rank
    return Estimate(strategy, world_size, list(enumerate(samples)), held, moment, *besides)


def known(what, name, table):
    if name not in table:
        raise ValueError(f"unknown {what} {name!r}: known are {', '.join(table)}")
    return table[name]


def walk(rehearsal, holding, start):
    """Bytes by kind after every change, and how many of them belong to forward."""
    now, samples, backward_at = dict(start), [dict(start)], 0
    for position, (piece, change, event) in enumerate(rehearsal.log):
        if position == rehearsal.backward_at:
            backward_at = len(samples)
        changes = []
        if change:
            kept = piece.gradient_of is not None and holding.keeps(piece.gradient_of)
            changes.append(("gradients" if kept else "activations", change))
        if event is not None:
            changes += holding.on(event, piece.size if piece else 0)
        for kind, grown in changes:
            now[kind] += grown
            samples.append(dict(now))
    return samples, backward_at
