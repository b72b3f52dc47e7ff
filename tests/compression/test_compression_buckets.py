"""Several buckets, for every compressor: on ranks that do not keep pace, and where the last one has no elements."""

import random
import time

import pytest
import torch
from tensors import noise
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labkit import comm
from labkit.compression import COMPRESSORS
from labkit.ddp import DDP

STEPS = 6
TINY = {DDP: 0, DistributedDataParallel: 1e-6}  # MiB, for a bucket a parameter


class Net(nn.Module):
    """padded: the first parameter has no elements, and so the last bucket has none."""

    def __init__(self, padded=False):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.zeros(0)) if padded else None
        self.layers = nn.Sequential(*(nn.Linear(24, 24) for _ in range(5)), nn.Tanh())

    def forward(self, x):
        x = self.layers(x)
        return x if self.first is None else x + self.first.sum()


def train(rank, wrap, name, module, pace=None, steps=STEPS):
    """A bucket for each parameter. Returns the weights, the compressor, and the bytes of each message in order."""
    compressor = COMPRESSORS[name]()

    def hook(group, bucket):
        if pace is not None:
            time.sleep(pace.choice((0, 0, 0.004)))
        return compressor.hook(group, bucket)

    wrapped = wrap(module, bucket_cap_mb=TINY[wrap])
    wrapped.register_comm_hook(None, hook)
    with comm.record() as log:
        for step in range(steps):
            module.zero_grad()
            batch = noise(8, 24, seed=10 * step + rank)
            wrapped(batch).square().mean().backward()
            with torch.no_grad():
                for p in module.parameters():
                    p -= 0.1 * p.grad
    return torch.cat([p.detach().flatten() for p in module.parameters()]), compressor, [e.payload_bytes for e in log]


def out_of_step(rank, world_size, name, wrap):
    paced, _, messages = train(rank, wrap, name, Net(), pace=random.Random(rank))
    return paced, messages, train(rank, wrap, name, Net())[0]


@pytest.mark.parametrize("wrap", [DDP, DistributedDataParallel])
@pytest.mark.parametrize("name", COMPRESSORS)
def test_ranks_that_do_not_keep_pace_send_the_same_messages_in_the_same_order(ranks, name, wrap):
    (paced, messages, straight), *others = ranks(3, out_of_step, name=name, wrap=wrap)
    assert torch.equal(paced, straight)
    for rank, (other, theirs, _) in enumerate(others, 1):
        assert torch.equal(other, paced), f"rank {rank}"
        assert theirs == messages, f"rank {rank}"


def padded(rank, world_size, name, wrap):
    (weights, compressor, _), (plain, *_) = (train(rank, wrap, name, Net(first)) for first in (True, False))
    return weights, plain, compressor.step


@pytest.mark.parametrize("wrap", [DDP, DistributedDataParallel])
@pytest.mark.parametrize("name", COMPRESSORS)
def test_a_last_bucket_without_elements_ends_the_step(ranks, name, wrap):
    for rank, (weights, plain, steps) in enumerate(ranks(2, padded, name=name, wrap=wrap)):
        assert torch.equal(weights, plain), f"rank {rank}"
        assert steps == STEPS, f"rank {rank}"
