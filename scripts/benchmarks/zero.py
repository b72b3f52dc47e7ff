"""A training step with AdamW: our ZeRO-1 and -2, and PyTorch's ZeroRedundancyOptimizer on PyTorch's DDP.

PyTorch's uses its faster variant: gradient_as_bucket_view=True and parameters_as_bucket_view=True. All variants start
from the same weights, use the same batch, and have their own copy of the model. Bytes are compared with DDP's.
"""

import copy

import torch

from benchmarks.data_parallel import share
from benchmarks.protocol import Comparison, exact_row
from labkit import comm, models
from labkit.measure.interleaved_timing import columns, time_variants
from labkit.run import launch

COMPARISONS = [
    Comparison("ZeRO-1 / PyTorch's", "zero1", "torch", at_most=0.95),
    Comparison("ZeRO-2 / PyTorch's", "zero2", "torch"),
    Comparison("ZeRO-1 / our DDP", "zero1", "ddp"),
    Comparison("A/A: PyTorch's / PyTorch's", "torch again", "torch"),
]


def setting(context, model):
    """Return a module and this rank's batch."""
    torch.manual_seed(0)
    module = models.build(model, "small").to(context.device)
    return module, share(context, model)


def of_pytorch(module):
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(module, gradient_as_bucket_view=True)
    return wrapped, ZeroRedundancyOptimizer(
        module.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=0.001
    )


def of_ours(stage):
    from labkit.ddp import ddp
    from labkit.zero import zero

    if stage == "ddp":
        return lambda module: (ddp.DDP(module), torch.optim.AdamW(module.parameters(), lr=0.001))
    sharded = {"zero1": zero.ZeRO1, "zero2": zero.ZeRO2}[stage]
    return lambda module: (module, sharded(module.parameters(), torch.optim.AdamW, lr=0.001))


def training_step(model, optimizer, loss, inputs, targets):
    def step():
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()

    return step


def times(context, model, repetitions):
    """Measure on every rank."""
    module, batch = setting(context, model)
    makes = {stage: of_ours(stage) for stage in ("zero1", "zero2", "ddp")}
    makes |= {"torch": of_pytorch, "torch again": of_pytorch}
    variants = {
        name: training_step(*make(copy.deepcopy(module)), models.loss(model), *batch) for name, make in makes.items()
    }
    time_variants(context, variants, repetitions=repetitions)


def sent(context, model):
    """Count, on every rank, the bytes sent in one step, and the padding among them."""
    module, batch = setting(context, model)
    counts = {}
    for stage in ("ddp", "zero1", "zero2"):
        wrapped, optimizer = of_ours(stage)(copy.deepcopy(module))
        step = training_step(wrapped, optimizer, models.loss(model), *batch)
        with comm.record() as log:
            step()
        counts[stage] = sum(event.sent_bytes for event in log)
    padding = sum(bucket.values.nbytes - bucket.nbytes for bucket in optimizer.buckets)
    context.record(**counts, padding=2 * (context.world_size - 1) * padding // context.world_size)


def run(repetitions):
    """Yield the rows and the raw milliseconds, or counts, of each run."""
    for model in ("mlp", "gpt"):  # models without buffers, so DDP sends only gradients
        for nproc in (2, 4):
            counts = launch("benchmarks.zero:sent", nproc=nproc, quiet=True, model=model).records
            row = {key: int(counts[key].max()) for key in ("ddp", "zero1", "zero2", "padding")}
            formula = f"of DDP's {row['ddp']:,} + {row['padding']} of padding"
            yield (
                [
                    exact_row(
                        f"ZeRO, {model}", f"{stage} sends, {formula}", nproc, row[stage], row["ddp"] + row["padding"]
                    )
                    for stage in ("zero1", "zero2")
                ],
                counts.to_dict("list"),
            )
    for model in ("mlp", "gpt"):
        for nproc in (2, 4):
            measured = launch("benchmarks.zero:times", nproc=nproc, model=model, repetitions=repetitions)
            values = columns(measured.records)
            yield [comparison.row(f"ZeRO, {model}", nproc, values) for comparison in COMPARISONS], values
