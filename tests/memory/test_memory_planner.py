"""Predicted against tracked: the same bytes of every kind at every moment, before and after the step is really run."""

import re
import time
from contextlib import nullcontext
from functools import partial
from itertools import groupby
from tempfile import gettempdir

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labkit import models
from labkit.amp import autocast
from labkit.ddp import DDP
from labkit.fsdp import FSDP
from labkit.horovod import DistributedOptimizer
from labkit.memory import choose, estimate
from labkit.memory.memory_tracker import MemoryTracker
from labkit.offload import Offloaded
from labkit.recompute import checkpoint, checkpoint_every
from labkit.zero import ZeRO1, ZeRO2

FLOAT = 4
OPTIMIZERS = {"sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "adamw": torch.optim.AdamW}


def batch(name, size):
    """(input, target) of random values; the model's own shapes."""
    if name == "gpt":
        tokens = torch.randint(256, (size, 33))
        return tokens[:, :-1], tokens[:, 1:]
    shape = (size, 64) if name == "mlp" else (size, 3, 8, 8)
    return torch.randn(shape), torch.randint(10, (size,))


def tracked(model, held, optimizer, loss, input, target, device=None):
    """The tracker of a later step: optimizer states and buckets are there.

    Of several steps the one with the smallest peak: the thread that has sent a message may let go of it a moment late.
    """

    def step():
        time.sleep(0.005)  # let go
        optimizer.zero_grad()
        value = loss(model(input), target)
        value.backward()
        optimizer.step()

    step()
    trackers = [MemoryTracker(held, optimizer, device) for _ in range(6 if dist.is_initialized() else 1)]
    for tracker in trackers:
        with tracker:
            step()
    return min(trackers, key=lambda tracker: tracker.peak_total)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", models.SIZES)
@pytest.mark.parametrize("size", [2, 16])
def test_one_process_at_every_moment(name, optimizer, size):
    """Not only the peak: every allocation and every release of the step, in the same order."""
    model, loss = models.build(name), models.loss(name)
    input, target = batch(name, size)
    predicted = estimate(model, input, loss, target=target, optimizer=optimizer)
    made = OPTIMIZERS[optimizer](model.parameters())
    tracked(model, model, made, loss, input, target)
    with MemoryTracker(model, made) as seen:
        made.zero_grad()
        before = len(seen.samples)
        value = loss(model(input), target)
        value.backward()
        made.step()
    assert [kinds for _, kinds in seen.samples][before - 1 :] == [kinds for _, kinds in predicted.samples]
    assert predicted.peak == seen.peak and predicted.held == seen.current


def wrapped(strategy, model, name, cap, make):
    """The model and its optimizer under a strategy."""
    if strategy in ("zero1", "zero2"):
        zero = ZeRO1 if strategy == "zero1" else ZeRO2
        lr = {"lr": 0.1, "momentum": 0.9} if make is OPTIMIZERS["sgd"] else {}
        return model, zero(model.parameters(), torch.optim.SGD if lr else torch.optim.AdamW, bucket_cap_mb=cap, **lr)
    if strategy == "horovod":
        return model, DistributedOptimizer(make(model.parameters()), model.named_parameters(), bucket_cap_mb=cap)
    if strategy == "ddp_bucketed":
        model = DDP(model, bucket_cap_mb=cap)
    elif strategy == "fsdp_nvme":
        model = FSDP(model, models.unit(name), offload=gettempdir())
        return model, Offloaded(make(model.parameters()), to=gettempdir())
    else:
        model = FSDP(model, models.unit(name), shard="full" if strategy == "fsdp" else "grad_op")
    return model, make(model.parameters())


def one_step(rank, world_size, strategy, name, cap, optimizer):
    model, loss = models.build(name), models.loss(name)
    list(model.parameters())[2].requires_grad_(False)
    input, target = batch(name, 4)
    options = {"target": target, "bucket_cap_mb": cap, "rank": rank, "unit": models.unit(name), "optimizer": optimizer}
    predicted = estimate(model, input, loss, strategy, world_size, **options)
    outside, made = wrapped(strategy, model, name, cap, OPTIMIZERS[optimizer])
    seen = tracked(outside, model, made, loss, input, target)
    return predicted, seen.peak, seen.current, course(seen.samples)


def states_of(kinds):
    """What is held on purpose: a message that is just being let go of is not."""
    return {kind: kinds[kind] for kind in ("parameters", "gradients", "optimizer_states", "buffers")}


def course(samples):
    """The bytes of parameters, one after the other as they change in a step."""
    return [size for size, _ in groupby(kinds["parameters"] for _, kinds in samples)]


@pytest.mark.slow
@pytest.mark.parametrize("name", models.SIZES)
@pytest.mark.parametrize(
    ("strategy", "cap", "world_size", "optimizer"),
    [
        *((strategy, 25, 2, "adamw") for strategy in ("ddp_bucketed", "zero1", "zero2", "fsdp", "fsdp_grad_op")),
        ("fsdp_nvme", 25, 2, "adamw"),
        ("horovod", 25, 2, "adamw"),
        ("horovod", 0.05, 2, "sgd"),
        ("ddp_bucketed", 0.05, 2, "sgd"),
        # 3 ranks divide nothing here: padding and empty pieces are in the numbers.
        *((strategy, 0.05, 3, "sgd") for strategy in ("zero1", "zero2", "fsdp")),
    ],
)
def test_every_strategy_to_the_byte(ranks, strategy, cap, name, world_size, optimizer):
    arguments = {"strategy": strategy, "cap": cap, "name": name, "optimizer": optimizer}
    for rank, (predicted, peak, current, gathered) in enumerate(ranks(world_size, one_step, **arguments)):
        assert predicted.peak == peak, f"rank {rank}"
        assert states_of(predicted.held) == states_of(current), f"rank {rank}"
        # Not only at the peak: what FSDP gathers and frees, and in which order.
        assert course(predicted.samples) == gathered, f"rank {rank}"


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
        (
            {"strategy": "zero9"},
            "unknown strategy 'zero9': known are single, ddp_naive, ddp_overlapped, ddp_bucketed, horovod, zero1",
        ),
        ({"optimizer": "adagrad"}, "unknown optimizer 'adagrad': known are sgd, adamw"),
        ({"precision": "fp8"}, "unknown precision 'fp8': known are"),
        ({"unit": nn.Conv3d}, "its parts are Linear, ReLU, Sequential"),
    ],
)
def test_what_is_unknown_is_told_with_what_is_known(wrong, words):
    with pytest.raises(ValueError, match=words):
        estimate(models.build("mlp"), batch("mlp", 2)[0], **wrong)


