"""Custom models and data: model="package.module:function" of an Experiment.

    # mine.py                                            python -m labkit.train --model mine:task
    def task():
        return Task(Net, train, held_out, torch.nn.functional.mse_loss, unit=Block)

The function is called once in each process that needs it.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from torch.utils.data import Dataset


@dataclass(frozen=True)
class Task:
    """The return value of a function that --model names.

    model: called without arguments, returns a module with random weights. train, held_out:
    map-style datasets of (input, target), tensors. loss: (output, target) -> scalar, the mean over
    targets. unit: the repeated part of the model, a class or a function module -> bool; FSDP
    gathers one unit at a time, --recompute recomputes units. None: the model is one unit.
    """

    model: Callable
    train: Dataset
    held_out: Dataset
    loss: Callable
    unit: type | Callable | None = None


@cache
def task(name):
    """Return the Task of "package.module:function". Raises ValueError if there is none."""
    module, _, function = name.partition(":")
    try:
        made = getattr(importlib.import_module(module), function)()
    except Exception as error:  # the user's code may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"model {name}: {reason}") from error
    if not isinstance(made, Task):
        raise ValueError(
            f"model {name}: must return a labkit.models.Task, not {type(made).__name__}"
        )
    return made


def is_own(name):
    return ":" in name


def no_unit(module):
    return False
