"""A 16-bit model with fp32 masters trains what the same optimizer trains on fp32 weights with the same gradients."""

import copy
from functools import partial

import pytest
import torch
from oracle_models import seeded

from labkit import models
from labkit.amp import GradScaler, MasterWeights
from labkit.ddp import DDP

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-2}),
}


def batches(count=6):
    data = models.data.load("digits", "mlp")
    for step in range(count):
        images, labels = data[step * 32 : (step + 1) * 32]
        yield images, labels


build = partial(seeded, "mlp", sizes=(64, 32, 10))


def backward(model, images, labels, scaler):
    weight = next(model.parameters())
    outputs = model(images.to(weight)).float()
    scaler.scale(models.cross_entropy(outputs, labels.to(weight.device))).backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_masters_are_what_fp32_training_with_these_gradients_makes(kind, dtype):
    optimizer_class, options = OPTIMIZERS[kind]
    model = build(dtype=dtype)
    optimizer = MasterWeights(model.parameters(), optimizer_class, **options)
    oracle = [torch.nn.Parameter(p.detach().float()) for p in model.parameters()]
    reference = optimizer_class(oracle, **options)
    scaler = GradScaler("cpu", 256.0)
    for images, labels in batches():
        optimizer.zero_grad()
        backward(model, images, labels, scaler)
        for p, q in zip(model.parameters(), oracle, strict=True):
            q.grad = p.grad.float() / 256
        scaler.step(optimizer)
        scaler.update()
        reference.step()
        masters = optimizer.param_groups[0]["params"]
        assert all(torch.equal(m, q) for m, q in zip(masters, oracle, strict=True))
        assert all(torch.equal(p, q.to(dtype)) for p, q in zip(model.parameters(), oracle, strict=True))


def test_small_steps_are_not_lost():
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    plain, with_master = copy.deepcopy(weight), weight
    optimizers = [torch.optim.SGD([plain], lr=1.0), MasterWeights([with_master], torch.optim.SGD, lr=1.0)]
    for _ in range(64):
        for p, optimizer in zip((plain, with_master), optimizers, strict=True):
            p.grad = torch.full_like(p, 2**-10)
            optimizer.step()
    assert plain.item() == 1.0  # 1 - 2^-10 rounds back to 1 in bf16, sixty-four times
    assert with_master.item() == 1 - 64 * 2**-10
    assert with_master.grad is optimizers[1].param_groups[0]["params"][0].grad is None  # freed: 4 bytes a parameter


def test_accumulated_clipped_and_skipped():
    model = build(dtype=torch.float16)
    optimizer = MasterWeights(model.parameters(), torch.optim.SGD, lr=0.1)
    scaler = GradScaler("cpu", 1024.0)
    for images, labels in batches(2):
        backward(model, images, labels, scaler)
    scaler.unscale_(optimizer)
    assert all(p.grad is None for p in model.parameters())  # moved, so that 2 bytes a parameter are free again
    masters = optimizer.param_groups[0]["params"]
    before = torch.cat([m.grad.flatten() for m in masters]).norm()
    assert torch.equal(optimizer.clip_grad_norm_(0.5), before) and before > 0.5
    torch.testing.assert_close(torch.cat([m.grad.flatten() for m in masters]).norm(), torch.tensor(0.5))
    masters[0].grad[0] = float("inf")
    weights = [p.clone() for p in model.parameters()]
    scaler.step(optimizer)  # the verdict was given in unscale_: finite
    assert not torch.equal(weights[1], list(model.parameters())[1])
    scaler.update()
    optimizer.zero_grad()
    next(model.parameters()).grad = torch.full_like(next(model.parameters()), float("nan"))
    weights = [p.clone() for p in model.parameters()]
    scaler.step(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))


