"""Watch one attempt of a launch until it ends or must be ended.

every 20 ms     has the job ended? what have the ranks written?  -> records, lines, the bar
every 0.5 s     is a process stopped (SIGSTOP)? how much have the ranks printed?

a rank failed      (or left by os._exit): the others get a second to report, then the job is stopped
a rank is stopped  its peers time out and fail. If no peer waits, or a process is stopped before all
                   ranks have started, the job is stopped after collective_timeout
a rank floods      its log exceeds 1 GiB: the job is stopped before the disk is full
all ranks are done but torchrun does not end, as over a cut link: the job is stopped after 3 s
the agent has died its ranks are waited for: the system kills them, and what they wrote is kept
"""

import json
import time
from dataclasses import dataclass

import psutil

from labkit.run.client import agent
from labkit.run.console import Console, Tail
from labkit.run.report import read_exits

POLL = 0.02  # seconds between checks of the ranks' output
LOOK = 0.5  # seconds between checks of their processes
EXIT_LIMIT = 3.0  # seconds for torchruns to end after their ranks; over a cut link they never do
LONGEST_LOG = 2**30  # bytes
ORPHAN_LIMIT = 10.0  # seconds for the system to kill the ranks of an agent that has died
OTHERS_REPORT = 0.8  # seconds that the other ranks get to report after one has failed


@dataclass
class Outcome:
    """Result of an attempt. exits: {pid: exit code} of ranks that ended before any stop.

    stopped: ranks that are stopped by SIGSTOP. broken: a sentence about an end that no rank
    reports: one printed too much, or Slurm ended the job.
    """

    status: int
    exits: dict | None
    stopped: list
    timed_out: float | None = None
    broken: str | None = None


def watch(run, command, timeout, quiet, bar, client=None):
    """Show the ranks' output until the job ends; return its Outcome.

    command: of a plain torchrun, or None. client: of the job; None: the warm agent. The timeout
    begins when the job leaves the queue, if there is one.
    """
    client = client or agent()
    console = Console(run.logs, quiet)
    tails = [Tail(run.folder / f"rank-{rank}.jsonl") for rank in range(run.world_size)]
    patience = run.job["collective_timeout"]
    notes_shown = quiet
    failed_at = done_at = frozen_at = status = None
    stopped = []
    try:
        client.start(run.job_path, run.nproc, command)
        start = looked_at = time.monotonic()
        while status is None:
            status = client.poll(POLL)
            # before the events: a rank writes its last event before it exits
            exits = read_exits(run.folder)
            take_events(run, tails, bar)
            console.show()
            if not notes_shown and run.network:
                notes_shown = True
                print_notes(run.network["notes"])
            now = time.monotonic()
            last = [events[-1]["kind"] if events else None for events in run.events]
            if failed_at is None and ("error" in last or has_left(run.events, exits or {})):
                failed_at = now
            if done_at is None and set(last) == {"done"}:
                done_at = now
            if now - looked_at > LOOK:
                looked_at = now
                stopped = stopped_ranks(run.events) if client.here else []
                still = stopped or (
                    client.here and is_stopped_early(run.events, client.process.pid)
                )
                frozen_at = (frozen_at or now) if still else None
                if flood := flooded(run.logs):
                    client.stop()
                    return Outcome(1, exits, stopped, broken=flood)
            if status is None and done_at is not None and now - done_at > EXIT_LIMIT:
                client.stop()
                return Outcome(0, exits, [])
            late = failed_at is not None and now - failed_at > OTHERS_REPORT
            frozen = frozen_at is not None and now - frozen_at > patience
            if status is None and (late or frozen or now - start > timeout):
                stopped = stopped_ranks(run.events) if client.here else []
                client.stop()
                return Outcome(1, exits, stopped, None if late or frozen else timeout)
        stopped = stopped if status else []
        return Outcome(status, read_exits(run.folder), stopped, broken=client.why)
    except KeyboardInterrupt:
        client.stop()
        print(f"[launch] interrupted: all {run.world_size} ranks have ended")
        raise
    finally:
        take_last_events(run, tails, bar, client)
        console.show(final=True)
        bar.close()


def take_last_events(run, tails, bar, client):
    """Take the events until the ranks end: without their agent, they train and save till then."""
    take_events(run, tails, bar)
    if client.here and client.process.poll() is not None:
        wait_until_gone(run.events)
        take_events(run, tails, bar)


def wait_until_gone(events):
    """Wait until the system has killed the ranks of an agent that has died."""
    alive = {of[0]["pid"] for of in events if of}
    deadline = time.monotonic() + ORPHAN_LIMIT
    while alive and time.monotonic() < deadline:
        alive = {pid for pid in alive if is_alive(pid)}
        time.sleep(POLL)


def has_left(events, exits):
    """Return whether a rank has ended before it was done. torchelastic does not notice os._exit(0).

    exits: {process id: exit code}, read before events.
    """
    starts = {of[0]["pid"]: of[-1]["kind"] for of in events if of}
    return any(code or starts.get(pid, "done") != "done" for pid, code in exits.items())


def flooded(logs):
    """Return a sentence about the first rank whose log is too long, or None."""
    for rank, log in enumerate(logs):
        if log.exists() and log.stat().st_size > LONGEST_LOG:
            return f"rank {rank} printed more than {LONGEST_LOG >> 20} MiB and was stopped"
    return None


def stopped_ranks(events):
    """Return the stopped ranks: they ignore SIGTERM, and torchrun would wait 30 s."""
    return [
        rank
        for rank, (start, *_) in ((rank, of) for rank, of in enumerate(events) if of)
        if is_stopped(start["pid"])
    ]


def is_stopped_early(events, agent_pid):
    """Return whether a process of the job is stopped before all ranks have started."""
    if all(events):
        return False
    try:
        below = psutil.Process(agent_pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return False
    return any(is_stopped(process.pid) for process in below)


def is_stopped(pid):
    return status_of(pid) == psutil.STATUS_STOPPED


def is_alive(pid):
    return status_of(pid) not in (None, psutil.STATUS_ZOMBIE)


def status_of(pid):
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return None


def print_notes(notes):
    for note in notes:
        print(f"[launch] {note}", flush=True)


def take_events(run, tails, bar):
    for events, tail in zip(run.events, tails, strict=True):
        for event in map(json.loads, tail.lines()):
            events.append(event)
            if event["kind"] == "progress":
                bar.update(event["step"], event["total"])
            elif event["kind"] == "record":
                bar.record(event)
