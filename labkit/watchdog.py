"""A watchdog: it names and kills a rank that is frozen or stuck, so that the others can exit.

    rank 0   41 | 42 | 43, waits for rank 1 ...            | exits with 75
    rank 1   41 | 42 | frozen, or in an endless loop       | killed
    rank 2   41 | 42 | 43, waits for rank 1 ...            | exits with 75

    a thread of each rank writes   { beat 17, awaits 43 of group 0 }  -->  the ranks'
    and reads those of all ranks                                      <--  store
    rank 1:  no new beat for timeout seconds                               it is frozen
             new beats, no new collective, others wait for it, it for none it is stuck

Operations are matched by group and number, messages by pair of ranks (progress.py).

A hanging collective reports nothing: its timeout names no rank, and must exceed the longest
checkpoint. A launcher that restarts ranks (torchrun --max-restarts) needs all of them to exit.

Sent: 8 bytes at first; then a write and a read of the store, about three times a second, and no
message of a process group.
Clocks of different ranks are not compared, and only monotonic clocks are used.
"""

import json
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from labkit import comm, comm_log, progress
from labkit.torch_private import default_store

PAUSE = 0.3  # seconds between two reads of the store
FIRST = {
    "beat": 0, "begun": 0, "last": "", "rows": [], "patience": "", "verdict": None,
    "left": False, "node": None, "pid": None,
}  # fmt: skip
LEFT = os.EX_TEMPFAIL  # 75, the exit code of a rank that exits because of another


@dataclass
class Seen:
    """This rank's knowledge of another rank.

    told: its last entry in the store. heard: time of its last new beat. moved: time of its last
    new collective, or of its last patience() block.
    """

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
    """Return (the rank that the others wait for, or None; reason), or None if all is well.

    seen: a Seen of each rank that has not exited yet. now: the time of the last read.
    """
    silent = [rank for rank, one in seen.items() if now - one.heard > timeout]
    if silent:
        return silent[0], f"has sent no beat for {timeout:g} s: it is frozen"
    if not seen or now - max(one.moved for one in seen.values()) <= timeout:
        return None
    late = progress.late({rank: one.told["rows"] for rank, one in seen.items()})
    if not late:
        return None, f"all ranks have waited or computed for {timeout:g} s"
    return late[0], f"is stuck: the others have waited {timeout:g} s for it"


class Watchdog:
    """Watches the ranks of the default group from all of them, while the block lasts.

        with Watchdog(timeout=60) as watchdog:
            for step in ...:
                train_step(...)                          at least one collective within 60 s
                with watchdog.patience("a checkpoint"):  no limit
                    save(...)

    timeout: seconds. If there is a suspect, a thread ends this process, as the main thread may hang
    in a collective. A suspect on this node is killed (torchrun alone needs 35 s for a frozen one).
    If all ranks of a node are frozen, only ranks of other nodes can detect it.
    """

    def __init__(self, timeout):
        self.timeout = timeout
        self.rank = dist.get_rank()
        self.n = dist.get_world_size()
        self.told = FIRST | {"node": int(os.environ.get("GROUP_RANK", "0")), "pid": os.getpid()}
        self.progress = progress.Progress()
        now = time.monotonic()
        self.seen = {rank: Seen(FIRST, now, now) for rank in range(self.n)}
        self.unanswered = 0.0
        self.ended = threading.Event()

    def append(self, event):
        """Count a collective that begins. Called as the log of comm.record()."""
        self.told["begun"] += 1
        self.told["last"] = f"{event.op} of {event.payload_bytes:,} bytes"
        return self.progress.append(event)

    @contextmanager
    def patience(self, why):
        """Let the other ranks wait without limit within this block."""
        before, self.told["patience"] = self.told["patience"], why
        try:
            yield
        finally:
            self.told["patience"] = before

    def __enter__(self):
        mark = torch.tensor([time.time_ns()], device=comm.device())
        comm.broadcast(mark)  # a store may hold entries of an earlier attempt
        # A separate connection: on a shared one, a request waits for those of other threads.
        store = default_store().clone()
        self.store = dist.PrefixStore(f"labkit/watchdog/{mark.item()}", store)
        self.keys = [str(rank) for rank in range(self.n)]
        for key in self.keys:  # so that a rank that freezes before its first entry is named, too
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
            thread.join(PAUSE)  # not longer, as the store may be gone

    def watch(self):
        try:
            while not self.ended.wait(min(PAUSE, self.timeout / 10)):
                self.look()
            self.tell(left=True)
        except RuntimeError:  # the store is gone together with a rank, which the collectives report
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
        if found and not self.ended.is_set():  # a read may return after the end
            self.tell(verdict=found)
            self.leave(*found, silently=bool(verdict))

    def watch_store(self):
        """Detect that rank 0 holds the store and is frozen: then a read does not return."""
        while not self.ended.wait(PAUSE):
            self.unanswered += PAUSE  # not a clock, as this process may have been frozen meanwhile
            if self.unanswered > self.timeout:
                if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                    self.leave(None, f"torchrun's store has not answered for {self.timeout:g} s")
                self.leave(0, f"has sent no beat for {self.timeout:g} s: it holds the store")

    def leave(self, rank, why, silently=False):
        """Kill the suspect if it is on this node, and end this process."""
        told = self.seen[self.rank if rank is None else rank].told
        who = "no rank is behind" if rank is None else f"rank {rank} on node {told['node']}"
        if not silently:
            say(f"rank {self.rank} noticed: {who} {why}; its last beat: {place_of(told)}")
        say(f"rank {self.rank} exits at {here()}")
        time.sleep(2 * PAUSE)  # torchrun ends all ranks once one has exited: let them print first
        if rank not in (None, self.rank) and told["node"] == self.told["node"]:
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(told["pid"], signal.SIGKILL)
        os._exit(1 if rank == self.rank else LEFT)


def place_of(told):
    """Return where a rank was at its last beat, which may be older than its last collective."""
    if not told["begun"]:
        return "before its first collective"
    return f"in or after collective {told['begun']}, {told['last']}"


def here():
    """Return the position of the main thread in code outside torch and comm."""
    frame = sys._current_frames()[threading.main_thread().ident]
    machinery = (str(Path(dist.__file__).parent), comm.__file__, comm_log.__file__)
    stack = traceback.extract_stack(frame)
    place = [place for place in stack if not place.filename.startswith(machinery)][-1]
    return f"line {place.lineno} of {place.filename}: {place.line}"


def say(words):
    print(f"labkit.watchdog: {words}", file=sys.stderr, flush=True)
