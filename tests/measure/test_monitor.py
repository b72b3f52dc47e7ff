"""The reports of a run while it trains: its readers can read them, and they never block training."""

import json
import re
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from math import inf, isnan, nan
from types import ModuleType, SimpleNamespace

import psutil
import pytest
import test_clock
import torch
import torch.distributed as dist
from prometheus_client.parser import text_string_to_metric_families
from torch.distributed.distributed_c10d import _get_default_store
from train_command import lines, run, start, steady

from labkit import comm_log
from labkit.ddp import DDP
from labkit.measure import monitor as watching
from labkit.measure.monitor import Monitor, Readings
from labkit.measure.sinks import KNOWN, JsonLines, Prometheus, TensorBoard, open_sinks
from labkit.measure.timeline import Timeline
from labkit.preempt import Agreement
from labkit.run.experiment import Experiment
from labkit.run.experiment_runner import Participant
from labkit.run.options import WRONG
from labkit.run.training import main
from labkit.trainer import Trainer

PHASES = ("data_ms", "forward_ms", "backward_ms", "optimizer_ms")


def curves_in(folder):
    """What TensorBoard reads there. It is imported here: the ranks of other tests import this file, too."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


class Kept:
    """A sink that keeps its rows."""

    def __init__(self):
        self.rows, self.closed = [], False

    def write(self, row):
        self.rows.append(row)

    def close(self):
        self.closed = True


def take(monitor, steps, **numbers):
    """So many steps that do nothing; returns their rows."""
    taken = []
    for step in range(1, steps + 1):
        with monitor.step(step) as row:
            row.update(numbers)
        taken.append(row)
    return taken


def scrape(url):
    """{(name, rank): value} of what a Prometheus server would read."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {(s.name, s.labels["rank"]): s.value for family in families for s in family.samples}


def until(true, seconds=30):
    limit = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.01)


# ---- rows


class Telling(comm_log.HostClock):
    """Rank 0 says in the store, by the key, when something of the kind `next` begins: then it freezes."""

    def __init__(self, rank, key):
        self.rank, self.key, self.next = rank, key, ()

    def stamp(self, thing, name):
        super().stamp(thing, name)
        if self.rank == 0 and name == "start" and isinstance(thing, self.next):
            self.next = ()
            _get_default_store().set(self.key, "")

    def come_late(self):
        """Rank 1 waits until rank 0 is frozen, and 200 ms more."""
        if self.rank == 1:
            _get_default_store().wait([self.key])
            time.sleep(0.2)


def watched(rank, world_size, folder, key):
    """Three steps; in the second, rank 1 comes late to the gradients."""
    torch.manual_seed(0)
    clock = Telling(rank, key)
    timeline = Timeline(rank, clock=clock)
    model = DDP(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, optimizer, torch.nn.functional.mse_loss, span=timeline.span)
    sinks = open_sinks([f"jsonl:{folder}", f"tensorboard:{folder}", "prometheus"], rank)
    with Monitor(timeline, sinks, samples=8, tokens=40, flops=1e6, peak=1e9) as monitor:
        for step in (1, 2, 3):
            dist.barrier()
            with monitor.step(step) as row:
                with timeline.span("data"):
                    if step == 2:
                        clock.next = comm_log.Pause
                        clock.come_late()
                row["loss"] = trainer.train_step(torch.ones(4, 4), torch.ones(4, 1)).item()
    assert not any(monitor.dropped.values())
    return [type(sink).__name__ for sink in sinks]


