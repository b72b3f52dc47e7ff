"""After any failure, on any rank: a restarted run ends with the result of an uninterrupted one.

python tests/run/test_faults.py 20      all of it, so many times, with other seeds
"""

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict
from functools import cache, partial

import psutil
import pytest
import torch
import torch.distributed as dist
from test_launch import interrupt_what_runs
from torch import nn

from labkit import models
from labkit.checkpoint import Checkpoints
from labkit.checkpoint.storage import Store
from labkit.cluster import network_namespaces
from labkit.fsdp import FSDP
from labkit.measure.faults import Fault, Injected, draw, fill_up, inject
from labkit.preempt import Agreement
from labkit.run import LaunchError, launch
from labkit.run import training as train
from labkit.run.client import agent
from labkit.run.context import Context

STEPS, BATCH = 8, 360  # four steps make an epoch of the 1,797 digits
TIMEOUT = 10  # seconds that a collective waits for a frozen rank
FIELDS = ["--batch-size", BATCH, "--steps", STEPS, "--optimizer", "adamw", "--lr", "0.01", "--precision", "fp64"]
OPTIONS = {"timeout": 200, "quiet": True}
HANGS = {"collective_timeout": TIMEOUT}


def go(context, arguments, plan=(), terms=(), saving=(), backward=(), agent_at=None):
    """labkit.train on warm ranks, with faults. plan: before a step; backward: in the middle of one.

    terms, saving: (rank, step) that gets a SIGTERM before the step, or while it is saved. Records a line a step.
    """
    one_step, save = train.step, Checkpoints.save
    plan, backward = ([Fault(**fault) for fault in faults] for faults in (plan, backward))
    now = {"step": 0}

    def next_batch(self, original=train.Participant.next_batch):
        inputs, targets = original(self)
        inject(plan, context, now["step"], [inputs], cut=network_namespaces.cut)
        now["rows"] = [hash(tuple(row.flatten().tolist())) for row in inputs]
        return inputs, targets

    def step(monitor, number, participant, preemption):
        if number == agent_at and context.attempt == 0 and context.rank == 0:
            psutil.Process().parents()[1].kill()
        if not now["step"]:
            first = next(participant.model.parameters())
            first.register_hook(lambda gradient: inject(backward, context, now["step"], [gradient]))
        now["step"] = number
        for _ in range(terms.count([context.rank, number])):
            os.kill(os.getpid(), signal.SIGTERM)
        loss, norm, stop = one_step(monitor, number, participant, preemption)
        context.record(step=number, loss=loss, rows=now["rows"])
        return loss, norm, stop

    def save_and_hear(self, number, state, **metrics):
        save(self, number, state, **metrics)
        if [context.rank, number] in saving:
            os.kill(os.getpid(), signal.SIGTERM)
        self.wait()

    train.Participant.next_batch, train.step, Checkpoints.save = next_batch, step, save_and_hear
    train.launched(context, arguments)


def trained(folder, nproc=2, **options):
    """A launch of go, with checkpoints in the folder."""
    for name in ("plan", "backward"):
        options[name] = [asdict(fault) for fault in options.get(name, ())]
    saved = ["--checkpoint-dir", folder, "--checkpoint-every", 2, "--timeout", 30, "--strategy", "zero2"]
    arguments = [str(word) for word in [*FIELDS, *saved]]
    return launch("test_faults:go", nproc=nproc, arguments=arguments, **{**OPTIONS, **options})


def history(*runs):
    """{step: (loss, samples of the global batch)}: what each step was when it was last taken."""
    found = {}
    for run in runs:
        attempts = run.records.get("attempt", run.records["rank"] * 0)
        for (_, step), rows in run.records.groupby([attempts, "step"]):
            found[step] = rows["loss"].iloc[0], Counter(row for share in rows["rows"] for row in share)
    return found


@cache
def unbroken(nproc):
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return history(trained(folder, nproc))


def same(found, wanted, tolerance=0.0):
    assert list(found) == list(wanted) == list(range(1, STEPS + 1))
    for step, (loss, samples) in found.items():
        assert loss == pytest.approx(wanted[step][0], abs=tolerance, rel=0)
        assert samples == wanted[step][1]


