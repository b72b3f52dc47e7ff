import os
import sys
import time

import pytest
import torch
import torch.distributed as dist


def sum_of_ranks(rank, world_size):
    value = torch.tensor([float(rank)])
    dist.all_reduce(value)
    return value


def one_rank_raises(rank, world_size):
    if rank == 1:
        raise ValueError("rank one says no")
    dist.barrier()


def one_rank_dies(rank, world_size):
    if rank == 1:
        os._exit(3)
    dist.barrier()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_rank_answers(ranks, world_size):
    assert [v.item() for v in ranks(world_size, sum_of_ranks)] == [sum(range(world_size))] * world_size


@pytest.mark.parametrize("body", [one_rank_raises, one_rank_dies])
def test_a_failure_is_told_and_the_next_run_works(ranks, body):
    with pytest.raises(AssertionError, match=r"rank one says no|rank 1 died|Connection"):
        ranks(2, body)
    assert ranks(2, sum_of_ranks)[0].item() == 1


def makes_groups(rank, world_size):
    before = threads()
    for group in [dist.new_group([0, 1]) for _ in range(4)]:
        dist.all_reduce(torch.ones(1), group=group)
    return before, threads()


def threads():
    return len(os.listdir("/proc/self/task"))


def few_threads(rank, world_size, most):
    """A thread that was joined may stay in the list for a moment."""
    deadline = time.monotonic() + 60
    while threads() > most[rank] and time.monotonic() < deadline:
        time.sleep(0.01)
    return threads()


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_a_bodys_groups_end_with_it(ranks):
    before, within = zip(*ranks(2, makes_groups), strict=True)
    assert all(more > few + 8 for few, more in zip(before, within, strict=True))
    after = ranks(2, few_threads, most=before)
    assert all(left <= few for left, few in zip(after, before, strict=True))
