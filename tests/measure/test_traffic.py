"""The traffic counter agrees with the log of labkit.comm, and sees what PyTorch sends from C++."""

import pytest
import torch
import torch.distributed as dist

from labkit import comm
from labkit.measure.traffic import TrafficCounter


def both_counts(rank, world_size):
    x, part, whole = torch.ones(12 * world_size), torch.ones(12), torch.ones(12 * world_size)
    with TrafficCounter(world_size) as traffic, comm.record() as log:
        comm.all_reduce(x)
        comm.all_gather(whole, part)
        comm.reduce_scatter(part, whole)
        comm.broadcast(x)
        comm.barrier()
    return traffic.messages, traffic.sent_bytes, sum(event.sent_bytes for event in log)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_it_agrees_with_the_log(ranks, world_size):
    for rank, (messages, sent, logged) in enumerate(ranks(world_size, both_counts)):
        assert messages == 4 and sent == logged == 48 * (world_size - 1) * (2 + 1 + 1 + 1), f"rank {rank}"


def torchs_own(rank, world_size):
    """What fully_shard sends: our forms on gloo are made of other operators."""
    part, whole = torch.ones(12), torch.ones(12 * world_size)
    with TrafficCounter(world_size) as traffic:
        comm._all_gather(whole, part)
        comm._reduce_scatter(part, whole)
    return traffic.messages, traffic.sent_bytes


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_it_counts_torchs_own_gather_and_reduce_scatter(ranks, world_size):
    assert ranks(world_size, torchs_own) == [(2, 2 * 48 * (world_size - 1))] * world_size


def from_cpp(rank, world_size):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    for _ in range(3):  # the second step also sends the new order of the buckets
        with TrafficCounter(world_size) as traffic:
            model(torch.ones(2, 8)).sum().backward()
    return traffic.payload_bytes


def test_it_sees_the_messages_of_pytorchs_reducer(ranks):
    assert ranks(2, from_cpp) == [4 * 72, 4 * 72]


def unknown(rank, world_size):
    with TrafficCounter(world_size), pytest.raises(ValueError, match=r"no formula .* c10d\.gather_"):
        dist.gather(torch.ones(1), [torch.ones(1) for _ in range(world_size)] if rank == 0 else None)
    return True


def test_a_collective_without_a_formula_is_named(ranks):
    assert ranks(2, unknown) == [True, True]
