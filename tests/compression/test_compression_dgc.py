"""Deep Gradient Compression and 1-bit Adam: what they do with momentum, step by step."""

import copy
from unittest import mock

import pytest
import torch
from hook_training import train
from tensors import mlp, noise
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labkit import comm
from labkit.amp import GradScaler
from labkit.compression import DGC, OneBit, OneBitAdam, TopK
from labkit.ddp import DDP
from labkit.ddp.bucket import Bucket
from labkit.trainer import Trainer

STEPS = 6


def in_words(rank, world_size, masking):
    """DGC as its paper writes it, one element after the other."""
    compressor, p, momentum, k = DGC(0.1, masking=masking), nn.Parameter(torch.zeros(100)), 0.9, 10
    u, v, worst = torch.zeros(100), torch.zeros(100), 0.0
    for step in range(STEPS):
        bucket = Bucket([p])
        bucket.buffer().copy_(noise(100, seed=step))
        sent = compressor.hook(None, bucket).wait()
        u = momentum * u + noise(100, seed=step)
        v = v + u
        chosen = v.abs().argsort(descending=True)[:k]
        wanted = torch.zeros(100)
        wanted[chosen] = v[chosen]
        v[chosen] = 0
        if masking:
            u[chosen] = 0
        worst = max(worst, float((sent - wanted).abs().max()))
    return worst


@pytest.mark.parametrize("masking", [True, False])
def test_dgc_is_what_its_paper_says(ranks, masking):
    assert ranks(1, in_words, masking=masking)[0] < 1e-5


def whole(rank, world_size):
    ours, plain = mlp(24, 40, 40, 4), mlp(24, 40, 40, 4)
    hook = DGC(1.0, momentum=0.9, masking=False).hook
    ours = train(ours, hook, torch.optim.SGD(ours.parameters(), lr=0.1), rank, range(STEPS))
    plain = train(plain, None, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), rank, range(STEPS))
    return float((ours - plain).abs().max())


def test_dgc_with_everything_sent_is_momentum(ranks):
    assert max(ranks(2, whole)) < 1e-6


