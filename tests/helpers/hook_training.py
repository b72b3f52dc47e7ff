"""Training with a communication hook, as the tests of compressors do it: each rank on batches of its own."""

import torch
from tensors import flat, noise

from labkit.ddp import DDP


def batch(rank, step):
    return noise(8, 24, seed=100 * step + rank)


def train(module, hook, optimizer, rank, steps, wrap=DDP, group=None, seen=None, **settings):
    """The weights after these steps. hook: None for plain averaging. seen: a list; gets each step's averaged gradients.

    settings: of the wrapper.
    """
    wrapped = wrap(module, **settings)
    if hook is not None:
        wrapped.register_comm_hook(group, hook)
    for step in steps:
        optimizer.zero_grad()
        wrapped(batch(rank, step)).square().mean().backward()
        if seen is not None:
            seen.append(torch.cat([p.grad.flatten().clone() for p in module.parameters()]))
        optimizer.step()
    return flat(module)
