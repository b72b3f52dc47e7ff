import os
import sys

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
    for group in [dist.new_group([0, 1]) for _ in range(4)]:
        dist.all_reduce(torch.ones(1), group=group)
    return threads(rank, world_size)


def threads(rank, world_size):
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_a_bodys_groups_end_with_it(ranks):
    before = ranks(2, threads)
    assert max(ranks(2, makes_groups)) > max(before) + 8
    assert ranks(2, threads) == before
