"""Small models and random tensors that every process has alike, and comparisons of what came of them."""

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn


def noise(*shape, seed=0, dtype=torch.float32):
    """Standard normal values of this shape, drawn from a generator of their own."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def mlp(*widths, seed=0):
    """Linear layers of these widths with tanh in between, float32, their weights drawn from the seed."""
    torch.manual_seed(seed)
    layers = [nn.Linear(*pair) for pair in pairwise(widths)]
    return nn.Sequential(layers[0], *[part for layer in layers[1:] for part in (nn.Tanh(), layer)])


def flat(module):
    """All parameters of a module as one detached vector."""
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def state(module):
    """{name: a copy of the tensor} of a module's state_dict."""
    return {name: t.clone() for name, t in module.state_dict().items()}


def grads(module):
    """A copy of each parameter's gradient; None where there is none."""
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def gap(ours, theirs):
    """The largest difference of two lists or dicts of tensors; None must face None, a name the same name."""
    if isinstance(ours, dict):
        assert list(ours) == list(theirs)
        ours, theirs = ours.values(), theirs.values()
    pairs = list(zip(ours, theirs, strict=True))
    assert [a is None for a, _ in pairs] == [b is None for _, b in pairs]
    found = [furthest(a, b) for a, b in pairs if a is not None and a.numel()]
    return float(torch.tensor([0.0, *found], dtype=torch.float64).max())  # nan where one is nan


def furthest(a, b):
    """The largest difference of two tensors' elements, in float64 or complex128."""
    exact = torch.promote_types(a.dtype, torch.float64)
    return float((a.to(exact) - b.to(exact)).abs().max())


def mean_of_ranks(module, loss, world_size):
    """The oracle: the gradients of every rank's loss(module, rank), averaged, in this process."""
    module = copy.deepcopy(module)
    module.zero_grad()
    for rank in range(world_size):
        (loss(module, rank) / world_size).backward()
    return grads(module)


def error_of(kind, action):
    """The message of the error of this kind that action() raises."""
    with pytest.raises(kind) as caught:
        action()
    return str(caught.value)
