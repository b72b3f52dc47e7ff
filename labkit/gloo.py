"""What gloo, the backend without GPUs, does in another way: fewer bytes or copies, same result.

    reduce_scatter   all_to_all, then n-1 additions       gloo's own sends a whole all_reduce
                     in the order of the ranks
    all_gather       n broadcasts at once, in place       gloo's own copies all parts twice more

Sent per rank: (n-1)/n x the payload, for both; comm.py logs each as the operation it stands for.
"""

from threading import local

import torch
import torch.distributed as dist

_thread = local()


def continues():
    """Whether this operation belongs to the message before: for those who count from below."""
    return getattr(_thread, "continues", False)


class Sum:
    """An all_to_all whose parts are added up when it is waited for: a reduce_scatter."""

    def __init__(self, work, parts, output):
        self.work, self.parts, self.output = work, parts, output

    def wait(self, *timeout):
        done = self.work.wait(*timeout)
        if self.parts is not None:
            add_up(self.parts, self.output)
            self.parts.untyped_storage().resize_(0)  # now, not when gloo's thread lets go of it
            self.parts = None
        return done

    def is_completed(self):
        return self.work.is_completed()

    def get_future(self):
        raise RuntimeError("a reduce_scatter on gloo is complete only when wait() returns")


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
    return Sum(work, parts.view(dist.get_world_size(group), output.numel()), output.view(-1))


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
    works = []
    try:
        for src, part in enumerate(parts):
            works.append(dist.broadcast(part, group=group, async_op=True, group_src=src))
            _thread.continues = True
    finally:
        _thread.continues = False
    return All(works)
