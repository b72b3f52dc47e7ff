"""Collectives with a meter: all messages of the lab go through here, and `record()` lists them.

        rank 0   all_reduce |=====|            broadcast |==|
        rank 1   all_reduce   |===|            broadcast |==|
                            ^start ^end        one Event per operation and rank, which also has
                                               payload_bytes, sent_bytes, waited

Each function is torch.distributed's of the same name (reduce_scatter and all_gather: the
single-tensor forms), but src and dst count *within the group*. While no `record()` is open they
cost one `if` more than torch's own.

Bytes one rank of n sends, for a payload (the tensor before it is cut or after it is put together)
of P bytes:

    all_reduce                    2 (n-1)/n P   derived: what a bandwidth-optimal ring sends
    reduce_scatter, all_gather      (n-1)/n P   derived: one half of that ring
    broadcast                       (n-1)/n P   derived: n-1 ranks must get P; mean over the ranks
    all_to_all                      P - own     derived: all that the rank does not keep for itself
    send, exchange                  P           counted: we send that message ourselves
    recv, barrier                   0           counted

"derived" is the formula rounded down to whole bytes, not a measurement: the backend may choose
another algorithm. On gloo the sum over the ranks is what leaves real nodes, except where a
reduce_scatter is of anything other than a sum: it sends a whole all_reduce. Notebook 01 and
tests/test_nodes.py hold both against the counters of the nodes' interfaces. Patarasuk and Yuan,
Bandwidth optimal all-reduce algorithms for clusters of workstations, JPDC 2009.
"""

from contextlib import contextmanager
from dataclasses import dataclass
from math import nan
from time import perf_counter

import torch.distributed as dist
from torch.distributed import ReduceOp

from labkit import gloo

# torch 2.13 deprecates *_tensor for *_single, which torch 2.11 does not have for both.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_MESSAGES = ("send", "recv", "exchange")

# The open logs. No ContextVar, because autograd calls hooks, and so us, from its own threads.
_logs = []


class HostClock:
    """Stamps moments in `time.perf_counter()` seconds: one clock for all processes of a machine."""

    def stamp(self, thing, name):
        setattr(thing, name, perf_counter())

    def resolve(self):
        """Tell what was stamped: for the clock of a device, labkit.measure.clock."""


class NoClock(HostClock):
    """Of what a CUDA device does the host's clock knows nothing."""

    def stamp(self, thing, name):
        setattr(thing, name, nan)


HOST, UNKNOWN = HostClock(), NoClock()


@dataclass(slots=True)
class Pause:
    start: float = nan
    end: float = nan


@dataclass(slots=True)
class Event:
    """One operation of one rank.

    start, end: from the call until the operation was complete, in seconds of the record's clock;
        end is None while it is in flight, or if it failed. An async operation without a future
        (gloo's send, recv, exchange and reduce_scatter) is known to be complete only when `wait()`
        returns, so its end is that moment.
    pauses: the `wait()`s of an async operation; None: the caller waited all along.
    On CUDA all are NaN unless the record has a clock of the device, until that is resolved.
    """

    op: str
    group_size: int
    payload_bytes: int
    sent_bytes: int
    source: str  # "counted" or "derived"
    start: float = nan
    end: float | None = None
    pauses: list | None = None

    @property
    def waited(self):
        """Seconds the caller was blocked, or on CUDA its stream."""
        if self.pauses is None:
            return 0.0 if self.end is None else self.end - self.start
        return sum(pause.end - pause.start for pause in self.pauses)


@contextmanager
def record(log=None, timed=True, clock=None):
    """`with record() as log:` appends an Event to log for every operation that starts inside.

    Of any thread. Records nest; each sees all events.
    log: a list is made, or give anything with `append`.
    timed=False: asynchronous operations have no end, and cost less: only that they start counts.
    clock: a labkit.measure.clock for CUDA; None: that of the record around this one, or the host's.
    """
    log = [] if log is None else log
    entry = (log, timed, clock)
    _logs.append(entry)
    try:
        yield log
    finally:
        # by identity: two empty lists are equal
        _logs[:] = [other for other in _logs if other is not entry]


class MeteredWork:
    """torch's Work for an async operation, while a record is open; fills in its Event."""

    __slots__ = ("clock", "event", "work")

    def __init__(self, work, event, clock=HOST):
        self.work, self.event, self.clock = work, event, clock
        event.pauses = []
        if event.op not in _MESSAGES:
            try:
                future = work.get_future()
            except RuntimeError:  # gloo's reduce_scatter has none
                return
            # on CUDA it runs in a stream that follows the operation
            future.add_done_callback(self._complete)

    def _complete(self, _=None):
        if self.event.end is None:
            self.clock.stamp(self.event, "end")

    def wait(self, *timeout):
        pause = Pause()
        self.event.pauses.append(pause)
        self.clock.stamp(pause, "start")
        try:
            done = self.work.wait(*timeout)
        except BaseException:
            self.event.end = None  # the future's callback runs on failure too
            raise
        finally:
            self.clock.stamp(pause, "end")
        self._complete()
        return done

    def is_completed(self):
        return self.work.is_completed()

    def get_future(self):
        return self.work.get_future()