@pytest.mark.slow
def test_the_samples_of_an_epoch_are_seen_once():
    images = models.data.load("digits", "mlp")
    there = Counter(hash(tuple(image.double().flatten().tolist())) for image, _ in images)
    epoch = sum((samples for step, (_, samples) in unbroken(2).items() if step <= 4), Counter())
    assert epoch.total() == 4 * BATCH and epoch <= there


def every_fault(seed):
    """{name: options of `trained`}: each ends in another attempt, or in none."""
    chance = random.Random(seed)

    def fault(kind, **more):
        return Fault(kind, chance.randrange(2), chance.randint(2, STEPS), **more)

    step = chance.randint(2, STEPS)
    return {
        "raise": {"plan": [fault("raise")]},
        "kill": {"plan": [fault("kill")]},
        "kill in backward": {"backward": [fault("kill")]},
        "kill all": {"plan": [Fault("kill", rank, step) for rank in range(2)]},
        "kill, and the next attempt too": {"plan": [fault("kill"), fault("raise", attempt=1)]},
        "kill the agent": {"agent_at": step},
        "stop": {"plan": [fault("stop")], **HANGS},
        "stop all": {"plan": [Fault("stop", rank, step) for rank in range(2)], **HANGS},
        "stall": {"plan": [fault("stall")], **HANGS},
        "slow": {"plan": [fault("slow", seconds=0.02)]},
    }


def survives(folder, options):
    """What is left of a fault: the attempts' failures, after the comparison with the unbroken run."""
    run = trained(folder, restarts=2, **options)
    same(history(run), unbroken(2))
    assert psutil.Process(agent().process.pid).children(recursive=True) == []
    return run.failures


@pytest.mark.slow
@pytest.mark.parametrize("name", every_fault(0))
def test_after_a_fault_the_run_is_bit_for_bit_the_unbroken_one(tmp_path, name):
    failures = survives(tmp_path, every_fault(0)[name])
    assert len(failures) == {"slow": 0, "kill, and the next attempt too": 2}.get(name, 1), failures


