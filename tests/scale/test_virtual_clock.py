"""On the clock of a dry run only emulated compute takes time, and all ranks of all world sizes agree."""

import time

import torch
from pytest import approx

from labkit import models
from labkit.ddp import DDP
from labkit.memory.dry_run import dry_run
from labkit.models import emulated
from labkit.models.gpt import GPT, Block
from labkit.scale.simulate import alpha_beta, simulate
from labkit.scale.virtual_clock import only_sleep


def job(device, clock):
    with torch.device(device):
        model = GPT(vocab=64, context=16, layers=3, heads=2, width=32)
        tokens = torch.zeros(2, 16, dtype=torch.long)
    emulated.emulate(model, Block, 7000.0)
    ddp, start = DDP(model, bucket_cap_mb=0.02), clock.now
    models.loss("gpt")(ddp(tokens), tokens).backward()
    return start, clock.now


def test_a_minute_of_compute_takes_none_and_is_the_same_for_any_number_of_ranks():
    begun, told = time.perf_counter(), {}
    for n in (2, 1024):
        with only_sleep(emulated) as clock:
            told[n] = dry_run(job, n, clock=clock)
    assert time.perf_counter() - begun < 60
    assert emulated.sleep is time.sleep  # and all is as before
    moments = {n: [(e.op, e.start, [p.start for p in e.pauses or ()]) for e in one.events] for n, one in told.items()}
    assert moments[2] == moments[1024] and told[2].result == told[1024].result
    start, end = told[2].result
    assert end - start == approx(3 * 21)
    reduced = [e for e in told[2].events if e.op == "all_reduce"]
    assert [e.start for e in reduced] == sorted(e.start for e in reduced) and reduced[0].start >= start + 21
    assert simulate(told[2].events, start, end, alpha_beta(0, 0)).exposed == 0
