"""Monitor a run: a row per step and rank, sent to sinks that can never delay training.

    step      |-- data, forward, backward, optimizer --|-- ... --|-- ... --|      never waits
                                                       v row     v row     v row
    queue                                              [ . . . . . ]      full: rows are dropped
                                                            v
    thread                                             sink.write(row)    may be slow, may raise

A row: time (seconds since 1970), step, rank; step_ms and for each span its forward_ms,
backward_ms, optimizer_ms ...; exposed_comm_ms; messages, network_ms (time with at least one message
in flight) and shortest_message_ms; memory_stalls (major page faults, and on a GPU allocation
retries); samples_per_s, tokens_per_s and mfu, of all ranks; fields that the training loop adds
(loss, lr, gradient_norm, loss_scale: numbers, tensors of one element, or text); rss_bytes,
host_cpu_percent, host_memory_percent; with a GPU gpu_percent, gpu_used_bytes (NVML: of all
processes), gpu_allocated_bytes, gpu_peak_bytes (of this one). Unknown fields are left out.

Cost: no message; a few clock readings, and on CUDA one wait for the device at the end of a step.
The sinks' threads share Python's lock with training. Sinks: sinks.py.
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
from labkit.measure.timeline_analysis import length, union

WAITING = 1000  # rows in the queue of a sink
CLOSING = 5.0  # seconds that all sinks together get to write the remaining rows
READING = 1.0  # seconds between two readings of the host


def waited_ms(events):
    """Return the exposed communication in ms: how long messages blocked this rank."""
    return 1e3 * sum(event.waited for event in events)


def of_messages(events):
    """Return a row's messages, network_ms and shortest_message_ms; {} if no event has ended."""
    times = [(event.start, event.end) for event in events if event.end is not None]
    if not times:
        return {}
    return {
        "messages": len(events),
        "network_ms": 1e3 * length(union(times)),
        "shortest_message_ms": 1e3 * min(end - start for start, end in times),
    }


def memory_stalls(device):
    """Return how often this process waited for memory: major page faults and GPU retries."""
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    if device is None or torch.device(device).type != "cuda":
        return faults
    return faults + torch.cuda.memory_stats(device).get("num_alloc_retries", 0)


def plain(row):
    """Return the row with Python numbers and text as values. Raises ValueError for other values."""
    return {name: plain_value(name, value) for name, value in row.items()}


def plain_value(name, value):
    size = value.numel() if isinstance(value, torch.Tensor) else getattr(value, "size", 0)
    if size == 1:
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(
        f"row[{name!r}] is of type {type(value).__name__}: use numbers, text, or tensors of one "
        "element"
    )


class Monitor:
    """A monitor of steps, on a timeline whose spans the training loop opens.

        with Monitor(timeline, sinks, samples=64) as monitor:
            for step in ...:
                with monitor.step(step) as row:
                    with timeline.span("data"): ...
                    row["loss"] = trainer.train_step(input, target).item()

    samples, tokens, flops: per step, of all ranks. peak: FLOP/s of all ranks, for the MFU.
    exposed: function (comm's events of the step) -> ms. device: of the model, None: the host.
    The row is complete after the step. dropped: {sink: number of rows that it did not get}.
    """

    def __init__(
        self, timeline, sinks=(), samples=0, tokens=0, flops=nan, peak=nan, exposed=waited_ms,
        device=None,
    ):  # fmt: skip
        self.timeline = timeline
        self.exposed = exposed
        self.device = device
        self.samples = samples
        self.tokens = tokens
        self.flops = flops
        self.peak = peak
        self.readings = Readings(device) if sinks else None
        self.feeds = [Feed(sink, timeline.rank) for sink in sinks]

    @contextmanager
    def step(self, step):
        """Time a block as this step, on a cleared timeline. Yields the row, to add fields to.

        If the block raises, no row is written.
        """
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
        """Give the sinks CLOSING seconds to write their queues, then abandon them."""
        deadline = time.monotonic() + CLOSING
        if self.feeds:
            self.readings.ended.set()
        for feed in self.feeds:
            feed.end()
        for feed in self.feeds:
            feed.leave(deadline)


class Feed:
    """A sink in its own thread, behind a queue, so that a slow sink does not delay the others."""

    def __init__(self, sink, rank):
        self.sink = sink
        self.rank = rank
        self.dropped = 0
        self.rows = queue.SimpleQueue()
        self.lock = threading.Lock()
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
            self.say(f"{why}; rows are dropped, training continues")

    def end(self):
        self.rows.put(None)

    def leave(self, deadline):
        self.thread.join(max(0.0, deadline - time.monotonic()))
        if self.thread.is_alive():
            self.dropped += self.rows.qsize()  # one row is being written; the end mark is no row
        if self.dropped:
            self.say(f"did not get {self.dropped} rows")

    def say(self, words):
        line = f"labkit: rank {self.rank}: metrics to {self.sink}: {words}"
        with suppress(OSError, ValueError):  # stderr may be closed
            print(line, file=sys.stderr, flush=True)


class Readings:
    """The load of the host and the GPU, read once a second in a thread."""

    def __init__(self, device=None):
        self.device = torch.device(device or "cpu")
        self.latest = {}
        self.ended = threading.Event()
        threading.Thread(target=self.run, name="metrics of the host", daemon=True).start()

    def run(self):
        process = psutil.Process()
        pause = 0.1
        psutil.cpu_percent()  # returns the load since the previous call
        while not self.ended.wait(pause):
            host = {
                "rss_bytes": process.memory_info().rss,
                "host_cpu_percent": psutil.cpu_percent(),
                "host_memory_percent": psutil.virtual_memory().percent,
            }
            self.latest = host | self.of_gpu()
            pause = READING

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
        except Exception:  # NVML: no driver, a part of a GPU (MIG), or no permission
            return own
        return own | {"gpu_percent": busy, "gpu_used_bytes": used}
