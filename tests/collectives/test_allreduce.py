import time
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tensors import noise

from labkit import comm
from labkit.allreduce import ALGORITHMS, PipelinedRing, allreduce, chunk_pipelining

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
SEGMENTS = [(1009, 64), (1024, 256), (23, 8), (3 << 18, 2 << 20), (1009, None), (3 << 18, None)]
sizes = pytest.mark.parametrize("n", [1, 2, 3, 4])
algorithms = pytest.mark.parametrize("name", [*ALGORITHMS, "pipelined"])


def values(shape, dtype, rank):
    """Small whole numbers, different on every rank and exact in every dtype: sums do not depend on their order."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randint(0, 8, shape, generator=generator).to(dtype)


@contextmanager
def algorithm(name):
    """The algorithm as a function of a tensor. The pipelined ring is one object for all calls: it keeps its memory."""
    if name != "pipelined":
        yield ALGORITHMS[name]
        return
    twin = dist.new_group()
    yield PipelinedRing(twin)
    dist.destroy_process_group(twin)


def against_gloo(rank, n, name):
    with algorithm(name) as all_reduce:
        for dtype in DTYPES:
            for shape in SHAPES:
                ours = values(shape, dtype, rank)
                theirs, exact = ours.clone(), sum(values(shape, dtype, r) for r in range(n))
                all_reduce(ours)
                dist.all_reduce(theirs)
                assert ours.dtype == dtype and ours.shape == shape
                assert torch.equal(ours, theirs), (dtype, shape)
                assert torch.equal(ours, exact), (dtype, shape)


@sizes
@algorithms
def test_equals_gloo_and_the_exact_sum(ranks, n, name):
    ranks(n, against_gloo, name=name)


def in_segments(rank, n, name, elements, segment_bytes):
    """More segments than places, the last ones shorter; or whole, as for NCCL. Random values, so that order shows."""
    changed = {"SEGMENT_BYTES": segment_bytes} if segment_bytes else {"_cuts_by_itself": lambda tensor: True}
    with mock.patch.multiple(chunk_pipelining, **changed), algorithm(name) as all_reduce:
        exact = values((elements,), torch.float64, rank)
        all_reduce(exact)
        assert torch.equal(exact, sum(values((elements,), torch.float64, r) for r in range(n)))
        random = noise(elements, seed=rank)
        all_reduce(random)
        return random


@sizes
@algorithms
@pytest.mark.parametrize(("elements", "segment_bytes"), SEGMENTS)
def test_any_number_of_segments_and_ranks_end_bitwise_equal(ranks, n, name, elements, segment_bytes):
    first, *others = ranks(n, in_segments, name=name, elements=elements, segment_bytes=segment_bytes)
    for other in others:
        assert torch.equal(first, other)  # each element is added up once, on one rank, then copied
    # fp32 sums of n normals in any order
    random = [noise(elements, seed=r) for r in range(n)]
    assert torch.allclose(first, sum(random), atol=1e-5, rtol=0)


def layouts(rank, n, name):
    with algorithm(name) as all_reduce:
        in_any_layout(rank, n, all_reduce)


def in_any_layout(rank, n, all_reduce):
    """Tensors that are not one contiguous line, and their neighbours in memory, which must stay as they were."""

    def check(view_of, shape):
        base = values(shape, torch.float32, rank)
        before, exact = base.clone(), view_of(sum(values(shape, torch.float32, r) for r in range(n)))
        all_reduce(view_of(base))
        assert torch.equal(view_of(base), exact)
        view_of(before).copy_(exact)
        assert torch.equal(base, before), "an element outside the view was changed"

    check(lambda t: t.t(), (6, 9))
    check(lambda t: t[:, 1::3], (5, 8))
    check(lambda t: t[2:5], (7, 4))  # contiguous, but inside a larger storage
    check(lambda t: t.select(1, 2), (6, 4))
    check(lambda t: t.permute(2, 0, 1), (2, 3, 4))
    image = values((2, 3, 4, 4), torch.float32, rank).to(memory_format=torch.channels_last)
    all_reduce(image)
    assert torch.equal(image, sum(values((2, 3, 4, 4), torch.float32, r) for r in range(n)))
    assert image.is_contiguous(memory_format=torch.channels_last)
    parameter = torch.nn.Parameter(values((3, 3), torch.float32, rank))
    all_reduce(parameter)
    assert parameter.requires_grad and parameter.is_leaf
    assert torch.equal(parameter.detach(), sum(values((3, 3), torch.float32, r) for r in range(n)))


@sizes
@algorithms
def test_any_layout(ranks, n, name):
    ranks(n, layouts, name=name)


def in_groups(rank, n, name):
    """Two groups at once, one of them with its ranks in another order than the world's."""
    members = [[0, 2], [3, 1]] if n == 4 else [[0], [2, 1]]
    groups = [dist.new_group(m, use_local_synchronization=False) for m in members * 2]
    which = next(i for i, m in enumerate(members) if rank in m)
    tensor = values((7,), torch.float64, rank)
    if name == "pipelined":
        PipelinedRing(groups[which + len(members)], groups[which])(tensor)
    else:
        ALGORITHMS[name](tensor, group=groups[which])
    assert torch.equal(tensor, sum(values((7,), torch.float64, r) for r in members[which]))
    for group in groups:
        if dist.get_rank(group) >= 0:
            dist.destroy_process_group(group)


@pytest.mark.parametrize("n", [3, 4])
@algorithms
def test_sub_groups(ranks, n, name):
    ranks(n, in_groups, name=name)


