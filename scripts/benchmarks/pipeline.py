"""A pipeline step with emulated compute: ours against torch.distributed.pipelining, and bubbles against theory.

Every stage sleeps, so four ranks on two cores do not compete for the processor; messages are real. Both have the same
stages, micro-batches and loss. The bubble is computed from the spans of our actions. The theory has no messages, so the
unit of time is much longer than one, as for stages with several layers of a large model.
"""

import torch
from torch import nn

from benchmarks.protocol import Comparison
from labkit.measure.interleaved_timing import columns, time_variants
from labkit.run import launch

MICRO_BATCHES = 8
FORWARD_MS = 5.0  # of a micro-batch in a stage; backward is twice that
BUBBLE_MS = 100.0  # the same where the bubble is measured
WIDTH = 256
COMPARISONS = [
    Comparison("GPipe / PyTorch's", "gpipe", "torch gpipe", at_most=1.0),
    Comparison("1F1B / PyTorch's", "one_f_one_b", "torch one_f_one_b", at_most=1.0),
    Comparison("A/A: PyTorch's 1F1B / PyTorch's 1F1B", "torch again", "torch one_f_one_b"),
]


def stage(forward_ms):
    from labkit.models.emulated import emulate

    return emulate(nn.Linear(WIDTH, WIDTH), nn.Linear, forward_ms, 2 * forward_ms, forward_ms)


def finish(result):
    """Wrap a step so that its result is neither timed nor recorded."""


def times(context, repetitions):
    """Measure on every rank."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    from labkit.pipeline import pipeline

    rank, ranks = context.rank, context.world_size
    batch = torch.randn(8 * MICRO_BATCHES, WIDTH, generator=torch.Generator().manual_seed(0))
    loss = nn.functional.mse_loss

    def ours(name):
        made = pipeline.Pipeline({rank: stage(FORWARD_MS)}, None, getattr(pipeline, name), MICRO_BATCHES, loss)
        return lambda: finish(made.step(batch, batch))

    def theirs(schedule):
        made = schedule(PipelineStage(stage(FORWARD_MS), rank, ranks, torch.device("cpu")), MICRO_BATCHES, loss_fn=loss)
        given = (batch,) if rank == 0 else ()
        target = {"target": batch} if rank == ranks - 1 else {}
        return lambda: finish(made.step(*given, **target))

    variants = {name: ours(name) for name in ("gpipe", "one_f_one_b")}
    variants |= {"torch gpipe": theirs(ScheduleGPipe), "torch one_f_one_b": theirs(Schedule1F1B)}
    variants["torch again"] = theirs(Schedule1F1B)
    time_variants(context, variants, repetitions=repetitions, steps=1)


def bubbles(context, schedules, repetitions, unit_ms):
    """Measure on every rank. schedules: {name: stages of a rank}, all for the same model."""
    from labkit.measure.timeline import Timeline
    from labkit.measure.timeline_analysis import watch_pipeline
    from labkit.pipeline import pipeline
    from labkit.pipeline.pipeline_schedules import routes
    from labkit.pipeline.schedule_validation import play

    ranks = context.world_size
    batch = torch.zeros(MICRO_BATCHES, WIDTH, requires_grad=True)  # like the output of an embedding
    for name, a_rank in schedules.items():
        schedule = getattr(pipeline, name)(a_rank * ranks, MICRO_BATCHES, ranks)
        share = len(routes(schedule)[0]) / ranks  # stages of the model per rank
        own = {action.stage: stage(unit_ms / share) for action in schedule[context.rank]}
        made = pipeline.Pipeline(own, None, schedule, MICRO_BATCHES, nn.functional.mse_loss)
        made.step(batch, batch.detach())  # the first step also sends shapes
        for repetition in range(repetitions):
            timeline = Timeline(context.rank)
            with watch_pipeline(made, timeline):
                made.step(batch, batch.detach())
            known = {"name": name, "repetition": repetition, "predicted": play(schedule).bubble}
            context.record(spans=timeline.rows(), **known)


def run(repetitions):
    """Yield the rows and the raw milliseconds, or bubbles."""
    from labkit.measure.timeline import Timeline
    from labkit.measure.timeline_analysis import bubble

    for nproc in (2, 4):
        measured = launch("benchmarks.pipeline:times", nproc=nproc, device="cpu", repetitions=repetitions)
        values = columns(measured.records)
        yield [one.row("pipeline, emulated compute", nproc, values) for one in COMPARISONS], values
    schedules = {"gpipe": 1, "one_f_one_b": 1, "interleaved": 2, "zero_bubble": 1, "v_shaped": 2, "dual_pipe": 2}
    given = {"schedules": schedules, "repetitions": repetitions, "unit_ms": BUBBLE_MS}
    records = launch("benchmarks.pipeline:bubbles", nproc=4, device="cpu", timeout=1800, **given).records
    for name in schedules:
        of_schedule = records[records["name"] == name]
        steps = [rows for _, rows in of_schedule.groupby("repetition")]
        values = {
            "measured": [bubble(Timeline.from_records(rows).frame()) for rows in steps],
            "predicted": [float(rows["predicted"].iloc[0]) for rows in steps],
        }
        comparison = Comparison(f"bubble of {name} / theory", "measured", "predicted", at_most=1.05)
        yield [comparison.row("pipeline", 4, values)], values
