"""Times of a device that runs behind the host, on one that is made up: only what its streams do takes time."""

from contextlib import nullcontext
from math import isnan, nan
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from labkit import comm, comm_log
from labkit.measure import time_to_loss
from labkit.measure.clock import CudaClock, clock_of
from labkit.measure.timeline import Timeline
from labkit.measure.timeline_analysis import overlap
from labkit.run.experiment import Experiment
from labkit.run.experiment_runner import Participant


class Device:
    """Streams are lists of one number: the moment, in ms, in which they have done all that was enqueued so far."""

    def __init__(self):
        self.compute, self.network = [0.0], [0.0]
        self.current, self.synchronised = self.compute, 0

    def clock(self):
        return CudaClock("cuda", self.event, lambda device: self.current)

    def run(self, ms):
        self.current[0] += ms

    def event(self, enable_timing):
        assert enable_timing
        return Moment(self)

    def all_reduce(self, ms):
        """The Work of a collective that takes so long."""
        self.network[0] = max(self.network[0], self.compute[0]) + ms
        return Work(self, self.network[0])


class Moment:
    def __init__(self, device):
        self.device, self.passed = device, False

    def record(self, stream):
        self.at = stream[0]

    def synchronize(self):
        self.passed = True
        self.device.synchronised += 1

    def elapsed_time(self, end):
        assert self.passed and end.passed
        return end.at - self.at


class Work:
    def __init__(self, device, ends):
        self.device, self.ends = device, ends

    def wait(self):
        """As NCCL's: the host continues, the current stream waits."""
        self.device.current[0] = max(self.device.current[0], self.ends)

    def get_future(self):
        return self

    def add_done_callback(self, callback):
        """As of a CUDA future: at once, in a stream that follows the operation."""
        self.device.current = [self.ends]
        callback(self)
        self.device.current = self.device.compute


def metered(device, ms, async_op=True):
    """An all_reduce of a CUDA tensor through comm's meter."""
    tensor = SimpleNamespace(nbytes=8, is_cuda=True)

    def launch():
        work = device.all_reduce(ms)
        return work if async_op else work.wait()

    return comm_log.metered("all_reduce", None, tensor, async_op, launch, sent=lambda n, payload: payload)


def as_if_alone(monkeypatch):
    """What the meter asks torch.distributed, answered without a process group."""
    monkeypatch.setattr(comm.dist, "get_world_size", lambda group=None: 1)
    monkeypatch.setattr(comm.dist, "group", SimpleNamespace(WORLD=SimpleNamespace(group_name="0")))


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    as_if_alone(monkeypatch)
    monkeypatch.setattr(comm.dist, "barrier", lambda group=None: None)


def test_a_moment_is_unknown_until_it_is_resolved():
    device, thing = Device(), SimpleNamespace()
    clock = device.clock()
    clock.stamp(thing, "start")
    device.run(30)
    clock.stamp(thing, "end")
    assert isnan(thing.start) and isnan(thing.end) and device.synchronised == 0
    clock.resolve()
    assert thing.end - thing.start == pytest.approx(0.030)
    seen = device.synchronised
    clock.resolve()
    assert device.synchronised == seen  # nothing to report, nothing to wait for


def test_the_clock_of_a_device():
    assert clock_of(None) is clock_of("cpu") is comm.HOST and isinstance(clock_of("cuda:1"), CudaClock)


def test_what_a_wait_costs_is_how_long_the_stream_stands_still():
    device = Device()
    clock = device.clock()
    with comm.record(clock=clock) as log:
        long, short = metered(device, 50), metered(device, 5)  # the second ends at 55
        device.run(20)
        long.wait()
        device.run(100)
        short.wait()
        metered(device, 7, async_op=False)
    assert all(isnan(event.waited) and isnan(event.end) for event in log) and device.synchronised == 0
    clock.resolve()
    assert [event.waited for event in log] == pytest.approx([0.030, 0, 0.007])
    assert [event.end - event.start for event in log] == pytest.approx([0.050, 0.055, 0.007])


def test_without_a_clock_of_the_device_nothing_is_told():
    device = Device()
    with comm.record() as log:
        metered(device, 50).wait()
        metered(device, 7, async_op=False)
    assert all(isnan(event.start) and isnan(event.end) and isnan(event.waited) for event in log)
    with pytest.raises(ValueError, match=r"all_reduce has no times: use comm.record\(clock=timeline.clock\)"):
        Timeline().add_comm(log)


def test_a_record_inside_another_keeps_its_clock():
    device = Device()
    clock = device.clock()
    with comm.record(clock=clock), comm.record() as log:
        metered(device, 50).wait()
    clock.resolve()
    assert log[0].waited == pytest.approx(0.050)


