"""Benchmarks that one rank can run, on a GPU if there is one: attention, recomputation, mixed precision (`lab gpu`)."""

from benchmarks import amp, attention, recompute


def run(repetitions):
    """Yield the rows and the raw milliseconds of each run."""
    for benchmark in (attention, recompute, amp):
        yield from benchmark.alone(repetitions)
