import copy
from itertools import chain

import pytest
import torch
import torch.distributed as dist

from labkit import models
from labkit.models import emulated
from labkit.models.emulated import emulate
from labkit.models.gpt import Attention, Block


@pytest.fixture
def sleeps(monkeypatch):
    slept = []
    monkeypatch.setattr(emulated, "sleep", slept.append)
    return slept


def example(name, batch=4):
    torch.manual_seed(3)
    if name == "gpt":
        tokens = torch.randint(256, (batch, 9))
        return tokens[:, :-1], tokens[:, 1:]
    inputs = torch.randn(batch, 64) if name == "mlp" else torch.randn(batch, 3, 32, 32)
    return inputs, torch.randint(10, (batch,))


@pytest.mark.parametrize("name", models.SIZES)
def test_every_parameter_of_every_model_gets_a_gradient(name, sleeps):
    model = emulate(models.build(name), models.unit(name), forward_ms=10, backward_ms=30)
    inputs, target = example(name)
    models.loss(name)(model(inputs), target).backward()
    assert all(p.grad.shape == p.shape and p.grad.dtype == p.dtype for p in model.parameters())
    units = len(sleeps) // 2
    assert units >= 1 and sleeps == [0.01] * units + [0.03] * units


def test_sleeps_of_a_step(sleeps):
    model = emulate(models.build("gpt", layers=3), Block, forward_ms=4)
    inputs, target = example("gpt")
    model(inputs)
    assert sleeps == [0.004] * 3
    del sleeps[:]
    models.loss("gpt")(model(inputs), target).backward()
    assert sleeps == [0.004] * 3 + [0.008] * 3  # twice as long by default
    del sleeps[:]
    with torch.no_grad():
        model(inputs)
    assert sleeps == [0.004] * 3


def test_gradients_become_ready_layer_by_layer_from_the_last(monkeypatch):
    events = []
    monkeypatch.setattr(emulated, "sleep", lambda seconds: events.append(seconds))
    model = emulate(models.build("gpt", layers=3, tied=False), Block, forward_ms=1000, backward_ms=2000)
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: events.append(name))
    inputs, target = example("gpt")
    models.loss("gpt")(model(inputs), target).backward()

    def layer(event):
        return int(event.split(".")[1]) if str(event).startswith("blocks") else event

    order = [layer(event) for event in events[3:]]  # after the three forwards
    parameters = sum(1 for _ in model.blocks[0].parameters())
    assert order[0] == "head.weight" and set(order[1:3]) == {"norm.weight", "norm.bias"}
    assert order[3:-2] == list(chain(*([2.0] + [index] * parameters for index in (2, 1, 0))))
    assert set(order[-2:]) == {"token_embedding.weight", "position_embedding.weight"}


def test_units_pass_their_input_and_the_gradient_on(sleeps):
    layer = torch.nn.Linear(3, 3)
    model = emulate(torch.nn.Sequential(layer), torch.nn.Linear, 1)
    x = torch.randn(2, 3, requires_grad=True)
    y = model(x)
    assert torch.equal(y, x) and y.data_ptr() != x.data_ptr()
    weight = torch.randn(2, 3)
    (y * weight).sum().backward()
    assert torch.equal(x.grad, weight)
    # The gradient of y is `weight`; its sum at the last dimension's first index scales each parameter.
    torch.testing.assert_close(layer.weight.grad, layer.weight * weight[:, 0].sum())
    torch.testing.assert_close(layer.bias.grad, layer.bias * weight[:, 0].sum())


def test_a_frozen_parameter_gets_no_gradient(sleeps):
    layer = torch.nn.Linear(3, 3)
    layer.bias.requires_grad_(False)
    emulate(layer, torch.nn.Linear, 1)(torch.randn(2, 3)).sum().backward()
    assert layer.bias.grad is None and layer.weight.grad is not None