def test_what_failed_has_no_end():
    device = Device()
    clock = device.clock()
    with comm.record(clock=clock) as log:
        work = metered(device, 50)
        work.work.wait = lambda: 1 / 0
        with pytest.raises(ZeroDivisionError):
            work.wait()
    clock.resolve()
    assert log[0].end is None and log[0].start > 0


def test_the_overlap_of_a_device_is_that_of_its_streams():
    device = Device()
    timeline = Timeline(clock=device.clock())
    with comm.record(clock=timeline.clock) as log:
        with timeline.span("forward"):
            device.run(10)
        with timeline.span("backward"):
            device.run(10)
            work = metered(device, 25)
            device.run(10)
            work.wait()
    assert device.synchronised == 0
    timeline.add_comm(log)
    row = overlap(timeline.frame()).iloc[0]
    expected = {"compute_ms": 30, "network_ms": 25, "hidden_ms": 10, "exposed_ms": 15, "total_ms": 45}
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    assert Timeline.merge(t for t in [timeline]).rows() == sorted(timeline.rows(), key=lambda row: row["start"])


def test_units_are_timed_where_the_device_runs_them():
    device = Device()

    class Layer(nn.Linear):
        def forward(self, x):
            device.run(4)
            return super().forward(x)

    model, timeline = nn.Sequential(Layer(2, 2), Layer(2, 2)), Timeline(clock=device.clock())
    with timeline.watch(l1=model[0], l2=model[1]):
        model(torch.ones(1, 2))
    assert list(timeline.frame()["duration_ms"]) == pytest.approx([4, 4])


class Trainer:
    """One step: 10 ms forward, 20 backward with a message of 30 in its middle, 5 for the optimizer."""

    def __init__(self, device, participant):
        self.device, self.participant = device, participant
        self.model = nn.Linear(1, 1)

    def train_step(self, input, target):
        span = self.participant.timeline.span
        with span("forward"):
            self.device.run(10)
        with span("backward"):
            self.device.run(10)
            work = metered(self.device, 30)
            self.device.run(10)
            self.participant.note_gradient(None)
            work.wait()
        with span("optimizer"):
            self.device.run(5)
        return torch.tensor(0.5)


def rows_of_compare(device, clock, strategy):
    """Two steps of the Trainer above, as compare measures and reports them."""
    participant = object.__new__(Participant)
    participant.experiment, participant.device = Experiment(strategy=strategy), torch.device("cuda")
    participant.timeline, participant.done, participant.compressor = Timeline(clock=clock), 0, None
    participant.next_batch = lambda: (None, None)
    participant.trainer = Trainer(device, participant)
    return [participant.step() for _ in range(2)]


TIMES = {"step_ms": 55, "forward_ms": 10, "backward_ms": 40, "optimizer_ms": 5, "exposed_comm_ms": 20}


@pytest.mark.parametrize("strategy", ["ddp_bucketed", "torch_ddp", "torch_fsdp"])
def test_a_row_of_compare_has_the_times_of_the_device(strategy):
    device = Device()
    for row in rows_of_compare(device, device.clock(), strategy):
        expected = TIMES | ({"exposed_comm_ms": nan} if strategy == "torch_fsdp" else {})
        assert {name: row[name] for name in TIMES} == pytest.approx(expected, nan_ok=True)


def test_compressing_is_not_timed_by_the_host_where_it_runs_on_a_device():
    participant = object.__new__(Participant)
    participant.device, participant.compressor = torch.device("cuda"), SimpleNamespace(seconds=1.0)
    assert isnan(participant.seconds_compressing())


def test_memory_is_counted_where_the_model_is(monkeypatch):
    seen, participant = [], object.__new__(Participant)
    participant.takes_part, participant.world_size, participant.device = True, 1, torch.device("cuda")
    participant.experiment, participant.advance = Experiment(), lambda: None
    participant.model, participant.trainer, participant.flops = None, SimpleNamespace(optimizer=None), 0
    memory = nullcontext(SimpleNamespace(peak={}, peak_total=0))
    monkeypatch.setattr(
        "labkit.run.experiment_runner.MemoryTracker", lambda *arguments: seen.append(arguments) or memory
    )
    participant.prepare()
    assert seen == [(None, None, torch.device("cuda"))]


def test_a_lap_lasts_until_the_device_has_run_it(monkeypatch):
    device = Device()

    class Training:
        model = nn.Linear(1, 1)

        def train_step(self, input, target):
            device.run(100)

    monkeypatch.setattr(time_to_loss, "Timeline", lambda device: timeline)
    monkeypatch.setattr(time_to_loss, "worst_loss", lambda *_: 1.0)
    timeline = Timeline(clock=device.clock())
    rows = list(time_to_loss.laps(Training(), [(0, 0)] * 4, (0, 0), target=0.0, lap=2))
    assert [row["seconds"] for row in rows] == pytest.approx([0, 0.2, 0.4])
