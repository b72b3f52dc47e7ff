"""Counts that are the same on every machine: bytes sent by each rank, peak bytes."""

import torch

from benchmarks.protocol import exact_row
from labkit import comm, models
from labkit.run import launch

NUMEL = 12 * 2**16  # divisible by 2, 3 and 4


def ring_bytes(context):
    """Measure on every rank."""
    from labkit.allreduce import ring

    with comm.record() as log:
        ring(torch.zeros(NUMEL))
    context.record(sent=sum(event.sent_bytes for event in log))


def ddp_bytes(context, model):
    """Measure on every rank."""
    from labkit.ddp import DDP
    from labkit.memory.memory_tracker import MemoryTracker

    module = models.build(model, "small")
    samples = models.data.load("auto", model)
    inputs, targets = (torch.as_tensor(part).unsqueeze(0) for part in samples[0])
    ddp = DDP(module, broadcast_buffers=False)  # BatchNorm's statistics would be an extra small message
    with comm.record() as log, MemoryTracker(module) as tracker:
        models.loss(model)(ddp(inputs), targets).backward()
    sizes = [p.numel() * p.element_size() for p in module.parameters()]
    peak = tracker.peak
    context.record(
        parameters=sum(sizes),
        reduced=sum(event.payload_bytes for event in log if event.op == "all_reduce"),
        held=peak.get("parameters", 0) + peak.get("gradients", 0) + peak.get("communication", 0),
    )


def run(repetitions):
    """Yield the rows and the counts."""
    for nproc in (2, 3, 4):
        sent = launch("benchmarks.exact:ring_bytes", nproc=nproc, device="cpu", quiet=True).records["sent"]
        predicted = 2 * (nproc - 1) * NUMEL * 4 // nproc
        rows = [exact_row("ring all-reduce", "sent by each rank", nproc, int(sent.max()), predicted)]
        yield rows, {"sent": sent.tolist()}
    for model in ("mlp", "resnet", "gpt"):
        counts = launch("benchmarks.exact:ddp_bytes", nproc=2, device="cpu", quiet=True, model=model).records
        total = int(counts["parameters"].max())
        rows = [
            exact_row(f"DDP, {model}", "gradients all-reduced", 2, int(counts["reduced"].max()), total),
            exact_row(f"DDP, {model}", "parameters + gradients at the peak", 2, int(counts["held"].max()), 2 * total),
        ]
        yield rows, counts.to_dict("list")
