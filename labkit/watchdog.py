"""A watchdog: it names and kills a rank that is frozen or stuck, so that the others can exit.

    rank 0   41 | 42 | 43, waits for rank 1 ...            | leaves with 75
    rank 1   41 | 42 | stopped, or in an endless loop      | killed
    rank 2   41 | 42 | 43, waits for rank 1 ...            | leaves with 75

    a thread of each rank tells   { beat 17, awaits 43 of group 0 }  -->  the ranks'
    and reads what all have told                                     <--  store
    rank 1:  no new beat for timeout seconds                              it is stopped
             new beats, nobody begins, others wait for it, it for nobody  it is stuck

Who waits for whom: by group and number, and of messages by pair (progress.py).

A collective that hangs says nothing: its own timeout names nobody, and has to be as long as the
longest checkpoint. Whoever starts ranks again (torchrun --max-restarts) needs all of them to leave.

Sent: 8 bytes at first; then a write and a read of the store, about three times a second, and no
message of a process group.
No clock of one rank is compared with another's, nor one that somebody can set.
"""

import json
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from labkit import comm, comm_log, progress

PAUSE = 0.3  # seconds between two looks
FIRST = {
    "beat": 0, "begun": 0, "last": "none yet", "rows": [], "patience": "", "verdict": None,
    "left": False, "node": None, "pid": None,
}  # fmt: skip
LEFT = os.EX_TEMPFAIL  # 75, the exit code of a rank that leaves because of another


@dataclass
class Seen:
    """What this rank knows of one. heard: when it last told; moved: when it began a collective,
    or was not to be hurried."""

    told: dict
    heard: float
    moved: float

    def hear(self, told, now):
        if told["beat"] != self.told["beat"]:
            self.heard = now
        if told["begun"] != self.told["begun"] or told["patience"]:
            self.moved = now
        self.told = told


def suspect(seen, now, timeout):
    """The idea: (the rank that the others wait for, or None; why), or None where all is well.

    seen: a Seen of each rank that has not left yet. now: when they were last read.
    """
    silent = [rank for rank, one in seen.items() if now - one.heard > timeout]
    if silent:
        return silent[0], f"has not been heard of for {timeout:g} s: it is stopped"
    if not seen or now - max(one.moved for one in seen.values()) <= timeout:
        return None
    late = progress.late({rank: one.told["rows"] for rank, one in seen.items()})
    if not late:
        return None, f"all wait, or compute, since {timeout:g} s"
    return late[0], f"is stuck: the others have waited {timeout:g} s for it"


