"""Who has not arrived: compared by group and number, messages by pair; an innocent rank is never named."""

import pytest
import torch
import torch.distributed as dist

from labkit import comm, progress
from labkit.measure.diagnose import diagnose
from labkit.measure.diagnosis_metrics import last_collectives
from labkit.run import LaunchError, launch

ALL = [0, 1, 2, 3]


def row(ranks=ALL, scheduled=0, awaited=0, completed=None, group="0", message=False, op="all_reduce", at=0):
    done = completed if completed is not None else scheduled - bool(awaited)
    counts = {"scheduled": scheduled, "awaited": awaited, "completed": done, "at": at or scheduled}
    return {"group": group, "ranks": ranks, "message": message, "op": op, "bytes": 8, **counts}


def message(src, dst, scheduled, awaited=0, completed=None):
    return row([src, dst], scheduled, awaited, completed, message=True, op="send")


def test_the_ends_of_a_pipeline_send_half_as_much_and_are_not_blamed():
    """Rank 1 of four is in a loop, with a receive asked for ahead; every other rank waits, for it or behind it."""
    told = {
        0: [message(0, 1, 4), message(1, 0, 2, awaited=2)],
        1: [message(0, 1, 3), message(1, 0, 1), message(1, 2, 2), message(2, 1, 3, completed=2)],
        2: [message(1, 2, 3, awaited=3), message(2, 1, 2), message(2, 3, 2), message(3, 2, 2)],
        3: [message(2, 3, 3, awaited=3), message(3, 2, 2)],
    }
    assert progress.late(told) == [1]


def test_where_nobody_is_known_to_wait_those_behind_are_named_and_of_a_circle_nobody():
    """As on CUDA: the host knows only what was scheduled."""
    assert progress.late({rank: [row(scheduled=9 - (rank == 2), completed=0)] for rank in ALL}) == [2]
    circle = {0: [message(0, 1, 2, completed=0)], 1: [message(1, 0, 2, completed=0)]}
    assert progress.late(circle) == []


def test_a_rank_that_waits_in_another_group_is_innocent():
    """Rank 0 is late for its group with 2 because rank 1 is late for theirs; no wait() of rank 0 is known."""
    told = {
        0: [row([0, 1], 5, completed=4, group="a"), row([0, 2], 4, group="b")],
        1: [row([0, 1], 4, group="a")],
        2: [row([0, 2], 5, awaited=5, group="b")],
    }
    assert progress.late(told) == [1]


def test_all_in_the_same_or_gone_and_nobody_is_named():
    assert progress.late({rank: [row(scheduled=5, awaited=5)] for rank in ALL}) == []
    assert progress.late({rank: [row(scheduled=5, awaited=5)] for rank in ALL[:2]}) == []  # 2 and 3 have left
    assert progress.late({0: [row(scheduled=1, awaited=1)], 1: [], 2: [], 3: []}) == [1, 2, 3]
    assert progress.late({0: [], 1: []}) == []


def test_a_rank_that_waits_for_an_early_one_of_several():
    """Operation 5, a broadcast, has been scheduled by all but rank 3, which the wait is for; rank 2 only lacks 6."""
    told = {rank: [row(scheduled=6, awaited=5, completed=4)] for rank in (0, 1)}
    assert progress.late(told | {2: [row(scheduled=5)], 3: [row(scheduled=4)]}) == [3]


def kept(rank, n):
    log = progress.Progress()
    aside = dist.new_group([1, 0])
    with comm.record(log, timed=False):
        comm.barrier()
        works = [comm.all_reduce(torch.ones(2), async_op=True) for _ in range(2)]
        works[0].wait()
        comm.broadcast(torch.ones(3), group=aside)
        if rank == 0:
            comm.send(torch.ones(4), 1)
        else:
            comm.recv(torch.ones(4), 0)
        comm.exchange(torch.ones(1), 1 - rank, torch.ones(1), 1 - rank)
    before = [(one["ranks"], one["message"], one["scheduled"], one["completed"], one["op"]) for one in log.told()]
    works[1].wait()
    works[1].wait()
    return sorted(before), log.rows["0",].completed, [one["awaited"] for one in log.told()]


def test_what_is_scheduled_awaited_and_completed_is_counted(ranks):
    for rank, (rows, completed, awaited) in enumerate(ranks(2, kept)):
        assert rows == [
            ([0, 1], False, 1, 1, "broadcast"),
            ([0, 1], False, 3, 2, "all_reduce"),
            ([0, 1], True, 2, 2, "exchange"),
            ([1, 0], True, 1, 1, "exchange"),
        ], f"rank {rank}"
        assert completed == 3 and set(awaited) == {0}, f"rank {rank}"


PIPELINE = """
import time
from labkit.pipeline import Pipeline
from labkit.watchdog import Watchdog
from contextlib import nullcontext

def loss(output, target):
    return (output - target).square().mean()

class Stage(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls = torch.nn.Linear(4, 4), 0

    def forward(self, x):
        self.calls += 1
        while self.calls == 15 and rank == {culprit}:
            pass
        return self.linear(x)

def step():
    x, y = torch.ones(8, 4), torch.ones(8, 4)
    pipeline.step(x if rank == 0 else None, y if rank == 3 else None)

pipeline = Pipeline({{rank: Stage()}}, dist.new_group(), micro_batches=4, loss=loss)
step()  # the first takes its time on a busy machine
with {around}:
    while True:
        step()
"""


def hung(culprit, around, **options):
    with pytest.raises(LaunchError) as caught:
        launch(PIPELINE.format(culprit=culprit, around=around), nproc=4, device="cpu", quiet=True, **options)
    return caught.value


@pytest.mark.slow
@pytest.mark.parametrize("culprit", ALL)
def test_of_a_pipeline_that_hangs_the_watchdog_names_the_stage_in_a_loop(culprit):
    error = hung(culprit, "Watchdog(6)", collective_timeout=100, timeout=60)
    logs = "".join(log.read_text() for log in error.run.logs)
    assert f"noticed: rank {culprit} on node 0 is stuck" in logs, logs
    assert all(f"noticed: rank {other}" not in logs for other in ALL if other != culprit)
    assert error.cause.rank == culprit


@pytest.mark.slow
@pytest.mark.parametrize("culprit", [1, 2])
def test_of_a_pipeline_that_hangs_launch_and_diagnose_name_the_stage_in_a_loop(culprit):
    error = hung(culprit, "nullcontext()", collective_timeout=6)
    assert error.cause.rank == culprit, str(error)
    (found,) = diagnose(last_collectives(error.run.folder))
    assert f"waiting for rank {culprit}, last seen in message" in found.evidence
