"""Training with compressed gradients: with error feedback it gets where it gets without compression."""

from functools import partial

import pytest
import torch

from labkit import models
from labkit.compression import DGC, Cast, OneBit, OneBitAdam, PowerSGD, Quantize, RandomK, TopK
from labkit.ddp import DDP
from labkit.models.digits import digits
from labkit.models.text import stdlib_text

STEPS = 120
PLAIN = 0.095  # the loss that plain averaging ends with here; checked below


def trained(rank, world_size, make, lr=0.2, **adam):
    """The loss over all digits after training on them, with the compressor that make() gives; None: plain averaging."""
    torch.manual_seed(0)
    module, data = models.build("mlp", "tiny"), digits()
    inputs, labels = torch.stack([x for x, _ in data]), torch.tensor([y for _, y in data])
    wrapped, loss = DDP(module), models.loss("mlp")
    if make is OneBitAdam:
        optimizer = OneBitAdam(module.parameters(), lr, **adam)
        wrapped.register_comm_hook(None, optimizer.hook)
    else:
        # No momentum: it would multiply what comes late (DGC's reason to be).
        optimizer = torch.optim.SGD(module.parameters(), lr)
        if make is not None:
            wrapped.register_comm_hook(None, make().hook)
    shuffle = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        chosen = torch.randint(len(inputs), (world_size, 32), generator=shuffle)[rank]
        optimizer.zero_grad()
        loss(wrapped(inputs[chosen]), labels[chosen]).backward()
        optimizer.step()
    with torch.no_grad():
        return float(loss(module(inputs), labels))


def test_the_yardstick(ranks):
    assert ranks(2, trained, make=None)[0] == pytest.approx(PLAIN, rel=0.05)


AS_GOOD = {
    "fp16": partial(Cast, torch.float16),
    "bf16": partial(Cast, torch.bfloat16),
    "8 bits": partial(Quantize, 8),
    "4 bits": partial(Quantize, 4),
    "1 bit": OneBit,
    "top 1 %": partial(TopK, 0.01),
    "random 5 %": partial(RandomK, 0.05),
    "rank 2": partial(PowerSGD, 2),
}
WORSE = {  # the bias that feedback would repay: theory promises nothing
    "1 bit": partial(OneBit, feedback=False),
    "top 1 %": partial(TopK, 0.01, feedback=False),
    "rank 2": partial(PowerSGD, 2, feedback=False),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", AS_GOOD)
def test_with_feedback_it_ends_within_a_fifth_of_plain_averaging(ranks, name):
    assert ranks(2, trained, make=AS_GOOD[name])[0] < 1.2 * PLAIN  # untrained: 2.3


@pytest.mark.slow
@pytest.mark.parametrize("name", WORSE)
def test_without_feedback_it_ends_visibly_higher(ranks, name):
    assert ranks(2, trained, make=WORSE[name])[0] > 1.8 * PLAIN


def test_dgc_needs_no_momentum_in_the_optimizer(ranks):
    # Its own momentum of 0.9 makes steps ten times as long.
    assert ranks(2, trained, make=partial(DGC, 0.01), lr=0.05)[0] < 1.2 * PLAIN


def test_one_bit_adam_learns(ranks):
    settings = {"lr": 1e-3, "betas": (0.9, 0.97), "eps": 1e-4, "warmup": 30}
    assert ranks(2, trained, make=OneBitAdam, **settings)[0] < PLAIN


def on_text(rank, world_size, makes, lr=0.2, adam=None):
    """The mean loss of the last 20 of 100 steps of a small GPT on Python source, for each of makes.

    adam: settings; then each make is an optimizer's class, else None or a compressor for SGD's gradients.
    """
    data, loss, told = stdlib_text(64), models.loss("gpt"), []
    for make in makes:
        torch.manual_seed(0)
        module = models.build("gpt", "tiny")
        wrapped = DDP(module)
        if adam:
            optimizer = make(module.parameters(), **adam)
            hook = getattr(optimizer, "hook", None)
        else:
            optimizer = torch.optim.SGD(module.parameters(), lr)
            hook = None if make is None else make().hook
        if hook is not None:
            wrapped.register_comm_hook(None, hook)
        shuffle, losses = torch.Generator().manual_seed(1), []
        for _ in range(100):
            chosen = torch.randint(len(data), (world_size, 8), generator=shuffle)[rank].tolist()
            inputs, targets = (torch.stack(part) for part in zip(*(data[i] for i in chosen), strict=True))
            optimizer.zero_grad()
            value = loss(wrapped(inputs), targets)
            value.backward()
            optimizer.step()
            losses.append(float(value.detach()))
        told.append(sum(losses[-20:]) / 20)
    return told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings"),
    [(OneBit, {}), (TopK, {"ratio": 0.01}), (PowerSGD, {"rank": 1})],
    ids=["1 bit", "top 1 %", "rank 1"],
)
def test_on_text_as_well(ranks, kind, settings):
    makes = [None, partial(kind, **settings), partial(kind, **settings, feedback=False)]
    plain, with_feedback, without = (sum(losses) / 2 for losses in zip(*ranks(2, on_text, makes=makes), strict=True))
    assert plain < 4.0  # it learns: untrained 5.6
    # The text is another one with every Python: what is lost without feedback is the measure of what is lost with it.
    assert without > plain + 0.08
    assert with_feedback - plain < (without - plain) / 2


@pytest.mark.slow
def test_on_text_what_needs_no_feedback_random_places_and_dgc(ranks):
    def end(make, lr=0.2):
        return sum(losses[0] for losses in ranks(2, on_text, makes=[make], lr=lr)) / 2

    plain = end(None)
    for make in (partial(Cast, torch.float16), partial(Quantize, 4), partial(RandomK, 0.1)):
        assert end(make) < plain + 0.05, make
    assert end(partial(DGC, 0.01), lr=0.05) < plain + 0.05  # its own momentum, see above


@pytest.mark.slow
def test_one_bit_adam_on_text_needs_its_feedback(ranks):
    settings = {"lr": 2e-3, "betas": (0.9, 0.97), "eps": 1e-4}
    ours = partial(OneBitAdam, warmup=30)
    makes = [torch.optim.Adam, ours, partial(ours, compressor=OneBit(feedback=False))]
    told = ranks(2, on_text, makes=makes, adam=settings)
    adam, with_feedback, without = (sum(losses) / 2 for losses in zip(*told, strict=True))
    assert adam < 3.0
    assert with_feedback < adam + 0.35
    assert without > with_feedback + 0.15
