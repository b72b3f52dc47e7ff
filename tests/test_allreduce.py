import pytest
import torch
import torch.distributed as dist

from labkit import allreduce, comm
from labkit.allreduce import ALGORITHMS

# What gloo's own all_reduce takes as well, so that it can be the oracle.
DTYPES = [
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]
SHAPES = [(), (0,), (1,), (2,), (3,), (5,), (97,), (3, 5, 7), (4, 0, 2), (8, 8)]
sizes = pytest.mark.parametrize("n", [1, 2, 3, 4])
algorithms = pytest.mark.parametrize("name", ALGORITHMS)


def values(shape, dtype, rank):
    """Small whole numbers, different on every rank and exact in every dtype: sums do not depend on their order."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randint(0, 8, shape, generator=generator).to(dtype)


def against_gloo(rank, n, name):
    for dtype in DTYPES:
        for shape in SHAPES:
            ours = values(shape, dtype, rank)
            theirs, exact = ours.clone(), sum(values(shape, dtype, r) for r in range(n))
            ALGORITHMS[name](ours)
            dist.all_reduce(theirs)
            assert ours.dtype == dtype and ours.shape == shape
            assert torch.equal(ours, theirs), (dtype, shape)
            assert torch.equal(ours, exact), (dtype, shape)


@sizes
@algorithms
def test_equals_gloo_and_the_exact_sum(ranks, n, name):
    ranks(n, against_gloo, name=name)