def test_each_rank_tells_its_own_steps(ranks, tmp_path):
    sinks = ranks(2, watched, folder=str(tmp_path), key=uuid.uuid4().hex)
    assert sinks == [["JsonLines", "TensorBoard", "Prometheus"], ["JsonLines"]]
    told = [lines(tmp_path / f"metrics-rank{rank}.jsonl") for rank in range(2)]
    for rank, rows in enumerate(told):
        assert [row["step"] for row in rows] == [1, 2, 3] and {row["rank"] for row in rows} == {rank}
        for row in rows:
            assert 0 < sum(row[phase] for phase in PHASES) <= row["step_ms"]
            assert 0 < row["exposed_comm_ms"] <= row["step_ms"]
            assert row["samples_per_s"] == pytest.approx(8e3 / row["step_ms"])
            assert row["tokens_per_s"] == pytest.approx(40e3 / row["step_ms"])
            assert row["mfu"] == pytest.approx(1 / row["step_ms"])  # 1e6 FLOPs of 1e9 a second
    # Who comes late has worked; the other has waited for it.
    assert told[1][1]["data_ms"] >= 200 and told[0][1]["exposed_comm_ms"] >= 200
    for row in (rows[1] for rows in told):
        assert row["data_ms"] + row["exposed_comm_ms"] <= row["step_ms"]  # no moment is both


def test_what_is_not_known_is_not_there():
    kept = Kept()
    with Monitor(Timeline(3), [kept]) as monitor:
        (row,) = take(monitor, 1, loss=2.5)
    assert kept.closed and len(kept.rows) == 1
    host = {"host_cpu_percent", "host_memory_percent", "rss_bytes"}
    assert row.keys() - host == {"step", "rank", "loss", "time", "step_ms", "exposed_comm_ms", "memory_stalls"}
    assert (row["rank"], row["loss"]) == (3, 2.5) and abs(row["time"] - time.time()) < 60


def test_a_step_that_raises_has_no_row_and_nothing_of_it_is_left():
    kept, timeline = Kept(), Timeline()
    with Monitor(timeline, [kept]) as monitor:
        with pytest.raises(ZeroDivisionError), monitor.step(1), timeline.span("forward"):
            raise ZeroDivisionError
        take(monitor, 2)
    assert [row["step"] for row in kept.rows] == [1, 2] and "forward_ms" not in kept.rows[0]


def test_on_a_device_times_are_those_of_the_device(monkeypatch):
    test_clock.as_if_alone(monkeypatch)
    device = test_clock.Device()
    timeline = Timeline(clock=device.clock())
    with Monitor(timeline, samples=110).step(1) as row:
        with timeline.span("forward"):
            device.run(10)
        with timeline.span("backward"):
            work = test_clock.metered(device, 30)
            device.run(15)
            work.wait()
    expected = {"step_ms": 40, "forward_ms": 10, "backward_ms": 30, "exposed_comm_ms": 15, "samples_per_s": 2750}
    assert {name: row[name] for name in expected} == pytest.approx(expected)


def late_to_the_wish(rank, world_size, strategy, key):
    """Rank 1 comes late to the collective after the optimizer's step."""
    context = SimpleNamespace(rank=rank, world_size=world_size, device=torch.device("cpu"))
    participant = Participant(context, Experiment(strategy=strategy, model="mlp"))
    clock = participant.timeline.clock = Telling(rank, key)
    with participant.monitor([], nan) as monitor:
        dist.barrier()
        with monitor.step(1) as row:
            loss = participant.trainer.train_step(*participant.next_batch())
            clock.next = comm_log.Event
            clock.come_late()
            agreement = Agreement(lambda: False)
            agreement.send(loss)
            agreement.read()
    return row


@pytest.mark.parametrize("strategy", ["ddp_bucketed", "torch_ddp"])
def test_waiting_for_a_late_rank_after_the_step_counts_too(ranks, strategy):
    early, late = ranks(2, late_to_the_wish, strategy=strategy, key=uuid.uuid4().hex)
    assert 200 <= early["exposed_comm_ms"] <= early["step_ms"]
    assert late["exposed_comm_ms"] <= late["step_ms"] - 200  # in which it was late


# ---- the host


def test_the_host_is_looked_at_from_time_to_time_and_never_by_the_step(monkeypatch):
    looked, real = [], psutil.virtual_memory
    monkeypatch.setattr(psutil, "virtual_memory", lambda: looked.append(threading.current_thread()) or real())
    kept, row = Kept(), {}
    with Monitor(Timeline(), [kept]) as monitor:
        begin = time.monotonic()
        while "rss_bytes" not in row or time.monotonic() < begin + 1.5 * watching.READING:
            (row,) = take(monitor, 1)
            time.sleep(0.01)
        seconds = time.monotonic() - begin
    assert threading.main_thread() not in looked and len(kept.rows) > 10
    assert 1 <= len(looked) <= 2 + seconds / watching.READING
    assert row["rss_bytes"] > 1e7 and 0 <= row["host_cpu_percent"] <= 100 and 0 < row["host_memory_percent"] <= 100


