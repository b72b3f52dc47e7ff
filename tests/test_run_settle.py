"""What an Experiment's ranks will hold, asked before they are: to the byte what they then hold, kind by kind."""

import io

import pytest
import torch

from labkit.run.context import Context, EventFile
from labkit.run.experiment import Experiment
from labkit.run.participant import Participant, estimate
from labkit.run.settle import held

BASE = Experiment(model="gpt", batch_size=4, optimizer="adamw", lr=1e-3)
MESHES = {
    "tp": (2, {"tensor": 2}),
    "cp": (2, {"context": 2}),
    "dp x tp": (4, {"tensor": 2}),
}


def real(rank, world_size, fields):
    """Of several steps the one with the smallest peak: a message's thread may let go of it a moment late."""
    context = Context(rank, world_size, 0, 0, torch.device("cpu"), EventFile(io.StringIO()))
    participant = Participant(context, Experiment.from_dict(fields))
    return min((held(participant) for _ in range(3)), key=lambda one: one.peak_total)


@pytest.mark.parametrize("mesh", MESHES)
def test_each_rank_of_a_mesh_to_the_byte(ranks, mesh):
    world_size, changes = MESHES[mesh]
    experiment = BASE.replace(**changes)
    told = estimate(experiment, world_size)
    for one, found in zip(told, ranks(world_size, real, fields=experiment.to_dict()), strict=True):
        assert one.peak == found.peak and one.held == found.held
        assert one.rank == found.rank and one.moment in ("forward", "backward")
