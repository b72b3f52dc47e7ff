"""The oracle of sharding: ranks that hold a part of everything train what one process trains that holds all of it."""

from functools import partial

import pytest
import torch

from labkit import models
from labkit.ddp import DDP
from labkit.fsdp import FSDP

STEPS, SHARE = 5, 4
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
FORMS = {
    "full": {},
    "no prefetch": {"prefetch": 0},
    "prefetch 3": {"prefetch": 3},
    "grad_op": {"shard": "grad_op"},
    "replicate": {"root": "replicate"},
    "offload": {"offload": True},
}
OPTIMIZERS = {
    # Adam divides by the gradient's size and so hides a sum in place of a mean; SGD does not.
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    # eps: a key's bias has no influence on attention; its gradient is rounding alone, which Adam would blow up to 1.
    "adamw": partial(torch.optim.AdamW, lr=1e-3, eps=1e-5, weight_decay=0.1),
}


def build(name, dtype, seed, **overrides):
    """A model with its own random weights, one parameter frozen; gpt has its embedding tied to the output layer."""
    torch.manual_seed(seed)
    if name == "gpt":
        overrides = {"vocab": 31, "context": 16, **overrides}
    elif name == "mlp":
        overrides = {"sizes": (8, 33, 33, 33, 10), **overrides}
    elif name == "resnet":
        overrides = {"norm": "group", **overrides}
    model = models.build(name, **overrides).to(dtype)
    list(model.parameters())[-3].requires_grad_(False)
    return model


def batch(name, dtype, step, world_size):
    """The whole batch of a step: (input, target), the same in every process."""
    generator = torch.Generator().manual_seed(step)
    size = SHARE * world_size
    if name == "gpt":
        tokens = torch.randint(31, (size, 9), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    shape = (size, 8) if name == "mlp" else (size, 3, 8, 8)
    return torch.randn(shape, dtype=dtype, generator=generator), torch.randint(10, (size,), generator=generator)


def fit(model, name, dtype, optimizer, share, world_size, steps=STEPS):
    """Train; share: function from a whole tensor to what this process sees of it."""
    optimizer, loss = OPTIMIZERS[optimizer](p for p in model.parameters() if p.requires_grad), models.loss(name)
    for step in range(steps):
        inputs, targets = (share(t) for t in batch(name, dtype, step, world_size))
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()


def one_process(name, dtype, optimizer, world_size):
    model = build(name, dtype, seed=0)
    fit(model, name, dtype, optimizer, lambda t: t, world_size)
    return {key: value.clone() for key, value in model.state_dict().items()}


def difference(ours, theirs):
    assert list(ours) == list(theirs)  # names, and their order
    return max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours)


def trained(rank, world_size, name, dtype, optimizer, forms):
    results = {}
    for form in forms:
        model = build(name, dtype, seed=rank)  # other weights on every rank: construction must even them out
        wrapped = FSDP(model, models.unit(name), **FORMS[form])
        fit(wrapped, name, dtype, optimizer, lambda t: t.split(SHARE)[rank], world_size)
        results[form] = wrapped.full_state_dict()
    model = build(name, dtype, seed=rank)
    ddp = DDP(model)
    fit(ddp, name, dtype, optimizer, lambda t: t.split(SHARE)[rank], world_size)
    results["ddp"] = {key: value.clone() for key, value in ddp.state_dict().items()}
    return results


@pytest.mark.parametrize(
    ("name", "optimizer", "dtype"),
    [(name, "sgd", torch.float64) for name in models.SIZES]
    + [(name, "adamw", torch.float32) for name in models.SIZES]
    + [("mlp", "sgd", torch.float32)],
    ids=str,
)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_train_what_one_process_trains(ranks, world_size, name, optimizer, dtype):
    oracle = one_process(name, dtype, optimizer, world_size)
    for results in ranks(world_size, trained, name=name, dtype=dtype, optimizer=optimizer, forms=list(FORMS)):
        for form in FORMS:
            # The same sums in another order: rounding only.
            assert difference(results[form], oracle) <= TOLERANCE[dtype], form
            if world_size <= 2:
                # a + b == b + a: with two ranks the order of sums cannot matter, and DDP divides at the same place.
                assert difference(results[form], results["ddp"]) == 0.0, form
