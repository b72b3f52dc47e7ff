"""The log of messages: what was sent, when, and how long a rank waited. `record()` returns it.

        rank 0   all_reduce |=====|            broadcast |==|
        rank 1   all_reduce   |===|            broadcast |==|
                            ^start ^end        one Event per operation and rank, which also has
                                               payload_bytes, sent_bytes, waited

While no `record()` is open, this costs a message one call and one `if`.
"""

from contextlib import contextmanager
from dataclasses import dataclass
from math import nan
from time import perf_counter

import torch.distributed as dist

from labkit.ring_cost import sent_bytes

_MESSAGES = ("send", "recv", "exchange")

# The open logs. No ContextVar, because autograd calls hooks, and so us, from its own threads.
_logs = []


class HostClock:
    """Stamps moments in `time.perf_counter()` seconds: one clock for all processes of a machine."""

    def stamp(self, thing, name):
        """Set thing.name to the time now."""
        setattr(thing, name, perf_counter())

    def resolve(self):
        """Do nothing: only a device's clock (labkit.measure.clock) sets its stamps later."""


class NoClock(HostClock):
    """Stamps NaN: the host's clock cannot know when a CUDA device is done."""

    def stamp(self, thing, name):
        setattr(thing, name, nan)


HOST, UNKNOWN = HostClock(), NoClock()


@dataclass(slots=True)
class Pause:
    """One wait() for an operation, in seconds of the record's clock."""

    start: float = nan
    end: float = nan


@dataclass(slots=True)
class Event:
    """One operation of one rank.

    start, end: from the call until the operation was complete, in seconds of the record's clock;
        end is None while it is in flight, or if it failed. An async operation without a future
        (gloo's send, recv, exchange and reduce_scatter) is known to be complete only when `wait()`
        returns, so its end is that moment.
    pauses: the `wait()`s of an async operation; None: the caller waited from start to end.
    group: its name in torch; Mesh.axis_of returns the axis of that name.
    pairs: ((from, to), ...) of a message, as ranks within the group. An exchange has two.
    On CUDA all times are NaN: always without a clock of the device, with one until its resolve().
    """

    op: str
    group_size: int
    payload_bytes: int
    sent_bytes: int
    source: str  # "counted" or "derived"
    start: float = nan
    end: float | None = None
    pauses: list | None = None
    group: str = ""
    pairs: tuple = ()

    @property
    def waited(self):
        """Seconds for which the caller was blocked, or on CUDA its stream."""
        if self.pauses is None:
            return 0.0 if self.end is None else self.end - self.start
        return sum(pause.end - pause.start for pause in self.pauses)


@contextmanager
def record(log=None, timed=True, clock=None):
    """`with record() as log:` appends an Event to log for every operation that starts in the block.

    It records operations of all threads. Records nest, and each gets all events.
    log: an object with `append`; None: a new list. If append returns a function, that is called
        with "awaited" when a thread begins to wait for the operation, and with "completed". It is
        not called for operations on CUDA, whose progress the host does not know.
    timed=False: do not time the end of asynchronous operations, which costs less.
    clock: a labkit.measure.clock for CUDA; None: that of the enclosing record, or the host's.
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
    """Wraps torch's Work of an async operation while a record is open, and completes its Event."""

    __slots__ = ("clock", "event", "notes", "work")

    def __init__(self, work, event, clock=HOST, timed=True, notes=()):
        self.work, self.event, self.clock, self.notes = work, event, clock, notes
        event.pauses = []
        if timed and event.op not in _MESSAGES:
            try:
                future = work.get_future()
            except RuntimeError:  # gloo's reduce_scatter has none
                return
            # on CUDA the callback runs in a stream that follows the operation
            future.add_done_callback(self._complete)

    def _complete(self, _=None):
        if self.event.end is None:
            self.clock.stamp(self.event, "end")
        self._note_completed()

    def _note_completed(self):
        notes, self.notes = self.notes, ()
        tell(notes, "completed")

    def wait(self, *timeout, **named):
        pause = Pause()
        self.event.pauses.append(pause)
        self.clock.stamp(pause, "start")
        tell(self.notes, "awaited")
        try:
            done = self.work.wait(*timeout, **named)
        except BaseException:
            self.event.end = None  # the future's callback runs on failure too
            raise
        finally:
            self.clock.stamp(pause, "end")
        self._complete()
        return done

    def is_completed(self):
        done = self.work.is_completed()
        if done:
            self._note_completed()
        return done

    def get_future(self):
        return self.work.get_future()


def tell(notes, state):
    """Call the functions that the logs' append() returned."""
    for note in notes:
        note(state)


def metered(op, group, tensor, async_op, launch, pairs=None, sent=None):
    """Call launch() and log it as op. Return its result, or a MeteredWork if async_op.

    tensor: the payload, or None. pairs: function (rank within the group) -> Event.pairs. sent:
    function (group size, payload bytes) -> bytes that this rank sends; None: the ring's formula.
    """
    if not _logs:
        return launch()
    size = dist.get_world_size(group)
    if size < 1:  # not a member of the group: torch warns and does nothing
        return launch()
    open_logs = tuple(_logs)
    clock = next((clock for *_, clock in reversed(open_logs) if clock), HOST)
    if clock is HOST and tensor is not None and tensor.is_cuda:
        clock = UNKNOWN
    payload = 0 if tensor is None else tensor.nbytes
    source = "counted" if op in (*_MESSAGES, "barrier") else "derived"
    name = (group or dist.group.WORLD).group_name
    bytes_sent = sent(size, payload) if sent else sent_bytes(op, size, payload)
    event = Event(op, size, payload, bytes_sent, source, group=name)
    if pairs:
        event.pairs = pairs(dist.get_rank(group))
    clock.stamp(event, "start")
    notes = [note for log, *_ in open_logs if (note := log.append(event))]
    if tensor is not None and tensor.is_cuda:
        notes = []
    if async_op:
        timed = any(timed for _, timed, _ in open_logs)
        work = launch()
        return MeteredWork(work, event, clock, timed, notes) if timed or notes else work
    tell(notes, "awaited")
    work = launch()
    clock.stamp(event, "end")
    tell(notes, "completed")
    return work
