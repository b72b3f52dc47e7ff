"""Mixed precision: our GradScaler and autocast against torch.amp's, on the same gradients and the same model.

The scaler is timed alone: unscale, the check for infinities, an empty step, update. On two ranks ours has an all_reduce
more, because all ranks agree on the result; torch's ranks do not, so that row makes no claim. Autocast is timed in a
training step.
"""

import copy
from contextlib import nullcontext

import torch

from benchmarks.protocol import Comparison
from labkit import models
from labkit.measure.interleaved_timing import columns, time_variants
from labkit.run import launch

MODELS = {"mlp": ("medium", 64), "resnet": ("small", 8), "gpt": ("medium", 4)}  # size, samples of a batch
SHORT_STEP = ("mlp", "small", 64)  # a few milliseconds, which show the cost of a Python function per operation
ITERATIONS = 20  # of the scaler in one timed call, because one is shorter than a barrier
SCALER = [
    Comparison("ours / PyTorch's", "ours", "torch", at_most=1.00, upper=1.03),
    Comparison("A/A: PyTorch's / PyTorch's", "torch again", "torch"),
]
AGREED = [
    Comparison("ours, agreed by all ranks / PyTorch's, not agreed", "ours", "torch"),
    Comparison("A/A: PyTorch's / PyTorch's", "torch again", "torch"),
]
INFORM = [
    Comparison("ours / PyTorch's", "ours", "torch"),
    Comparison("fp32 / PyTorch's autocast", "fp32", "torch"),
    Comparison("A/A: PyTorch's / PyTorch's", "torch again", "torch"),
]
AUTOCAST = [Comparison("ours / PyTorch's", "ours", "torch", at_most=1.05), *INFORM[1:]]


class Idle(torch.optim.Optimizer):
    """An optimizer that does nothing, so that only the scaler is timed."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        pass


def scaler_times(context, model, repetitions):
    """Measure on every rank."""
    from labkit.amp import GradScaler

    variants = {}
    for name, scaler in {
        "ours": GradScaler,
        "torch": torch.amp.GradScaler,
        "torch again": torch.amp.GradScaler,
    }.items():
        parameters = list(models.build(model, "small").to(context.device).parameters())
        for p in parameters:
            p.grad = torch.full_like(p, 1e-3)
        # A constant scale of 1, so that the same gradients can be unscaled repeatedly.
        made = scaler(context.device.type, init_scale=1.0, growth_interval=2**30)
        variants[name] = scaler_calls(made, Idle(parameters), torch.ones((), device=context.device))
    time_variants(context, variants, repetitions=repetitions)


def scaler_calls(scaler, optimizer, loss):
    def calls():
        for _ in range(ITERATIONS):
            scaler.scale(loss)
            scaler.step(optimizer)
            scaler.update()

    return calls


def autocast_times(context, model, size, batch_size, repetitions):
    """Measure on one rank, in bf16."""
    from labkit.amp import autocast

    torch.manual_seed(0)
    module = models.build(model, size).to(context.device)
    samples = models.data.load("auto", model)
    batch = [
        torch.stack([torch.as_tensor(part) for part in parts]).to(context.device)
        for parts in zip(*(samples[i] for i in range(batch_size)), strict=True)
    ]
    kind = context.device.type
    contexts = {
        "ours": lambda: autocast(kind, torch.bfloat16),
        "torch": lambda: torch.autocast(kind, torch.bfloat16),
        "torch again": lambda: torch.autocast(kind, torch.bfloat16),
        "fp32": nullcontext,
    }
    loss = models.loss(model)
    variants = {name: training_step(copy.deepcopy(module), loss, make, *batch) for name, make in contexts.items()}
    time_variants(context, variants, repetitions=repetitions)


def training_step(model, loss, precision, inputs, targets):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step():
        optimizer.zero_grad()
        with precision():
            value = loss(model(inputs), targets)
        value.backward()
        optimizer.step()

    return step


def run(repetitions):
    """Yield the rows and the raw milliseconds of each run."""
    yield from alone(repetitions)
    yield from scalers(2, AGREED, repetitions)


def scalers(nproc, comparisons, repetitions):
    for model in ("resnet", "gpt"):
        parameters = {"model": model, "repetitions": repetitions}
        values = columns(launch("benchmarks.amp:scaler_times", nproc=nproc, **parameters).records)
        yield [comparison.row(f"GradScaler, {model}", nproc, values) for comparison in comparisons], values


def alone(repetitions):
    """Yield the rows of one rank."""
    yield from scalers(1, SCALER, repetitions)
    steps = [(name, *chosen, AUTOCAST) for name, chosen in MODELS.items()]
    for model, size, batch_size, comparisons in (*steps, (*SHORT_STEP, INFORM)):
        parameters = {"model": model, "size": size, "batch_size": batch_size, "repetitions": repetitions}
        values = columns(launch("benchmarks.amp:autocast_times", nproc=1, **parameters).records)
        yield [comparison.row(f"autocast bf16, {model} {size}", 1, values) for comparison in comparisons], values
