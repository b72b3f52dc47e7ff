"""The budget of a training step: where every byte will go, before anything is run, and what to do if it does not fit.

    bytes |            ______ <- peak                estimate(model, batch, loss, "ddp", world_size=4)
          |         __|  a   |__
          |      __|  activations __                 activations: from a rehearsal, operator by operator
          |   __|____________|_gradients|___         the rest: from what the strategy holds of each parameter
          |  |  parameters, states      |            the optimizer: its own step, rehearsed on its own shard
          +--+------------+-------------+--+-> time

Held per rank: P + G + S + buffers + activations, each counted as labkit.measure.memory.MemoryTracker counts it.
Activations grow with the batch and, in attention, with the sequence; nothing else does.
Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020, section 3.
"""

from dataclasses import dataclass

import torch

from labkit import gathered, holdings
from labkit.rehearsal import rehearse, rehearse_optimizer
from labkit.units import split_units

KINDS = ("parameters", "gradients", "optimizer_states", "buffers", "communication", "activations")
HOLDINGS = {
    "single": holdings.Single,
    "ddp": holdings.DDP,
    "zero1": holdings.ZeRO1,
    "zero2": holdings.ZeRO2,
    "fsdp": gathered.FSDP,
    "fsdp_grad_op": gathered.FSDPGradOp,
    "fsdp_offload": gathered.FSDPOffload,
}
OPTIMIZERS = {"sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "adamw": torch.optim.AdamW}
PRECISIONS = {"fp64": torch.float64, "fp32": torch.float32}


@dataclass(frozen=True)
class Estimate:
    """What one rank will hold during a step that is not the first (optimizer states are there).

    samples: bytes by kind after every change, as MemoryTracker.samples has them, with the position for the time.
    held: bytes by kind after backward, and so between steps. moment: where the peak is: "forward", "backward" or
    "optimizer". padding: bytes that flat buffers add, contained in the other numbers. host: bytes in host memory.
    """

    strategy: str
    world_size: int
    samples: list
    held: dict
    moment: str
    padding: int = 0
    host: int = 0

    @property
    def peak(self):
        """Bytes by kind at the moment when their sum is largest."""
        return max((kinds for _, kinds in self.samples), key=lambda kinds: sum(kinds.values()))

    @property
    def peak_total(self):
        return sum(self.peak.values())


def estimate(module, input, loss=None, strategy="single", world_size=1, target=None, precision="fp32", **options):
    """The Estimate of one training step of `module` on one rank's batch. Nothing is computed, held or changed.

    input: a tensor or a tuple, one rank's; loss(output, target), or loss(output) without a target; None: the output's
    sum. All of them may be on the meta device. The rest, and what is raised, as in rehearse_step and account.
    """
    given = {name: options.pop(name) for name in ("unit", "device") if name in options}
    rehearsal = rehearse_step(module, input, loss, target, precision, **given)
    return account(rehearsal, strategy, world_size, precision=precision, **options)


def rehearse_step(module, input, loss=None, target=None, precision="fp32", unit=None, device=None):
    """A Rehearsal to be accounted for under several strategies.

    unit: what FSDP gathers together, as for FSDP: a class, a tuple of them, a function module -> bool, or None.
    device: what to rehearse for, by default where the module is. Raises ValueError for an unknown precision.
    """
    known("precision", precision, PRECISIONS)
    units = split_units(module, unit)
    return rehearse(module, input, loss, target, dtype=PRECISIONS[precision], device=device, units=units)


def account(
    rehearsal,
    strategy="single",
    world_size=1,
    optimizer="adamw",
    precision="fp32",
    rank=0,
    bucket_cap_mb=25,
    prefetch=1,
):
    """The Estimate of a rehearsed step under a strategy, for one rank (the shards of others may hold less).

    strategy: one of HOLDINGS. optimizer: "adamw", "sgd" (with momentum), or a function parameters -> Optimizer.
    Raises ValueError, with what is known, for another.
    """
    rule = known("strategy", strategy, HOLDINGS)
    make = known("optimizer", optimizer, OPTIMIZERS) if isinstance(optimizer, str) else optimizer
    holding = rule(rehearsal, world_size, rank, int(bucket_cap_mb * 2**20), prefetch)
    start = dict.fromkeys(KINDS, 0) | holding.start()
    states, temporaries = rehearse_optimizer(holding.stepped(), make)
    start |= {"optimizer_states": states, "buffers": sum(b.nbytes for b in rehearsal.buffers.values())}
    samples, backward_at = walk(rehearsal, holding, start)
    held = dict(samples[-1])
    samples.append(held | {"activations": held["activations"] + temporaries})
    return Estimate(
        strategy=strategy,
        world_size=world_size,
        samples=list(enumerate(samples)),
        held=held,
        moment=moment_of_peak(samples, backward_at),
        padding=holding.padding,
        host=holding.host,
    )


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


def moment_of_peak(samples, backward_at):
    totals = [sum(kinds.values()) for kinds in samples]
    position = totals.index(max(totals))
    if position == len(samples) - 1:
        return "optimizer"
    return "forward" if position < backward_at else "backward"