@pytest.mark.parametrize("name", models.SIZES)
@pytest.mark.parametrize(("keep", "precision"), [(None, "fp32"), ("matmul", "fp32"), (None, "bf16")])
def test_recomputation_and_autocast(name, keep, precision):
    """As an argument of the estimate or applied to the module: the same bytes, and those of the real step."""
    model, loss, unit = models.build(name), models.loss(name), models.unit(name)
    input, target = batch(name, 16)
    options = {"target": target, "precision": precision, "unit": unit}
    told = estimate(model, input, loss, recompute=partial(checkpoint, keep=keep), **options)
    plain = estimate(model, input, loss, **options)
    checkpoint_every(model, unit, keep=keep)
    assert estimate(model, input, loss, **options).peak == told.peak

    def lowered(x):
        with autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext():
            return model(x)

    def low_loss(output, target):
        with autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext():
            return loss(output, target)

    seen = tracked(lowered, model, torch.optim.AdamW(model.parameters()), low_loss, input, target)
    # Under autocast a weight that both blocks use is cast once in each: some of the smallest are counted twice.
    assert told.peak_total == pytest.approx(seen.peak_total, rel=0 if precision == "fp32" else 0.02)
    assert max(k["activations"] for _, k in told.samples) <= max(k["activations"] for _, k in plain.samples)


@pytest.mark.slow
def test_what_is_sharded_falls_as_one_over_n():
    model, input = models.build("gpt", "small"), batch("gpt", 1)[0]
    size = sum(p.nbytes for p in model.parameters())
    for n in (1, 2, 3, 4, 16):
        held = {
            s: estimate(model, input, None, s, n, "sgd", unit=models.unit("gpt")) for s in ("zero1", "zero2", "fsdp")
        }
        padded = [one.held["optimizer_states"] * n - size for one in held.values()]
        assert all(0 <= extra < n * FLOAT * 8 for extra in padded)  # fewer than n elements for each of few flat buffers
        assert held["zero1"].held["gradients"] >= size > held["zero2"].held["gradients"] - n * FLOAT
        fsdp = held["fsdp"]
        assert fsdp.held["parameters"] == fsdp.held["gradients"]
        assert size / n <= fsdp.held["parameters"] <= size / n + FLOAT * 8


GPT = {"unit": models.unit("gpt"), "recompute": checkpoint}


