"""Local SGD and DiLoCo: compared with the same rounds in one process, and with PyTorch's."""

import copy
from functools import partial

import pytest
import torch
from tensors import flat, mlp, noise
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

from labkit import comm
from labkit.compression import PowerSGD, TopK
from labkit.ddp import DDP
from labkit.local_sgd import DiLoCo, LocalSGD

STEPS = 9


def net(seed=0):
    module = mlp(6, 10, 10, 2, seed=seed).double()
    module[0].bias.requires_grad_(False)
    return module


def batch(rank, step):
    return noise(4, 6, seed=100 * step + rank, dtype=torch.float64)


def one_step(module, optimizer, rank, step):
    optimizer.zero_grad()
    module(batch(rank, step)).square().mean().backward()
    optimizer.step()


INNER = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
}


def together(rank, world_size, kind, inner, **settings):
    """Our class on ranks that begin with different weights. Returns the parameters after each step."""
    module = net(rank)
    optimizer = kind(INNER[inner](module.parameters()), **settings)
    told = []
    for step in range(STEPS):
        one_step(module, optimizer, rank, step)
        told.append(flat(module))
    return torch.stack(told)


def in_one_process(world_size, inner, every, start=0, outer=None):
    """All ranks' models one after the other. outer: (lr, momentum) of Nesterov, written out."""
    modules = [net() for _ in range(world_size)]
    optimizers = [INNER[inner](m.parameters()) for m in modules]
    anchor, velocity, told, since = flat(modules[0]), 0.0, [[] for _ in modules], 0
    for step in range(STEPS):
        for rank, (module, optimizer) in enumerate(zip(modules, optimizers, strict=True)):
            one_step(module, optimizer, rank, step)
        since += 1
        if step < start or since == every:
            since = 0
            mean = sum(flat(m) for m in modules) / world_size
            if outer:
                lr, momentum = outer
                movement = anchor - mean
                velocity = momentum * velocity + movement
                mean = anchor - lr * (movement + momentum * velocity)
                anchor = mean
            for module in modules:
                nn.utils.vector_to_parameters(mean.clone(), module.parameters())  # views of it
        for rank, module in enumerate(modules):
            told[rank].append(flat(module))
    return [torch.stack(rows) for rows in told]


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize(("n", "every", "start", "cap"), [(1, 2, 0, 25), (2, 4, 0, 25), (3, 3, 4, 0), (4, 2, 0, 1e-4)])
def test_local_sgd_is_that_of_one_process(ranks, inner, n, every, start, cap):
    told = ranks(n, together, kind=LocalSGD, inner=inner, every=every, start=start, bucket_cap_mb=cap)
    alone = in_one_process(n, inner, every, start)
    for rank, (ours, wanted) in enumerate(zip(told, alone, strict=True)):
        assert float((ours - wanted).abs().max()) < 1e-12, f"rank {rank}"


@pytest.mark.parametrize("n", [1, 2, 3])
def test_diloco_is_that_of_one_process(ranks, n):
    told = ranks(n, together, kind=DiLoCo, inner="adamw", every=3, outer_lr=0.7, outer_momentum=0.9)
    alone = in_one_process(n, "adamw", 3, outer=(0.7, 0.9))
    for rank, (ours, wanted) in enumerate(zip(told, alone, strict=True)):
        assert float((ours - wanted).abs().max()) < 1e-12, f"rank {rank}"


def test_ranks_drift_apart_and_meet_again(ranks):
    first, second = ranks(2, together, kind=LocalSGD, inner="sgd", every=3)
    assert [torch.equal(a, b) for a, b in zip(first, second, strict=True)] == [False, False, True] * 3


LINEAR = {
    "plain": {},
    "heavy ball": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "decay": {"weight_decay": 0.1},
    "all": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
}


def as_ddp(rank, world_size, make):
    ours, theirs = net(), net()
    optimizer = LocalSGD(make(ours.parameters()), every=1)
    wrapped, plain = DDP(theirs), make(theirs.parameters())
    for step in range(STEPS):
        one_step(ours, optimizer, rank, step)
        one_step(wrapped, plain, rank, step)
    return float((flat(ours) - flat(theirs)).abs().max())


@pytest.mark.parametrize("name", LINEAR)
def test_averaging_after_each_step_of_sgd_is_data_parallelism(ranks, name):
    make = partial(torch.optim.SGD, lr=0.1, **LINEAR[name])
    assert max(ranks(2, as_ddp, make=make)) < 1e-12  # the mean of steps is the step of the mean


def test_averaging_after_each_step_of_adamw_is_not(ranks):
    # It divides by the root of each rank's own squares.
    assert min(ranks(2, as_ddp, make=INNER["adamw"])) > 1e-3