def test_a_gpu_is_read_as_far_as_it_tells(monkeypatch):
    class NotSupported(Exception):
        """As NVML's, for a part of a GPU."""

    def refuses(device):
        raise NotSupported

    readings = object.__new__(Readings)
    readings.device = torch.device("cuda", 1)
    answers = {"memory_allocated": 1, "max_memory_allocated": 2, "utilization": 3, "device_memory_used": 4}
    for name, value in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value * device.index)
    own = {"gpu_allocated_bytes": 1, "gpu_peak_bytes": 2}
    assert readings.of_gpu() == own | {"gpu_percent": 3, "gpu_used_bytes": 4}
    monkeypatch.setattr(torch.cuda, "utilization", refuses)
    assert readings.of_gpu() == own
    readings.device = torch.device("cpu")
    assert readings.of_gpu() == {}


# ---- a sink that is down


class Broken(Kept):
    def write(self, row):
        raise OSError("the disk is full")

    def close(self):
        raise OSError("the disk is still full")


class Hanging(Kept):
    """Takes its first row for ever."""

    def __init__(self):
        self.free = threading.Event()

    def write(self, row):
        self.free.wait()


def test_a_sink_that_raises_costs_its_rows_and_one_line(capfd):
    broken, kept = Broken(), Kept()
    with Monitor(Timeline(2), [broken, kept]) as monitor:
        rows = take(monitor, 50)
    assert len(rows) == len(kept.rows) == 50
    assert monitor.dropped == {broken: 50, kept: 0}
    told = capfd.readouterr().err.splitlines()
    assert [line.partition("metrics to ")[0] for line in told] == ["labkit: rank 2: "] * 3
    assert "failed: OSError: the disk is full; rows are dropped, training continues" in told[0]
    assert "could not be closed: OSError: the disk is still full" in told[1] and "did not get 50 rows" in told[2]


@pytest.mark.slow
def test_a_sink_that_hangs_holds_up_neither_the_steps_nor_the_others(capfd, monkeypatch):
    monkeypatch.setattr(watching, "WAITING", 5)
    monkeypatch.setattr(watching, "CLOSING", 3)  # seconds, in which `kept` is closed
    hanging, kept = Hanging(), Kept()
    monitor = Monitor(Timeline(), [hanging, kept])
    for step in range(1, 51):  # kept must have had its row before the next comes: the queue is short
        with monitor.step(step):
            pass
        until(lambda step=step: len(kept.rows) == step)
    waiting = 50 - monitor.dropped[hanging]
    assert 5 <= waiting <= 6  # those in the queue, and the one that it has taken
    begin = time.monotonic()
    monitor.close()
    assert time.monotonic() - begin < 30 and kept.closed
    assert monitor.dropped == {hanging: 50, kept: 0}
    told = capfd.readouterr().err.splitlines()
    assert len(told) == 2 and told[0].endswith("is too slow; rows are dropped, training continues")
    assert told[1].endswith("did not get 50 rows")
    hanging.free.set()


def test_closed_stderr_is_no_reason_to_stop(monkeypatch):
    with open("/dev/null", "w") as gone:
        monkeypatch.setattr(sys, "stderr", gone)
    broken = Broken()
    with Monitor(Timeline(), [broken]) as monitor:
        take(monitor, 5)
    assert monitor.dropped == {broken: 5}


# ---- sinks, read by those they are for


def test_json_lines_go_on_in_the_same_file_and_hold_no_nan(tmp_path):
    for numbers in ({"loss": nan}, {"loss": -inf}, {"loss": 0.1 + 0.2}):
        with Monitor(Timeline(1), [JsonLines(tmp_path / "new", 1)]) as monitor:
            take(monitor, 1, **numbers)
    rows = (tmp_path / "new" / "metrics-rank1.jsonl").read_text().splitlines()
    found = [json.loads(row, parse_constant=pytest.fail)["loss"] for row in rows]
    assert found == [None, None, 0.1 + 0.2]