def _metered(op, group, tensor, sent, async_op, launch):
    """Run launch(), logged as op. tensor: the payload or None. sent(group size, payload): bytes."""
    size = dist.get_world_size(group)
    if size < 1:  # not a member of the group: torch warns and does nothing
        return launch()
    open_logs = tuple(_logs)
    clock = next((clock for *_, clock in reversed(open_logs) if clock), HOST)
    if clock is HOST and tensor is not None and tensor.is_cuda:
        clock = UNKNOWN
    payload = 0 if tensor is None else tensor.nbytes
    source = "counted" if op in (*_MESSAGES, "barrier") else "derived"
    event = Event(op, size, payload, sent(size, payload), source)
    clock.stamp(event, "start")
    for log, *_ in open_logs:
        log.append(event)
    work = launch()
    if async_op:
        return MeteredWork(work, event, clock) if any(timed for _, timed, _ in open_logs) else work
    clock.stamp(event, "end")
    return work


def _finish(work):
    work.wait()  # and return None, as torch's operations do that are not asynchronous


def all_reduce(tensor, op=ReduceOp.SUM, group=None, async_op=False):
    """Every rank's tensor becomes the sum (or op) of all of them, in place."""

    def launch():
        return dist.all_reduce(tensor, op, group, async_op)

    if not _logs:
        return launch()
    return _metered(
        "all_reduce", group, tensor, lambda n, P: 2 * (n - 1) * P // n, async_op, launch
    )


def reduce_scatter(output, input, op=ReduceOp.SUM, group=None, async_op=False):
    """output becomes this rank's n-th part of the sum of all inputs.

    input: n times the elements of output, contiguous. On gloo a sum is an all_to_all and n-1
    additions, in the order of the ranks: gloo's own sends a whole all_reduce.
    """

    def launch():
        if op == ReduceOp.SUM and dist.get_backend(group) == "gloo":
            work = gloo.reduce_scatter(output, input, group)
            return work if async_op else _finish(work)
        return _reduce_scatter(output, input, op, group, async_op)

    if not _logs:
        return launch()
    return _metered("reduce_scatter", group, input, lambda n, P: (n - 1) * P // n, async_op, launch)


def all_gather(output, input, group=None, async_op=False):
    """output becomes the inputs of all ranks, one after the other.

    output: n times the elements of input, contiguous. On gloo it is n broadcasts, under way at
    once: gloo's own copies everything twice more.
    """

    def launch():
        if dist.get_backend(group) == "gloo":
            work = gloo.all_gather(output, input, group)
            return work if async_op else _finish(work)
        return _all_gather(output, input, group, async_op)

    if not _logs:
        return launch()
    return _metered("all_gather", group, output, lambda n, P: (n - 1) * P // n, async_op, launch)


def broadcast(tensor, src=0, group=None, async_op=False):
    """Every rank's tensor becomes that of src (a rank within the group)."""

    def launch():
        return dist.broadcast(tensor, group=group, async_op=async_op, group_src=src)

    if not _logs:
        return launch()
    return _metered("broadcast", group, tensor, lambda n, P: (n - 1) * P // n, async_op, launch)


def all_to_all(
    output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False
):
    """Part i of input goes to rank i; j of output is from j. Split sizes: rows (dim 0) or equal."""

    def launch():
        return dist.all_to_all_single(
            output, input, output_split_sizes, input_split_sizes, group, async_op
        )

    if not _logs:
        return launch()

    def sent(n, P):
        if not input_split_sizes:
            return P - P // n
        return P - P * input_split_sizes[dist.get_rank(group)] // max(1, sum(input_split_sizes))

    return _metered("all_to_all", group, input, sent, async_op, launch)


def send(tensor, dst, group=None, async_op=False):
    """Send a contiguous tensor to dst (a rank within the group), which must call recv."""

    def launch():
        return (dist.isend if async_op else dist.send)(tensor, group=group, group_dst=dst)

    if not _logs:
        return launch()
    return _metered("send", group, tensor, lambda n, P: P, async_op, launch)


def recv(tensor, src, group=None, async_op=False):
    """Fill a contiguous tensor with what src (a rank within the group) sends."""

    def launch():
        return (dist.irecv if async_op else dist.recv)(tensor, group=group, group_src=src)

    if not _logs:
        return launch()
    return _metered("recv", group, tensor, lambda n, P: 0, async_op, launch)


def exchange(outgoing, dst, incoming, src, group=None, async_op=False):
    """Send outgoing to dst while src fills incoming (ranks within the group): MPI's sendrecv.

    Safe in a circle. Both tensors contiguous; a rank that sends must find the other receiving as
    many elements. payload: outgoing.
    """

    def launch():
        receive = dist.P2POp(dist.irecv, incoming, group=group, group_peer=src)
        works = dist.batch_isend_irecv(
            [receive, dist.P2POp(dist.isend, outgoing, group=group, group_peer=dst)]
        )
        work = works[0] if len(works) == 1 else gloo.All(works)  # NCCL fuses them into one
        if async_op:
            return work
        work.wait()

    if not _logs:
        return launch()
    return _metered("exchange", group, outgoing, lambda n, P: P, async_op, launch)


def barrier(group=None):
    """Return once every rank of the group has called."""

    def launch():
        return dist.barrier(group)

    return _metered("barrier", group, None, lambda n, P: 0, False, launch) if _logs else launch()
