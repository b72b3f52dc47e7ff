"""Killed again and again at random moments, a training ends with the weights of the unbroken one.

python tests/test_soak.py 3 7      minutes; another seed draws other kills
"""

import json
import random
import signal
import sys
import tempfile
import threading
import time
from functools import cache
from pathlib import Path

import psutil
import pytest
import safetensors.torch
import torch

from labkit.convert import convert
from labkit.measure.faults import flip
from labkit.run import LaunchError, launch
from labkit.run.client import AgentError, agent

STEPS, TIMEOUT, LIMIT = 120, 3, 60
FIELDS = ["--batch-size", 12, "--steps", STEPS, "--optimizer", "adamw", "--lr", "0.01", "--clip", "0.5"]
ALIKE = {  # on two ranks again, it goes on bit for bit
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


def train(folder, fields, nproc=2, every=3, **options):
    """labkit.train in the folder; returns (whether it is done, its last line or the error's first)."""
    saved = ["--checkpoint-dir", folder / "checkpoints", "--checkpoint-every", every, "--timeout", TIMEOUT]
    arguments = [str(word) for word in [*FIELDS, *fields, *saved, "--log", folder / "log.jsonl"]]
    options = {"collective_timeout": 2 * TIMEOUT, "timeout": LIMIT, "quiet": True} | options
    try:
        run = launch("labkit.train:launched", nproc=nproc, arguments=arguments, **options)
    except LaunchError as error:
        return False, str(error).partition("\n")[0]
    except AgentError as error:
        return False, str(error)
    told = run.logs[0].read_text()
    return "done: " in told, told.strip().splitlines()[-1]


def lines(folder):
    path = folder / "log.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


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


def strike(kind, chance):
    """Let it happen to the ranks that are there; says to how many."""
    job, ranks = family()
    struck = {"one": ranks and [chance.choice(ranks)], "all": ranks, "job": job and [job], "agent": []}
    number, whom = kind
    hit = [psutil.Process(agent().process.pid)] if whom == "agent" else struck[whom] or []
    for process in hit:
        try:
            process.send_signal(number)
        except psutil.Error:
            return 0  # it has ended meanwhile
    return len(hit)


KINDS = [
    *[(number, whom) for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP) for whom in ("one", "all")],
    (signal.SIGKILL, "one"),
    (signal.SIGKILL, "job"),
    (signal.SIGKILL, "agent"),
]


def damage(folder, chance):
    """One bit of one file of the latest checkpoint."""
    files = sorted((folder / "checkpoints").glob("step-*/*"))
    latest = [path for path in files if path.parent == files[-1].parent]
    if latest:
        flip(chance.choice(latest), chance)


def broken(folder, fields, chance, kills, spread=False):
    """Train to the end, with so many kills on the way; spread: over ranks and strategies as they come."""
    agent()
    for number in range(kills + 1):
        nproc, strategy = chance.choice((1, 2, 3)), chance.choice(OTHERS)
        more = ["--strategy", strategy] if spread else []
        kind, seconds, hit = chance.choice(KINDS), chance.uniform(0.2, 2.5), []
        struck = threading.Timer(seconds, lambda kind=kind, hit=hit: hit.append(strike(kind, chance)))
        if number < kills:
            struck.start()
        start = time.monotonic()
        done, told = train(folder, [*fields, *more], nproc if spread else 2, cold=chance.random() < 0.1)
        struck.cancel()
        took = time.monotonic() - start
        where = f"{nproc} {strategy}" if spread else ""
        at = lines(folder)[-1]["step"] if lines(folder) else 0
        print(f"  {where} {kind[0].name} {kind[1]} after {seconds:.1f} s, hit {hit}; {took:.1f} s, {at}: {told}")
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
