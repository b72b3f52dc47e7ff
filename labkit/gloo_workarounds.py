"""Replacements for operations of gloo, the backend for CPUs: fewer bytes, copies or messages.

    operation        here                                    gloo
    all_reduce       two ranks, at most 1 MiB: each sends    sends halves, twice in a row
                     all of it at once
    all_gather       each rank sends its part to each rank   copies all parts twice more
                     in place
    all_to_all       both directions at once                 the directions may alternate
    reduce_scatter   all_to_all, then n-1 additions          sends a complete all_reduce
                     in the order of the ranks

A sender in gloo waits for the receiver's request, and a rank's requests wait behind its own sends.
So all receives are posted before any send, and both directions of a link are used at once. On
loopback, every message costs CPU time and alternating directions costs nothing. There gloo's own
threads do the work: n broadcasts at once, or gloo's all_to_all. The thread that computes posts the
messages, and it waits for the lock of a connection.

Sent per rank: as by the operation that is replaced, under whose name comm.py logs it.
"""

import os
from datetime import timedelta
from threading import Event, Thread, local

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from labkit.torch_private import timeout_of

FAKE_GLOO = "labkit_fake_gloo"  # ranks of labkit.memory.dry_run: nothing is sent
TAG = 1 << 30  # far from the tags that users choose
SMALL = {ReduceOp.SUM: torch.add, ReduceOp.MAX: torch.maximum, ReduceOp.MIN: torch.minimum}
LARGEST = 1 << 20  # bytes that are added in one piece; more would need pieces, and more memory
FOREVER = timedelta(0)  # to torch, no timeout but that of the group

_thread = local()


def continues():
    """Return whether this operation continues the last message, for counters below torch."""
    return getattr(_thread, "continues", False)


class All:
    """Several Works as one."""

    def __init__(self, works, output=None):
        self.works, self.output, self.future = works, output, None

    def wait(self, timeout=FOREVER):
        if self.future is None:
            self._complete(timeout)
            return True
        done = Event()
        self.future.add_done_callback(lambda _: done.set())
        seconds = timeout.total_seconds()
        if not done.wait(seconds or None):
            raise RuntimeError(f"Timed out waiting {1000 * seconds:.0f}ms for ranks on gloo")
        self.future.wait()  # raises what has gone wrong
        return True

    def _complete(self, timeout=FOREVER):
        while self.works:
            self.works[0].wait(timeout)
            del self.works[0]  # waited for again, gloo would expect one more message

    def is_completed(self):
        return self.get_future().done()

    def get_future(self):
        """Of [output]. Messages have no future in gloo: a thread waits for them."""
        if self.future is None:
            try:
                arrived = torch.futures.collect_all([work.get_future() for work in self.works])
                self.future = arrived.then(self._told)
            except RuntimeError:
                self.future = torch.futures.Future()
                Thread(target=self._tell, daemon=True).start()
        return self.future

    def _told(self, arrived):
        arrived.value()  # raises what has gone wrong on the way
        self.works = []
        return [self.output]

    def _tell(self):
        try:
            self._complete()
        except Exception as error:
            self.future.set_exception(error)
        else:
            self.future.set_result([self.output])


class Message:
    """A Work of isend or irecv that waits no longer than the group's timeout of today, unless told.

    gloo's own waits for as long as the group's timeout was when the group was made. Only wait()
    looks it up: between two tasks of a pipeline every call counts.
    """

    def __init__(self, work, group):
        self.work = work
        self.group = group

    def wait(self, timeout=FOREVER):
        if not timeout and dist.get_backend(self.group) == "gloo":
            timeout = timeout_of(self.group)
        return self.work.wait(timeout)

    def __getattr__(self, name):
        return getattr(self.work, name)


class Sum(All):
    """Several Works whose parts, when all have arrived, are added up into output.

    parts: by rank. buffer: the memory of those that arrive. op: a key of SMALL if n is 2, else SUM.
    """

    def __init__(self, works, output, parts, buffer, op=ReduceOp.SUM):
        super().__init__(works, output)
        self.parts = parts
        self.buffer = buffer
        self.op = op

    def _complete(self, timeout=FOREVER):
        super()._complete(timeout)
        self._reduce()

    def _reduce(self):
        if self.parts is not None:
            reduce_parts(self.parts, self.output, self.op)
            self.buffer.untyped_storage().resize_(0)  # now, not when gloo's thread lets go
            self.parts = self.buffer = None

    def is_completed(self):
        return self.parts is None

    def get_future(self):
        raise RuntimeError("a reduce_scatter on gloo is complete only when wait() returns")


class Swap(Sum):
    """A Sum with a future. Without one, it is complete only when wait() returns."""

    get_future = All.get_future
    is_completed = All.is_completed

    def _told(self, arrived):
        told = super()._told(arrived)
        self._reduce()
        return told


def reduce_parts(parts, output, op):
    """The sum (or op) of parts, in the order of the ranks. For two, torch.add takes half the time.

    Inference mode lets it write into tensors that were made in that mode, as a backend may.
    """
    with torch.inference_mode():
        if len(parts) == 2:
            SMALL[op](*parts, out=output)
        else:
            torch.sum(parts, 0, out=output)


