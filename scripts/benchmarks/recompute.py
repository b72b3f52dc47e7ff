"""A training step of a GPT without recomputation, with recomputed blocks, and with PyTorch's checkpoint.

Memory is counted, too: with every block checkpointed, activations after forward grow by one block input per block.
"""

import copy
from functools import partial

import torch

from benchmarks.protocol import Comparison, exact_row
from labkit import models
from labkit.measure.interleaved_timing import columns, time_variants
from labkit.run import launch

BATCH = {"small": 8, "medium": 4}
COMPARISONS = [
    Comparison("every block recomputed / everything kept", "every block", "plain", at_most=1.36),
    Comparison("every second block / everything kept", "every second block", "plain"),
    Comparison("products kept / everything kept", "products kept", "plain"),
    Comparison("every block: ours / PyTorch's", "every block", "torch"),
    Comparison("A/A: everything kept / everything kept", "plain again", "plain"),
]


def checkpoint_with_pytorch(model, block):
    from torch.utils.checkpoint import checkpoint

    for part in model.modules():
        if isinstance(part, block):
            part.forward = partial(checkpoint, part.forward, use_reentrant=False)


def times(context, size, repetitions):
    """Measure on one rank."""
    from labkit.models.gpt import Block
    from labkit.recompute import checkpoint_every

    torch.manual_seed(0)
    module = models.build("gpt", size).to(context.device)
    tokens = torch.randint(256, (BATCH[size], module.context + 1), device=context.device)
    prepares = {
        "plain": lambda model: None,
        "plain again": lambda model: None,
        "every block": lambda model: checkpoint_every(model, Block),
        "every second block": lambda model: checkpoint_every(model, Block, 2),
        "products kept": lambda model: checkpoint_every(model, Block, keep="matmul"),
        "torch": lambda model: checkpoint_with_pytorch(model, Block),
    }
    variants = {}
    for name, prepare in prepares.items():
        model = copy.deepcopy(module)
        prepare(model)
        variants[name] = training_step(model, tokens[:, :-1], tokens[:, 1:])
    time_variants(context, variants, repetitions=repetitions)


def training_step(model, inputs, targets):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loss = models.loss("gpt")

    def step():
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()

    return step


def held(context):
    """Count bytes of activations after forward for four and five layers, on one rank."""
    from labkit.memory.memory_tracker import MemoryTracker
    from labkit.models.gpt import Block
    from labkit.recompute import checkpoint_every

    for recompute in (False, True):
        for layers in (4, 5):
            model = models.build("gpt", "small", layers=layers)
            if recompute:
                checkpoint_every(model, Block)
            with MemoryTracker(model) as memory:
                output = model(torch.zeros(BATCH["small"], model.context, dtype=torch.int64))
                now = memory.current["activations"]
            block_input = BATCH["small"] * model.context * model.norm.normalized_shape[0] * output.element_size()
            context.record(recompute=recompute, layers=layers, held=now, block_input=block_input)


def run(repetitions):
    """Yield the rows and the raw measurements."""
    counted = launch("benchmarks.recompute:held", nproc=1, device="cpu", quiet=True).records
    grown = {kind: int(rows["held"].diff().iloc[-1]) for kind, rows in counted.groupby("recompute")}
    block_input = int(counted["block_input"].iloc[0])
    rows = [exact_row("recompute", "activations held for one more block", 1, grown[True], block_input)]
    yield rows, {"held": counted["held"].tolist(), "one more block, everything kept": grown[False]}
    yield from alone(repetitions)


def alone(repetitions):
    """Return the timed variants of one rank."""
    for size in ("small", "medium"):
        measured = launch("benchmarks.recompute:times", nproc=1, size=size, repetitions=repetitions)
        values = columns(measured.records)
        yield [comparison.row(f"recompute, gpt {size}", 1, values) for comparison in COMPARISONS], values