WORDS = {
    "raise": "rank 1 raised Injected: injected fault in step 3",
    "kill": "rank 1 died of SIGKILL (signal 9)",
    "stop": "rank 1 is frozen: stopped by a signal (SIGSTOP)",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", WORDS)
def test_the_rank_that_failed_is_named(tmp_path, capfd, kind):
    start = time.monotonic()
    source = "comm.barrier()\nrecord(x=attempt)\nfor step in range(9):\n    comm.barrier()\n"
    source += "    if step == 3:\n        from labkit.measure.faults import Fault, inject\n"
    source += f"        from types import SimpleNamespace\n        plan = [Fault('{kind}', 1, 3)]\n"
    source += "        inject(plan, SimpleNamespace(rank=rank, attempt=attempt), step)\n"
    run = launch(source, restarts=1, **OPTIONS | HANGS | {"quiet": False})
    assert len(run.failures) == 1 and run.failures[0].startswith(WORDS[kind])
    assert f"[launch] {run.failures[0]}: restart 1 of 1" in capfd.readouterr().out
    assert run.records[["rank", "attempt"]].values.tolist() == [[0, 0], [1, 0], [0, 1], [1, 1]]
    assert run.records["x"].tolist() == run.records["attempt"].tolist()
    assert time.monotonic() - start < TIMEOUT + 30  # of a stopped rank, torchrun alone thinks for 30 s more


@pytest.mark.slow
def test_when_all_attempts_have_failed_the_last_is_told():
    with pytest.raises(LaunchError, match="attempt 2 is no better") as caught:
        launch("record(x=1)\nraise ValueError(f'attempt {attempt} is no better')", nproc=1, restarts=2, **OPTIONS)
    run = caught.value.run
    assert [text.rpartition(": ")[2] for text in run.failures] == [f"attempt {i} is no better" for i in range(3)]
    assert run.records["attempt"].tolist() == [0, 1, 2]


OUTLIVES = """
import ctypes, os, psutil, signal, time
comm.barrier()
if attempt == 0:
    time.sleep(60 * rank)
    ctypes.CDLL(None).prctl(1, 0)  # not killed with its parent: the system is late
    psutil.Process().parents()[1].kill()
    time.sleep(0.5)
    record(late=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_what_a_rank_does_after_its_agent_has_died_is_in_the_records_and_the_next_attempt_waits_for_it():
    run = launch(OUTLIVES + "record(late=False)", restarts=1, **OPTIONS)
    assert len(run.failures) == 1 and "the launching agent died (-9)" in run.failures[0]
    assert run.records[["attempt", "rank", "late"]].values.tolist() == [[0, 0, True], [1, 0, False], [1, 1, False]]


@pytest.mark.slow
def test_without_restarts_there_is_one_attempt_and_no_column():
    run = launch("record(x=attempt)", nproc=1, **OPTIONS)
    assert list(run.records) == ["rank", "x"] and run.failures == []


@pytest.mark.parametrize("restarts", [-1, 1.5, True])
def test_restarts_are_counted(restarts):
    with pytest.raises(ValueError, match="restarts="):
        launch("pass", restarts=restarts)


@pytest.mark.slow
def test_an_interrupt_is_no_failure():
    interrupt_what_runs()
    with pytest.raises(KeyboardInterrupt):
        launch("import time; time.sleep(100)", restarts=5, **OPTIONS)
    assert psutil.Process(agent().process.pid).children(recursive=True) == []


def first_attempt_fails(context):
    context.record(attempt=context.attempt)
    if context.attempt == 0 and context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.slow
def test_the_shell_command_restarts_as_often(tmp_path):
    run = launch("test_faults:first_attempt_fails", restarts=2, **OPTIONS)
    assert len(run.failures) == 1
    setting, torchrun, *words = shlex.split(run.command.replace("$(mktemp -d)", str(tmp_path)))
    assert torchrun == "torchrun" and "--max-restarts 2" in run.command
    here = dict([setting.split("=")], PYTHONPATH=os.path.dirname(__file__))
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=os.environ | here)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stderr
    came = {(row["rank"], row["attempt"]) for row in rows}
    last = max(attempt for _, attempt in came)  # 2 where the next one failed too: torchrun can lose a port to others
    assert {(1, 0), (0, last), (1, last)} <= came and 1 <= last <= 2, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_an_interrupt_at_any_moment_of_many_attempts_leaves_nothing(seed):
    seconds = random.Random(seed).uniform(0.3, 1.5)
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        launch("raise ValueError('again')", restarts=1000, **OPTIONS)
    deadline = time.monotonic() + 30
    while below := psutil.Process(agent().process.pid).children(recursive=True):
        assert time.monotonic() < deadline, below
    assert launch("record(x=1)", **OPTIONS).records["x"].sum() == 2


# ---- ranks and nodes that go and come


@pytest.mark.slow
def test_4_ranks_then_2_then_4(tmp_path):
    runs = []
    for nproc, step in ((4, 4), (2, 7)):
        with pytest.raises(LaunchError, match="rank 1 died of SIGKILL") as caught:
            trained(tmp_path, nproc, plan=[Fault("kill", 1, step)])
        runs.append(caught.value.run)
    runs.append(trained(tmp_path, 4))
    assert [run.records["step"].max() for run in runs] == [3, 6, 8] and runs[1].records["step"].min() == 3
    for nproc in (2, 4):
        same(history(*runs), unbroken(nproc), tolerance=1e-6)


@pytest.mark.slow
def test_a_node_leaves_and_comes_back(tmp_path):
    network = launch("pass", nodes=2, nproc=1, **OPTIONS).network
    if network["how"] == "loopback":
        pytest.skip(network["notes"][0])
    with pytest.raises(LaunchError, match="the link of node 1 is cut") as caught:
        trained(tmp_path, nodes=2, plan=[Fault("link down", 2, 4)])
    with pytest.raises(LaunchError) as stopped:
        trained(tmp_path, nodes=1, plan=[Fault("kill", 0, 7)])
    back = trained(tmp_path, nodes=2)
    same(history(caught.value.run, stopped.value.run, back), unbroken(2), tolerance=1e-6)


@pytest.mark.slow
def test_a_node_that_is_cut_off_is_there_again_in_the_next_attempt(tmp_path):
    if launch("pass", nodes=2, nproc=1, **OPTIONS).network["how"] == "loopback":
        pytest.skip("no network namespaces here")
    run = trained(tmp_path, 1, nodes=2, plan=[Fault("link down", 1, 5)], restarts=1)
    assert run.failures == ["the link of node 1 is cut"]
    same(history(run), unbroken(2))


# ---- asked to stop


SIGNALS = {
    "one rank": {"terms": [(1, 4)]},
    "both, at different steps": {"terms": [(0, 4), (1, 5)]},
    "during a save": {"saving": [(1, 4)]},
    "twice, and during the last save": {"terms": [(0, 3), (0, 3)], "saving": [(0, 3), (1, 3)]},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SIGNALS)
def test_a_signal_ends_all_ranks_after_the_same_step_and_they_go_on_from_there(tmp_path, name):
    first = trained(tmp_path, **SIGNALS[name])
    ended = first.records.groupby("rank")["step"].max()
    assert ended.nunique() == 1 and 3 <= ended[0] <= 5
    assert f"stopped after step {ended[0]}" in first.logs[0].read_text()
    second = trained(tmp_path)
    assert second.records["step"].min() == ended[0] + 1
    same(history(first, second), unbroken(2))


# ---- killed while it saves


def saver(context, folder, kills):
    """Save without end; in each attempt, one rank is killed after so many saves and so many ms, as the seed draws.

    It travels as source.
    """
    import os
    import random
    import signal
    import threading

    from torch import nn

    from labkit.checkpoint import Checkpoints
    from labkit.fsdp import FSDP

    chance = random.Random(context.attempt)
    model = FSDP(nn.Linear(300, 300))
    checkpoints = Checkpoints(folder, keep=2)
    step = checkpoints.load({"model": model}) or 0
    values = torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])
    assert step == 0 or (values == step).all()
    context.record(step=step, loaded=True)
    if context.attempt == kills:
        return checkpoints.close()
    dist.barrier()
    victim, last, seconds = chance.randrange(context.world_size), step + chance.randrange(3), chance.uniform(0.0, 0.06)
    while True:
        if context.rank == victim and step == last:
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        step += 1
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(step)
        checkpoints.save(step, {"model": model})
        checkpoints.wait()
        context.record(step=step, loaded=False)


@pytest.mark.slow
def test_killed_at_20_moments_of_a_save_nothing_that_was_saved_is_lost(tmp_path):
    run = launch(saver, folder=str(tmp_path), kills=20, restarts=20, **OPTIONS)
    assert len(run.failures) == 20 and all("died of SIGKILL" in text for text in run.failures)
    saved = 0
    for attempt, records in run.records.groupby("attempt"):
        loaded = set(records[records["loaded"]]["step"])
        assert len(loaded) == 1 and min(loaded) >= saved, (attempt, loaded, saved)
        saved = records["step"].max()
    assert saved > 5


# ---- the faults themselves


def at(rank=0, attempt=0):
    return Context(rank, 2, rank, 0, torch.device("cpu"), None, attempt)


def test_a_fault_happens_at_its_step_its_rank_and_its_attempt():
    plan = [Fault("raise", 1, 5)]
    for context, step in ((at(0), 5), (at(1), 4), (at(1), 6), (at(1, 1), 5)):
        inject(plan, context, step)
    with pytest.raises(Injected, match="in step 5"):
        inject(plan, at(1), 5)
    for attempt in range(3):
        with pytest.raises(Injected):
            inject([Fault("raise", 1, 5, attempt=None)], at(1, attempt), 5)
    with pytest.raises(ValueError, match="unknown fault 'burn': choose from raise, kill"):
        Fault("burn", 0, 1)


def test_slow_is_slow_from_its_step_on_and_stall_once(monkeypatch):
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    for step in range(5):
        inject([Fault("slow", 0, 2, seconds=0.5), Fault("stall", 0, 3, seconds=9)], at(), step)
    assert slept == [0.5, 0.5, 9, 0.5]


def test_what_a_seed_draws_is_the_same_again():
    assert draw(["kill", "nan"], 4, 50, seed=3) == draw(["kill", "nan"], 4, 50, seed=3)
    drawn = [draw(["kill"], 4, 50, seed)[0] for seed in range(60)]
    assert {fault.rank for fault in drawn} == set(range(4)) and all(1 <= fault.step <= 50 for fault in drawn)


@pytest.mark.parametrize("seed", [0, 1])
def test_one_element_of_one_tensor_is_nan(seed):
    found = []
    for _ in range(2):
        tensors = [torch.zeros(3, 4), torch.zeros(5)]
        inject([Fault("nan", 0, 1, seed=seed)], at(), 1, tensors)
        found.append([tensor.isnan().nonzero().tolist() for tensor in tensors])
    assert found[0] == found[1] and sum(map(len, found[0])) == 1


def test_one_bit_is_flipped_or_half_a_file_gone(tmp_path):
    path = tmp_path / "rank-0.safetensors"
    path.write_bytes(bytes(1000))
    inject([Fault("flip", 0, 1)], at(), 1, files=[path])
    assert sum(byte.bit_count() for byte in path.read_bytes()) == 1 and path.stat().st_size == 1000
    inject([Fault("cut short", 0, 1)], at(), 1, files=[path])
    assert path.stat().st_size == 500


@pytest.mark.parametrize("kind", ["flip", "cut short"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, capsys, kind):
    model, checkpoints = nn.Linear(3, 3), Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, {"model": model})
        checkpoints.wait()
    inject([Fault(kind, 0, 2)], at(), 2, files=(tmp_path / "step-000000002").iterdir())
    assert checkpoints.load({"model": model}) == 1
    assert "skipped the checkpoint of step 2" in capsys.readouterr().out
    checkpoints.close()


def test_a_full_disk_takes_what_there_is_room_for(tmp_path):
    store = Store(tmp_path)
    store.write("one/a", lambda file: file.write(bytes(2000)))
    inject([Fault("disk full", 0, 1, free_bytes=1000)], at(), 1, store=store)
    store.write("one/b", lambda file: file.write(bytes(1000)))
    with pytest.raises(OSError, match="No space left"):
        store.write("one/c", lambda file: [file.write(bytes(600)) for _ in range(2)])
    assert sorted(store.names("one")) == ["a", "b"]


def one_is_full(rank, world_size, folder):
    from labkit.checkpoint import CheckpointError

    checkpoints = Checkpoints(folder)
    model = FSDP(nn.Linear(100, 100))
    if rank == 1:
        fill_up(checkpoints.store, 1000)
    checkpoints.save(1, {"model": model})
    with pytest.raises(CheckpointError, match=r"step 1 was not saved: rank 1: .*No space left"):
        checkpoints.wait()
    checkpoints.close()


def test_a_full_disk_on_one_rank_is_told_by_all(ranks, tmp_path):
    ranks(2, one_is_full, folder=str(tmp_path))


def nan_loss(rank, world_size):
    for wish in (False, True):
        agreement = Agreement(partial(bool, wish and rank == 0))
        agreement.send(torch.tensor(float("nan") if rank else 1.0))
        loss, stop = agreement.read()
        assert loss.isnan() and stop is wish


def test_a_loss_that_is_nan_on_one_rank_is_so_on_all_and_is_no_wish_to_stop(ranks):
    ranks(2, nan_loss)


@pytest.mark.slow
def test_a_nan_in_the_input_of_one_rank_reaches_the_loss_of_all(tmp_path):
    run = trained(tmp_path, plan=[Fault("nan", 1, 5)])
    losses = run.records.pivot(index="step", columns="rank", values="loss")
    assert losses.isna().sum(axis=1).tolist() == [0, 0, 0, 0, 2, 2, 2, 2]


if __name__ == "__main__":
    import tempfile

    for seed in range(int(sys.argv[1])):
        for name, options in every_fault(seed).items():
            with tempfile.TemporaryDirectory() as folder:
                print(seed, name, survives(folder, options), flush=True)