def test_a_copy_sleeps_for_its_own_parameters(sleeps):
    model = emulate(models.build("gpt"), Block, 1)
    other = copy.deepcopy(model)
    inputs, target = example("gpt")
    models.loss("gpt")(other(inputs), target).backward()
    assert all(p.grad is not None for p in other.parameters())
    assert all(p.grad is None for p in model.parameters())
    assert model.state_dict().keys() == models.build("gpt").state_dict().keys()


def test_which_parts_match(sleeps):
    inputs, _ = example("gpt")
    for unit, count in (((Block, Attention), 2), (Attention, 2), (lambda part: isinstance(part, Block), 2)):
        del sleeps[:]
        emulate(models.build("gpt"), unit, 1)(inputs)
        assert len(sleeps) == count  # of nested matches the outer one
    with pytest.raises(
        ValueError, match=r"no part of the model matches unit .*Block.*: it consists of Linear, MLP, ReLU"
    ):
        emulate(models.build("mlp"), Block, 1)
    with pytest.raises(ValueError, match="backward_ms=-1"):
        emulate(models.build("gpt"), Block, 1, backward_ms=-1)
    assert emulated.PROVENANCE == "emulated"


def train(name, rank, world_size, skip_average=False):
    """Three steps of SGD with momentum on this rank's share of a batch; the parameters afterwards."""
    torch.manual_seed(0)
    model = emulate(models.build(name).double(), models.unit(name), forward_ms=0.01)
    if name == "resnet":
        model.eval()  # batch statistics would differ between a batch and its halves
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, target = example(name, batch=6)
    inputs, target = inputs[rank::world_size], target[rank::world_size]
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    for _ in range(3):
        optimizer.zero_grad()
        models.loss(name)(model(inputs), target).backward()
        for p in model.parameters():
            if world_size > 1 and not skip_average:
                dist.all_reduce(p.grad)
                p.grad /= world_size
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def train_here(rank, world_size, name, **arguments):
    return train(name, rank, world_size, **arguments)


@pytest.mark.parametrize("name", models.SIZES)
def test_ranks_train_as_one_process(ranks, name):
    alone = train(name, 0, 1)
    for result in ranks(2, train_here, name=name):
        for key, value in alone.items():
            torch.testing.assert_close(result[key], value, rtol=1e-12, atol=1e-12)
    # The gradients depend on the data, so an average left out is seen in the units' parameters too.
    torch.manual_seed(0)
    unit = models.unit(name)
    is_unit = (lambda part: isinstance(part, unit)) if isinstance(unit, type) else unit
    key = next(key + ".weight" for key, part in unit_parts(models.build(name), is_unit))
    different = ranks(2, train_here, name=name, skip_average=True)[0][key]
    assert (different - alone[key]).abs().max() > 1e-6


def unit_parts(model, is_unit):
    """The first layer with a matrix in each unit, with its name in the model."""
    for name, part in model.named_modules():
        if is_unit(part):
            inner = [(key, layer) for key, layer in part.named_modules() if getattr(layer, "weight", None) is not None]
            key, layer = next((key, layer) for key, layer in inner if layer.weight.dim() > 1)
            yield ".".join(filter(None, (name, key))), layer


@pytest.mark.gpu
def test_on_cuda(sleeps):
    model = emulate(models.build("gpt").cuda(), Block, 1)
    inputs, target = example("gpt")
    models.loss("gpt")(model(inputs.cuda()), target.cuda()).backward()
    assert len(sleeps) == 4 and all(p.grad.is_cuda for p in model.parameters())


def test_beside_the_arithmetic_nothing_changes_but_the_time(sleeps):
    plain = models.build("gpt", "tiny")
    sleeping = emulate(copy.deepcopy(plain), models.unit("gpt"), forward_ms=4.0, arithmetic=True)
    for model in (sleeping, plain):
        model(example("gpt")[0]).square().mean().backward()
    for own, theirs in zip(sleeping.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own.grad, theirs.grad)
    assert sleeps == [0.004] * 2 + [0.008] * 2  # two blocks
