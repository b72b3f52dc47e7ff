"""timm's LAMB and ours: the same weights to rounding, for both of its implementations."""

import importlib
import sys
import types
from pathlib import Path

import pytest
import torch
from hook_training import train
from installed_frameworks import FOLDER, MISSING
from tensors import mlp

from labkit.lamb import LAMB

pytestmark = pytest.mark.skipif(FOLDER is None, reason=MISSING)


@pytest.fixture
def timms(monkeypatch):
    """timm's class, without the rest of timm, which needs torchvision."""
    timm = Path(FOLDER, "timm")
    for name, folder in (("timm", timm), ("timm.optim", timm / "optim")):
        package = types.ModuleType(name)
        package.__path__ = [str(folder)]
        monkeypatch.setitem(sys.modules, name, package)
    return importlib.import_module("timm.optim.lamb").Lamb


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_ten_steps_end_with_timms_weights(timms, weight_decay, foreach):
    ours, theirs = (mlp(24, 40, 4).double() for _ in range(2))
    for model in (ours, theirs):
        torch.nn.init.zeros_(model[0].bias)  # its first trust ratio is 1 in both
    options = {"lr": 0.05, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": weight_decay}
    # timm clips gradients unless told not to, and without always_adapt has no ratio where nothing decays.
    other = {"max_grad_norm": None, "always_adapt": True, "foreach": foreach}
    ends = [fit(ours, LAMB(ours.parameters(), **options)), fit(theirs, timms(theirs.parameters(), **options, **other))]
    torch.testing.assert_close(*ends, rtol=0, atol=1e-12)


def fit(model, optimizer):
    """The weights after ten steps."""
    return train(model, None, optimizer, rank=0, steps=range(10), wrap=in_float64)


def in_float64(model):
    return lambda inputs: model(inputs.double())
