"""The budget of a training step: where every byte will go, and what to do if it does not fit.

    bytes |            ______ <- peak          estimate(model, batch, loss, "zero1", world_size=4)
          |         __|      |__
          |      __|  activations __           activations: of a step on tensors without data
          |   __|____________|_gradients|___   the rest: what the strategy holds of each parameter
          |  |  parameters, states      |      the optimizer: its own step, on its shard, likewise
          +--+------------+-------------+--+-> time

Known before anything is run. Held per rank: parameters + gradients + optimizer states + buffers +
activations, counted as by labkit.measure.MemoryTracker. Activations grow with the batch and the
sequence (its square, where attention keeps its weights); the rest does not. On a mesh the
composed job itself is run without data, as one of its ranks (labkit.scale.rehearse): `estimate` of
labkit.run.experiment_runner gives such an Estimate for each rank, and first_that_fits() chooses.
Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020,
section 3.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch.utils._pytree import tree_map_only

from labkit.memory.batch_size import BatchSize, find_batch_size, first_true, last_true
from labkit.memory.memory_account import PRECISIONS, Estimate, account, rehearse_step

__all__ = [
    "PRECISIONS",
    "BatchSize",
    "Choice",
    "Estimate",
    "account",
    "choose",
    "estimate",
    "find_batch_size",
    "first_that_fits",
    "rehearse_step",
]


def estimate(
    module,
    input,
    loss=None,
    strategy="single",
    world_size=1,
    optimizer="adamw",
    precision="fp32",
    **options,
):
    """The Estimate of one training step of `module` on one rank's batch.

    Nothing is computed, held or changed. options: target, unit, recompute, device as in
    rehearse_step; rank, bucket_cap_mb, prefetch as in account.
    """
    accounted = {
        name: options.pop(name) for name in ("rank", "bucket_cap_mb", "prefetch") if name in options
    }
    rehearsal = rehearse_step(module, input, loss, precision=precision, **options)
    return account(rehearsal, strategy, world_size, optimizer, **accounted)


@dataclass(frozen=True)
class Choice:
    """A strategy that fits, as parallelize takes it, with FSDP's offload and units' recomputation.

    reasons: one sentence for each strategy looked at, the chosen one last; str() gives them all.
    """

    strategy: str
    offload: bool
    recompute: bool
    estimate: Estimate
    reasons: tuple

    def __str__(self):
        return "\n".join(self.reasons)


# From cheap to expensive: (strategy, units recomputed). ZeRO sends what DDP sends; FSDP half as
# much again; offload moves shards and states between host and device in every step; recomputation
# runs every forward twice.
ALONE = (("single", False), ("fsdp_offload", False), ("single", True), ("fsdp_offload", True))
LADDER = (
    *(
        ("ddp_bucketed", False),
        ("zero1", False),
        ("zero2", False),
        ("fsdp", False),
        ("fsdp_offload", False),
    ),
    *(("fsdp", True), ("fsdp_offload", True)),
)
WORDS = {
    "single": "one process",
    "ddp_naive": "DDP after backward",
    "ddp_bucketed": "DDP",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "fsdp": "FSDP",
    "fsdp_offload": "FSDP with offload",
}


class Search:
    """The estimates that choose() needs, each made once."""

    def __init__(self, module, input, loss, target, world_size, optimizer, recompute, options):
        self.module, self.loss, self.recompute, self.options = module, loss, recompute, options
        self.input, self.target, self.world_size, self.optimizer = (
            input,
            target,
            world_size,
            optimizer,
        )
        self.rehearsals = {}

    def rungs(self):
        """What there is to try. On a CPU a rank's memory is the host's: offload moves nothing."""
        ladder = ALONE if self.world_size == 1 else LADDER
        on_cpu = self.rehearsal(False).device.type == "cpu"
        return [
            r
            for r in ladder
            if (self.recompute or not r[1]) and not (on_cpu and r[0] == "fsdp_offload")
        ]

    def rehearsal(self, recomputed, batch=None):
        if (recomputed, batch) not in self.rehearsals:
            input, target = tree_map_only(
                torch.Tensor, lambda t: t[:batch], (self.input, self.target)
            )
            how = self.recompute if recomputed else None
            made = rehearse_step(
                self.module, input, self.loss, target, recompute=how, **self.options
            )
            self.rehearsals[recomputed, batch] = made
        return self.rehearsals[recomputed, batch]

    def estimate(self, rung, world_size=None, batch=None):
        strategy, recomputed = rung
        return account(
            self.rehearsal(recomputed, batch),
            strategy,
            world_size or self.world_size,
            self.optimizer,
        )


def choose(
    module,
    input,
    memory_bytes,
    world_size=1,
    loss=None,
    target=None,
    optimizer="adamw",
    recompute=None,
    host_bytes=None,
    order=list,
    **options,
):
    """The first strategy that fits into memory_bytes a rank, from cheap to expensive: a Choice.

    One rank: one process, with offload, with recomputation. More: DDP, ZeRO-1, ZeRO-2, FSDP, FSDP
    with offload, FSDP with recomputation, with both.
    input, target: one rank's batch. recompute: as in rehearse_step; None leaves it out.
    host_bytes: a rank's host memory, for offload. order: of rungs, (strategy, recomputed), makes
    another order of them. options: precision, unit, device.
    Raises MemoryError if nothing fits: by how much, and what would make it fit.
    """
    search = Search(module, input, loss, target, world_size, optimizer, recompute, options)
    ways = partial(ways_out, search, memory_bytes)
    rungs = order(search.rungs())
    return first_that_fits(rungs, search.estimate, memory_bytes, host_bytes, ways)


def first_that_fits(rungs, estimate, memory_bytes, host_bytes=None, ways=lambda rung: []):
    """A Choice, of rungs: [(strategy, recomputed)] from cheap to expensive.

    estimate: rung -> Estimate, of the fullest rank. ways: what else would do, of the rung that
    needs least. Raises MemoryError as choose does.
    """
    reasons, seen = [], {}
    for rung in rungs:
        seen[rung] = found = estimate(rung)
        needs = f"{words_of(rung)} needs {binary(found.peak_total)} at its peak, in {found.moment}"
        needs += f" of rank {found.rank}" if found.rank else ""
        if found.peak_total > memory_bytes:
            reasons.append(
                f"{needs}: {binary(found.peak_total - memory_bytes)} more "
                f"than the {binary(memory_bytes)} of a rank."
            )
        elif host_bytes is not None and found.host > host_bytes:
            reasons.append(
                f"{needs}, but {binary(found.host - host_bytes)} more of the host "
                f"than the {binary(host_bytes)}."
            )
        else:
            reasons.append(
                f"{needs}: it fits, and leaves {binary(memory_bytes - found.peak_total)}."
            )
            strategy = rung[0].removesuffix("_offload")
            return Choice(strategy, strategy != rung[0], rung[1], found, tuple(reasons))
    rung, found = min(seen.items(), key=lambda item: item[1].peak_total)
    needed = found.peak_total
    raise MemoryError(
        f"nothing fits into {binary(memory_bytes)} a rank: {words_of(rung)} needs least, "
        f"{binary(needed)}, {binary(needed - memory_bytes)} too much; "
        f"it would fit with {', or '.join([f'{binary(needed)} a rank', *ways(rung)])}"
    )


def ways_out(search, memory_bytes, rung):
    """What would fit, with more ranks or a smaller batch."""
    ways, sharded = [], ("fsdp", rung[1])
    ranks = first_true(
        lambda n: search.estimate(sharded, n).peak_total <= memory_bytes,
        search.world_size + 1,
        1024,
    )
    if ranks:
        ways.append(f"{ranks} ranks with {words_of(sharded)}")
    whole = len(search.input if torch.is_tensor(search.input) else search.input[0])
    if batch := last_true(
        lambda size: search.estimate(rung, batch=size).peak_total <= memory_bytes, whole - 1
    ):
        ways.append(f"a batch of {batch} a rank instead of {whole}")
    return ways


def words_of(rung):
    strategy, recomputed = rung
    return (
        WORDS[strategy]
        + (" and recomputation" if "with" in WORDS[strategy] else " with recomputation")
        * recomputed
    )


def binary(size):
    """Bytes as people read them: 1536 -> "1.5 KiB"."""
    power = 0
    while size >= 1024 and power < 4:
        size, power = size / 1024, power + 1
    return f"{size:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