def test_what_a_skipped_step_leaves_is_not_used_again():
    first, second = (torch.nn.Parameter(torch.ones(1, dtype=torch.float16)) for _ in range(2))
    optimizer = MasterWeights([first, second], torch.optim.SGD, lr=1.0)
    scaler = GradScaler("cpu", 2.0)
    for used, slope in (([first, second], float("inf")), ([first], 0.25)):  # then second has no gradient
        for p in (first, second):
            p.grad = None  # as model.zero_grad() does, which knows no masters
        scaler.scale(sum(p.float().sum() * slope for p in used)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert (first.item(), second.item()) == (0.75, 1.0)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_resumed_from_a_state_dict_it_goes_on_bit_by_bit(kind):
    optimizer_class, options = OPTIMIZERS[kind]
    scaler = GradScaler(enabled=False)

    def train(model, optimizer, data):
        for images, labels in data:
            optimizer.zero_grad()
            backward(model, images, labels, scaler)
            optimizer.step()

    data = list(batches())
    model = build(dtype=torch.bfloat16)
    optimizer = MasterWeights(model.parameters(), optimizer_class, **options)
    train(model, optimizer, data[:3])
    saved = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, data[3:])
    other = build(1, torch.bfloat16)
    resumed = MasterWeights(other.parameters(), optimizer_class, **options)
    resumed.load_state_dict(saved)
    train(other, resumed, data[3:])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_schedulers_groups_and_mixed_dtypes():
    low, full = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)), torch.nn.Parameter(torch.ones(2))
    frozen = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16), requires_grad=False)
    groups = [{"params": [low, frozen], "lr": 1.0}, {"params": [full]}]
    optimizer = MasterWeights(groups, torch.optim.SGD, lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    assert optimizer.param_groups[1]["params"][0] is full  # fp32 is its own master
    for _ in range(2):
        optimizer.zero_grad()
        ((low.float() + full).sum() * 0.25).backward()
        optimizer.step()
        schedule.step()
    assert low.tolist() == [1 - 0.25 - 0.125] * 2 and full.tolist() == [1 - 0.125 - 0.0625] * 2
    assert frozen.tolist() == [1, 1]


def test_an_added_group_gets_masters():
    first, second, full = (torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16)) for _ in range(3))
    full.data = full.data.float()
    optimizer = MasterWeights([first], torch.optim.SGD, lr=1.0)
    optimizer.add_param_group({"params": second})
    optimizer.add_param_group({"params": [full], "lr": 0.5})
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=1.0)
    for _ in range(64):
        optimizer.zero_grad()
        ((first.float() + second.float() + full) * 2**-10).sum().backward()
        optimizer.step()
        schedule.step()
    assert first.item() == second.item() == 1 - 64 * 2**-10 and full.item() == 1 - 32 * 2**-10
    assert len(optimizer.state_dict()["masters"]) == len(optimizer.param_groups) == 3
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [first]})


def test_what_cannot_be_is_said():
    optimizer = MasterWeights(build(dtype=torch.bfloat16).parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(RuntimeError, match="takes no closure"):
        optimizer.step(lambda: 0)
    for wrong in (torch.optim.SGD([torch.zeros(1)], lr=0.1).state_dict(), {"masters": [torch.zeros(3)]}):
        with pytest.raises(ValueError, match="its masters do not fit"):
            optimizer.load_state_dict(wrong)


def low_under_ddp(rank, world_size):
    """fp16 model and fp16 messages under DDP, fp32 masters on every rank."""
    model = DDP(build(rank, torch.float16))
    optimizer = MasterWeights(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    scaler = GradScaler("cpu")
    for images, labels in batches():
        optimizer.zero_grad()
        backward(model, images[rank::world_size], labels[rank::world_size], scaler)
        scaler.step(optimizer)
        scaler.update()
    return [p.detach().float() for p in model.parameters()], scaler.get_scale()


def test_under_ddp_the_ranks_stay_one_model(ranks):
    (first, scale), (second, other) = ranks(2, low_under_ddp)
    assert scale == other and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
