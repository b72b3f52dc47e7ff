"""Collectives with a meter: every message of the lab goes through here, and `record()` keeps the list.

        rank 0   all_reduce |=====|            broadcast |==|
        rank 1   all_reduce   |===|            broadcast |==|
                            ^start ^end     payload_bytes, sent_bytes, waited: one Event per operation and rank

Each function is torch.distributed's of the same name (reduce_scatter and all_gather: the single-tensor forms), but src
and dst count *within the group*. While no `record()` is open they cost one `if` more than torch's own.

Bytes one rank of n sends, for a payload (the whole tensor, before it is cut or after it is put together) of P bytes:

    all_reduce                    2 (n-1)/n P   derived: what a bandwidth-optimal ring sends
    reduce_scatter, all_gather      (n-1)/n P   derived: one half of that ring
    broadcast                       (n-1)/n P   derived: n-1 ranks must be given P; this is the mean over the ranks
    all_to_all                      P - own     derived: all that the rank does not keep for itself
    send, exchange                  P           counted: we send that message ourselves
    recv, barrier                   0           counted

"derived" is the formula rounded down to whole bytes, not a measurement: the backend may choose another algorithm.
Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, JPDC 2009.
"""

from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import torch.distributed as dist
from torch.distributed import ReduceOp

from labkit import gloo

# torch 2.13 deprecates the *_tensor names in favour of *_single, which torch 2.11 does not have for both.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_MESSAGES = ("send", "recv", "exchange")

# The open logs. Module-wide and not a ContextVar, because autograd calls hooks, and so us, from its own threads.
_logs = []


@dataclass(slots=True)
class Event:
    """One operation of one rank. Times are `time.perf_counter()` seconds: one clock for all processes of a machine.

    start, end: from the call until the operation was complete; end is None while it is in flight, or if it failed.
        An async operation without a future (gloo's send, recv, exchange and reduce_scatter) is known to be complete
        only when `wait()` returns, so its end is that moment.
    waited: seconds the caller was blocked: the whole duration, or with async_op the time inside `Work.wait()`.
    On CUDA the host only enqueues: start, end and waited are then the host's times, and say nothing of the device.
    """

    op: str
    group_size: int
    payload_bytes: int
    sent_bytes: int
    source: str  # "counted" or "derived"
    start: float
    end: float | None = None
    waited: float = 0.0


@contextmanager
def record(log=None, timed=True):
    """`with record() as log:` appends an Event to log for every operation that starts inside, from any thread.

    log: a list is made, or give anything with `append`. Records nest; each sees all events.
    timed=False: only that operations start is of interest; asynchronous ones then have no end, and cost less.
    """
    log = [] if log is None else log
    entry = (log, timed)
    _logs.append(entry)
    try:
        yield log
    finally:
        _logs[:] = [other for other in _logs if other is not entry]  # by identity: two empty lists are equal


class MeteredWork:
    """torch's Work for an async operation, filling in its Event. Returned only while a record is open."""

    __slots__ = ("event", "work")

    def __init__(self, work, event):
        self.work, self.event = work, event
        if event.op not in _MESSAGES:
            try:
                future = work.get_future()
            except RuntimeError:  # gloo's reduce_scatter has none
                return
            future.add_done_callback(self._complete)

    def _complete(self, _=None):
        if self.event.end is None:
            self.event.end = perf_counter()

    def wait(self, *timeout):
        start = perf_counter()
        try:
            done = self.work.wait(*timeout)
        except BaseException:
            self.event.end = None  # the future's callback runs on failure too
            raise
        finally:
            self.event.waited += perf_counter() - start
        self._complete()
        return done

    def is_completed(self):
        return self.work.is_completed()

    def get_future(self):
        return self.work.get_future()


def _metered(op, group, payload, sent, async_op, launch):
    """Run launch(), logged as op. payload: bytes. sent: function, from the size of the group to bytes."""
    size = dist.get_world_size(group)
    if size < 1:  # not a member of the group: torch warns and does nothing
        return launch()
    source = "counted" if op in (*_MESSAGES, "barrier") else "derived"
    event = Event(op, size, payload, sent(size), source, perf_counter())
    open_logs = tuple(_logs)
    for log, _ in open_logs:
        log.append(event)
    work = launch()
    if async_op:
        return MeteredWork(work, event) if any(timed for _, timed in open_logs) else work
    event.end = perf_counter()
    event.waited = event.end - event.start
    return work


def _finish(work):
    """Wait for it; returns None, as torch's operations do that are not asynchronous."""
    work.wait()


