"""What a run tells while it trains: a row a step and rank, into sinks that can never hold it up.

    step      |-- data, forward, backward, optimizer --|-- ... --|-- ... --|      never waits
                                                       v row     v row     v row
    queue                                              [ . . . . . ]      full: rows are dropped
                                                            v
    thread                                             sink.write(row)    may be slow, may raise

A row: time (seconds since 1970), step, rank; step_ms and for each span its forward_ms,
backward_ms, optimizer_ms ...; exposed_comm_ms; of its messages messages, network_ms (at least one
was under way) and shortest_message_ms; memory_stalls (major page faults, and on a GPU allocations
that had to be tried again); samples_per_s, tokens_per_s and mfu, of all ranks; what the training
loop adds (loss, lr, gradient_norm, loss_scale: numbers, tensors of one element, or text);
rss_bytes, host_cpu_percent, host_memory_percent; with a GPU gpu_percent, gpu_used_bytes (NVML: of
all processes), gpu_allocated_bytes, gpu_peak_bytes (of this one). What is not known is not there.

Cost: no message; a few readings of a clock, and on CUDA one wait for the device at the end of a
step. The sinks' threads share Python's lock with training. Sinks: sinks.py.
"""

import queue
import resource
import sys
import threading
import time
from contextlib import contextmanager, suppress
from math import nan

import psutil
import torch

from labkit import comm
from labkit.measure.flops import mfu
from labkit.measure.overlap import length, union

WAITING = 1000  # rows that a sink may be behind
CLOSING = 5.0  # seconds that all sinks together get to write what is left
READING = 1.0  # seconds between two looks at the host


def waited_ms(events):
    """Exposed communication: how long this rank stood still inside wait()."""
    return 1e3 * sum(event.waited for event in events)


def of_messages(events):
    """How many there were, how long any was under way, and the shortest; {} without any."""
    times = [(event.start, event.end) for event in events if event.end is not None]
    if not times:
        return {}
    return {
        "messages": len(events),
        "network_ms": 1e3 * length(union(times)),
        "shortest_message_ms": 1e3 * min(end - start for start, end in times),
    }


def memory_stalls(device):
    """How often this process had to wait for memory so far: a page from the disk, a retry."""
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    if device is None or torch.device(device).type != "cuda":
        return faults
    return faults + torch.cuda.memory_stats(device).get("num_alloc_retries", 0)


def plain(row):
    """The row with Python's numbers and text. ValueError names a value that is neither."""
    return {name: plain_value(name, value) for name, value in row.items()}


def plain_value(name, value):
    size = value.numel() if isinstance(value, torch.Tensor) else getattr(value, "size", 0)
    if size == 1:
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(
        f"row[{name!r}] is of type {type(value).__name__}: a row takes numbers, text, and tensors "
        "of one element"
    )


class Monitor:
    """Measures steps, on a timeline whose spans the training loop opens, and tells them to sinks.

        with Monitor(timeline, sinks, samples=64) as monitor:
            for step in ...:
                with monitor.step(step) as row:
                    with timeline.span("data"): ...
                    row["loss"] = trainer.train_step(input, target).item()

    samples, tokens, flops: of one step, of all ranks. peak: FLOP/s of all ranks, for the MFU.
    exposed: function (comm's events of the step) -> ms. After a step its row is complete.
    dropped: {sink: rows that it did not get}.
    """

    def __init__(
        self, timeline, sinks=(), samples=0, tokens=0, flops=nan, peak=nan, exposed=waited_ms,
        device=None,
    ):  # fmt: skip
        self.timeline, self.exposed, self.device = timeline, exposed, device
        self.samples, self.tokens, self.flops, self.peak = samples, tokens, flops, peak
        self.readings = Readings(device) if sinks else None
        self.feeds = [Feed(sink, timeline.rank) for sink in sinks]

    @contextmanager
    def step(self, step):
        """Time a block as this step; it may add numbers to the row. One that raises has no row."""
        row = {"step": step, "rank": self.timeline.rank}
        self.timeline.spans.clear()
        stalls = memory_stalls(self.device)
        with comm.record(clock=self.timeline.clock) as events, self.timeline.span("step"):
            yield row
        ms = self.timeline.milliseconds()
        row |= {"time": time.time(), **{f"{name}_ms": value for name, value in ms.items()}}
        row["exposed_comm_ms"] = self.exposed(events)
        row |= of_messages(events)
        row["memory_stalls"] = memory_stalls(self.device) - stalls
        for name, count in (("samples", self.samples), ("tokens", self.tokens)):
            if count:
                row[f"{name}_per_s"] = 1e3 * count / ms["step"]
        if self.flops > 0 and self.peak > 0:
            share = mfu(self.flops, ms["step"], self.peak)
            row |= {"mfu": share} if share > 0 else {}
        if self.feeds:
            row |= self.readings.latest
        for feed in self.feeds:
            feed.offer(dict(row))

    @property
    def dropped(self):
        return {feed.sink: feed.dropped for feed in self.feeds}

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def close(self):
        """Give the sinks a few seconds for the rows that wait; then leave them behind."""
        deadline = time.monotonic() + CLOSING
        if self.feeds:
            self.readings.ended.set()
        for feed in self.feeds:
            feed.end()
        for feed in self.feeds:
            feed.leave(deadline)


