"""Times on a real GPU: sleeps of known length must come out of every figure, and a warm step must wait for nothing."""

from itertools import pairwise

import pytest
import test_clock
import torch
from on_device import group_of_one
from torch import nn

from labkit import comm
from labkit.ddp import DDP
from labkit.fsdp import FSDP
from labkit.measure.clock import CudaClock
from labkit.measure.timeline import Timeline
from labkit.measure.timeline_analysis import overlap
from labkit.zero import ZeRO1, ZeRO2

pytestmark = pytest.mark.gpu


class Gpu:
    """The device of test_clock.py in earnest: the GPU sleeps where that one adds a number."""

    def __init__(self):
        self.network, self.cycles_per_ms = torch.cuda.Stream(), 1.0
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.run(10**7)  # the first sleep loads the kernel
        start.record()
        self.run(10**8)
        end.record()
        end.synchronize()
        self.cycles_per_ms = 10**8 / start.elapsed_time(end)

    def run(self, ms):
        torch.cuda._sleep(int(ms * self.cycles_per_ms))

    def all_reduce(self, ms):
        """As NCCL's: in a stream of its own, after what the current one has begun."""
        self.network.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.network):
            self.run(ms)
            ended = torch.cuda.Event()
            ended.record()
        return Slow(self.network, ended)


class Slow:
    """The Work of a collective that takes long."""

    def __init__(self, network, ended):
        self.network, self.ended = network, ended

    def wait(self):
        self.ended.wait()

    def get_future(self):
        return self

    def add_done_callback(self, callback):
        with torch.cuda.stream(self.network):
            callback(self)


@pytest.fixture
def alone(tmp_path):
    torch.cuda.set_device(0)
    with group_of_one("cuda", tmp_path):
        yield


@pytest.mark.parametrize("strategy", ["ddp_bucketed", "torch_ddp"])
def test_sleeps_come_out_of_a_row_of_compare(alone, strategy):
    for row in test_clock.rows_of_compare(Gpu(), CudaClock("cuda"), strategy):
        assert {name: row[name] for name in test_clock.TIMES} == pytest.approx(test_clock.TIMES, rel=0.05)


def test_sleeps_come_out_of_a_timeline(alone):
    gpu, timeline = Gpu(), Timeline(device="cuda")
    with comm.record(clock=timeline.clock) as log, timeline.span("backward"):
        gpu.run(20)
        work = test_clock.metered(gpu, 50)
        gpu.run(20)
        work.wait()
    timeline.add_comm(log)
    row = overlap(timeline.frame()).iloc[0]
    expected = {"compute_ms": 40, "network_ms": 50, "hidden_ms": 20, "exposed_ms": 30, "total_ms": 70}
    assert {name: row[name] for name in expected} == pytest.approx(expected, rel=0.05)


def test_the_meter_times_nccls_own_operations_in_their_order(alone):
    clock, x = CudaClock("cuda"), torch.ones(1 << 20, device="cuda")
    part = torch.empty_like(x)
    with comm.record(clock=clock) as log:
        for async_op in (False, True):
            works = [
                comm.all_reduce(x, async_op=async_op),
                comm.broadcast(x, async_op=async_op),
                comm.all_gather(part, x, async_op=async_op),
                comm.reduce_scatter(part, x, async_op=async_op),
                comm.all_to_all(part, x, async_op=async_op),
            ]
            for work in works if async_op else ():
                work.wait()
    clock.resolve()
    assert all(event.end >= event.start and event.waited >= 0 for event in log) and len(log) == 10
    assert all(event.end < later.end for event, later in pairwise(log))


WARM = {
    "ddp": (DDP, lambda model: torch.optim.SGD(model.parameters(), lr=0.1)),
    "zero1": (lambda model: model, lambda model: ZeRO1(model.parameters(), torch.optim.SGD, lr=0.1)),
    "zero2": (lambda model: model, lambda model: ZeRO2(model.parameters(), torch.optim.SGD, lr=0.1)),
    "fsdp": (lambda model: FSDP(model, nn.Linear), lambda model: torch.optim.SGD(model.parameters(), lr=0.1)),
}


@pytest.mark.parametrize("name", WARM)
def test_a_warm_step_never_waits_for_the_gpu(alone, name):
    wrap, make = WARM[name]
    model = wrap(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)).cuda())
    optimizer, x, clock = make(model), torch.ones(4, 64, device="cuda"), CudaClock("cuda")
    for step in range(4):
        if step == 3:
            torch.cuda.set_sync_debug_mode("error")
        try:
            with comm.record(clock=clock):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    clock.resolve()