def all_reduce(tensor, op=ReduceOp.SUM, group=None, async_op=False):
    """Every rank's tensor becomes the sum (or op) of all of them, in place."""

    def launch():
        return dist.all_reduce(tensor, op, group, async_op)

    if not _logs:
        return launch()
    payload = tensor.nbytes
    return _metered("all_reduce", group, payload, lambda n: 2 * (n - 1) * payload // n, async_op, launch)


def reduce_scatter(output, input, op=ReduceOp.SUM, group=None, async_op=False):
    """output becomes this rank's n-th part of the sum of all inputs. input: n times the elements of output, contiguous.

    On gloo a sum is an all_to_all and n-1 additions, in the order of the ranks: gloo's own sends a whole all_reduce.
    """

    def launch():
        if op == ReduceOp.SUM and dist.get_backend(group) == "gloo":
            work = gloo.reduce_scatter(output, input, group)
            return work if async_op else _finish(work)
        return _reduce_scatter(output, input, op, group, async_op)

    if not _logs:
        return launch()
    payload = input.nbytes
    return _metered("reduce_scatter", group, payload, lambda n: (n - 1) * payload // n, async_op, launch)


def all_gather(output, input, group=None, async_op=False):
    """output becomes the inputs of all ranks, one after the other. output: n times the elements of input, contiguous.

    On gloo it is n broadcasts, under way at once: gloo's own copies everything twice more.
    """

    def launch():
        if dist.get_backend(group) == "gloo":
            work = gloo.all_gather(output, input, group)
            return work if async_op else _finish(work)
        return _all_gather(output, input, group, async_op)

    if not _logs:
        return launch()
    payload = output.nbytes
    return _metered("all_gather", group, payload, lambda n: (n - 1) * payload // n, async_op, launch)


def broadcast(tensor, src=0, group=None, async_op=False):
    """Every rank's tensor becomes that of src (a rank within the group)."""

    def launch():
        return dist.broadcast(tensor, group=group, async_op=async_op, group_src=src)

    if not _logs:
        return launch()
    payload = tensor.nbytes
    return _metered("broadcast", group, payload, lambda n: (n - 1) * payload // n, async_op, launch)


def all_to_all(output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False):
    """Part i of input goes to rank i; part j of output comes from rank j. Split sizes: rows (dim 0); default: equal."""

    def launch():
        return dist.all_to_all_single(output, input, output_split_sizes, input_split_sizes, group, async_op)

    if not _logs:
        return launch()
    payload = input.nbytes

    def sent(n):
        if not input_split_sizes:
            return payload - payload // n
        rows = max(1, sum(input_split_sizes))
        return payload - payload * input_split_sizes[dist.get_rank(group)] // rows

    return _metered("all_to_all", group, payload, sent, async_op, launch)


def send(tensor, dst, group=None, async_op=False):
    """Send a contiguous tensor to dst (a rank within the group), which must call recv."""

    def launch():
        return (dist.isend if async_op else dist.send)(tensor, group=group, group_dst=dst)

    if not _logs:
        return launch()
    return _metered("send", group, tensor.nbytes, lambda n: tensor.nbytes, async_op, launch)


def recv(tensor, src, group=None, async_op=False):
    """Fill a contiguous tensor with what src (a rank within the group) sends."""

    def launch():
        return (dist.irecv if async_op else dist.recv)(tensor, group=group, group_src=src)

    if not _logs:
        return launch()
    return _metered("recv", group, tensor.nbytes, lambda n: 0, async_op, launch)


def exchange(outgoing, dst, incoming, src, group=None, async_op=False):
    """Send outgoing to dst while incoming is filled by src (ranks within the group): MPI's sendrecv, safe in a circle.

    Both tensors contiguous; a rank that sends must find the other receiving as many elements. payload: outgoing.
    """

    def launch():
        receive = dist.P2POp(dist.irecv, incoming, group=group, group_peer=src)
        works = dist.batch_isend_irecv([receive, dist.P2POp(dist.isend, outgoing, group=group, group_peer=dst)])
        work = works[0] if len(works) == 1 else gloo.All(works)  # NCCL fuses them into one by itself
        if async_op:
            return work
        work.wait()

    if not _logs:
        return launch()
    return _metered("exchange", group, outgoing.nbytes, lambda n: outgoing.nbytes, async_op, launch)


def barrier(group=None):
    """Return once every rank of the group has called."""

    def launch():
        return dist.barrier(group)

    return _metered("barrier", group, 0, lambda n: 0, False, launch) if _logs else launch()