class Feed:
    """A sink in a thread of its own, behind a queue: one that hangs does not hold up the others."""

    def __init__(self, sink, rank):
        self.sink, self.rank, self.dropped = sink, rank, 0
        self.rows, self.lock = queue.SimpleQueue(), threading.Lock()
        self.thread = threading.Thread(target=self.run, name=f"metrics to {sink}", daemon=True)
        self.thread.start()

    def offer(self, row):
        if self.rows.qsize() < WAITING:
            self.rows.put(row)
        else:
            self.drop("is too slow")

    def run(self):
        while (row := self.rows.get()) is not None:
            try:
                self.sink.write(plain(row))
            except Exception as error:
                self.drop(f"failed: {type(error).__name__}: {error}")
        try:
            self.sink.close()
        except Exception as error:
            self.say(f"could not be closed: {type(error).__name__}: {error}")

    def drop(self, why):
        with self.lock:
            self.dropped += 1
            first = self.dropped == 1
        if first:
            self.say(f"{why}; rows are dropped, training goes on")

    def end(self):
        self.rows.put(None)

    def leave(self, deadline):
        self.thread.join(max(0.0, deadline - time.monotonic()))
        if self.thread.is_alive():
            self.dropped += self.rows.qsize()  # one is being written, and the last is no row
        if self.dropped:
            self.say(f"did not get {self.dropped} rows")

    def say(self, words):
        line = f"labkit: rank {self.rank}: metrics to {self.sink}: {words}"
        with suppress(OSError, ValueError):  # where stderr is closed, nobody listens
            print(line, file=sys.stderr, flush=True)


class Readings:
    """How busy the host and the GPU are: looked up once a second, in a thread that may wait."""

    def __init__(self, device=None):
        self.device = torch.device(device or "cpu")
        self.latest, self.ended = {}, threading.Event()
        threading.Thread(target=self.run, name="metrics of the host", daemon=True).start()

    def run(self):
        process, pause = psutil.Process(), 0.1
        psutil.cpu_percent()  # it tells how busy the host was since the last call
        while not self.ended.wait(pause):
            host = {
                "rss_bytes": process.memory_info().rss,
                "host_cpu_percent": psutil.cpu_percent(),
                "host_memory_percent": psutil.virtual_memory().percent,
            }
            self.latest, pause = host | self.of_gpu(), READING

    def of_gpu(self):
        if self.device.type != "cuda":
            return {}
        own = {
            "gpu_allocated_bytes": torch.cuda.memory_allocated(self.device),
            "gpu_peak_bytes": torch.cuda.max_memory_allocated(self.device),
        }
        try:
            busy = torch.cuda.utilization(self.device)
            used = torch.cuda.device_memory_used(self.device)
        except Exception:  # NVML's own kinds: no driver, a part of a GPU (MIG), no permission
            return own
        return own | {"gpu_percent": busy, "gpu_used_bytes": used}