def counted(rank, n, name, elements):
    tensor = torch.ones(elements)
    with algorithm(name) as all_reduce, comm.record() as log:
        all_reduce(tensor)
    assert tensor.eq(n).all()
    assert all(event.source == "counted" and event.end is not None for event in log)
    return sum(event.sent_bytes for event in log), sum(event.op == "send" for event in log)


@pytest.mark.parametrize("name", ["ring", "pipelined"])
@pytest.mark.parametrize("elements", [12, 12 << 10, 3 << 20])
@sizes
def test_the_ring_sends_exactly_the_formula(ranks, n, name, elements):
    for rank, (sent, messages) in enumerate(ranks(n, counted, name=name, elements=elements)):
        assert sent == 2 * (n - 1) * elements * 4 // n, f"rank {rank}"
        in_a_chunk = max(1, -(-elements * 4 // n // chunk_pipelining.SEGMENT_BYTES))
        assert messages == 2 * (n - 1) * in_a_chunk, f"rank {rank}"


@pytest.mark.parametrize("elements", [12, 12 << 10])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_halving_doubling_sends_as_little_in_fewer_messages(ranks, n, elements):
    for rank, (sent, messages) in enumerate(ranks(n, counted, name="halving_doubling", elements=elements)):
        assert sent == 2 * (n - 1) * elements * 4 // n, f"rank {rank}"
        assert messages == 2 * (n.bit_length() - 1), f"rank {rank}"


def test_what_the_fold_and_the_tree_send(ranks):
    P = 48
    # p = 2: rank 2 hands over P, rank 0 halves and doubles (2 (p-1)/p P) and hands P back
    assert [sent for sent, _ in ranks(3, counted, name="halving_doubling", elements=12)] == [2 * P, P, P]
    # 0 over 1 and 2; 1 over 3
    assert [sent for sent, _ in ranks(4, counted, name="tree", elements=12)] == [2 * P, 2 * P, P, P]


def phases(rank, n, elements):
    flat = values((elements,), torch.float64, rank)
    exact = sum(values((elements,), torch.float64, r) for r in range(n))
    chunk = allreduce.ring_reduce_scatter(flat)
    assert torch.equal(chunk, exact.tensor_split(n)[rank])
    assert chunk.numel() == 0 or chunk.data_ptr() == flat.tensor_split(n)[rank].data_ptr()  # a view: no copy
    other = torch.full((elements,), -1.0)
    other.tensor_split(n)[rank].fill_(rank)
    allreduce.ring_all_gather(other)
    for r, chunk in enumerate(other.tensor_split(n)):
        assert chunk.eq(r).all()


@sizes
@pytest.mark.parametrize("elements", [0, 1, 3, 12, 101])
def test_the_two_phases_of_the_ring_alone(ranks, n, elements):
    ranks(n, phases, elements=elements)


def overlapping(rank, n, name):
    tensor = torch.ones(1).expand(4)
    with algorithm(name) as all_reduce, pytest.raises(RuntimeError, match="single memory location"):
        all_reduce(tensor)


@algorithms
def test_a_tensor_that_cannot_hold_the_sum_is_refused(ranks, name):
    ranks(2, overlapping, name=name)


def naively(rank, n):
    for shape in SHAPES:
        ours = values(shape, torch.float64, rank)
        with comm.record() as log:
            allreduce.naive(ours)
        assert torch.equal(ours, sum(values(shape, torch.float64, r) for r in range(n)))
        if n > 1:
            assert sum(event.sent_bytes for event in log) == ours.nbytes * (n - 1 if rank == 0 else 1)


@sizes
def test_the_naive_one_is_right_and_rank_0_sends_what_the_formula_says(ranks, n):
    ranks(n, naively)


def kept(rank, n):
    """Larger, smaller, larger again, in another dtype: its memory grows to the largest and then stays where it is."""
    with algorithm("pipelined") as all_reduce:
        held = []
        for elements in (5000, 12000, 40, 12000, 0, 6000):
            for dtype in (torch.float64, torch.uint8):
                tensor = values((elements,), dtype, rank)
                all_reduce(tensor)
                assert torch.equal(tensor, sum(values((elements,), dtype, r) for r in range(n)))
            held.append([memory.data_ptr() for memory in all_reduce._memory])
        assert held[1:] == held[1:2] * 5
        assert sum(memory.nbytes for memory in all_reduce._memory) <= min(2, n - 1) * 8 * -(-12000 // max(2, n))


@sizes
def test_the_pipelined_ring_keeps_its_memory(ranks, n):
    ranks(n, kept)


def late(rank, n):
    """Rank 0 comes late to each call, so others may be one call ahead of it: their messages must wait for its next."""
    with mock.patch.object(chunk_pipelining, "SEGMENT_BYTES", 64), algorithm("pipelined") as all_reduce:
        for number in range(20):
            tensor = torch.full((101,), float(rank + number))
            if rank == number % n:
                time.sleep(0.01)
            all_reduce(tensor)
            assert tensor.eq(sum(r + number for r in range(n))).all()


@pytest.mark.parametrize("n", [2, 3, 4])
def test_ranks_of_a_pipelined_ring_may_come_late(ranks, n):
    ranks(n, late)


def refused(rank, n):
    alone = [dist.new_group([r]) for r in range(n)]
    for twin in (alone[rank], dist.group.WORLD):
        with pytest.raises(ValueError, match="a second group of the same ranks"):
            PipelinedRing(twin)
    dist.destroy_process_group(alone[rank])
    nccl = mock.patch.object(dist, "get_backend", lambda group: "nccl")
    with nccl, pytest.raises(ValueError, match="supports gloo only, not nccl"):
        PipelinedRing(alone[rank])


def test_the_pipelined_ring_refuses_what_it_cannot_use(ranks):
    ranks(2, refused)