def needs(strategy, world_size, recompute=None, device=None):
    model, (input, target) = models.build("gpt"), batch("gpt", 8)
    options = {"target": target, "unit": models.unit("gpt"), "recompute": recompute, "device": device}
    return estimate(model, input, models.loss("gpt"), strategy, world_size, **options).peak_total


def chosen(memory_bytes, world_size, **options):
    model, (input, target) = models.build("gpt"), batch("gpt", 8)
    return choose(model, input, memory_bytes, world_size, models.loss("gpt"), target, **GPT | options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "world_size", "recompute"),
    [("single", 1, False), ("single", 1, True), *((s, 4, False) for s in ("ddp_bucketed", "zero1", "zero2", "fsdp"))],
)
def test_the_first_that_fits_is_chosen(strategy, world_size, recompute):
    room = needs(strategy, world_size, checkpoint if recompute else None)
    choice = chosen(room, world_size)
    assert (choice.strategy, choice.recompute, choice.offload) == (strategy, recompute, False)
    assert choice.estimate.peak_total == room and "it fits, and leaves 0 B" in choice.reasons[-1]
    assert all(" more than the " in reason for reason in choice.reasons[:-1])
    assert str(choice).count("\n") == len(choice.reasons) - 1
    # With a byte less it is another one, further down.
    further = chosen_or_none(room - 1, world_size)
    assert further is None or len(further.reasons) > len(choice.reasons)


def chosen_or_none(*arguments):
    try:
        return chosen(*arguments)
    except MemoryError:
        return None


@pytest.mark.parametrize("strategy", ["single", "ddp_bucketed", "zero1", "fsdp"])
def test_counts_of_steps_are_in_the_memory_of_the_host(strategy):
    """Adam's are on the CPU whatever the device, 4 bytes for each of its parameters."""
    model, loss = models.build("gpt"), models.loss("gpt")
    input, target = batch("gpt", 4)
    on = {device: estimate(model, input, loss, strategy, 2, target=target, device=device) for device in ("cpu", "cuda")}
    cpu, cuda = (states_of(on[device].held) for device in ("cpu", "cuda"))
    counts = cpu["optimizer_states"] - cuda["optimizer_states"]
    assert counts == on["cuda"].host - on["cpu"].host > 0 and counts % 4 == 0
    if strategy in ("single", "ddp_bucketed"):
        assert counts == 4 * len(list(model.parameters()))
    assert {**cpu, "optimizer_states": 0} == {**cuda, "optimizer_states": 0}


@pytest.mark.slow
def test_offload_is_for_devices_with_memory_of_their_own():
    """On a GPU shards and states go to the host; on a CPU there is nowhere to go."""
    room = needs("fsdp", 4, device="cuda") - 1
    choice = chosen(room, 4, device="cuda", recompute=None)
    assert (choice.strategy, choice.offload) == ("fsdp", True)
    weights = sum(p.nbytes for p in models.build("gpt").parameters())
    assert 0 <= choice.estimate.host - 4 * weights / 4 < 1024  # shards, gradients, two moments; step counts, padding
    with pytest.raises(MemoryError, match="nothing fits into"):
        chosen(room, 4, recompute=None)
    with pytest.raises(MemoryError, match="nothing fits into"):
        chosen(room, 4, device="cuda", recompute=None, host_bytes=choice.estimate.host - 1)


@pytest.mark.slow
def test_what_cannot_fit_says_by_how_much_and_what_would():
    need = needs("fsdp", 2, checkpoint)
    with pytest.raises(MemoryError) as told:
        chosen(need - 1024, 2)
    words = str(told.value)
    assert "FSDP with recomputation needs least" in words and ", 1 KiB too much" in words
    ranks = int(re.search(r"(\d+) ranks", words).group(1))
    assert needs("fsdp", ranks, checkpoint) <= need - 1024 < needs("fsdp", ranks - 1, checkpoint)
    smaller = int(re.search(r"a batch of (\d+) a rank instead of 8", words).group(1))
    assert 1 <= smaller < 8 and "\n" not in words


@pytest.mark.gpu
def test_on_cuda():
    """States to the byte, activations within 2 %: kernels are those of the GPU, in the dry run, too."""
    model, loss = models.build("gpt", "small").cuda(), models.loss("gpt")
    input, target = (t.cuda() for t in batch("gpt", 16))
    predicted = estimate(model, input, loss, target=target)
    seen = tracked(model, model, torch.optim.AdamW(model.parameters()), loss, input, target, "cuda")
    assert states_of(predicted.held) == states_of(seen.current)
    assert predicted.peak["activations"] == pytest.approx(seen.peak["activations"], rel=0.02)
