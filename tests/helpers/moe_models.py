"""A model with a mixture of experts, its batches, and the mixture on one process."""

import torch
from tensors import noise
from torch import nn

from labkit.moe import MoE

F64, WIDTH, TOKENS, STEPS = torch.float64, 6, 10, 3


def expert():
    """A small network, float64: (tokens, WIDTH) -> (tokens, WIDTH)."""
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH)).to(F64)


class Model(nn.Module):
    """A layer and a mixture of four experts behind it, added up; its weights are the same in every process."""

    def __init__(self, group=None, **options):
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(WIDTH, WIDTH)
        self.moe = MoE(WIDTH, 4, expert=expert, group=group, **options).to(F64)
        self.to(F64)

    def forward(self, x):
        return x + self.moe(self.before(x))


def batch(step, world_size):
    """The samples of all ranks: (world_size, 2, TOKENS // 2, WIDTH), float64."""
    return noise(world_size, 2, TOKENS // 2, WIDTH, seed=step, dtype=F64)


def alone(**options):
    """A mixture of four experts, float64, its weights the same in every process."""
    torch.manual_seed(0)
    return MoE(WIDTH, 4, expert=expert, **options).to(F64)
