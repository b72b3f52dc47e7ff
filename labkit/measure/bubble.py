"""When each rank of a pipeline is at work: spans of its actions, and the part of time that is none.

    rank 0   |F0|F1|F2|F3|......|B0|......|B1|  ...       bubble = 1 - work / (ranks x step)
    rank 1      .|F0|..|B0|...                            a step: from the first span to the last

Waiting for messages, and the time that sending takes from a rank, are part of the bubble.
"""

from contextlib import contextmanager


@contextmanager
def watch_pipeline(pipeline, timeline):
    """Inside, each action of a labkit.pipeline.Pipeline on this rank is a span of the timeline.

    A span is called as the schedule writes its action ("0F3"), and has kind, stage, micro_batch and
    held: of how many micro-batches of a stage this rank then holds the activations.
    """
    real = pipeline.compute

    def compute(action, arrived):
        span = timeline.begin(str(action), **action._asdict())
        made = real(action, arrived)
        timeline.end(span)
        span.info["held"] = len(pipeline.held) + len(pipeline.later)
        return made

    pipeline.compute = compute
    try:
        yield timeline
    finally:
        del pipeline.compute


def bubble(frame):
    """The part of all ranks' time without work. frame: a Timeline.frame() of one step's actions."""
    work = frame[frame["lane"] == "compute"]
    step = work["end_ms"].max() - work["start_ms"].min()
    return 1 - work["duration_ms"].sum() / (step * work["rank"].nunique())
