"""Find the largest batch that fits: predict it, then try real steps that may run out of memory.

    predicted    1 2 4 8 16 32 64 x              double until it does not fit, then bisect
    tried                      52 ok 58 ok 65 x  change by an eighth until the answer changes,
                                     58 ok 61 x  then bisect until a sixteenth is left

A prediction needs no memory and no step, but it does not include the work space of kernels or what
the allocator rounds up. A real step includes all of it, and may fail, so only few are tried, near
the limit. On several ranks a size fits if it fits on all of them.
"""

import gc
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

from labkit import comm


@dataclass(frozen=True)
class BatchSize:
    """The result of find_batch_size, in samples per rank.

    size: the largest that fits. predicted: the largest by prediction. tried: ((size, fitted), ...).
    """

    size: int
    predicted: int
    tried: tuple = ()


def find_batch_size(predict, memory_bytes, step=None, largest=65536, group=None):
    """Find the largest batch of one rank that fits into memory_bytes; returns a BatchSize.

    predict: function batch size -> bytes at the peak, which must not fall as the size grows, such
        as lambda size: estimate(model, x[:1].expand(size, -1), ...).peak_total.
    step: function batch size -> bytes at the peak, or None: trains one real step. If it raises an
        out-of-memory error, the size does not fit. step=None: the result is the prediction.
    largest: the largest size to consider.

    Collective if there is a process group: all ranks get the same result. A step must then send no
    message (use DDP's no_sync()), since the other ranks would wait for a rank that has run out of
    memory. Raises MemoryError if not even 1 fits, ValueError if the step sends a message.
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
    """A log of messages that raises ValueError for each."""

    def append(self, event):
        raise ValueError(
            f"the step sends a message ({event.op}), which hangs if another rank runs out of "
            "memory: run it in model.no_sync()"
        )


def too_large(needed, memory_bytes):
    return (
        f"not even a batch of 1 fits: it needs {needed:,} bytes, {needed - memory_bytes:,} more "
        "than there are; shard the model over more ranks, offload or recompute "
        "(labkit.memory.choose lists what would fit)"
    )


def last_true(holds, largest):
    """Return the last of 1, ..., largest with holds(size), or 0; holds is true up to there."""
    size = 1
    while size <= largest and holds(size):
        size *= 2
    return between(holds, size // 2, min(size, largest + 1))


def first_true(holds, smallest, largest):
    """Return the first of smallest, ..., largest with holds(size), or 0; true from there on."""
    size = smallest
    while size <= largest and not holds(size):
        size *= 2
    if size > largest:
        return 0
    return size if size == smallest else between(lambda n: not holds(n), size // 2, size) + 1


def between(holds, low, high, gap=1):
    """Bisect: return a size that holds, at most `gap` below one that does not.

    low holds or is 0; high does not hold.
    """
    while high - low > gap:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def refine(fits, start, largest):
    """Go from start by eighths until fits() changes, then bisect to a sixteenth."""
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
    """Return whether one step with this batch size stays within memory_bytes."""
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
    """Return the smallest value of all ranks, an int. Collective if there is a process group."""
    if not dist.is_initialized():
        return int(value)
    smallest = torch.tensor(int(value), device=comm.device(group))
    comm.all_reduce(smallest, dist.ReduceOp.MIN, group)
    return int(smallest)
