"""The losses of an Experiment on warm ranks."""

import io

import torch

from labkit.run.context import Context, EventFile
from labkit.run.experiment import Experiment
from labkit.run.experiment_runner import Participant


def of_rank(rank, world_size, fields, steps):
    """[loss of each step], or [] of a rank that takes no part."""
    context = Context(rank, world_size, rank, 0, torch.device("cpu"), EventFile(io.StringIO()))
    participant = Participant(context, Experiment.from_dict(fields))
    return [participant.advance()[0].item() for _ in range(steps)] if participant.takes_part else []


def losses_of(experiment, ranks, world_size, steps):
    """[loss of each step], the mean over the ranks that take part; ranks: the fixture."""
    found = ranks(world_size, of_rank, fields=experiment.to_dict(), steps=steps)
    return torch.tensor([of_one for of_one in found if of_one], dtype=torch.float64).mean(0).tolist()
