"""A model and data of one's own: model="package.module:function" of an Experiment.

    # mine.py                                            python -m labkit.train --model mine:task
    def task():
        return Task(Net, train, held_out, torch.nn.functional.mse_loss, unit=Block)

The function is called once in each process that asks.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from torch.utils.data import Dataset


@dataclass(frozen=True)
class Task:
    """What a function that --model names has to return.

    model: called without arguments, a module with random weights. train, held_out: map-style
    datasets of (input, target), tensors. loss: (output, target) -> scalar, the mean over targets.
    unit: what repeats in the model, a class or a function module -> bool; FSDP gathers it together,
    --recompute recomputes it. None: the model is one unit.
    """

    model: Callable
    train: Dataset
    held_out: Dataset
    loss: Callable
    unit: type | Callable | None = None


@cache
def task(name):
    """The Task of "package.module:function". ValueError, in a line, where there is none."""
    module, _, function = name.partition(":")
    try:
        made = getattr(importlib.import_module(module), function)()
    except Exception as error:  # whatever code of one's own raises
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"model {name}: {reason}") from error
    if not isinstance(made, Task):
        raise ValueError(f"model {name}: returns {type(made).__name__}, not a labkit.models.Task")
    return made


def is_own(name):
    return ":" in name


def no_unit(module):
    return False
