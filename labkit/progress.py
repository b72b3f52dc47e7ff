"""Finds the rank that others wait for, from the progress of each rank by group and by pair.

    group "0" of ranks 0 to 3      rank 0   scheduled 12   awaits 12: all_reduce of 8 bytes
                                   rank 1   scheduled 11                   <- has not arrived
    message from 1 to 2            rank 1   scheduled 5
                                   rank 2   scheduled 6    awaits 6: recv of 400 bytes

Operations are matched by their number within a process group, messages by their number between two
ranks. Other counts cannot be compared: the ends of a pipeline send half as many messages.

A rank waits for all members that have not scheduled the operation that it awaits. A thread awaits
inside comm's operation or in wait(). If no thread does (a Future's wait(), and on CUDA, where the
host does not wait), a rank may wait for all ranks that have not scheduled its latest operation. The
faulty rank is one that others wait for, and that itself waits for none.

PyTorch's Flight Recorder compares ranks in the same way after a failure.
"""

import json
from dataclasses import asdict, dataclass


@dataclass
class Row:
    """A rank's progress in one group, or of the messages between two ranks of it.

    ranks: the members, or [from, to], as global ranks. scheduled, completed: numbers of operations.
    awaited: the number of the one that a thread waits for, 0 for none. op, bytes: of the latest.
    at: number of operations that this rank had scheduled in all groups by then.
    """

    group: str
    ranks: list
    message: bool = False
    scheduled: int = 0
    awaited: int = 0
    completed: int = 0
    op: str = ""
    bytes: int = 0
    at: int = 0


class Progress:
    """A log for comm.record(): a Row for each group and pair. count: operations in total."""

    def __init__(self):
        self.rows, self.count = {}, 0

    def append(self, event):
        self.count += 1
        places = []
        for row in self.rows_of(event):
            row.scheduled += 1
            row.op = event.op
            row.bytes = event.payload_bytes
            row.at = self.count
            places.append((row, row.scheduled))
            self.keep(row)
        return lambda state: self.note(places, state)

    def note(self, places, state):
        for row, number in places:
            if state == "awaited":
                row.awaited = number
            else:
                row.completed += 1
                row.awaited = 0 if row.awaited == number else row.awaited
            self.keep(row)

    def rows_of(self, event):
        keys = [(event.group, *pair) for pair in event.pairs] or [(event.group,)]
        for key in keys:
            if key not in self.rows:
                members = members_of(event.group)
                ranks = [members[rank] for rank in key[1:]] or members
                self.rows[key] = Row(event.group, ranks, bool(event.pairs))
        return [self.rows[key] for key in keys]

    def keep(self, row):
        """Hook for subclasses that store a changed row."""

    def told(self):
        """Return all rows as dicts for JSON."""
        return [asdict(row) for row in list(self.rows.values())]


def members_of(name):
    """Return the ranks of a process group by its name."""
    # Imported here, as readers of rows, such as the command line, do not need PyTorch.
    import torch.distributed as dist

    from labkit.torch_private import group_named

    return dist.get_process_group_ranks(group_named(name))


def read(path):
    """Return the rows that a rank has written into its file (run/worker.py); [] without one."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().rstrip("\0").splitlines()]


def latest(rows):
    """Return the row of the operation that was scheduled last; None if there is none."""
    return max(rows, key=lambda row: row["at"], default=None)


def place(row):
    """Return the key that comparable rows of several ranks have in common."""
    return row["group"], *(row["ranks"] if row["message"] else ())


@dataclass
class Wait:
    """A rank waits (surely=False: may wait) for the missing ranks in operation `number`."""

    rank: int
    row: dict
    number: int
    missing: set
    surely: bool


def waits(told):
    """Return [Wait]. told: {rank: [a Row as dict, ...]} of the ranks that still run."""
    reached = {(place(row), rank): row["scheduled"] for rank in told for row in told[rank]}
    found = []
    for rank, rows in told.items():
        surely = any(row["awaited"] for row in rows)
        for row in rows:
            number = row["awaited"] if surely else row["scheduled"]
            if number and (surely or number > row["completed"]):
                others = sorted(told.keys() & set(row["ranks"]))
                missing = {one for one in others if reached.get((place(row), one), 0) < number}
                found.append(Wait(rank, row, number, missing, surely))
    return found


def late(told):
    """Return the ranks that others wait for and that wait for none, as far as is known."""
    found = waits(told)
    surely = {wait.rank for wait in found if wait.surely}
    free = set().union(*(wait.missing for wait in found)) - surely
    return sorted(free - {wait.rank for wait in found if wait.missing & free - {wait.rank}})


def differ(one, other):
    """Return the first pair of rows whose latest operation has one number but differs, or None."""
    there = {place(row): row for row in other if not row["message"]}
    for row in one:
        same = there.get(place(row), row)
        different = (row["op"], row["bytes"]) != (same["op"], same["bytes"])
        by_nature = row["op"] == same["op"] == "all_to_all"
        if row["scheduled"] == same["scheduled"] and different and not by_nature:
            return row, same
    return None