def test_tensorboard_reads_the_curves_back_and_those_of_a_run_that_goes_on(tmp_path):
    def curve(first, last, **numbers):
        sink = TensorBoard(str(tmp_path))
        for step in range(first, last + 1):
            sink.write({"step": step, "rank": 0, "time": 1e9 + step, "loss": 1 / step, **numbers})
        sink.close()

    curve(1, 6, lr=0.5)
    time.sleep(1.1)  # the files are sorted by the second in their names
    curve(4, 8, lr=0.25)  # the first run was killed after the checkpoint of step 3
    events = curves_in(tmp_path)
    assert set(events.Tags()["scalars"]) == {"loss", "lr"}
    loss, lr = events.Scalars("loss"), events.Scalars("lr")
    assert [point.step for point in loss] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [point.value for point in loss] == pytest.approx([1 / point.step for point in loss])
    assert [point.value for point in lr] == [0.5] * 3 + [0.25] * 5
    assert [point.wall_time for point in loss] == [1e9 + point.step for point in loss]


def test_prometheus_scrapes_the_latest_row_whole():
    sink, other = Prometheus(), Prometheus()  # each has a port of its own, and a registry of its own
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/metrics", str(sink)) and str(sink) != str(other)
    assert scrape(str(sink)) == {}
    with Monitor(Timeline(0), [sink], samples=8) as monitor:
        take(monitor, 2, loss=0.5, loss_scale=2.0**16)
        *_, row = take(monitor, 3, loss=nan)
        until(lambda: scrape(str(sink)).get(("labkit_step", "0")) == 3)
        found = scrape(str(sink))
    assert {name for name, _ in found} == {f"labkit_{name}" for name in row if name != "rank"}
    assert found["labkit_step_ms", "0"] == row["step_ms"] and isnan(found["labkit_loss", "0"])
    assert scrape(str(other)) == {}
    with pytest.raises(OSError):  # closed with the monitor
        scrape(str(sink))
    other.close()


def test_text_and_tensors_in_a_row_reach_whoever_can_take_them(tmp_path, capfd):
    sink, curves = Prometheus(), TensorBoard(str(tmp_path / "curves"))
    with Monitor(Timeline(0), [sink, curves, JsonLines(tmp_path)]) as monitor:
        take(monitor, 2, stage="warm-up", loss=torch.tensor(0.5), done=True, **{"loss of a": 2.0})
        until(lambda: ("labkit_step", "0") in (found := scrape(str(sink))) and found["labkit_step", "0"] == 2)
        found = scrape(str(sink))
        assert not any(monitor.dropped.values())
    assert found["labkit_loss", "0"] == 0.5 and found["labkit_done", "0"] == 1 and found["labkit_loss_of_a", "0"] == 2
    assert ("labkit_stage", "0") not in found
    row = lines(tmp_path / "metrics-rank0.jsonl")[-1]
    assert row["stage"] == "warm-up" and row["loss"] == 0.5
    assert {"loss", "done"} <= set(curves_in(tmp_path / "curves").Tags()["scalars"])
    assert capfd.readouterr().err == ""


def test_what_no_sink_can_take_is_named(tmp_path, capfd):
    with Monitor(Timeline(0), [JsonLines(tmp_path)]) as monitor:
        take(monitor, 1, losses=torch.ones(2))
    assert "ValueError: row['losses'] is of type Tensor: use numbers" in capfd.readouterr().err


def test_wandb_is_used_where_it_is_installed_and_offline(tmp_path, monkeypatch):
    """With a module that notes how it is called: the real one is no part of the lab."""
    noted, wandb = [], ModuleType("wandb")
    run = SimpleNamespace(log=lambda values, step: noted.append((step, values)), finish=lambda: noted.append("end"))
    wandb.init = lambda **options: noted.append(options) or run
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    sinks = open_sinks([f"wandb:{tmp_path}/new"])
    with Monitor(Timeline(), sinks) as monitor:
        rows = take(monitor, 2, loss=0.5)
    assert noted[0]["mode"] == "offline" and (tmp_path / "new").is_dir() and noted[-1] == "end"
    assert noted[1:-1] == [
        (row["step"], {name: row[name] for name in row.keys() - {"step", "rank", "time"}}) for row in rows
    ]