def serves(tensor, group=None):
    """Return whether the functions below serve: CPU tensors on gloo, meta tensors in a dry run."""
    backend = dist.get_backend(group)
    return (backend == "gloo" and tensor.is_cpu) or (backend == FAKE_GLOO and tensor.is_meta)


def on_loopback():
    """Return whether all ranks are on one machine: launch() then sets the interface to loopback."""
    return os.environ.get("GLOO_SOCKET_IFNAME") in ("lo", "lo0")


def copy(source, destination):
    """Copy a tensor. Inference mode: as in reduce_parts."""
    with torch.inference_mode():
        destination.copy_(source)


def swaps(tensor, op, group=None):
    """Return whether all_reduce() below serves."""
    dense = tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.is_complex()
    small = dense and 0 < tensor.nbytes <= LARGEST and op in SMALL
    return small and dist.get_world_size(group) == 2 and serves(tensor, group)


def all_reduce(tensor, op, group=None):
    """As comm.all_reduce with async_op, of a tensor that swaps(): returns the Work.

    Unlike gloo's, the maximum or minimum of NaN and a number is NaN.
    """
    own = tensor.data  # like a backend's own write, this one is none that autograd counts
    arrived = torch.empty_like(own)
    parts = pair(own, arrived, group)
    return Swap(_exchange([own, own], parts, group), own, parts, arrived, op)


def pair(own, other, group):
    """Return what this rank has and what the other of two ranks has, in the order of the ranks."""
    return [own, other] if dist.get_rank(group) == 0 else [other, own]


def all_to_all(output, input, output_split_sizes=None, input_split_sizes=None, group=None):
    """As comm.all_to_all with async_op: returns the Work."""
    n = dist.get_world_size(group)
    incoming = output.data.split(output_split_sizes or [len(output) // n] * n)
    outgoing = input.data.split(input_split_sizes or [len(input) // n] * n)
    if not len(incoming) == len(outgoing) == n or output.dtype != input.dtype:
        raise ValueError(f"all_to_all takes {n} split sizes, one for each rank, and one dtype")
    return All(_exchange(outgoing, incoming, group), output)


def reduce_scatter(output, input, group=None):
    """As comm.reduce_scatter with async_op: returns the Work."""
    n = dist.get_world_size(group)
    outgoing, output = input.data.view(n, output.numel()), output.data.view(-1)
    if n == 2:  # add to this rank's part where it is
        arrived = torch.empty_like(outgoing[0])
        parts = pair(outgoing[dist.get_rank(group)], arrived, group)
        return Sum(_exchange(outgoing, parts, group), output, parts, arrived)
    parts = torch.empty_like(outgoing)
    if on_loopback():
        works = [dist.all_to_all_single(parts, outgoing, group=group, async_op=True)]
    else:
        works = _exchange(outgoing, parts, group)
    return Sum(works, output, parts, parts)


def all_gather(output, input, group=None):
    """As comm.all_gather with async_op: returns the Work. input may be this rank's own part."""
    parts = output.data.view(dist.get_world_size(group), input.numel())
    mine = parts[dist.get_rank(group)]
    if mine.data_ptr() != input.data_ptr():
        copy(input.data.reshape(-1), mine)
    return All(_share(mine, parts, group), output)


def _share(mine, parts, group):
    """Return the Works that fill parts[r] with the part of rank r. mine: this rank's own."""
    if not on_loopback() or len(parts) == 2:
        return _exchange([mine] * len(parts), parts, group)
    works = []
    try:
        for src, part in enumerate(parts):
            works.append(dist.broadcast(part, group=group, async_op=True, group_src=src))
            _thread.continues = True
    finally:
        _thread.continues = False
    return works


def peers(rank, n):
    """Return the other ranks, the next one first."""
    return [(rank + k) % n for k in range(1, n)]


def _exchange(outgoing, incoming, group):
    """Send outgoing[r] to rank r and receive incoming[r] from it; copy this rank's own part.

    Returns the Works. Receives are posted first; otherwise a late rank would send before it
    requests.
    """
    rank, n, works = dist.get_rank(group), dist.get_world_size(group), []
    if incoming[rank].data_ptr() != outgoing[rank].data_ptr():
        copy(outgoing[rank], incoming[rank])
    if n == 2 and on_loopback():
        return [_swap(outgoing[1 - rank], incoming[1 - rank], group)]
    others = peers(rank, n)
    try:
        for r in others:
            if incoming[r].numel():
                works.append(dist.irecv(incoming[r], group=group, group_src=r, tag=TAG))
                _thread.continues = True
        for r in others:
            if outgoing[r].numel():
                works.append(dist.isend(outgoing[r], group=group, group_dst=r, tag=TAG))
                _thread.continues = True
    finally:
        _thread.continues = False
    return with_timeout(works, outgoing[rank], group)


def with_timeout(works, tensor, group):
    """Return the Works of isend and irecv; those of CPU tensors with the timeout of the group.

    tensor: one that is sent or received.
    """
    return [Message(work, group) for work in works] if tensor.is_cpu else works


def _swap(outgoing, incoming, group):
    """As _exchange between two ranks, in one Work of gloo's own threads."""
    sizes = pair(0, outgoing.numel(), group)
    return dist.all_to_all_single(incoming.view(-1), outgoing.view(-1), sizes, sizes, group, True)
