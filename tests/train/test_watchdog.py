"""The watchdog: it names and kills a frozen rank soon after the timeout, and no other rank."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from labkit.run import LaunchError, launch
from labkit.watchdog import FIRST, LEFT, Seen, Watchdog, place_of, suspect

TIMEOUT = 6  # seconds: on a busy machine a rank may be silent for some


def told(beat=0, begun=0, patience="", **others):
    group = {"group": "0", "ranks": [0, 1, 2], "message": False, "op": "barrier", "bytes": 0, "at": begun}
    rows = [group | {"scheduled": begun, "awaited": begun * (begun == 7), "completed": 6}]
    return {"beat": beat, "begun": begun, "patience": patience, "last": "barrier", "rows": rows, **others}


def knows(*about):
    return {rank: Seen(told(begun=begun), heard, moved) for rank, (heard, moved, begun) in enumerate(about)}


# ---- the idea


def test_who_does_not_tell_any_more_is_named():
    seen = knows((99, 89, 7), (90, 89, 7), (99, 89, 7))
    assert suspect(seen, 99, 10) is None
    assert suspect(seen, 101, 10) == (1, "has sent no beat for 10 s: it is frozen")


def test_who_is_behind_is_named_once_nobody_begins():
    seen = knows((99, 50, 7), (99, 50, 6), (99, 95, 7))
    assert suspect(seen, 100, 10) is None  # rank 2 has just begun one: they are on their way
    assert suspect(seen, 106, 10) == (1, "is stuck: the others have waited 10 s for it")


def test_where_all_have_begun_the_same_none_is_named():
    rank, why = suspect(knows((99, 50, 7), (99, 50, 7)), 100, 10)
    assert rank is None and "all ranks have waited or computed" in why


def test_one_who_says_why_it_takes_long_is_waited_for_but_has_to_tell():
    seen = knows((99, 50, 7), (99, 50, 6))
    seen[1].hear(told(beat=1, begun=6, patience="saving"), now=100)
    assert suspect(seen, 105, 10) is None
    seen[1].hear(told(beat=2, begun=6), now=106)  # done: it has the whole time again to begin the next
    assert suspect(seen, 109, 10) is None and suspect(seen, 112, 20) is None
    assert suspect(seen, 120, 10)[0] == 0  # nothing was heard of either


def test_only_news_counts_and_a_reader_that_slept_accuses_nobody():
    seen = Seen(told(beat=1, begun=1), heard=0.0, moved=0.0)
    seen.hear(told(beat=2, begun=1), now=500.0)  # it was written long ago, and is read now
    assert (seen.heard, seen.moved) == (500.0, 0.0)
    seen.hear(told(beat=2, begun=1), now=501.0)
    assert seen.heard == 500.0


# ---- who leaves


@pytest.mark.parametrize(("node", "ended_by"), [(0, signal.SIGKILL), (1, signal.SIGTERM)], ids=["here", "elsewhere"])
def test_who_leaves_kills_the_suspect_of_its_own_node(node, ended_by, monkeypatch):
    monkeypatch.delenv("GROUP_RANK", raising=False)  # node 0
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(os, "_exit", sys.exit)
    watchdog = Watchdog(TIMEOUT)
    with subprocess.Popen(["sleep", "60"]) as suspected:
        watchdog.seen[1].told = FIRST | {"node": node, "pid": suspected.pid}
        with pytest.raises(SystemExit) as left:
            watchdog.leave(1, "is stuck")
        suspected.terminate()  # nobody else ends it
    assert (left.value.code, suspected.returncode) == (LEFT, -ended_by)


# ---- on ranks


TRAINING = """
import os, time
from labkit.watchdog import Watchdog

with Watchdog({timeout}) as watchdog:
    for step in range(12):
        time.sleep(0.1)
        comm.all_reduce(torch.ones(2))
        if rank == 0:
            print("step", step, time.monotonic(), flush=True)
        if step == 5 and rank == {rank}:
            {fault}
    record(steps=step + 1)
