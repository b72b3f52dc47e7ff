import os

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
