"""What gloo, the backend without GPUs, does in another way: fewer bytes or copies, same result.

    reduce_scatter   all_to_all, then n-1 additions       gloo's own sends a whole all_reduce
                     in the order of the ranks
    all_gather       n broadcasts at once, in place       gloo's own copies all parts twice more
    all_reduce       of 16 bits between two ranks: each   gloo's own takes as long again: it adds
                     broadcasts all, both add             such numbers one at a time

Sent per rank: as by the operation it stands for, under whose name comm.py logs it.
"""

from threading import Lock, local

import torch
import torch.distributed as dist

_thread = local()


def continues():
    """Whether this operation belongs to the message before: for those who count from below."""
    return getattr(_thread, "continues", False)


class Sum:
    """A Work whose parts are added up, into output, when it is waited for.

    buffer: the memory of what has arrived, given back then.
    """

    def __init__(self, work, parts, output, buffer):
        self.work, self.parts, self.output, self.buffer = work, parts, output, buffer
        self._adding = Lock()

    def wait(self, *timeout):
        done = self.work.wait(*timeout)
        self._add()
        return done

    def _add(self):
        with self._adding:
            if self.parts is not None:
                add_up(self.parts, self.output)
                self.parts = None
                self.buffer.untyped_storage().resize_(0)  # now, not when gloo's thread lets go

    def is_completed(self):
        return self.work.is_completed()

    def get_future(self):
        raise RuntimeError("a reduce_scatter on gloo is complete only when wait() returns")


class SumOfTwo(Sum):
    """Added up at once, by gloo's thread, where a future is asked for: a hook waits for nothing."""

    def get_future(self):
        def add(travelled):
            travelled.value()  # raises what has gone wrong on the way
            self._add()
            return [self.output]

        return self.work.get_future().then(add)


def add_up(parts, output):
    """The sum of parts, in the order of the ranks. For two, torch.add takes half the time."""
    if len(parts) == 2:
        torch.add(*parts, out=output)
    else:
        torch.sum(parts, 0, out=output)


def reduce_scatter(output, input, group=None):
    """As comm.reduce_scatter with async_op: returns the Work."""
    parts = torch.empty_like(input)
    work = dist.all_to_all_single(parts, input, group=group, async_op=True)
    by_rank = parts.view(dist.get_world_size(group), output.numel())
    return Sum(work, by_rank, output.view(-1), parts)


def adds_slowly(tensor, op, group=None):
    """Whether all_reduce below is the sooner one."""
    return (
        tensor.element_size() == 2
        and tensor.is_floating_point()
        and op == dist.ReduceOp.SUM
        and dist.get_backend(group) == "gloo"
        and dist.get_world_size(group) == 2
    )


def all_reduce(tensor, group=None):
    """As comm.all_reduce of a sum with async_op, between two ranks: returns the Work."""
    arrived = torch.empty_like(tensor)
    parts = [tensor, arrived] if dist.get_rank(group) == 0 else [arrived, tensor]
    return SumOfTwo(_broadcast_all(parts, group), parts, tensor, arrived)


class All:
    """Several Works as one."""

    def __init__(self, works):
        self.works = works

    def wait(self, *timeout):
        done = [work.wait(*timeout) for work in self.works]
        return all(done)

    def is_completed(self):
        return all(work.is_completed() for work in self.works)

    def get_future(self):
        return torch.futures.collect_all([work.get_future() for work in self.works])


def all_gather(output, input, group=None):
    """As comm.all_gather with async_op: returns the Work. input may be this rank's own part."""
    parts = output.view(dist.get_world_size(group), input.numel())
    mine = parts[dist.get_rank(group)]
    if mine.data_ptr() != input.data_ptr():
        mine.copy_(input.reshape(-1))
    return _broadcast_all(parts, group)


def _broadcast_all(parts, group):
    """Part r is what rank r sends; each of the others becomes its sender's."""
    works = []
    try:
        for src, part in enumerate(parts):
            works.append(dist.broadcast(part, group=group, async_op=True, group_src=src))
            _thread.continues = True
    finally:
        _thread.continues = False
    return All(works)
