"""Backward in two parts, against autograd's in one: on graphs of all kinds, and for the price of one."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from labkit.models import emulated
from labkit.models.emulated import emulate
from labkit.pipeline.zero_bubble_backward import backward_of_input, backward_of_weights
from labkit.recompute import checkpoint

F64 = torch.float64


class Odd(nn.Module):
    """A weight used twice, one that is never used, one that is frozen, one that the input does not meet."""

    def __init__(self):
        super().__init__()
        self.twice, self.once, self.never, self.frozen = (nn.Linear(5, 5) for _ in range(4))
        self.frozen.requires_grad_(False)
        self.scale, self.apart = nn.Parameter(torch.ones(5)), nn.Parameter(torch.randn(5))

    def forward(self, x):
        x = torch.tanh(self.twice(x) * self.scale)
        x = self.frozen(self.once(torch.tanh(self.twice(x))))
        return x + self.apart.exp() * (self.apart * 2).sin()


class Ignoring(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 5))

    def forward(self, x):
        return self.weight * 2


MODELS = {
    "layers": lambda: nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.LayerNorm(7), nn.Linear(7, 5)),
    "attention": lambda: nn.TransformerEncoderLayer(5, 1, 8, dropout=0.0, batch_first=True),
    "odd": Odd,
    "no weights": nn.Tanh,
    "input ignored": Ignoring,
}


def gradients(model, x, backward):
    model.zero_grad()
    output = model(x)
    return [backward(output, x), *(p.grad for p in model.parameters())]


def at_once(output, x):
    weight = torch.linspace(0, 1, output.numel(), dtype=F64).view_as(output)
    output.backward(weight)
    return x.grad


def in_two(output, x):
    weight = torch.linspace(0, 1, output.numel(), dtype=F64).view_as(output)
    found, later = backward_of_input(output, x, weight)
    backward_of_weights(later)
    return found


@pytest.mark.parametrize("wants", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_both_parts_are_the_whole(name, wants):
    torch.manual_seed(0)
    model, x = MODELS[name]().to(F64), torch.randn(4, 5, dtype=F64)
    if name == "no weights" and not wants:
        return
    wanted = gradients(model, x.clone().requires_grad_(wants), at_once)
    found = gradients(model, x.clone().requires_grad_(wants), in_two)
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.allclose(ours, theirs, rtol=0, atol=1e-14)


def test_gradients_are_added_to_those_that_are_there():
    model, x = nn.Linear(5, 5).to(F64), torch.randn(4, 5, dtype=F64, requires_grad=True)
    in_two(model(x), x)
    once = model.weight.grad.clone()
    in_two(model(x), x)
    assert torch.equal(model.weight.grad, 2 * once)


def test_nothing_is_computed_twice():
    model, x = MODELS["layers"]().to(F64), torch.randn(4, 5, dtype=F64, requires_grad=True)
    with FlopCounterMode(display=False) as whole:
        model(x).sum().backward()
    with FlopCounterMode(display=False) as forward:
        output = model(x)
    with FlopCounterMode(display=False) as of_input:
        _, later = backward_of_input(output, x, torch.ones_like(output))
    with FlopCounterMode(display=False) as of_weights:
        backward_of_weights(later)
    flops = [one.get_total_flops() for one in (forward, of_input, of_weights)]
    assert flops[0] == flops[1] == flops[2] == whole.get_total_flops() / 3


def test_what_is_checkpointed():
    torch.manual_seed(0)
    model, x = MODELS["layers"]().to(F64), torch.randn(4, 5, dtype=F64)
    wanted = gradients(model, x.clone().requires_grad_(), at_once)
    again = x.clone().requires_grad_()
    model.zero_grad()
    found = [in_two(checkpoint(model, again), again), *(p.grad for p in model.parameters())]
    assert all(torch.allclose(a, b, rtol=0, atol=1e-14) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("wants", "slept"), [(True, [[0.01], [0.02], [0.03]]), (False, [[0.01], [], [0.05]])])
def test_emulated_compute_sleeps_for_each_part_in_its_part(monkeypatch, wants, slept):
    sleeps, parts = [], []
    monkeypatch.setattr(emulated, "sleep", sleeps.append)
    torch.manual_seed(0)
    plain, split = nn.Linear(3, 3), nn.Linear(3, 3)
    split.load_state_dict(plain.state_dict())
    emulate(plain, nn.Linear, 10, 50)
    emulate(split, nn.Linear, 10, 50, weights_ms=30)
    x = torch.randn(2, 3, requires_grad=wants)
    output = split(x)
    parts.append([*sleeps])
    _, later = backward_of_input(output, x, torch.ones_like(output))
    parts.append(sleeps[1:])
    backward_of_weights(later)
    parts.append(sleeps[1 + len(parts[1]) :])
    assert parts == [pytest.approx(part) for part in slept]
    plain(x).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), split.parameters(), strict=True))
    del sleeps[:]
    split(x).sum().backward()
    assert sum(sleeps) == pytest.approx(0.06)
    with pytest.raises(ValueError, match="weights_ms=60"):
        emulate(plain, nn.Linear, 10, 50, weights_ms=60)
