"""1-bit LAMB: LAMB in its warm-up, then its paper's algorithm written again for one process, in float64."""

from functools import partial

import pytest
import torch
from hook_training import train
from tensors import gap, mlp, noise
from test_compression_training import on_text
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labkit import comm
from labkit.compression import OneBit, OneBitLamb, TopK
from labkit.compression.onebit_optimizer import OneBitOptimizer
from labkit.ddp import DDP
from labkit.ddp.bucket import Bucket
from labkit.lamb import LAMB

CLOSE = 1e-12
STEPS, WARMUP, RANKS, CHUNK = 9, 4, 3, 16
SIZES = (40, 24)  # the third chunk has elements of both; the second tensor's gradients are a tenth as large
F64 = torch.float64


def gradient(number, step, rank):
    """Of one rank: a direction that all share and that lasts, and what is its own."""
    both = noise(SIZES[number], seed=number, dtype=F64), noise(SIZES[number], seed=9 + 100 * step + rank, dtype=F64)
    return sum(both) / 10**number


def starts():
    return [2 + noise(size, seed=50 + i, dtype=F64) for i, size in enumerate(SIZES)]


def signs(values):
    """What one bit an element transmits: the signs, and the mean magnitude of each chunk."""
    scale = values.view(-1, CHUNK).abs().mean(1).repeat_interleave(CHUNK)
    return torch.where(values >= 0, scale, -scale)


def everything(values):
    return values


def rms(values):
    return float(values.square().mean().sqrt())


def in_one_process(world_size, compress, lr, betas, eps, weight_decay, bounds, beta, factors, change):
    """Li et al., without the server's second compression: [weights] by step, [factors] by step.

    bounds, beta: of the trust ratio and its average; factors, change: bounds of the factor, and its change in a step.
    """
    b1, b2 = betas
    x, told, seen = starts(), [], []
    m, v, fresh = ([0.0 * one for one in x] for _ in range(3))
    error = [torch.zeros(sum(SIZES), dtype=F64) for _ in range(world_size)]
    average, factor = [0.0, 0.0], [1.0, 1.0]
    for t in range(1, STEPS + 1):
        own = [[gradient(i, t - 1, k) for i in (0, 1)] for k in range(world_size)]
        before = list(m)
        if t <= WARMUP:
            means = [sum(own[k][i] for k in range(world_size)) / world_size for i in (0, 1)]
            m = [b1 * m[i] + (1 - b1) * means[i] for i in (0, 1)]
            v = [b2 * v[i] + (1 - b2) * means[i] ** 2 for i in (0, 1)]
        else:
            if t == WARMUP + 1:
                fresh, scale = list(v), [(rms(m[0]) + rms(m[1])) / 2 / rms(one) for one in m]
            total = 0.0
            for k in range(world_size):
                local = torch.cat([scale[i] * (b1 * m[i] + (1 - b1) * own[k][i]) for i in (0, 1)]) + error[k]
                sent = compress(local)
                error[k] = local - sent
                total = total + sent / world_size
            m = [part / scale[i] for i, part in enumerate(total.split(SIZES))]
        for i in (0, 1):
            root = (v[i] / (1 - b2 ** min(t, WARMUP))).sqrt() + eps
            r = m[i] / (1 - b1**t) / root
            u = r + weight_decay * x[i]
            if t <= WARMUP:
                ratio = min(max(float(x[i].norm() / u.norm()), bounds[0]), bounds[1])
                average[i] = beta * average[i] + (1 - beta) * ratio
            else:
                fresh[i] = b2 * fresh[i] + (1 - b2) * ((m[i] - b1 * before[i]) / (1 - b1)) ** 2
                share = min(1.0, float(r.norm() / u.norm()))  # of the update, that is not decay
                found = share * float((root / ((fresh[i] / (1 - b2**t)).sqrt() + eps)).max()) + 1 - share
                found = min(max(found, factors[0]), factors[1])
                factor[i] = min(max(found, factor[i] * (1 - change)), factor[i] * (1 + change))
                ratio = average[i] * factor[i]
            x[i] = x[i] - lr * ratio * u
        told.append(torch.cat(x))
        seen.append(list(factor))
    return told, seen


def on_ranks(rank, world_size, compressor, lr, betas, eps, weight_decay, bounds, beta, factors, change):
    members, told, seen = [nn.Parameter(start) for start in starts()], [], []
    optimizer = OneBitLamb(
        members,
        lr,
        betas,
        eps,
        weight_decay,
        warmup=WARMUP,
        compressor=compressor(),
        ratio_bounds=bounds,
        ratio_beta=beta,
        factor_bounds=factors,
        factor_change=change,
    )
    for step in range(STEPS):
        bucket = Bucket(members)
        for i, (p, view) in enumerate(zip(members, bucket.gradients(), strict=True)):
            p.grad = view.copy_(gradient(i, step, rank))
        optimizer.hook(None, bucket).wait()
        optimizer.step()
        told.append(torch.cat([p.detach() for p in members]))
        seen.append([optimizer.state[p]["factor"] for p in members])
    return told, seen


