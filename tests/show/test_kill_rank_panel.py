"""Buttons that kill: real ranks, a real SIGKILL, and a run that comes back."""

import time

import pytest

from labkit.run import launch
from labkit.show.kill_rank_panel import Panel

PROGRAM = """
import os
from pathlib import Path
from time import sleep

Path(pids, str(rank)).write_text(str(os.getpid()))
done = Path(folder, "done")
step = int(done.read_text()) if done.exists() else 0
while step < 30:
    step += 1
    comm.barrier()
    sleep(0.1)
    if rank == 0:  # who is killed while it writes leaves no half of it
        done.with_suffix(".part").write_text(str(step))
        done.with_suffix(".part").replace(done)
    progress(step, 30)
record(step=step)
"""


def wait_for(true):
    deadline = time.monotonic() + 100
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return true()


@pytest.mark.slow
def test_a_rank_is_killed_and_the_run_comes_back(tmp_path):
    def begin(bar, pids):
        run = launch(PROGRAM, restarts=3, folder=str(tmp_path), pids=pids, quiet=True, bar=bar, device="cpu")
        return f"{len(run.failures)} failed: {run.failures[0]}"

    panel = Panel(begin, 2)
    assert [one.disabled for one in (panel.start, *panel.victims)] == [False, True, True]
    panel.start.click()
    assert [one.disabled for one in (panel.start, *panel.victims)] == [True, False, False]
    assert wait_for(lambda: panel.step >= 3)
    panel.victims[1].click()
    assert "rank 1 killed after step" in panel.message.value
    assert wait_for(lambda: "attempt 2: step" in panel.message.value)
    panel.thread.join(100)
    assert not panel.thread.is_alive() and panel.step == 30
    assert "done. 1 failed: rank 1 died of SIGKILL" in panel.message.value
    assert [one.disabled for one in (panel.start, *panel.victims)] == [False, True, True]


def test_a_rank_that_is_not_there_yet_is_not_killed():
    panel = Panel(lambda bar, pids: wait_for(lambda: "just being started" in panel.message.value) and "ended", 2)
    panel.start.click()
    assert wait_for(lambda: hasattr(panel, "pids"))
    panel.victims[0].click()
    panel.thread.join(100)
    assert panel.kills == [] and panel.message.value == "<p>done. ended</p>"


@pytest.mark.parametrize(("message", "words"), [("no <rank>\nis left", "no &lt;rank&gt;"), ("", "no message")])
def test_a_failure_is_told_in_words(message, words):
    def begin(bar, pids):
        raise RuntimeError(message)

    panel = Panel(begin, 1)
    panel.start.click()
    panel.thread.join(100)
    assert panel.message.value == f"<p>done. RuntimeError: {words}</p>"
    assert not panel.start.disabled
