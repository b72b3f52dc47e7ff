"""The largest batch that fits: predicted, then tried with real steps that may run out of memory.

    predicted    1 2 4 8 16 32 64 x              doubled until it says no, then halved in between
    tried                      52 ok 58 ok 65 x  from there by an eighth, until the answer turns
                                     58 ok 61 x  then halved in between, until a sixteenth is left

A prediction costs no memory and no step, but it does not see what a kernel or the allocator takes
besides. A real step sees all of it, and may fail: so few are taken, near the edge. On several ranks
a size fits if it fits all of them.
"""

import gc
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

from labkit import comm


@dataclass(frozen=True)
class BatchSize:
    """size: the largest that fits. predicted: the estimate's. tried: (size, fitted), in order."""

    size: int
    predicted: int
    tried: tuple = ()


def find_batch_size(predict, memory_bytes, step=None, largest=65536, group=None):
    """The largest batch of one rank that fits into memory_bytes, as BatchSize.

    predict: function batch size -> bytes at the peak, rising, such as
        lambda size: estimate(model, x[:1].expand(size, -1), ...).peak_total.
    step: function batch size -> bytes at the peak, or None: trains one real step. What it raises
        for want of memory is a size that does not fit. Without it, the prediction is the answer.
    largest: where to stop.

    With a process group all ranks call together, and get the same answer. A step then sends no
    message, as DDP's in no_sync(): a rank that runs out of memory before its message would leave
    the others waiting. Raises MemoryError if not even 1 fits, ValueError before a message leaves.
    """
    predicted = agreed(last_true(lambda size: predict(size) <= memory_bytes, largest), group)
    if step is None:
        if not predicted:
            raise MemoryError(too_large(predict(1), memory_bytes))
        return BatchSize(predicted, predicted)
    several = dist.is_initialized() and dist.get_world_size(group) > 1
    tried = []

    def fits(size):
        with comm.record(Silence(), timed=False) if several else nullcontext():
            fitted = try_step(step, size, memory_bytes)
        tried.append((size, bool(agreed(fitted, group))))
        return tried[-1][1]

    size = refine(fits, max(1, predicted), largest)
    if not size:
        raise MemoryError(
            f"not even a batch of 1 fits: a step with it needs more than {memory_bytes:,} bytes"
        )
    return BatchSize(size, predicted, tuple(tried))


class Silence:
    """A log in which no message may be entered."""

    def append(self, event):
        raise ValueError(
            f"the step sends a message, {event.op}: find_batch_size tries steps without "
            "(model.no_sync()), as a rank that has no room for it would leave the others waiting"
        )


def too_large(needed, memory_bytes):
    return (
        f"not even a batch of 1 fits: it needs {needed:,} bytes, {needed - memory_bytes:,} more "
        "than there are. Shard the model over more ranks, offload, or recompute: "
        "labkit.memory.choose says what would do"
    )


def last_true(holds, largest):
    """The last of 1, ..., largest for which holds(size), true up to there; 0 for none."""
    size = 1
    while size <= largest and holds(size):
        size *= 2
    return between(holds, size // 2, min(size, largest + 1))


def first_true(holds, smallest, largest):
    """The first of smallest, ..., largest for which holds(size), true from there on; 0 for none."""
    size = smallest
    while size <= largest and not holds(size):
        size *= 2
    if size > largest:
        return 0
    return size if size == smallest else between(lambda n: not holds(n), size // 2, size) + 1


def between(holds, low, high, gap=1):
    """A size that holds, at most `gap` below one that does not. low holds (or is 0), high not."""
    while high - low > gap:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def refine(fits, start, largest):
    """From start by eighths to where the answer turns, then halving the gap to a sixteenth."""
    if fits(start):
        low, high = start, largest + 1
        while (size := low + max(1, low // 8)) < high:
            if not fits(size):
                high = size
                break
            low = size
    else:
        low, high = 0, start
        while (size := high - max(1, high // 8)) > 0:
            if fits(size):
                low = size
                break
            high = size
    return between(fits, low, high, gap=max(1, low // 16))


def try_step(step, size, memory_bytes):
    """Whether one step with this batch size stays within memory_bytes."""
    try:
        seen = step(size)
        return seen is None or seen <= memory_bytes
    except (MemoryError, RuntimeError) as error:  # the latter: torch's, on a GPU and on a CPU
        if not out_of_memory(error):
            raise
        error.__traceback__ = None  # its frames hold the tensors of the step
    gc.collect()
    torch.cuda.empty_cache()  # nothing where CUDA was not used
    return False


def out_of_memory(error):
    words = str(error).lower()
    return (
        isinstance(error, MemoryError | torch.OutOfMemoryError)
        or "allocate memory" in words
        or "out of memory" in words
    )


def agreed(value, group):
    """The smallest value of all ranks."""
    if not dist.is_initialized():
        return int(value)
    smallest = torch.tensor(int(value), device=comm.device(group))
    comm.all_reduce(smallest, dist.ReduceOp.MIN, group)
    return int(smallest)