# ---- the command


def test_what_cannot_be_opened_is_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    taken = Prometheus()
    port = taken.server.server_port
    for name in ("tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "GROUP_RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    expected = {
        "jsonlines:runs": f"choose from {KNOWN}",
        "tensorboard": "add a folder, as in tensorboard:FOLDER",
        f"jsonl:{tmp_path}/file/in": "Not a directory",
        f"prometheus:127.0.0.1:{port}": f"port {port} is in use: use another, or prometheus:127.0.0.1",
        "prometheus:9100": "9100 is not a host: use prometheus:127.0.0.1:9100",
        "prometheus:127.0.0.1:http": "Port could not be cast",
        "prometheus:no.such.host.invalid": "[Errno",
        f"tensorboard:{tmp_path}": f"tensorboard is not installed: {sys.executable} -m pip install tensorboard",
        "wandb:runs": f"wandb is not installed: {sys.executable} -m pip install wandb",
    }
    for place, words in expected.items():
        with pytest.raises(SystemExit) as ended:
            main(["--metrics", place])
        text = capsys.readouterr().err
        assert text.startswith(f"labkit.train: --metrics {place}: ") and text.count("\n") == 1
        assert ended.value.code == WRONG
        assert words in text, text
    taken.close()


@pytest.mark.slow
def test_no_library_of_a_sink_is_imported_before_it_is_asked_for():
    code = (
        "import sys, labkit.train\n"
        "print([name for name in ('tensorboard', 'prometheus_client', 'wandb') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.slow
def test_a_run_that_is_watched_trains_bit_for_bit_as_one_that_is_not(tmp_path):
    fields = ("--model", "gpt", "--precision", "fp16", "--strategy", "zero1", "--warmup-steps", "4")
    places = (f"jsonl:{tmp_path}", f"tensorboard:{tmp_path}/curves", "prometheus")
    until_told = ("--steps", 100_000, "--stop-file", tmp_path / "stop", "--log", tmp_path / "watched.jsonl")
    process = start(2, *fields, *until_told, "--metrics", *places)
    printed = "".join(iter(process.stdout.readline, f"metrics: tensorboard --logdir {tmp_path}/curves\n"))
    assert printed == f"metrics: {tmp_path}/metrics-rank0.jsonl\n"
    url = process.stdout.readline().removeprefix("metrics: ").strip()
    until(lambda: scrape(url).get(("labkit_step", "0"), 0) >= 10, seconds=120)
    (tmp_path / "stop").touch()
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0 and "stopped after step" in out, error
    watched = steady(tmp_path / "watched.jsonl")
    steps = len(watched)
    code, out, error = run(2, *fields, "--steps", steps + 1, "--log", tmp_path / "alone.jsonl")
    assert code == 0 and "metrics" not in out, error
    assert watched == steady(tmp_path / "alone.jsonl")[:steps] and steps >= 10
    told = [lines(tmp_path / f"metrics-rank{rank}.jsonl") for rank in range(2)]
    for rows in told:
        assert [row["loss"] for row in rows] == [line["loss"] for line in watched]
        assert [row["lr"] for row in rows] == pytest.approx([0.01 * min(1, s / 5) for s in range(1, steps + 1)])
        for row in rows:
            assert sum(row[phase] for phase in PHASES) <= row["step_ms"]
            assert row["loss_scale"] > 1 and row["gradient_norm"] > 0
            assert row.get("mfu", 0.5) > 0  # left out where the peak was measured on busy cores
            assert row["tokens_per_s"] == pytest.approx(64 * row["samples_per_s"])
    assert [row["gradient_norm"] for row in told[0]] == [row["gradient_norm"] for row in told[1]]
    events = curves_in(tmp_path / "curves")
    assert [point.value for point in events.Scalars("loss")] == pytest.approx([line["loss"] for line in watched])
