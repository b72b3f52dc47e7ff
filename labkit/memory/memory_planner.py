"""Choose the first strategy that fits into a rank's memory; if none does, say what would fit.

    DDP 9 GiB | ZeRO-1 6 GiB | ZeRO-2 5 GiB | FSDP 3 GiB | FSDP + offload | ... recomputed
    cheap, in messages and time                                       expensive    first that fits

Each candidate is estimated by a dry run (memory_estimate.py). On a mesh the candidates are whole
experiments: `estimate` of labkit.run.experiment_runner gives the Estimate of each rank, and
first_that_fits() chooses.
Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020,
section 3.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch.utils._pytree import tree_map_only

from labkit.memory.batch_size import first_true, last_true
from labkit.memory.memory_estimate import Estimate, device_of, estimate


@dataclass(frozen=True)
class Choice:
    """A strategy that fits.

    strategy: a name for labkit.trainer.parallelize. offload: whether FSDP offloads. recompute:
    whether units are recomputed. estimate: its Estimate. reasons: one sentence for each candidate
    that was tried, with the chosen one last; str() joins them.
    """

    strategy: str
    offload: bool
    recompute: bool
    estimate: Estimate
    reasons: tuple

    def __str__(self):
        return "\n".join(self.reasons)


# From cheap to expensive: (strategy, whether units are recomputed). ZeRO sends as much as DDP,
# FSDP 1.5 times as much. Offload moves shards and states between host and device in every step.
# Recomputation runs every forward twice.
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
    "horovod": "Horovod",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "fsdp": "FSDP",
    "fsdp_offload": "FSDP with offload",
    "fsdp_nvme": "FSDP in files",
}


class Search:
    """The candidates of choose() and a cache of their estimates.

    step: arguments of estimate() that are the same for all: module, input, loss, target ...
    recompute: as in estimate(), for the candidates that recompute; None: there are none.
    """

    def __init__(self, step, world_size, recompute):
        self.step, self.world_size, self.recompute = step, world_size, recompute
        self.found = {}

    def rungs(self):
        """Return the candidates, [(strategy, recomputed)], from cheap to expensive.

        Without offload on a CPU, whose memory is the host's.
        """
        on_cpu = device_of(self.step["module"], self.step.get("device")).type == "cpu"
        rungs = []
        for strategy, recomputed in ALONE if self.world_size == 1 else LADDER:
            moves_nothing = on_cpu and strategy == "fsdp_offload"
            if not moves_nothing and (self.recompute or not recomputed):
                rungs.append((strategy, recomputed))
        return rungs

    def estimate(self, rung, world_size=None, batch=None):
        """Return the Estimate of rank 0 for a candidate. batch: number of samples; None: all."""
        key = rung, world_size or self.world_size, batch
        if key not in self.found:
            (strategy, recomputed), ranks, _ = key
            step = dict(self.step)
            for name in ("input", "target"):
                step[name] = tree_map_only(torch.Tensor, lambda t: t[:batch], step[name])
            how = self.recompute if recomputed else None
            self.found[key] = estimate(strategy=strategy, world_size=ranks, recompute=how, **step)
        return self.found[key]


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
    """Return a Choice: the first strategy, from cheap to expensive, that fits into memory_bytes.

    memory_bytes: of one rank. Candidates on one rank: one process, offload, recomputation, both. On
    several: DDP, ZeRO-1, ZeRO-2, FSDP, FSDP with offload, with recomputation, with both.
    input, target: one rank's batch. recompute: as in estimate(); None: no candidate recomputes.
    host_bytes: a rank's host memory, for offload; None: no limit. order: function that sorts the
    candidates, a list of (strategy, recomputed). options: precision, unit, device.
    Raises MemoryError if nothing fits; the message says by how much, and what would fit.
    """
    step = {"module": module, "input": input, "loss": loss, "target": target}
    search = Search(step | {"optimizer": optimizer} | options, world_size, recompute)
    ways = partial(ways_out, search, memory_bytes)
    rungs = order(search.rungs())
    return first_that_fits(rungs, search.estimate, memory_bytes, host_bytes, ways)


def first_that_fits(rungs, estimate, memory_bytes, host_bytes=None, ways=lambda rung: []):
    """Return the Choice of the first rung that fits.

    rungs: [(strategy, recomputed)] from cheap to expensive. estimate: function rung -> Estimate of
    the rank that holds most. ways: function rung -> [what would fit], called with the rung that
    needs least if none fits. Raises MemoryError as choose does.
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
    """Return phrases for what would fit: more ranks (up to 1024), a smaller batch.

    Both are found by bisection.
    """
    ways, sharded = [], ("fsdp", rung[1])
    ranks = first_true(
        lambda n: search.estimate(sharded, n).peak_total <= memory_bytes,
        search.world_size + 1,
        1024,
    )
    if ranks:
        ways.append(f"{ranks} ranks with {words_of(sharded)}")
    input = search.step["input"]
    whole = len(input if torch.is_tensor(input) else input[0])
    if batch := last_true(
        lambda size: search.estimate(rung, batch=size).peak_total <= memory_bytes, whole - 1
    ):
        ways.append(f"a batch of {batch} a rank instead of {whole}")
    return ways


def words_of(rung):
    """Return the name of a candidate (strategy, recomputed) for messages."""
    strategy, recomputed = rung
    return (
        WORDS[strategy]
        + (" and recomputation" if "with" in WORDS[strategy] else " with recomputation")
        * recomputed
    )


def binary(size):
    """Format bytes: 1536 -> "1.5 KiB"."""
    power = 0
    while size >= 1024 and power < 4:
        size, power = size / 1024, power + 1
    return f"{size:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
