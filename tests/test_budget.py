"""Predicted against tracked: the same bytes of every kind at every moment, before and after the step is really run."""

import pytest
import torch
from torch import nn

from labkit import models
from labkit.budget import KINDS, estimate
from labkit.ddp import DDP
from labkit.measure import memory
from labkit.measure.memory import MemoryTracker

FLOAT = 4
OPTIMIZERS = {"sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "adamw": torch.optim.AdamW}


def batch(name, size):
    """(input, target) of random values; the model's own shapes."""
    if name == "gpt":
        tokens = torch.randint(256, (size, 33))
        return tokens[:, :-1], tokens[:, 1:]
    shape = (size, 64) if name == "mlp" else (size, 3, 8, 8)
    return torch.randn(shape), torch.randint(10, (size,))


def tracked(model, held, optimizer, loss, input, target):
    """The tracker of the second step: optimizer states and buckets are there."""

    def step():
        optimizer.zero_grad()
        value = loss(model(input), target)
        value.backward()
        optimizer.step()

    step()
    with MemoryTracker(held, optimizer) as seen:
        step()
    return seen


def test_the_kinds_are_the_trackers():
    assert KINDS == memory.KINDS


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", models.SIZES)
@pytest.mark.parametrize("size", [2, 16])
def test_one_process_to_the_byte(name, optimizer, size):
    model, loss = models.build(name), models.loss(name)
    input, target = batch(name, size)
    predicted = estimate(model, input, loss, target=target, optimizer=optimizer)
    seen = tracked(model, model, OPTIMIZERS[optimizer](model.parameters()), loss, input, target)
    assert predicted.peak == seen.peak and predicted.peak_total == seen.peak_total
    assert predicted.held | {"activations": 0} == seen.current | {"activations": 0}


def ddp_step(rank, world_size, name, cap):
    model, loss = models.build(name), models.loss(name)
    input, target = batch(name, 4)
    options = {"target": target, "bucket_cap_mb": cap}
    predicted = estimate(model, input, loss, "ddp", world_size, **options)
    ddp = DDP(model, bucket_cap_mb=cap)
    seen = tracked(ddp, model, torch.optim.AdamW(ddp.parameters()), loss, input, target)
    return predicted.peak, seen.peak, predicted.held, seen.current


@pytest.mark.parametrize("name", models.SIZES)
@pytest.mark.parametrize("cap", [25, 0.05, 0])
def test_ddp_to_the_byte(ranks, name, cap):
    for predicted, seen, held, current in ranks(2, ddp_step, name=name, cap=cap):
        assert predicted == seen
        assert held | {"activations": 0} == current | {"activations": 0}


def test_nothing_is_computed_held_or_changed():
    model = models.build("resnet")
    before = {name: t.clone() for name, t in model.state_dict().items()}
    input, target = batch("resnet", 4)
    with MemoryTracker(model) as seen:
        estimate(model, input, models.loss("resnet"), target=target)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert seen.peak["activations"] == 0


def test_a_model_that_fits_nowhere_is_rehearsed_on_the_meta_device():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(10**6, 10**6), nn.ReLU(), nn.Linear(10**6, 1))
        input = torch.empty(8, 10**6)
    weights = 10**12 + 10**6 + 10**6 + 1
    predicted = estimate(model, input)
    assert predicted.held["parameters"] == predicted.held["gradients"] == FLOAT * weights
    assert predicted.held["optimizer_states"] == 2 * FLOAT * weights + 4 * FLOAT


def test_tied_and_frozen_parameters():
    model = models.build("gpt")
    frozen = model.blocks[0].attention.output.weight
    frozen.requires_grad_(False)
    held = estimate(model, batch("gpt", 2)[0]).held
    size = sum(p.nbytes for p in model.parameters())  # the embedding counts once, though it is used twice
    assert held["parameters"] == size and held["gradients"] == size - frozen.nbytes


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"strategy": "zero9"}, "unknown strategy 'zero9': known are single, ddp"),
        ({"optimizer": "adagrad"}, "unknown optimizer 'adagrad': known are sgd, adamw"),
        ({"precision": "fp8"}, "unknown precision 'fp8': known are"),
        ({"unit": nn.Conv3d}, "matches no part of MLP: it is made of Linear, MLP, ReLU, Sequential"),
    ],
)
def test_what_is_unknown_is_told_with_what_is_known(wrong, words):
    with pytest.raises(ValueError, match=words):
        estimate(models.build("mlp"), batch("mlp", 2)[0], **wrong)
