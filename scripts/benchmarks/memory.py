"""Memory: the prediction before a step compared with the tracker's measurement, for each strategy.

Nothing is timed, so repetitions do not matter. The table shows the rank that is farthest from its prediction.
"""

import torch

from benchmarks.protocol import exact_row
from labkit import models
from labkit.run import launch

BATCH = {"mlp": 64, "resnet": 8, "gpt": 4}  # samples a rank
STRATEGIES = ("ddp_bucketed", "zero1", "zero2", "fsdp", "fsdp_grad_op")
STEPS = 4  # the first makes the states; the minimum of the others counts, as a sender may free a message late
STATE = ("parameters", "gradients", "optimizer_states")


def counts(context, model, strategy):
    """Measure on every rank."""
    from labkit.memory import estimate
    from labkit.memory.memory_tracker import MemoryTracker
    from labkit.trainer import make_optimizer, parallelize

    module = models.build(model, "small").to(context.device)
    loss = models.loss(model)
    unit = models.unit(model)
    samples = models.data.load("auto", model)
    parts = zip(*(samples[i] for i in range(BATCH[model])), strict=True)
    x, y = (torch.stack([torch.as_tensor(t) for t in part]).to(context.device) for part in parts)
    where = {"unit": unit, "rank": context.rank, "device": context.device}
    predicted = estimate(module, x, loss, strategy, context.world_size, target=y, **where)
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
        predicted_state=sum(predicted.held[kind] for kind in STATE),
        tracked_state=sum(trackers[-1].current[kind] for kind in STATE),
        predicted_activations=predicted.peak["activations"],
        tracked_activations=least.peak["activations"],
        predicted_peak=predicted.peak_total,
        tracked_peak=least.peak_total,
    )


def within_row(group, name, ranks, measured, predicted, tolerance=0.02):
    """Return a row for numbers that must agree within a tolerance."""
    row = exact_row(group, name, ranks, measured, predicted)
    verdict = "holds" if abs(row["ratio"] - 1) <= tolerance else "missed"
    return row | {"target": f"within {tolerance:.0%}", "verdict": verdict}


def rows_of(records, model, strategy, ranks):
    """Return two rows: bytes held between steps, of all ranks, and the peak of the rank with the largest error."""
    group = f"memory, {model}, {strategy}"
    state = [int(records[column].sum()) for column in ("tracked_state", "predicted_state")]
    name = "parameters + gradients + states of all ranks, with padding"
    worst = (records["tracked_peak"] / records["predicted_peak"] - 1).abs().idxmax()
    peak = [int(records.loc[worst, column]) for column in ("tracked_peak", "predicted_peak")]
    return [exact_row(group, name, ranks, *state), within_row(group, "peak of a rank", ranks, *peak)]


def run(repetitions):
    """Yield the rows and the counts."""
    for nproc in (1, 2, 3):
        for model in BATCH:
            for strategy in STRATEGIES if nproc > 1 else ("single",):
                run = launch("benchmarks.memory:counts", nproc=nproc, quiet=True, model=model, strategy=strategy)
                yield rows_of(run.records, model, strategy, nproc), run.records.to_dict("list")
