"""Offload against keeping everything on the device: the same bits, and the bytes are elsewhere."""

import pytest
import torch

from labkit import models
from labkit.measure.memory import MemoryTracker
from labkit.offload import Offloaded, offload_activations

OPTIMIZERS = {
    "SGD": {"lr": 0.1},
    "SGD with momentum": {"lr": 0.1, "momentum": 0.9},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "Adafactor": {},
    "Adagrad": {},
    "Adadelta": {},
    "Adamax": {},
    "ASGD": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"centered": True, "momentum": 0.5},
    "Rprop": {},
}


def gpt():
    torch.manual_seed(0)
    return models.build("gpt", "tiny", vocab=64, context=16, dropout=0.1)


def optimizer(model, name, **changes):
    """Two groups, of which one trains more slowly, and a frozen parameter."""
    first, *rest = model.parameters()
    rest[3].requires_grad_(False)
    slow = {"params": [first], "lr": 1e-3}
    return getattr(torch.optim, name.split()[0])([slow, {"params": rest}], **OPTIMIZERS[name] | changes)


def train(model, optimizer, steps=3, offload=None, first=0):
    for number in range(first, first + steps):
        torch.manual_seed(number)
        tokens = torch.randint(64, (4, 17))
        optimizer.zero_grad()
        if offload is None:
            loss = models.loss("gpt")(model(tokens[:, :-1]), tokens[:, 1:])
        else:
            with offload:
                loss = models.loss("gpt")(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_in_a_file_train_the_same_model(name, tmp_path):
    model = gpt()
    expected = train(model, optimizer(model, name))
    model = gpt()
    offloaded = Offloaded(optimizer(model, name), tmp_path, chunk_mb=0.01)
    assert torch.equal(train(model, offloaded), expected)
    states = [value for state in offloaded.state.values() for value in state.values()]
    assert all(value.untyped_storage().filename for value in states if isinstance(value, torch.Tensor) and value.dim())
    assert list(tmp_path.iterdir()) == []  # the file has no name


def test_activations_in_files_give_the_same_gradients(tmp_path):
    model = gpt()
    expected = train(model, optimizer(model, "AdamW"))
    model = gpt()
    offload = offload_activations(tmp_path, min_bytes=1024)
    assert torch.equal(train(model, optimizer(model, "AdamW"), offload=offload), expected)
    assert list(tmp_path.iterdir()) == []


def test_what_is_in_a_file_is_not_in_memory(tmp_path):
    model = gpt()
    offloaded = Offloaded(optimizer(model, "AdamW"), tmp_path)
    train(model, offloaded, steps=1)
    with MemoryTracker(model, offloaded) as tracker:
        train(model, offloaded, steps=1)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert tracker.peak["optimizer_states"] == 4 * len(trained)  # `step`, one number each
    assert offloaded.nbytes == sum(2 * p.nbytes for p in trained)
