"""What an Experiment's ranks will hold, asked before they are: to the byte what they then hold, kind by kind."""

import io

import pytest
import torch

from labkit import models
from labkit.run.context import Context, EventFile
from labkit.run.experiment import Experiment
from labkit.run.experiment_runner import Participant, estimate, held, largest_batch

BASE = Experiment(model="gpt", batch_size=4, optimizer="adamw", lr=1e-3)
MESHES = {
    "tp": (2, {"tensor": 2}),
    "cp": (2, {"context": 2}),
    "dp x tp": (4, {"tensor": 2}),
    "pp": (2, {"pipeline": 2, "accumulation": 2, "strategy": "ddp_naive"}),
    "FSDP in files": (2, {"strategy": "fsdp_nvme"}),
    "tp, bf16": (2, {"tensor": 2, "precision": "bf16"}),
}


def real(rank, world_size, fields):
    """Of several steps the one that held least: a message's thread may let go of it a moment late.

    Late, it may make of an earlier moment a second peak, as high: there more of it is communication.
    """
    context = Context(rank, world_size, 0, 0, torch.device("cpu"), EventFile(io.StringIO()))
    participant = Participant(context, Experiment.from_dict(fields))
    steps = (held(participant) for _ in range(5))
    return min(steps, key=lambda one: (one.peak_total, sum(one.held.values()), one.peak["communication"]))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_each_rank_of_a_mesh_to_the_byte(ranks, mesh):
    world_size, changes = MESHES[mesh]
    experiment = BASE.replace(**changes)
    told = estimate(experiment, world_size)
    for one, found in zip(told, ranks(world_size, real, fields=experiment.to_dict()), strict=True):
        assert one.peak == found.peak and one.held == found.held
        assert one.rank == found.rank and one.moment in ("forward", "backward")


FITTED = {
    "DDP": {"strategy": "ddp_bucketed"},
    "FSDP, micro-batches": {"strategy": "fsdp", "accumulation": 2},
    "ZeRO-1, recomputed": {"strategy": "zero1", "recompute": "every"},
    "tp": {"tensor": 2},
    "ZeRO-2, bf16": {"strategy": "zero2", "precision": "bf16"},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", FITTED)
def test_the_largest_batch_fits_and_one_more_does_not(ranks, case):
    """Held on real ranks: at most the room, and with one more sample for each of them more than that."""
    experiment, room = BASE.replace(**FITTED[case]), 6 * 2**20
    size = largest_batch(experiment, 2, 0, room)
    more = size + experiment.smallest_batch(2)
    peaks = {
        tried: max(one.peak_total for one in ranks(2, real, fields=experiment.replace(batch_size=tried).to_dict()))
        for tried in (size, more)
    }
    assert size > 4 and peaks[size] <= room < peaks[more]


@pytest.mark.slow
def test_all_of_the_data_at_most_and_one_sample_a_rank_at_least():
    everything = len(models.data.load("auto", "mlp"))
    assert largest_batch(Experiment(), 2, 0, 2**40) == everything - everything % 2
    with pytest.raises(MemoryError, match=r"a batch of 2 does not fit: a rank's step needs [\d,]+ bytes and has 1,000"):
        largest_batch(BASE, 2, 0, 1000)


def settled(rank, world_size, fields):
    """The strategy that is taken, or why none."""
    context = Context(rank, world_size, 0, 0, torch.device("cpu"), EventFile(io.StringIO()))
    try:
        return Participant(context, Experiment.from_dict(fields)).experiment.strategy
    except MemoryError as error:
        return str(error)


@pytest.mark.slow
def test_auto_takes_what_fits_the_fullest_rank_of_a_mesh(ranks):
    """Of a pipeline's two the last holds more: what fits the first alone is refused."""
    sharded = BASE.replace(context=2, strategy="auto")
    needs = {s: estimate(sharded.replace(strategy=s), 2)[0].peak_total for s in ("ddp_bucketed", "fsdp")}
    assert needs["fsdp"] < needs["ddp_bucketed"]
    piped = BASE.replace(**MESHES["pp"][1])
    first, last = (one.peak_total for one in estimate(piped, 2))
    assert first < last
    room = {
        (sharded, needs["ddp_bucketed"]): "ddp_bucketed",
        (sharded, needs["ddp_bucketed"] - 1): "fsdp",
        (piped.replace(strategy="auto"), last): "ddp_naive",
        (piped.replace(strategy="auto"), last - 1): "nothing fits into",
    }
    for (experiment, size), chosen in room.items():
        fields = experiment.replace(memory_mb=size / 2**20).to_dict()
        for rank, found in enumerate(ranks(2, settled, fields=fields)):
            assert found.startswith(chosen), f"rank {rank}"


def test_what_cannot_be_told_is_said():
    with pytest.raises(ValueError, match=r"nproc=3 must be a multiple of 2"):
        estimate(BASE.replace(tensor=2), 3)
    with pytest.raises(ValueError, match="experts=4: the memory of experts depends on the routing"):
        estimate(BASE.replace(experts=4), 2)
    with pytest.raises(ValueError, match="strategy='auto' does not support experts"):
        Experiment(model="gpt", experts=4, strategy="auto")
