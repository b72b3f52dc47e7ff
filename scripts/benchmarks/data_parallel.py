"""A training step with SGD and momentum: our bucketed DDP, PyTorch's DDP, and no communication.

PyTorch's DDP uses gradient_as_bucket_view=True, its faster variant. All variants start from the same weights, use the
same batch, and have their own copy of the model.
"""

import copy

import torch

from benchmarks.protocol import Comparison
from labkit import models
from labkit.measure.interleaved_timing import columns, time_variants
from labkit.run import launch

BATCH = {"mlp": 64, "resnet": 8, "gpt": 4}  # samples a rank
CLAIMS = {"mlp": (0.97, None), "resnet": (1.00, 1.02), "gpt": (0.97, None)}  # at_most, upper


def comparisons(model):
    at_most, upper = CLAIMS[model]
    return [
        Comparison("ours / PyTorch's", "ours", "torch", at_most, upper),
        Comparison("no communication / PyTorch's", "floor", "torch"),
        Comparison("A/A: PyTorch's / PyTorch's", "torch again", "torch"),
    ]


def times(context, model, size, repetitions):
    """Measure on every rank."""
    from torch.nn.parallel import DistributedDataParallel

    from labkit.ddp import DDP

    torch.manual_seed(0)
    module = models.build(model, size).to(context.device)
    batch = share(context, model)
    wraps = {
        "ours": DDP,
        "torch": lambda copied: DistributedDataParallel(copied, gradient_as_bucket_view=True),
        "torch again": lambda copied: DistributedDataParallel(copied, gradient_as_bucket_view=True),
        "floor": lambda copied: copied,
    }
    variants = {
        name: training_step(wrap(copy.deepcopy(module)), models.loss(model), *batch) for name, wrap in wraps.items()
    }
    time_variants(context, variants, repetitions=repetitions)


def share(context, model):
    """Return this rank's inputs and targets on its device: the samples after those of the rank before."""
    samples = models.data.load("auto", model)
    first = context.rank * BATCH[model]
    return [
        torch.stack([torch.as_tensor(part) for part in parts]).to(context.device)
        for parts in zip(*(samples[first + i] for i in range(BATCH[model])), strict=True)
    ]


def training_step(model, loss, inputs, targets):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step():
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()

    return step


def run(repetitions):
    """Yield the rows and the raw milliseconds of each run."""
    for model in ("mlp", "resnet", "gpt"):
        for nproc in (2, 4):
            parameters = {"model": model, "size": "small", "repetitions": repetitions}
            measured = launch("benchmarks.data_parallel:times", nproc=nproc, **parameters)
            values = columns(measured.records)
            yield [comparison.row(f"DDP, {model}", nproc, values) for comparison in comparisons(model)], values