class Watchdog:
    """Watches the ranks of the default group while it is open, from all of them.

        with Watchdog(timeout=60) as watchdog:
            for step in ...:
                train_step(...)                          at least one collective within 60 s
                with watchdog.patience("a checkpoint"):  as long as it takes
                    save(...)

    timeout: seconds. Ends the process, where there is a suspect, from a thread: the main one may
    hang in a collective. A suspect on this node is killed (torchrun alone needs 35 s for one that
    is stopped). If all ranks of a node are stopped, only those of other nodes can tell.
    """

    def __init__(self, timeout):
        self.timeout = timeout
        self.rank, self.n = dist.get_rank(), dist.get_world_size()
        self.told = FIRST | {"node": int(os.environ.get("GROUP_RANK", "0")), "pid": os.getpid()}
        self.progress = progress.Progress()
        now = time.monotonic()
        self.seen = {rank: Seen(FIRST, now, now) for rank in range(self.n)}
        self.unanswered, self.ended = 0.0, threading.Event()

    def append(self, event):
        """As the log of a comm.record: what begins, is counted."""
        self.told["begun"] += 1
        self.told["last"] = f"{event.op} of {event.payload_bytes:,} bytes"
        return self.progress.append(event)

    @contextmanager
    def patience(self, why):
        """What this rank does in here may make the others wait for as long as it takes."""
        before, self.told["patience"] = self.told["patience"], why
        try:
            yield
        finally:
            self.told["patience"] = before

    def __enter__(self):
        mark = torch.tensor([time.time_ns()], device=comm.device())
        comm.broadcast(mark)  # a store may hold what ranks of an earlier attempt have told
        # A connection of its own: on a shared one, a request waits for those of other threads.
        store = _get_default_store().clone()
        self.store = dist.PrefixStore(f"labkit/watchdog/{mark.item()}", store)
        self.keys = [str(rank) for rank in range(self.n)]
        for key in self.keys:  # who is stopped before it has told anything is to be named, too
            self.store.compare_set(key, "", json.dumps(FIRST))
        self.tell()
        self.recording = comm.record(self, timed=False)
        self.recording.__enter__()
        self.threads = [
            threading.Thread(target=target, name=f"watchdog: {target.__name__}", daemon=True)
            for target in (self.watch, self.watch_store)
        ]
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *error):
        self.recording.__exit__(*error)
        self.ended.set()
        for thread in self.threads:
            thread.join(PAUSE)  # the store may be gone: it is not worth waiting for

    def watch(self):
        try:
            while not self.ended.wait(min(PAUSE, self.timeout / 10)):
                self.look()
            self.tell(left=True)
        except RuntimeError:  # the store is gone, and a rank with it: its peers see that themselves
            return

    def tell(self, **news):
        self.told |= news
        self.store.set(self.keys[self.rank], json.dumps(self.told))

    def look(self):
        self.tell(beat=self.told["beat"] + 1, rows=self.progress.told())
        answer = [json.loads(text) for text in self.store.multi_get(self.keys)]
        now = time.monotonic()
        for rank, told in enumerate(answer):
            self.seen[rank].hear(told, now)
        self.unanswered = 0.0
        staying = {rank: one for rank, one in self.seen.items() if not one.told["left"]}
        verdict = next((told["verdict"] for told in answer if told["verdict"]), None)
        found = verdict or suspect(staying, now, self.timeout)
        if found and not self.ended.is_set():  # a look may come back when all is over
            self.tell(verdict=found)
            self.leave(*found, silently=bool(verdict))

    def watch_store(self):
        """Where rank 0 holds the store and is stopped, a look at it does not come back."""
        while not self.ended.wait(PAUSE):
            self.unanswered += PAUSE  # and no clock: this process may have been stopped meanwhile
            if self.unanswered > self.timeout:
                if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                    self.leave(None, f"torchrun's store has not answered for {self.timeout:g} s")
                self.leave(0, f"has not been heard of for {self.timeout:g} s: it holds the store")

    def leave(self, rank, why, silently=False):
        """End the suspect, where it is on this node, and this process."""
        told = self.seen[self.rank if rank is None else rank].told
        who = "no rank is behind" if rank is None else f"rank {rank} on node {told['node']}"
        if not silently:
            last = f"last collective {told['begun']}: {told['last']}"
            say(f"rank {self.rank} noticed: {who} {why}; {last}")
        say(f"rank {self.rank} leaves, from {here()}")
        time.sleep(2 * PAUSE)  # torchrun ends all ranks once one has left: let them say this first
        if rank not in (None, self.rank) and told["node"] == self.told["node"]:
            os.kill(told["pid"], signal.SIGKILL)
        os._exit(1 if rank == self.rank else LEFT)


def here():
    """Where the main thread is, in code that is neither torch's nor the meter's."""
    frame = sys._current_frames()[threading.main_thread().ident]
    machinery = (str(Path(dist.__file__).parent), comm.__file__, comm_log.__file__)
    stack = traceback.extract_stack(frame)
    place = [place for place in stack if not place.filename.startswith(machinery)][-1]
    return f"line {place.lineno} of {place.filename}: {place.line}"


def say(words):
    print(f"labkit.watchdog: {words}", file=sys.stderr, flush=True)