def against_pytorch(rank, world_size):
    ours, theirs = net(), net()
    optimizer = LocalSGD(INNER["sgd"](ours.parameters()), every=3, start=0)
    averager = PeriodicModelAverager(period=3, warmup_steps=2)  # counts from 0: averages after steps 3, 6, 9
    their = PostLocalSGDOptimizer(INNER["sgd"](theirs.parameters()), averager)
    gaps = []
    for step in range(STEPS):
        one_step(ours, optimizer, rank, step)
        one_step(theirs, their, rank, step)
        gaps.append(float((flat(ours) - flat(theirs)).abs().max()))
    return gaps


def test_it_is_pytorchs_post_local_sgd(ranks):
    for rank, gaps in enumerate(ranks(2, against_pytorch)):
        assert max(gaps) < 1e-12, f"rank {rank}"


HOOKS = {"whole": partial(TopK, 1.0), "topk": partial(TopK, 0.1), "power": partial(PowerSGD, 2, min_saving=0)}


def compressed(rank, world_size, kind, name, cap):
    module, compressor = net(), HOOKS[name]()
    optimizer = kind(INNER["adamw"](module.parameters()), every=3, hook=compressor.hook, bucket_cap_mb=cap)
    for step in range(STEPS):
        one_step(module, optimizer, rank, step)
    return flat(module), compressor.state_dict()["residuals"]


@pytest.mark.parametrize("cap", [25, 0])
@pytest.mark.parametrize("kind", [LocalSGD, DiLoCo])
@pytest.mark.parametrize("name", HOOKS)
def test_the_average_can_be_compressed(ranks, kind, name, cap):
    (first, residuals), (second, _) = ranks(2, compressed, kind=kind, name=name, cap=cap)
    assert torch.equal(first, second)
    assert len(residuals) == 5  # one for each parameter that trains, under a name of its own
    if name == "whole":
        wanted = ranks(2, together, kind=kind, inner="adamw", every=3)[0][-1]
        assert float((first - wanted).abs().max()) < 1e-12


def messages(rank, world_size, kind):
    module, counts = net(), []
    optimizer = kind(INNER["adamw"](module.parameters()), every=3)
    for step in range(6):
        with comm.record() as log:
            one_step(module, optimizer, rank, step)
        counts.append([(event.op, event.payload_bytes) for event in log])
    return counts, 8 * sum(p.numel() for p in module.parameters() if p.requires_grad)


@pytest.mark.parametrize("kind", [LocalSGD, DiLoCo])
def test_it_talks_every_third_step_only(ranks, kind):
    counts, size = ranks(2, messages, kind=kind)[0]
    assert counts == [[], [], [("all_reduce", size)]] * 2


def resumed(rank, world_size, kind):
    def make(module):
        return kind(INNER["adamw"](module.parameters()), every=3)

    straight, halted = net(), net()
    one, two = make(straight), make(halted)
    for step in range(8):
        one_step(straight, one, rank, step)
    for step in range(4):  # in the middle of a round
        one_step(halted, two, rank, step)
    weights, state = copy.deepcopy(halted.state_dict()), copy.deepcopy(two.state_dict())
    again = net(5)
    three = make(again)
    again.load_state_dict(weights)
    three.load_state_dict(state)
    for step in range(4, 8):
        one_step(again, three, rank, step)
    return torch.equal(flat(straight), flat(again))


@pytest.mark.parametrize("kind", [LocalSGD, DiLoCo])
def test_it_resumes_in_the_middle_of_a_round(ranks, kind):
    assert ranks(2, resumed, kind=kind) == [True, True]


def differing(rank, world_size):
    with pytest.raises(ValueError, match=r"rank 0 has every=2.*rank 1 has every=3"):
        LocalSGD(INNER["sgd"](net().parameters()), every=2 + rank)
    with pytest.raises(ValueError, match=r"rank 0 has .*'lr': 0.5.*rank 1 has .*'lr': 1.5"):
        DiLoCo(INNER["sgd"](net().parameters()), outer_lr=0.5 + rank)


def test_ranks_that_differ_are_told(ranks):
    ranks(2, differing)


@pytest.mark.parametrize("every", [0, -1, 2.0])
def test_every_must_be_a_number_of_steps(every):
    with pytest.raises(ValueError, match="must be an integer >= 1"):
        LocalSGD(INNER["sgd"](net().parameters()), every=every)


def added(rank, world_size):
    for kind in (LocalSGD, DiLoCo):
        module = net()
        optimizer = kind(torch.optim.SGD(module[2:].parameters(), 0.1), every=2)
        with pytest.raises(RuntimeError, match=f"{kind.__name__} cannot add a parameter group"):
            optimizer.add_param_group({"params": module[0].parameters()})
        one_step(module, optimizer, rank, 0)
        optimizer.inner.add_param_group({"params": module[0].parameters()})
        with pytest.raises(RuntimeError, match=r"shape \[10, 6\] was added or unfrozen after"):
            one_step(module, optimizer, rank, 1)


def test_parameters_that_would_not_be_averaged_are_refused(ranks):
    ranks(2, added)
