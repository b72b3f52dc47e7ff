"""Killed again and again at random moments, a training ends with the weights of the unbroken one.

PYTHONPATH=.:tests/helpers python tests/train/test_soak.py 3 7      minutes; another seed draws other kills
"""

import random
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil
import pytest
import safetensors.torch
import torch
from train_command import steady

from labkit.convert import convert
from labkit.measure.faults import flip
from labkit.run import LaunchError, launch
from labkit.run.client import AgentError, agent

STEPS, LIMIT = 120, 240
IMPATIENT, PATIENT = 3, 50  # seconds to wait for a rank: for one that may be gone, and where all are to come
FIELDS = ["--batch-size", 12, "--steps", STEPS, "--optimizer", "adamw", "--lr", "0.01", "--clip", "0.5"]
ALIKE = {  # on two ranks again, it resumes bit for bit
    "ddp": ["--precision", "fp16"],
    "powersgd": ["--comm-hook", "powersgd"],
    "zero1": ["--strategy", "zero1", "--precision", "bf16"],
    "zero2": ["--strategy", "zero2", "--precision", "fp16"],
    "fsdp": ["--strategy", "fsdp", "--precision", "bf16"],
    "torch_fsdp": ["--strategy", "torch_fsdp"],
    "diloco": ["--strategy", "diloco", "--every", 4],
}
OTHERS = ("ddp_bucketed", "zero1", "zero2", "fsdp", "fsdp_grad_op", "torch_ddp", "torch_fsdp")
PRECISE = ["--precision", "fp64"]


def train(folder, fields, nproc=2, every=3, patience=PATIENT, **options):
    """labkit.train in the folder; returns (whether it is done, its last line or the error's first)."""
    saved = ["--checkpoint-dir", folder / "checkpoints", "--checkpoint-every", every, "--timeout", patience]
    arguments = [str(word) for word in [*FIELDS, *fields, *saved, "--log", folder / "log.jsonl"]]
    options = {"collective_timeout": 2 * patience, "timeout": LIMIT, "quiet": True} | options
    try:
        run = launch("labkit.run.training:launched", nproc=nproc, arguments=arguments, **options)
    except LaunchError as error:
        return False, str(error).partition("\n")[0]
    except AgentError as error:
        return False, str(error)
    told = run.logs[0].read_text()
    return "done: " in told, told.strip().splitlines()[-1]


def lines(folder):
    path = folder / "log.jsonl"
    return steady(path) if path.exists() else []


def weights(folder):
    convert(folder / "checkpoints", folder / "weights.safetensors")
    return safetensors.torch.load_file(folder / "weights.safetensors")


@cache
def unbroken(*fields):
    """(lines of its log, weights)."""
    with tempfile.TemporaryDirectory() as folder:
        assert train(Path(folder), fields, every=STEPS)[0]
        return lines(Path(folder)), weights(Path(folder))


# ---- what happens to it


def family():
    """(job, its ranks), as far as they are there."""
    try:
        [job] = psutil.Process(agent().process.pid).children()
        return job, job.children()
    except (ValueError, psutil.Error):
        return None, []


class Strike(threading.Thread):
    """A signal for the ranks that are there, at a random moment: soon after they began, or some steps later."""

    def __init__(self, folder, chance):
        super().__init__(daemon=True)
        self.number, self.whom = chance.choice(KINDS)
        self.steps = chance.choice((0, chance.randint(1, 60)))
        self.seconds = chance.uniform(0, 0.1 if self.steps else 2)
        self.luck = chance.random()
        self.folder, self.ended, self.hit = folder, threading.Event(), 0
        self.told = f"{self.number.name} to {self.whom}, {self.steps} steps and {self.seconds:.2f} s later"

    def run(self):
        before = len(lines(self.folder))
        while not (family()[1] and len(lines(self.folder)) >= before + self.steps):
            if self.ended.wait(0.01):
                return
        if not self.ended.wait(self.seconds):
            job, ranks = family()
            whom = {"all": ranks, "job": [job], "agent": [psutil.Process(agent().process.pid)]}
            whom["one"] = ranks and [ranks[int(self.luck * len(ranks))]]
            for process in whom[self.whom]:
                with suppress(psutil.Error, AttributeError):  # it has ended meanwhile
                    process.send_signal(self.number)
                    self.hit += 1

    def end(self):
        self.ended.set()
        self.join()


KINDS = [
    *[(number, whom) for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP) for whom in ("one", "all")],
    (signal.SIGKILL, "one"),
    (signal.SIGKILL, "job"),
    (signal.SIGKILL, "agent"),
]


def damage(folder, chance):
    """One bit of one file of the latest checkpoint, be it whole or just begun."""
    files = sorted(path for path in (folder / "checkpoints").glob("step-*/*") if path.stat().st_size)
    latest = [path for path in files if path.parent == files[-1].parent]
    if latest:
        flip(chance.choice(latest), chance)


def broken(folder, fields, chance, kills, spread=False):
    """Train to the end, with so many kills on the way; spread: over ranks and strategies as they come."""
    agent()
    for number in range(kills + 1):
        nproc, strategy = (chance.choice((1, 2, 3)), chance.choice(OTHERS)) if spread else (2, "")
        more = ["--strategy", strategy] if spread else []
        strike = Strike(folder, chance)
        if number < kills:
            strike.start()
        start = time.monotonic()
        patience = IMPATIENT if number < kills else PATIENT
        done, told = train(folder, [*fields, *more], nproc, patience=patience, cold=chance.random() < 0.1)
        took = time.monotonic() - start
        if number < kills:
            strike.end()
        at = lines(folder)[-1]["step"] if lines(folder) else 0
        print(f"  {nproc} {strategy} {strike.told}, hit {strike.hit}; {took:.1f} s, {at}: {told}", flush=True)
        assert took < LIMIT - 10, told
        assert psutil.Process(agent().process.pid).children(recursive=True) == []
        if done:
            return
        if chance.random() < 0.2:
            damage(folder, chance)
    raise AssertionError(told)


def check(seed, name, kills=6):
    """One training, broken by the seed's kills, against the unbroken one."""
    chance = random.Random(f"{name} {seed}")
    spread = name == "spread"
    fields = PRECISE if spread else ALIKE[name]
    expected, wanted = unbroken(*fields)
    with tempfile.TemporaryDirectory() as folder:
        broken(Path(folder), fields, chance, kills, spread)
        found, values = lines(Path(folder)), weights(Path(folder))
    losses = {line["step"]: line["loss"] for line in expected}
    assert {line["step"] for line in found} == set(losses)
    for line in found:  # also of steps that were taken twice
        assert line["loss"] == (
            pytest.approx(losses[line["step"]], abs=1e-6, rel=0) if spread else losses[line["step"]]
        )
    if not spread:
        assert found[-1]["weights_sha256"] == expected[-1]["weights_sha256"]
    assert values.keys() == wanted.keys()
    for key in wanted:
        torch.testing.assert_close(values[key], wanted[key], rtol=0, atol=1e-6 if spread else 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero2", "spread"])
def test_killed_again_and_again_it_ends_with_the_right_weights(name):
    check(seed=0, name=name, kills=3)


if __name__ == "__main__":
    minutes, seed = float(sys.argv[1]), int(sys.argv[2])
    chance, end = random.Random(seed), time.monotonic() + 60 * minutes
    while time.monotonic() < end:
        name = chance.choice([*ALIKE, "spread", "spread", "spread"])
        print(seed, name, flush=True)
        check(seed, name)
        seed += 1
    print("right to the end")
