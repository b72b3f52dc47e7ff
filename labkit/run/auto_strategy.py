"""strategy="auto": of what fits into a rank's memory, that which the planner finds fastest.

    memory      no axes: labkit.memory.choose, one step without data, and what a strategy holds
                a mesh: each strategy's own run, rehearsed by every rank; the fullest must fit
    time        predicted (forecast.py); where it is alike, or of layers and sleeps that the planner
                does not know, from cheap to expensive, as labkit.memory has them

`participant` is labkit.run.experiment_runner's throughout. labkit.scale.rehearse is imported where
it is needed: the import takes seconds, and most ranks do not need it.
"""

import json
import os
from dataclasses import asdict, replace
from functools import partial
from time import perf_counter

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from labkit import comm, models
from labkit.measure.machine import free_bytes
from labkit.measure.memory_tracker import MemoryTracker
from labkit.memory import Estimate, choose, first_that_fits
from labkit.recompute import checkpoint
from labkit.replicas import gather_bytes
from labkit.run import forecast
from labkit.run.experiment_mesh import strategies_of


def settle(participant, module, optimizer):
    """The Experiment with the strategy that is chosen; rank 0 prints why. Collective."""
    e = participant.experiment
    free = int(e.memory_mb * 2**20) or free_bytes(participant.device, participant.world_size)
    room = torch.tensor(free, device=participant.device)
    comm.all_reduce(room, dist.ReduceOp.MIN)  # the ranks must not choose differently
    choice = (on_mesh if e.axes else on_line)(participant, module, optimizer, room.item())
    if dist.get_rank() == 0:
        print(choice)
    strategy = choice.strategy + ("_offload" if choice.offload else "")
    return e.replace(strategy=strategy, recompute="every" if choice.recompute else e.recompute)


def on_line(participant, module, optimizer, room):
    e, begin = participant.experiment, participant.batches.state_dict()
    input, target = participant.next_batch()
    participant.batches.load_state_dict(begin)  # training sees it, too
    memory = room - input.nbytes - target.nbytes
    options = {"precision": e.precision, "unit": models.unit(e.model), "recompute": checkpoint}
    options["order"] = partial(in_order, participant)
    loss, ranks = models.loss(e.model), participant.world_size
    return choose(module, input, memory, ranks, loss, target, optimizer, **options)


def on_mesh(participant, module, optimizer, room):
    rungs = [(strategy, False) for strategy in strategies_of(participant.experiment)]
    rungs = in_order(participant, rungs)
    return first_that_fits(rungs, lambda rung: fullest(participant, rung[0]), room)


def in_order(participant, rungs):
    """The rungs, the fastest by the planner first; rank 0 prints why. Collective."""
    e, ranks, device = participant.experiment, participant.world_size, participant.device
    if not forecast.knows(e):
        return rungs
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    each = [forecast.step_seconds(e, ranks, local, device, rung) for rung in rungs]
    slowest = torch.tensor(each, device=device)
    comm.all_reduce(slowest, dist.ReduceOp.MAX)  # the ranks must not choose differently
    if dist.get_rank() == 0:
        print(forecast.told(rungs, slowest.tolist()))
    return forecast.in_order(rungs, slowest.tolist())


def fullest(participant, strategy):
    """The Estimate of the rank that will hold most under another strategy. Collective."""
    from labkit.scale.rehearse import Fused

    context = replace(participant.context, device=torch.device("meta"))
    with torch.random.fork_rng(), Fused():
        twin = type(participant)(context, participant.experiment.replace(strategy=strategy))
        own = held(twin)
    everyone = gather_bytes(json.dumps(asdict(own)).encode(), device=participant.device)
    estimates = [Estimate(**json.loads(one)) for one in everyone]
    return max(estimates, key=lambda one: one.peak_total)


def fake_backend():
    """Of a mesh whose messages have no data, among ranks or alone."""
    from labkit.scale.rehearse import BACKEND

    return BACKEND


def held(participant):
    """What this rank holds in a step that is not its first, batch included: an Estimate."""
    participant.advance()
    optimizer, device = participant.trainer.optimizer, participant.device
    tracker, began = MemoryTracker(participant.model, optimizer, device), perf_counter()
    with tracker:
        participant.advance()
    states = (t for t in tree_leaves(list(optimizer.state.values())) if torch.is_tensor(t))
    beside = sum(t.nbytes for t in states if device.type == "meta" and t.is_cpu)  # step counts
    samples = [
        (at, kinds | {"optimizer_states": kinds["optimizer_states"] + beside})
        for at, kinds in tracker.samples
    ]
    at, _ = max(samples, key=lambda sample: sum(sample[1].values()))
    spans = [one for one in participant.timeline.spans if one.start <= began + at <= one.end]
    moment = next((one.name for one in spans if one.name != "step"), "forward")
    e, ranks, rank = participant.experiment, participant.world_size, participant.context.rank
    return Estimate(e.strategy, ranks, samples, samples[-1][1], moment, rank=rank)
