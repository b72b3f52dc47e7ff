"""Uneven inputs: join() against PyTorch's, step by step and to the last bit that two ranks allow."""

import pytest
import torch
from tensors import noise
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labkit import comm
from labkit.ddp import DDP

COUNTS = [[3, 3, 3], [1, 4, 2], [4, 0, 2], [0, 0, 0]]  # batches per rank


def build(kind):
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(4) if kind == "batch" else nn.Tanh()
    return nn.Sequential(nn.Linear(4, 4), middle, nn.Linear(4, 4)).double()


def data(rank, step):
    return noise(3, 4, seed=10 * step + rank).double()


def uneven(rank, world_size, wrap, kind, counts, divide, accumulate):
    module = build(kind)
    wrapped = DDP(module) if wrap == "ours" else DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    gradients = []
    for _ in range(2):  # the second epoch starts from whatever the first has left behind
        with wrapped.join(divide_by_initial_world_size=divide):
            for step in range(counts[rank]):
                optimizer.zero_grad()
                if accumulate:
                    with wrapped.no_sync():
                        wrapped(data(rank, 50 + step)).square().sum().backward()
                wrapped(data(rank, step)).square().sum().backward()
                gradients.append([p.grad.clone() for p in module.parameters()])
                optimizer.step()
    return {name: t.clone() for name, t in module.state_dict().items()}, gradients


@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("kind", ["plain", "batch"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_uneven_inputs_end_as_in_pytorch(ranks, world_size, kind, counts, divide):
    arguments = {"kind": kind, "counts": counts, "divide": divide, "accumulate": counts[0] == 1}
    ours, theirs = (ranks(world_size, uneven, wrap=wrap, **arguments) for wrap in ("ours", "torch"))
    for rank in range(world_size):
        for name, value in ours[rank][0].items():
            torch.testing.assert_close(value, theirs[rank][0][name], rtol=0, atol=1e-13)
            assert torch.equal(value, ours[0][0][name]), f"rank {rank}, {name}"  # one model on all ranks
        assert len(ours[rank][1]) == 2 * counts[rank], f"rank {rank}"
        for mine, other in zip(ours[rank][1], theirs[rank][1], strict=True):
            for a, b in zip(mine, other, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)).double()

    def forward(self, x, chosen):
        return sum(self.parts[i](x) for i in chosen)


def with_unused(rank, world_size, counts):
    wrapped = DDP(Branches(), bucket_cap_mb=0, find_unused_parameters=True)
    with wrapped.join():
        for step in range(counts[rank]):
            wrapped.zero_grad()
            wrapped(data(rank, step), [rank]).sum().backward()
    return [p.grad is None for p in wrapped.parameters()]


def test_unused_parameters_and_join(ranks):
    told = ranks(2, with_unused, counts=[1, 3])
    assert told[0] == [False, False, False, False, True, True]  # its own last step, with both ranks
    assert told[1] == [True, True, False, False, True, True]  # rank 0 has left, and with it branch 0


def early(rank, world_size, counts):
    wrapped = DDP(build("plain"))
    done = 0
    try:
        with wrapped.join(throw_on_early_termination=True):
            for step in range(counts[rank]):
                wrapped(data(rank, step)).sum().backward()
                done += 1
    except RuntimeError as error:
        assert "ranks [1] ran out of data before ranks [0, 2]" in str(error)
        wrapped.zero_grad()
        wrapped(data(rank, 0)).sum().backward()  # and outside of the block all is as before
        return done
    return None


def test_throw_on_early_termination_ends_all_ranks_at_once(ranks):
    assert ranks(3, early, counts=[4, 2, 3]) == [2, 2, 2]


def disabled(rank, world_size):
    wrapped = DDP(build("plain"))
    with comm.record() as log, wrapped.join(enable=False):
        wrapped(data(rank, 0)).sum().backward()
    with pytest.raises(KeyError), wrapped.join():
        raise KeyError("the user's own")
    return [event.op for event in log]


def test_disabled_it_sends_nothing_and_an_exception_passes(ranks):
    assert ranks(2, disabled) == [["all_reduce"]] * 2


def with_hook(rank, world_size, wrap, counts):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    module = build("plain")
    wrapped = DDP(module) if wrap == "ours" else DistributedDataParallel(module)
    wrapped.register_comm_hook(None, allreduce_hook)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with wrapped.join():
        for step in range(counts[rank]):
            optimizer.zero_grad()
            wrapped(data(rank, step)).sum().backward()
            optimizer.step()
    return [p.detach().clone() for p in module.parameters()]


def test_comm_hooks_and_join(ranks):
    ours, theirs = (ranks(2, with_hook, wrap=wrap, counts=[1, 3]) for wrap in ("ours", "torch"))
    for rank, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True)), f"rank {rank}"
