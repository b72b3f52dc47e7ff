"""Hierarchical all-reduce against the flat one: exact, with fewer bytes between nodes, and as a hook of either DDP."""

import threading
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tensors import noise
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from labkit import comm, hierarchical
from labkit.ddp import DDP
from labkit.hierarchical import FORMS, Hierarchical
from labkit.mesh import Mesh

GRIDS = [(1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (2, 2), (4, 1), (2, 3), (3, 2)]
DTYPES = [torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]
SHAPES = [(), (0,), (1,), (2,), (3,), (5,), (97,), (3, 5, 7), (4, 0, 2), (8, 8)]
forms = pytest.mark.parametrize("form", FORMS)


def groups(nodes, local):
    """(inside, across), and node and position of this rank."""
    mesh = Mesh({"node": nodes, "local": local})
    return (mesh.group("local"), mesh.group("node")), mesh.rank("node"), mesh.rank("local")


def whole_numbers(shape, dtype, rank):
    """Small whole numbers, exact in every dtype: sums do not depend on their order."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randint(0, 8, shape, generator=generator).to(dtype)


def against_flat(rank, world_size, nodes, form):
    (inside, across), _, _ = groups(nodes, world_size // nodes)
    for dtype, shape, bytes_a_segment in product(DTYPES, SHAPES, (hierarchical.SEGMENT_BYTES, 48)):
        ours = whole_numbers(shape, dtype, rank)
        theirs = ours.clone()
        with mock.patch.object(hierarchical, "SEGMENT_BYTES", bytes_a_segment):
            FORMS[form](ours, inside, across)
        dist.all_reduce(theirs)
        assert torch.equal(ours, theirs), (dtype, shape, bytes_a_segment)
    ours = noise(6, 5, seed=rank, dtype=torch.float64).t()  # with gaps
    theirs = ours.contiguous()  # NCCL takes no other
    FORMS[form](ours, inside, across)
    dist.all_reduce(theirs)
    assert (ours - theirs).abs().max() < 1e-12  # another order of the same sums
    return ours


@forms
@pytest.mark.parametrize(("nodes", "local"), GRIDS)
def test_it_equals_the_flat_one_on_any_grid(ranks, nodes, local, form):
    results = ranks(nodes * local, against_flat, nodes=nodes, form=form)
    for rank, result in enumerate(results):
        assert torch.equal(result, results[0]), f"rank {rank}"  # bitwise, or replicas drift apart


def uneven(rank, world_size):
    pair, single, leaders = dist.new_group([0, 1]), dist.new_group([2]), dist.new_group([0, 2])
    x = torch.tensor([1.0 + rank, 10.0])
    FORMS["leaders"](x, single if rank == 2 else pair, leaders)
    return x.tolist()


def test_leaders_allow_nodes_of_different_sizes(ranks):
    assert ranks(3, uneven) == [[6.0, 30.0]] * 3


def sent(rank, world_size, nodes, form, numel):
    (inside, across), node, _ = groups(nodes, world_size // nodes)
    x = torch.ones(numel)
    with comm.record() as log:
        FORMS[form](x, inside, across)
    between = sum(e.sent_bytes for e in log if e.op == "all_reduce")  # the only bytes sent between nodes
    return node, between, [e.op for e in log]


@pytest.mark.parametrize(("nodes", "local"), [(2, 3), (3, 2)])
def test_each_node_sends_what_its_ranks_would_as_one(ranks, nodes, local):
    numel = 6 * 3 * 100
    for form in FORMS:
        results = ranks(6, sent, nodes=nodes, form=form, numel=numel)
        for node in range(nodes):
            # 2 (m-1)/m P, by all ranks of a node together; a flat ring would send 2 (n-1)/n P from each.
            assert (
                sum(between for where, between, _ in results if where == node) == 2 * (nodes - 1) * 4 * numel // nodes
            )
        if form == "hierarchical":
            assert all(ops == ["reduce_scatter", "all_reduce", "all_gather"] for *_, ops in results)


def test_segments_follow_each_other(ranks):
    """All are launched before the first wait; the remainder that does not divide is sent first, and is small."""
    numel = 2 * hierarchical.SEGMENT_BYTES // 4 + 4
    for rank, (*_, ops) in enumerate(ranks(6, sent, nodes=2, form="hierarchical", numel=numel)):
        sums = ["reduce_scatter", "all_reduce"]
        assert ops == ["all_reduce", "all_reduce", *(3 * sums), "all_gather", "all_gather", "all_gather"], (
            f"rank {rank}"
        )


class Net(nn.Module):
    """Tied and frozen parameters, and one that the first step does not use."""

    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.a, self.b, self.c = (nn.Linear(7, 7, dtype=torch.float64) for _ in range(3))
        self.b.weight = self.a.weight
        self.c.bias.requires_grad_(False)
        self.extra = nn.Parameter(torch.zeros(5, dtype=torch.float64))
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype))

    def forward(self, x, step):
        x = self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))
        return x + self.extra.sum() if step else x


def batch(step):
    return noise(12, 7, seed=step, dtype=torch.float64)


def train(rank, world_size, wrap=None, nodes=2, form="hierarchical", around=None):
    """Four steps on this rank's share, or, without a wrapper, in one process on the whole batch."""
    module = Net(seed=rank if wrap else 0)
    model = module
    if wrap:
        model = wrap(module, bucket_cap_mb=0.0005, find_unused_parameters=True)
        inside, across = groups(nodes, world_size // nodes)[0]
        hook = Hierarchical(inside, across, form).hook
        model.register_comm_hook(None, around(hook) if around else hook)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        x = batch(step)
        model(x[rank::world_size] if wrap else x, step).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def hooked(rank, world_size, **options):
    return [train(rank, world_size, wrap, **options) for wrap in (DDP, DistributedDataParallel)]


@forms
@pytest.mark.parametrize(("world_size", "nodes"), [(2, 1), (2, 2), (3, 3), (4, 2)])
def test_as_a_hook_of_either_ddp_it_trains_as_one_process_does(ranks, world_size, nodes, form):
    alone = train(0, 1)
    results = ranks(world_size, hooked, nodes=nodes, form=form)
    for rank, (ours, theirs) in enumerate(results):
        assert (ours - alone).abs().max() < 1e-12, f"rank {rank}"
        assert (theirs - alone).abs().max() < 1e-12, f"rank {rank}"
        assert torch.equal(ours, results[0][0]) and torch.equal(theirs, results[0][1]), (
            f"rank {rank}"
        )  # the ranks never part


def halved(rank, world_size):
    return hooked(rank, world_size, around=default_hooks.fp16_compress_wrapper)


def test_pytorchs_wrapper_for_half_precision_goes_around_it(ranks):
    alone = train(0, 1)
    for rank, results in enumerate(ranks(4, halved)):
        assert all(1e-12 < (result - alone).abs().max() < 1e-2 for result in results), f"rank {rank}"


def failing(rank, world_size):
    inside, across = groups(2, 2)[0]
    hierarchy = Hierarchical(inside, across)

    def all_reduce(*_):
        raise ConnectionError("the link is gone")

    hierarchy.all_reduce = all_reduce
    model = DDP(Net(seed=0))
    model.register_comm_hook(None, hierarchy.hook)
    with pytest.raises(Exception, match="the link is gone"):
        model(batch(0), 1).sum().backward()
    return True


def test_an_error_in_the_courier_reaches_backward(ranks):
    assert all(ranks(4, failing))


def on_cuda(rank, world_size):
    """The hook's way on a GPU, with stand-ins for its stream and its tensor: which thread sends?"""
    hook, threads = Hierarchical(*groups(2, 2)[0]), []
    hook.carry_on_stream = lambda buffer, future, filled: threads.append(threading.current_thread())
    hook._agreed = True
    buffer = mock.Mock(is_cuda=True)
    buffer.div_.return_value = buffer
    with mock.patch("torch.cuda.Stream"), mock.patch("torch.cuda.current_stream"), mock.patch("torch.futures.Future"):
        hook.hook(None, mock.Mock(buffer=lambda: buffer))
    hook.courier.shutdown()
    return threads == [threading.current_thread()]


def test_on_a_gpu_one_thread_starts_all_messages(ranks):
    """DDP sends by another group in the meantime (find_unused_parameters), and NCCL's must start in one order."""
    assert ranks(4, on_cuda) == [True] * 4


def wrong_form(rank, world_size):
    with pytest.raises(ValueError, match="unknown form 'rings': choose one of hierarchical, leaders"):
        Hierarchical(None, None, "rings")
    with pytest.raises(ValueError, match="mesh node 2 x local 2 needs 4 ranks, but the world size is 3"):
        groups(2, 2)
    return True


def test_a_form_or_a_grid_that_cannot_be_is_named(ranks):
    assert all(ranks(3, wrong_form))


def two_forms(rank, world_size):
    hook = Hierarchical(*groups(2, 2)[0], form="leaders" if rank == 3 else "hierarchical").hook
    model = DDP(Net(seed=0))
    model.register_comm_hook(None, hook)
    with pytest.raises(ValueError, match=r"rank 0 has an all-reduce of the form hierarchical, rank 3 has .* leaders"):
        model(batch(0), 1).sum().backward()
    return True


def test_ranks_with_different_forms_are_told(ranks):
    assert all(ranks(4, two_forms))
