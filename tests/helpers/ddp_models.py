"""Modules, inputs and settings that the tests of DDP and of what wraps or resembles it share."""

import pytest
import torch
from tensors import mlp, noise
from torch import nn
from torch.utils.checkpoint import checkpoint

FORMS = [
    pytest.param({"bucket_cap_mb": 0, "overlap": False}, id="naive"),
    pytest.param({"bucket_cap_mb": 0}, id="overlapped"),
    pytest.param({}, id="bucketed"),
]


def net(seed=0, width=4):
    """Two layers in float64: (samples, width) -> (samples, width)."""
    return mlp(width, 8, width, seed=seed).double()


def data(rank, step=0, width=4):
    """The rank's samples of a step: (3, width), float64."""
    return noise(3, width, seed=100 * step + rank).double()


class Odd(nn.Module):
    """Every kind of tensor: several dtypes, no elements, no dimensions, not contiguous, tied, frozen."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.halves = nn.Parameter(torch.randn(3).half())
        self.doubles = nn.Parameter(torch.randn(3).double())
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.scalar = nn.Parameter(torch.randn(()))
        self.channels_last = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
        self.transposed = nn.Parameter(torch.randn(3, 5).t())
        self.complexes = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.tied = self.transposed
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.register_buffer("count", torch.randint(100, (3,)))
        self.register_buffer("flags", torch.rand(5) > 0.5)
        self.register_buffer("nothing", torch.empty(0))

    def forward(self, x):
        total = (self.halves.float() + self.doubles.float()).sum() + self.scalar * self.empty.sum() + self.scalar
        total = total + (self.channels_last.square().sum() + (self.transposed @ self.tied.t()).sum()) * x
        return total + (self.complexes * self.complexes.conj()).real.sum() * x + self.frozen.sum()


NAMES = list(Odd(0).named_parameters())


class Branches(nn.Module):
    """Four layers; forward adds up the chosen ones."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)).double()

    def forward(self, x, chosen):
        return sum(self.branches[i](x) for i in chosen)


class Checkpointed(nn.Module):
    """Three parts that are computed again in backward; shared: the first two are one module."""

    def __init__(self, reentrant, shared):
        super().__init__()
        self.parts = nn.ModuleList([net(0), net(0 if shared else 1), net(2)])
        if shared:
            self.parts[1] = self.parts[0]
        self.reentrant = reentrant

    def forward(self, x):
        x = x.clone().requires_grad_()
        for part in self.parts:
            x = checkpoint(part, x, use_reentrant=self.reentrant)
        return x
