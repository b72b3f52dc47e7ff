"""A timeline of each rank: spans in two lanes, compute and network, and exports.

    compute   |--- forward ---|---------- backward ----------|////////|- optimizer -|
    network                        |= bucket 2 =|= bucket 1 =|= bucket 0 =|
    exposed   the network works, compute waits               ^^^^^^^^      (timeline_analysis.py)

All times are `time.perf_counter()`, one clock for all processes of a machine, so timelines of ranks
can be merged directly. Those of a CUDA device come from events in its streams (clock.py), and are
NaN until they are read after the step.

Export: the Chrome trace event format, as read by Perfetto (ui.perfetto.dev) and chrome://tracing.
"""

import json
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isnan, nan
from pathlib import Path

import torch

from labkit.measure.clock import clock_of
from labkit.measure.timeline_analysis import LANES, exposed, overlap

__all__ = ["LANES", "Span", "Timeline", "exposed", "overlap"]


@dataclass(slots=True)
class Span:
    """An activity from `start` to `end`, seconds of time.perf_counter(). info: JSON scalars."""

    name: str
    lane: str
    start: float = nan
    end: float = nan
    rank: int = 0
    info: dict = field(default_factory=dict)


class Timeline:
    """The spans of one rank (or, merged, of several).

        timeline = Timeline(rank, device)
        with comm.record(clock=timeline.clock) as events:
            with timeline.span("forward"): ...
            with timeline.span("backward"): ...
        timeline.add_comm(events)

    device: the device to time, None: the host. clock: the device's, unless another is given.
    rows(), frame(), milliseconds(), chrome_trace(), merge(), add_comm() and clock.resolve() wait
    for the device.
    """

    def __init__(self, rank=0, device=None, clock=None):
        self.rank = rank
        self.spans = []
        self.clock = clock or clock_of(device)

    def begin(self, name, lane="compute", **info):
        """Begin a Span now; end() stores it."""
        span = Span(name, lane, rank=self.rank, info=info)
        self.clock.stamp(span, "start")
        return span

    def end(self, span):
        self.clock.stamp(span, "end")
        self.spans.append(span)

    @contextmanager
    def span(self, name, lane="compute", **info):
        """Time a block, also if it raises, because a trace of a failure is useful."""
        span = self.begin(name, lane, **info)
        try:
            yield
        finally:
            self.end(span)

    def add_comm(self, events, names=None, mesh=None):
        """Add comm.record()'s events as network spans. names: one per event, by default the op.

        mesh: the mesh whose groups they used; spans then have `axis` (Mesh.axis_of). Raises
        ValueError for an event in flight or without times, and another number of names.
        """
        names = [event.op for event in events] if names is None else list(names)
        if len(names) != len(events):
            raise ValueError(f"{len(events)} events but {len(names)} names")
        self.clock.resolve()
        for event, name in zip(events, names, strict=True):
            if event.end is None:
                raise ValueError(
                    f"{event.op} is still in flight: wait for it before adding it to the timeline"
                )
            if isnan(event.end - event.start):
                raise ValueError(f"{event.op} has no times: use comm.record(clock=timeline.clock)")
            fields = ("op", "group_size", "payload_bytes", "sent_bytes", "waited")
            info = {field: getattr(event, field) for field in fields}
            if mesh is not None:
                info["axis"] = mesh.axis_of(event.group)
            self.spans.append(Span(name, "network", event.start, event.end, self.rank, info))

    @contextmanager
    def watch(self, **units):
        """Time submodules: watch(l1=model[0], l2=model[2]) adds spans "l1", "l1 backward", "l2" ...

        A unit's backward lasts from the arrival of its output's gradient to that of the next unit,
        the last unit's until this block ends; this suits a chain of units. The spans have unit=True
        and lie within forward and backward.
        """
        entered = {}
        open_backward = []
        handles = []

        def close_backward():
            if open_backward:
                self.end(open_backward.pop())

        def before(name):
            def hook(module, args):
                entered[name] = self.begin(name, unit=True)

            return hook

        def after(name):
            def arrived(gradient):
                close_backward()
                open_backward.append(self.begin(f"{name} backward", unit=True))

            def hook(module, args, output):
                self.end(entered.pop(name))
                if isinstance(output, torch.Tensor) and output.requires_grad:
                    output.register_hook(arrived)

            return hook

        for name, module in units.items():
            handles += [
                module.register_forward_pre_hook(before(name)),
                module.register_forward_hook(after(name)),
            ]
        try:
            yield
        finally:
            close_backward()
            for handle in handles:
                handle.remove()

    @classmethod
    def merge(cls, timelines):
        """Return one timeline with the spans of all, in order of start."""
        merged = cls()
        timelines = list(timelines)
        for timeline in timelines:
            timeline.clock.resolve()
        merged.spans = sorted(
            (span for t in timelines for span in t.spans), key=lambda span: span.start
        )
        return merged

    def milliseconds(self):
        """Return {name: total duration of its spans in ms}."""
        self.clock.resolve()
        total = dict.fromkeys((span.name for span in self.spans), 0.0)
        for span in self.spans:
            total[span.name] += 1e3 * (span.end - span.start)
        return total

    def rows(self):
        """Return spans as flat dicts of JSON scalars, for record(spans=timeline.rows())."""
        self.clock.resolve()
        return [
            {"rank": s.rank, "name": s.name, "lane": s.lane, "start": s.start, "end": s.end}
            | s.info
            for s in self.spans
        ]

    @classmethod
    def from_rows(cls, rows):
        """Return a timeline of rows(), also of those of several ranks in one list."""
        timeline = cls()
        for row in rows:
            info = dict(row)
            fixed = [info.pop(key) for key in ("name", "lane", "start", "end", "rank")]
            timeline.spans.append(Span(*fixed, info=info))
        return timeline

    @classmethod
    def from_records(cls, records):
        """Return the timeline of all ranks of a launch that call record(spans=timeline.rows()).

        records: the launch's DataFrame. Raises ValueError if it has no spans.
        """
        if "spans" not in records:
            raise ValueError(
                "these records have no spans: each rank must call record(spans=timeline.rows())"
            )
        return cls.from_rows(
            row for rows in records["spans"] if isinstance(rows, list) for row in rows
        )

    def frame(self):
        """Return a DataFrame: per span rank, lane, name, start_ms, end_ms, duration_ms, and info.

        Times count from the start of the first span.
        """
        import pandas  # imported here, so that training ranks do not wait for it

        self.clock.resolve()
        origin = min((span.start for span in self.spans), default=0.0)
        rows = []
        for span in sorted(self.spans, key=lambda s: (s.rank, s.lane, s.start)):
            start = 1e3 * (span.start - origin)
            end = 1e3 * (span.end - origin)
            times = {"start_ms": start, "end_ms": end, "duration_ms": end - start}
            place = {"rank": span.rank, "lane": span.lane, "name": span.name}
            rows.append(place | times | span.info)
        empty = ["rank", "lane", "name", "start_ms", "end_ms", "duration_ms"]
        return pandas.DataFrame(rows, columns=None if rows else empty)

    def chrome_trace(self, path):
        """Write Chrome trace JSON (us; process = rank, thread = lane); return its path."""
        self.clock.resolve()
        origin = min((span.start for span in self.spans), default=0.0)
        lanes = list(dict.fromkeys([*LANES, *(span.lane for span in self.spans)]))
        events = []
        for rank in sorted({span.rank for span in self.spans}):
            meta = {"ph": "M", "pid": rank}
            events.append(meta | {"name": "process_name", "args": {"name": f"rank {rank}"}})
            for thread, lane in enumerate(lanes):
                events.append(meta | {"tid": thread, "name": "thread_name", "args": {"name": lane}})
        for span in self.spans:
            named = {"name": span.name, "cat": span.lane, "args": span.info}
            times = {"ts": 1e6 * (span.start - origin), "dur": 1e6 * (span.end - span.start)}
            place = {"ph": "X", "pid": span.rank, "tid": lanes.index(span.lane)}
            events.append(named | place | times)
        path = Path(path)
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, indent=1))
        return path