OPTIONS = {"lr": 0.05, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.01, "bounds": (0.01, 10.0), "beta": 0.5}
LIMITS = {
    "free": {"factors": (0.0, 100.0), "change": 100.0},
    "bounds": {"factors": (0.95, 1.05), "change": 100.0},
    "change": {"factors": (0.0, 100.0), "change": 0.01},
}


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize(
    ("compress", "compressor"),
    [(everything, partial(TopK, 1.0)), (signs, partial(OneBit, CHUNK))],
    ids=["compression off", "one bit"],
)
def test_it_is_the_papers_algorithm(ranks, compress, compressor, limits):
    settings = OPTIONS | LIMITS[limits]
    wanted, factors = in_one_process(RANKS, compress, **settings)
    for rank, (told, seen) in enumerate(ranks(RANKS, on_ranks, compressor=compressor, **settings)):
        assert gap(told, wanted) < CLOSE, f"rank {rank}"
        assert gap(list(map(torch.tensor, seen)), list(map(torch.tensor, factors))) < 1e-6, f"rank {rank}"


def lamb_and_ours(rank, world_size, wrap, steps):
    ours, plain = mlp(24, 40, 40, 4), mlp(24, 40, 40, 4)
    options = {"lr": 0.01, "weight_decay": 0.1, "ratio_bounds": (0.01, 10.0)}
    optimizer = OneBitLamb(ours.parameters(), warmup=4, ratio_beta=0.5, **options)
    one = train(ours, optimizer.hook, optimizer, rank, range(steps), wrap)
    two = train(plain, None, LAMB(plain.parameters(), **options), rank, range(steps), wrap)
    return one, two


@pytest.mark.parametrize("wrap", [DDP, DistributedDataParallel])
def test_it_warms_up_as_lamb_to_the_bit(ranks, wrap):
    for rank, (ours, lamb) in enumerate(ranks(2, lamb_and_ours, wrap=wrap, steps=4)):
        assert torch.equal(ours, lamb), f"rank {rank}"


@pytest.mark.parametrize("wrap", [DDP, DistributedDataParallel])
def test_afterwards_it_differs_but_not_between_ranks(ranks, wrap):
    (first, lamb), *others = ranks(3, lamb_and_ours, wrap=wrap, steps=8)
    assert all(torch.equal(first, other) for other, _ in others)
    assert 1e-4 < float((first - lamb).norm() / lamb.norm()) < 0.04  # four steps of 1 % each


def bytes_by_step(rank, world_size):
    module, told = mlp(24, 40, 40, 4), []
    optimizer = OneBitLamb(module.parameters(), warmup=2)
    wrapped = DDP(module)
    wrapped.register_comm_hook(None, optimizer.hook)
    for step in range(4):
        with comm.record() as log:
            wrapped(noise(8, 24, seed=step)).square().mean().backward()
            optimizer.step()
        optimizer.zero_grad()
        told += [(event.op, event.payload_bytes) for event in log[-1:]]
    return told, sum(p.numel() for p in module.parameters())


def test_its_messages_are_those_of_one_bit(ranks):
    told, numel = ranks(2, bytes_by_step)[0]
    rows = -(-numel // 2048)
    assert told == [("all_reduce", 4 * numel)] * 2 + [("all_gather", 2 * rows * (256 + 4))] * 2


def late_gradient(rank, world_size):
    members = [nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(0))]
    optimizer = OneBitLamb(members, lr=0.1, warmup=2)
    for step in range(4):
        bucket = Bucket(members)
        members[0].grad, late, members[2].grad = bucket.gradients()
        members[0].grad.fill_(1.0 + step)
        members[1].grad = late.fill_(1.0) if step >= 2 else None
        optimizer.hook(None, bucket).wait()
        optimizer.step()
    return [float(p.detach().sum()) for p in members]


def test_a_parameter_without_gradients_in_the_warm_up_stays(ranks):
    first, late, empty = ranks(1, late_gradient)[0]
    assert first < 8.0 and late == 8.0 and empty == 0.0


@pytest.mark.parametrize("warmup", [0, -1, 1.5])
def test_a_warmup_that_freezes_nothing_is_refused(warmup):
    with pytest.raises(ValueError, match=r"warmup=.* must be at least 1: without plain steps v would be zero"):
        OneBitLamb([nn.Parameter(torch.ones(2))], warmup=warmup)


def test_the_base_class_updates_nothing():
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    with pytest.raises(NotImplementedError):
        OneBitOptimizer([p], {"betas": (0.9, 0.9)}, 1, None).step()


@pytest.mark.slow
def test_on_text_it_ends_near_lamb_and_needs_its_feedback(ranks):
    """100 steps of a small GPT, 40 of them as warm-up; here LAMB ends with 2.65, 1-bit LAMB 0.13 above it."""
    settings = {"lr": 0.02, "betas": (0.9, 0.97)}
    ours = partial(OneBitLamb, warmup=40)
    makes = [LAMB, ours, partial(ours, compressor=OneBit(feedback=False))]
    told = ranks(2, on_text, makes=makes, adam=settings)
    lamb, with_feedback, without = (sum(losses) / 2 for losses in zip(*told, strict=True))
    assert lamb < 3.2  # untrained 5.6
    assert with_feedback < lamb + 0.3
    assert not without < with_feedback + 0.3  # it may be nan
