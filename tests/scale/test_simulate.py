"""A simulated step: compared with sums by hand, and from a dry run of emulated compute."""

import pytest
import torch
from pytest import approx

from labkit import models
from labkit.comm_log import Event, Pause
from labkit.ddp import DDP
from labkit.memory.dry_run import dry_run
from labkit.models.emulated import emulate
from labkit.models.gpt import GPT, Block
from labkit.scale.simulate import alpha_beta, simulate


def message(op, start, size=0, n=2, waited=None):
    pauses = None if waited is None else [Pause(start=waited)]
    return Event(op, n, size, size, "derived", start, start, pauses)


def second(event):
    return "network", 1.0


def test_what_is_waited_for_at_once_is_exposed_whole():
    found = simulate([message("all_reduce", 10.0)], 9.0, 12.0, second)
    assert found.seconds == 4.0 and found.exposed == 1.0


def test_what_compute_hides_costs_nothing():
    assert simulate([message("all_reduce", 10.0, waited=11.5)], 9.0, 12.0, second).seconds == 3.0
    assert simulate([message("all_reduce", 10.0, waited=10.25)], 9.0, 12.0, second).exposed == 0.75


def test_messages_of_a_channel_follow_one_another():
    events = [message("all_reduce", 10.0, waited=10.5), message("all_reduce", 10.0, waited=10.5)]
    assert simulate(events, 10.0, 11.0, second).seconds == 2.5
    apart = iter("ab")
    assert simulate(events, 10.0, 11.0, lambda event: (next(apart), 1.0)).seconds == 1.5


def test_a_delay_delays_what_follows():
    events = [message("all_gather", 0.0), message("all_reduce", 1.0, waited=1.5)]
    found = simulate(events, 0.0, 2.0, second)
    assert found.seconds == 3.5 and found.exposed == 1.5
    network = [(row["start_ms"], row["end_ms"]) for row in found.rows if row["lane"] == "network"]
    assert network == [(0.0, 1000.0), (2000.0, 3000.0)]
    for lane in ("compute", "exposed"):
        assert all(row["end_ms"] >= row["start_ms"] for row in found.rows if row["lane"] == lane)
    compute = sum(row["end_ms"] - row["start_ms"] for row in found.rows if row["lane"] == "compute")
    assert compute == approx(2000.0)


def test_what_lies_outside_of_the_step_is_left_out():
    assert simulate([message("broadcast", 1.0)], 2.0, 3.0, second).seconds == 1.0


@pytest.mark.parametrize(
    ("op", "seconds"), [("all_reduce", 12.5), ("all_gather", 9.5), ("exchange", 7.5), ("recv", 6.5)]
)
def test_alpha_and_beta(op, seconds):
    assert alpha_beta(1.0, 0.5)(message(op, 0.0, size=13, n=4)) == ("network", approx(seconds))


def job(device):
    import time

    with torch.device(device):
        model = GPT(vocab=64, context=16, layers=2, heads=2, width=32)
        tokens = torch.zeros(2, 16, dtype=torch.long)
    emulate(model, Block, 20.0)
    ddp, start = DDP(model, bucket_cap_mb=0.02), time.perf_counter()
    models.loss("gpt")(ddp(tokens), tokens).backward()
    return start, time.perf_counter()


@pytest.mark.parametrize("n", [2, 1024])
def test_a_rehearsed_step_on_a_slower_and_slower_network(n):
    told = dry_run(job, n)
    start, end = told.result
    assert simulate(told.events, start, end, alpha_beta(0.0, 0.0)).seconds == approx(end - start)
    slow = simulate(told.events, start, end, alpha_beta(0.0, 1e-3))
    sent = sum(event.sent_bytes for event in told.events if event.start > start)
    assert slow.seconds >= sent * 1e-3  # the network is never faster than it is
    assert slow.seconds <= sent * 1e-3 + end - start  # and compute hides or it does not
    assert slow.exposed > 0.5 * slow.seconds