def shares(rank, world_size):
    compressor, p, told = DGC(0.01, warmup=2), nn.Parameter(torch.zeros(10_000)), []
    for _ in range(9):
        bucket = Bucket([p])
        bucket.buffer().copy_(noise(10_000))
        with comm.record() as log:
            compressor.hook(None, bucket).wait()
        told.append(log[-1].payload_bytes // 8 / 10_000)
    return told


def test_the_warm_up_sends_a_quarter_of_the_stage_before(ranks):
    assert ranks(1, shares)[0] == [0.25, 0.25, 0.0625, 0.0625, 0.0156, 0.0156, 0.01, 0.01, 0.01]


def resumed(rank, world_size):
    module, compressor = mlp(24, 40, 40, 4), DGC(0.05, warmup=2)
    train(module, compressor.hook, torch.optim.SGD(module.parameters(), lr=0.1), rank, range(3))
    again = DGC(0.05, warmup=2)
    again.load_state_dict(copy.deepcopy(compressor.state_dict()))
    twin = copy.deepcopy(module)
    rest = range(3, 6)
    one = train(module, compressor.hook, torch.optim.SGD(module.parameters(), lr=0.1), rank, rest)
    # The first compressor continues with `module`'s parameters, the second finds the twin's by their names.
    two = train(twin, again.hook, torch.optim.SGD(twin.parameters(), lr=0.1), rank, rest)
    return torch.equal(one, two)


def test_dgc_resumes_with_its_velocities(ranks):
    assert ranks(2, resumed) == [True, True]


def adam_and_ours(rank, world_size, wrap, steps):
    ours, plain = mlp(24, 40, 40, 4), mlp(24, 40, 40, 4)
    optimizer = OneBitAdam(ours.parameters(), lr=0.01, warmup=4)
    one = train(ours, optimizer.hook, optimizer, rank, range(steps), wrap)
    two = train(plain, None, torch.optim.Adam(plain.parameters(), lr=0.01), rank, range(steps), wrap)
    return one, two


@pytest.mark.parametrize("wrap", [DDP, DistributedDataParallel])
def test_one_bit_adam_warms_up_as_adam(ranks, wrap):
    for rank, (ours, adam) in enumerate(ranks(2, adam_and_ours, wrap=wrap, steps=4)):
        assert float((ours - adam).abs().max()) < 1e-6, f"rank {rank}"


@pytest.mark.parametrize("wrap", [DDP, DistributedDataParallel])
def test_afterwards_it_differs_but_not_between_ranks(ranks, wrap):
    (first, adam), *others = ranks(3, adam_and_ours, wrap=wrap, steps=8)
    assert all(torch.equal(first, other) for other, _ in others)
    # Four steps of about lr = 0.01 each; single elements, whose frozen variance happens to be tiny, may go further.
    assert 1e-4 < float((first - adam).abs().mean()) < 0.02


def frozen_exactly(rank, world_size):
    """With a compressor that loses nothing: the momentum of the mean gradient over the root of the frozen variance."""
    p, b1, b2, lr, warmup = nn.Parameter(torch.zeros(50, dtype=torch.float64)), 0.9, 0.99, 0.1, 3
    optimizer = OneBitAdam([p], lr=lr, betas=(b1, b2), eps=1e-8, warmup=warmup, compressor=TopK(1.0))
    m, v, wanted = torch.zeros(50, dtype=torch.float64), torch.zeros(50, dtype=torch.float64), torch.zeros(50).double()
    for step in range(STEPS):
        bucket = Bucket([p])
        p.grad = bucket.gradients()[0]
        p.grad.copy_(noise(50, seed=10 * step + rank))
        optimizer.hook(None, bucket).wait()
        optimizer.step()
        mean = sum(noise(50, seed=10 * step + r).double() for r in range(world_size)) / world_size
        m = b1 * m + (1 - b1) * mean
        v = b2 * v + (1 - b2) * mean**2 if step < warmup else v
        root = (v / (1 - b2 ** min(step + 1, warmup))).sqrt()
        wanted -= lr * m / (1 - b1 ** (step + 1)) / (root + 1e-8)
    return float((p.detach() - wanted).abs().max())


def test_the_frozen_phase_is_the_formula(ranks):
    assert max(ranks(2, frozen_exactly)) < 1e-12


def bytes_by_step(rank, world_size):
    module, told = mlp(24, 40, 40, 4), []
    optimizer = OneBitAdam(module.parameters(), warmup=2)
    wrapped = DDP(module)
    wrapped.register_comm_hook(None, optimizer.hook)
    for step in range(5):
        with comm.record() as log:
            wrapped(noise(8, 24, seed=step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        told.append((log[-1].op, log[-1].payload_bytes))
    return told, sum(p.numel() for p in module.parameters())


def test_bytes_of_one_bit_adam(ranks):
    told, numel = ranks(2, bytes_by_step)[0]
    rows = -(-numel // 2048)
    assert told == [("all_reduce", 4 * numel)] * 2 + [("all_gather", 2 * rows * (256 + 4))] * 3


def adam_resumed(rank, world_size):
    straight, halted = mlp(24, 40, 40, 4), mlp(24, 40, 40, 4)
    one = OneBitAdam(straight.parameters(), lr=0.01, warmup=2)
    wanted = train(straight, one.hook, one, rank, range(6))
    first = OneBitAdam(halted.parameters(), lr=0.01, warmup=2)
    train(halted, first.hook, first, rank, range(4))
    second = OneBitAdam(halted.parameters(), lr=0.01, warmup=2)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    return torch.equal(wanted, train(halted, second.hook, second, rank, range(4, 6)))


def test_one_bit_adam_resumes_to_the_bit(ranks):
    assert ranks(2, adam_resumed) == [True, True]


def lost_in_the_warm_up(rank, world_size):
    bucket = Bucket([nn.Parameter(torch.zeros(9))])
    optimizer, future = OneBitAdam(bucket.parameters()), torch.futures.Future()
    future.set_exception(ConnectionError("the link is gone"))
    work = mock.Mock(get_future=lambda: future)
    with mock.patch.object(comm, "all_reduce", return_value=work), pytest.raises(Exception, match="the link is gone"):
        optimizer.hook(None, bucket).wait()


def test_one_bit_adam_takes_no_message_that_did_not_arrive_for_an_average(ranks):
    ranks(1, lost_in_the_warm_up)


def other_warmups(rank, world_size):
    module = mlp(24, 40, 40, 4)
    optimizer = OneBitAdam(module.parameters(), warmup=2 + rank)
    with pytest.raises(ValueError, match="rank 0 has 1-bit Adam, warmup=2, step 0, rank 1 has 1-bit Adam, warmup=3"):
        train(module, optimizer.hook, optimizer, rank, range(STEPS))


def test_one_bit_adam_on_ranks_that_differ_is_told(ranks):
    ranks(2, other_warmups)


def test_settings_that_do_not_exist():
    with pytest.raises(ValueError, match=r"warmup=.* must be at least 1"):
        OneBitAdam(mlp(24, 40, 40, 4).parameters(), warmup=0)
    with pytest.raises(ValueError, match=r"momentum=.* must be"):
        DGC(momentum=1.0)
    with pytest.raises(ValueError, match="ratio"):
        DGC(0)
    assert "OneBit(chunk=2048" in repr(OneBit())


@pytest.mark.parametrize("enabled", [True, False])
def test_one_bit_adam_takes_no_loss_scale_and_no_clipping(enabled):
    module = mlp(24, 40, 40, 4)
    optimizer, scaler = OneBitAdam(module.parameters()), GradScaler("cpu", enabled=enabled)
    trainer = Trainer(module, optimizer, nn.functional.mse_loss, scaler=scaler, clip=1.0)
    with pytest.raises(RuntimeError, match="OneBitAdam supports neither a loss scale nor clipping"):
        trainer.train_step(torch.ones(2, 24), module(torch.ones(2, 24)).detach())
