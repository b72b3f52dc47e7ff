"""fp16 training, its gradients dealt over ranks: torch.amp in one process decides the same, wherever the inf is."""

from functools import cache, partial

import pytest
import torch
from oracle_models import seeded
from torch.distributed.fsdp import fully_shard

from labkit import models
from labkit.amp import GradScaler, autocast
from labkit.ddp import DDP
from labkit.fsdp import FSDP
from labkit.zero import ZeRO1, ZeRO2

STEPS, BATCH = 9, 24
HUGE, PLANTED = 2, 5  # steps: in one an input overflows fp16, in the other one element of one shard is inf
SIZES = (64, 24, 24, 10)
SGD = {"lr": 0.05, "momentum": 0.9}


load = cache(models.data.load)


def batch(step):
    images, labels = load("digits", "mlp")[step * BATCH : (step + 1) * BATCH]
    images = images.clone()
    if step == HUGE:
        images[-1] = 1e6  # the last sample: on ranks, the last rank's
    return images, labels


build = partial(seeded, "mlp", sizes=SIZES)


def shard_all(model):
    for part in (*model.layers, model):
        fully_shard(part)
    return model


def wrap(strategy, seed):
    """(what is called, its optimizer)."""
    if strategy == "torch_fsdp":
        model = shard_all(build())  # takes every rank's own weights as they are
        return model, torch.optim.SGD(model.parameters(), **SGD)
    if strategy in ("zero1", "zero2"):
        model = build(seed)
        zero = {"zero1": ZeRO1, "zero2": ZeRO2}[strategy]
        return model, zero(model.parameters(), torch.optim.SGD, bucket_cap_mb=0.002, **SGD)
    model = DDP(build(seed)) if strategy == "ddp" else FSDP(build(seed), unit=(torch.nn.Linear,))
    return model, torch.optim.SGD(model.parameters(), **SGD)


def local(gradient):
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


def plant(optimizer):
    """An inf in the last element of what this rank's optimizer holds."""
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    [local(g) for g in gradients if local(g).numel()][-1].view(-1)[-1] = float("inf")


def clip(model, optimizer, max_norm):
    """Of all ranks' gradients together: whoever holds shards knows how."""
    holder = next((one for one in (model, optimizer) if hasattr(one, "clip_grad_norm_")), None)
    return holder.clip_grad_norm_(max_norm) if holder else torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def train(rank, world_size, strategy, max_norm=None):
    """Scale after each step, and the weights at the end: a list of tensors (None for fully_shard)."""
    model, optimizer = wrap(strategy, seed=rank)
    scaler, seen = GradScaler("cpu", 2.0**12, growth_interval=3), []
    share = slice(rank * BATCH // world_size, (rank + 1) * BATCH // world_size)
    for step in range(STEPS):
        images, labels = (part[share] for part in batch(step))
        optimizer.zero_grad()
        with autocast("cpu", torch.float16):
            loss = models.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        if step == PLANTED and (rank == world_size - 1 or strategy == "ddp"):  # under DDP all ranks hold the same
            plant(optimizer)
        if max_norm:
            scaler.unscale_(optimizer)
            norm = clip(model, optimizer, max_norm)
            assert not norm < max_norm, "nothing to clip"  # an inf's norm is NaN or inf: that step is skipped
        scaler.step(optimizer)
        scaler.update()
        seen.append(scaler.get_scale())
    if strategy == "torch_fsdp":
        return seen, None
    weights = model.full_state_dict() if strategy == "fsdp" else dict(model.named_parameters())
    return seen, [w.detach().clone() for w in weights.values()]


def one_process():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    scaler, seen = torch.amp.GradScaler("cpu", 2.0**12, growth_interval=3), []
    for step in range(STEPS):
        images, labels = batch(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = models.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        if step == PLANTED:
            plant(optimizer)
        scaler.step(optimizer)
        scaler.update()
        seen.append(scaler.get_scale())
    return seen, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp", "torch_fsdp"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_ranks_decide_as_one_process_does(ranks, world_size, strategy):
    scales, weights = one_process()
    assert [step for step in range(1, STEPS) if scales[step] < scales[step - 1]] == [HUGE, PLANTED]
    results = ranks(world_size, train, strategy=strategy)
    for rank, (seen, held) in enumerate(results):
        assert seen == scales, f"rank {rank}"  # on every rank, step by step
        if held is not None:
            # fp16 products of a share and of the whole batch are rounded apart; a step more or less would be 1e-2
            assert max(float((a - b).abs().max()) for a, b in zip(held, weights, strict=True)) < 2e-3, f"rank {rank}"
            assert all(torch.equal(a, b) for a, b in zip(held, results[0][1], strict=True)), f"rank {rank}"


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "fsdp"])
def test_sharded_it_is_ddp_bit_by_bit(ranks, strategy):
    # Two ranks: a + b == b + a, and a scale that is a power of two moves no bit of a fraction.
    (_, sharded), _ = ranks(2, train, strategy=strategy)
    (_, whole), _ = ranks(2, train, strategy="ddp")
    assert all(torch.equal(a, b) for a, b in zip(sharded, whole, strict=True))


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "fsdp"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_unscaled_then_clipped_it_is_ddp_clipped(ranks, world_size, strategy):
    (scales, sharded), *_ = ranks(world_size, train, strategy=strategy, max_norm=0.05)
    (same, whole), *_ = ranks(world_size, train, strategy="ddp", max_norm=0.05)
    assert scales == same
    # The norm adds up in another order: rounding only. Local norms would clip n times less.
    assert max(float((a - b).abs().max()) for a, b in zip(sharded, whole, strict=True)) < 1e-6
