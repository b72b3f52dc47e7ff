"""The traffic counter agrees with the log of labkit.comm, and sees what PyTorch sends from C++."""

import os
import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from labkit import comm, gloo_workarounds
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


def counted_twice(rank, n):
    """What labkit's log says of its own operations, and the counter of the same."""
    x, part, whole = torch.ones(12 * n), torch.empty(12), torch.empty(12 * n)
    with comm.record() as log, TrafficCounter(n) as traffic:
        comm.all_reduce(x)
        comm.reduce_scatter(part, x)
        comm.all_gather(whole, part)
        comm.all_to_all(x.clone(), x)
        comm.barrier()
        dist.all_reduce(whole)  # not labkit's
    payload = sum(event.payload_bytes for event in log) + whole.nbytes
    sent = sum(event.sent_bytes for event in log) + 2 * (n - 1) * whole.nbytes // n
    return traffic.messages, traffic.payload_bytes - payload, traffic.sent_bytes - sent


def over_a_cable(rank, n):
    """As if the ranks were on machines of their own."""
    with mock.patch.dict(os.environ, GLOO_SOCKET_IFNAME="eth0"):
        return counted_twice(rank, n)


@pytest.mark.parametrize("n", [2, 3])
def test_operations_that_go_as_others_count_as_themselves(ranks, n):
    assert ranks(n, counted_twice) == [(5, 0, 0)] * n
    assert ranks(n, over_a_cable) == [(5, 0, 0)] * n


def twice(rank, n):
    """A counter that is entered again, while another thread sends, which it does not see."""
    x, other = torch.ones(12 * n), dist.new_group()
    traffic = TrafficCounter(n)
    with traffic:
        comm.all_reduce(x)
    with traffic:
        thread = threading.Thread(target=comm.all_gather, args=(torch.empty(n * n * 12), x, other))
        with mock.patch.object(gloo_workarounds, "swaps", side_effect=lambda *_: thread.start() or thread.join()):
            comm.all_reduce(x)
    return traffic.messages, traffic.payload_bytes == 2 * x.nbytes


@pytest.mark.parametrize("n", [2, 3])
def test_a_counter_can_be_entered_again_and_sees_its_own_thread(ranks, n):
    assert ranks(n, twice) == [(2, True)] * n
