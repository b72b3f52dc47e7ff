"""Bytes: what was predicted before a step, held against what the tracker saw of it, strategy by strategy.

Nothing here is timed, so repetitions do not matter. Of several ranks the one farthest from its prediction is told.
"""

import torch

from benchmarks.protocol import exact_row
from labkit import models
from labkit.run import launch

BATCH = {"mlp": 64, "resnet": 8, "gpt": 4}  # samples a rank
STRATEGIES = ("ddp_bucketed", "zero1", "zero2", "fsdp", "fsdp_grad_op")
STEPS = 4  # the first makes the states; of the others the least: a sender may let go of a message late
STATE = ("parameters", "gradients", "optimizer_states")


def counts(context, model, strategy):
    """Runs on every rank."""
    from labkit.memory import estimate
    from labkit.memory.memory_tracker import MemoryTracker
    from labkit.trainer import make_optimizer, parallelize

    module, loss, unit = models.build(model, "small").to(context.device), models.loss(model), models.unit(model)
    samples = models.data.load("auto", model)
    parts = zip(*(samples[i] for i in range(BATCH[model])), strict=True)
    x, y = (torch.stack([torch.as_tensor(t) for t in part]).to(context.device) for part in parts)
    where = {"unit": unit, "rank": context.rank, "device": context.device}
    told = estimate(module, x, loss, strategy, context.world_size, target=y, **where)
    wrapped = parallelize(module, strategy, unit)
    optimizer = make_optimizer(wrapped, strategy, torch.optim.AdamW)
    trackers = [MemoryTracker(module, optimizer, device=context.device.type) for _ in range(STEPS)]
    for tracker in trackers:
        with tracker:
            optimizer.zero_grad()
            value = loss(wrapped(x), y)
            value.backward()
            optimizer.step()
    least = min(trackers[1:], key=lambda tracker: tracker.peak_total)
    context.record(
        predicted_state=sum(told.held[kind] for kind in STATE),
        tracked_state=sum(trackers[-1].current[kind] for kind in STATE),
        predicted_activations=told.peak["activations"],
        tracked_activations=least.peak["activations"],
        predicted_peak=told.peak_total,
        tracked_peak=least.peak_total,
    )


def within_row(group, name, ranks, measured, predicted, tolerance=0.02):
    """A row for what must agree to a part of it."""
    row = exact_row(group, name, ranks, measured, predicted)
    verdict = "holds" if abs(row["ratio"] - 1) <= tolerance else "missed"
    return row | {"target": f"within {tolerance:.0%}", "verdict": verdict}


def rows_of(told, model, strategy, ranks):
    """Two rows: what is held between steps, of all ranks, and the peak of the rank that is farthest from its own."""
    group = f"memory, {model}, {strategy}"
    state = [int(told[column].sum()) for column in ("tracked_state", "predicted_state")]
    name = "parameters + gradients + states of all ranks, with padding"
    worst = (told["tracked_peak"] / told["predicted_peak"] - 1).abs().idxmax()
    peak = [int(told.loc[worst, column]) for column in ("tracked_peak", "predicted_peak")]
    return [exact_row(group, name, ranks, *state), within_row(group, "peak of a rank", ranks, *peak)]


def run(repetitions):
    """Yield the rows and the counts."""
    for nproc in (1, 2, 3):
        for model in BATCH:
            for strategy in STRATEGIES if nproc > 1 else ("single",):
                run = launch("benchmarks.memory:counts", nproc=nproc, quiet=True, model=model, strategy=strategy)
                yield rows_of(run.records, model, strategy, nproc), run.records.to_dict("list")
