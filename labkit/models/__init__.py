"""Models by name: plain torch modules that are unaware of ranks, in three sizes, with a loss each.

              tiny                small (about 1 million)   medium (about 10 million parameters)
    mlp       64-256-256-10       4 hidden layers of 576    5 of 1536
    resnet    depth 8, width 4    depth 20, width 32        depth 20, width 96
    gpt       2 layers of 32      4 layers of 128           6 layers of 384

tiny is for tests and first tries (a batch of 32: milliseconds on one core), medium for benchmarks.
"package.module:function" names a custom model, without a size: a Task.
`data` has real inputs for each; `emulate` lets a model sleep instead of computing.
"""

import inspect

import torch
from torch.nn import functional as F

from labkit.models import data
from labkit.models.custom import Task, is_own, no_unit, task
from labkit.models.emulated import emulate
from labkit.models.gpt import GPT, Block
from labkit.models.mlp import MLP, is_hidden
from labkit.models.names import known
from labkit.models.resnet import ResNet, is_plain_block
from labkit.models.sizes import SIZES, arguments_of

__all__ = ["SIZES", "Task", "build", "cross_entropy", "data", "emulate", "loss", "unit"]

NONE_IGNORED = torch.iinfo(torch.int64).min
CLASSES = {"mlp": MLP, "resnet": ResNet, "gpt": GPT}
# the repeated part that keeps the shape of its input
UNITS = {"mlp": is_hidden, "resnet": is_plain_block, "gpt": Block}


def build(name, size="tiny", **overrides):
    """Build model `name` ("mlp", "resnet", "gpt") of a size ("tiny", "small", "medium").

    Weights are random. `overrides` replace arguments of the class, as in build("gpt", "small",
    layers=8, dropout=0.1). Raises ValueError with the valid names for another name, size or
    override.
    """
    if is_own(name):
        return task(name).model(**overrides)
    arguments = {**arguments_of(name, size), **overrides}
    accepted = inspect.signature(CLASSES[name]).parameters
    for argument in arguments:
        known(f"argument of {CLASSES[name].__name__}", argument, accepted)
    return CLASSES[name](**arguments)


def loss(name):
    """Return the loss of model `name`: (output, target) -> scalar, the mean over all targets.

    Classifiers: output [B, classes], target [B]. gpt: [B, T, vocab] and [B, T]. Targets are int64.
    Raises ValueError for an unknown name.
    """
    if is_own(name):
        return task(name).loss
    known("model", name, SIZES)
    return cross_entropy


def unit(name):
    """Return the repeated unit of model `name` that keeps its input's shape: class or predicate.

    A predicate is a function module -> bool.

    Raises ValueError for an unknown name.
    """
    if is_own(name):
        return task(name).unit or no_unit
    return known("model", name, UNITS)


def cross_entropy(output, target):
    """Return the mean cross-entropy: output [..., classes] floats, target [...] int64 -> scalar.

    Every target counts, so -100 raises an error like any other invalid class.
    """
    return F.cross_entropy(output.flatten(0, -2), target.flatten(), ignore_index=NONE_IGNORED)


cross_entropy.ignore_index = None  # so Trainer need not exchange the number of counted targets