"""


def end(fault, rank, nproc=3, timeout=TIMEOUT):
    """(what the ranks' logs say, seconds from the fault to the end)."""
    source = TRAINING.format(timeout=timeout, rank=rank, fault=fault)
    with pytest.raises(LaunchError) as caught:
        launch(source, nproc=nproc, collective_timeout=100, timeout=60, quiet=True)
    ended = time.monotonic()
    logs = [log.read_text() for log in caught.value.run.logs]
    begin = float(re.search(r"step 5 ([\d.]+)", logs[0])[1])
    return caught.value, "".join(logs), ended - begin


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "rank", "words"),
    [
        ("os.kill(os.getpid(), 19)", 1, f"has sent no beat for {TIMEOUT} s: it is frozen"),
        ("os.kill(os.getpid(), 19)", 2, f"has sent no beat for {TIMEOUT} s: it is frozen"),
        ("sum(range(10**12))", 1, f"has sent no beat for {TIMEOUT} s: it is frozen"),  # it holds Python's lock
        ("time.sleep(100)", 1, f"is stuck: the others have waited {TIMEOUT} s for it"),
        ("while True: pass", 0, f"is stuck: the others have waited {TIMEOUT} s for it"),
        ("dist.recv(torch.ones(1), 0)", 1, f"is stuck: the others have waited {TIMEOUT} s for it"),
    ],
    ids=["stopped", "stopped, the last", "no lock", "asleep", "endless", "recv"],
)
def test_who_stands_still_is_named_and_the_others_leave(fault, rank, words):
    error, logs, seconds = end(fault, rank)
    assert logs.count("noticed: ") >= 1 and set(re.findall(r"noticed: (rank \d on node \d)", logs)) == {
        f"rank {rank} on node 0"
    }
    assert words in logs and re.search(r"its last beat: in or after collective \d, all_reduce of 8 bytes\n", logs)
    assert error.cause.rank == rank, str(error)  # and launch does not blame those who left
    assert TIMEOUT - 1 < seconds < 30  # its last entry may be from before rank 0 printed; launch's own limit is 60


def test_a_rank_may_freeze_before_its_first_collective():
    assert place_of(FIRST) == "before its first collective"


@pytest.mark.slow
def test_all_in_a_collective_that_hangs_leave_and_say_from_where():
    _, logs, _ = end("pass\n        if step == 5: dist.recv(torch.ones(1))", 0)
    assert "no rank is behind" in logs and f"all ranks have waited or computed for {TIMEOUT} s" in logs
    assert sum(line.endswith("if step == 5: dist.recv(torch.ones(1))") for line in logs.splitlines()) == 3


PATIENT = """
import time
from labkit.watchdog import Watchdog

time.time = iter(range(10**9, 0, -3600)).__next__  # a clock that somebody sets back, again and again
with Watchdog(6) as watchdog:
    for step in range(4):
        comm.all_reduce(torch.ones(2))
        if rank == 0:
            with watchdog.patience("saving"):
                time.sleep(9 * (step == 2))
        time.sleep(0.3)
    comm.barrier()
record(done=step)
"""


@pytest.mark.slow
def test_a_rank_that_is_only_slow_is_left_alone_whatever_the_clock_says():
    run = launch(PATIENT, nproc=2, quiet=True)
    assert run.records["done"].tolist() == [3, 3]


class Late(Watchdog):
    def tell(self, **news):
        time.sleep(0.7)
        super().tell(**news)


def again(rank, world_size):
    for kind in (Watchdog, Late if rank else Watchdog):
        with kind(60) as watchdog:
            while watchdog.seen[1 - rank].told["beat"] < 2:
                time.sleep(0.01)
                assert watchdog.seen[1 - rank].told["verdict"] is None
            dist.barrier()
        Watchdog.tell(watchdog, verdict=[0, "is stuck"], left=False)  # as ranks do that leave
        dist.barrier()
        watchdog.look()  # that was under way when the block ended: nobody leaves any more
        dist.barrier()


@pytest.mark.slow
def test_a_verdict_of_an_earlier_attempt_is_not_heard(ranks):
    ranks(2, again)


@pytest.mark.slow
def test_ranks_that_leave_at_different_times_accuse_nobody():
    source = "import time\nfrom labkit.watchdog import Watchdog\nwith Watchdog(4) as watchdog:\n"
    source += "    with watchdog.patience('work'):\n        time.sleep(3 * rank)\n"
    source += "time.sleep(7 - 3 * rank)\nrecord(done=1)"
    assert launch(source, nproc=3, quiet=True).records["done"].sum() == 3
