"""What one rank can time, on a GPU where there is one: attention, recomputation, mixed precision. For `lab gpu`."""

from benchmarks import amp, attention, recompute


def run(repetitions):
    """Yield the rows and the raw milliseconds of each run."""
    for one in (attention, recompute, amp):
        yield from one.alone(repetitions)
