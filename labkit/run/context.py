"""What a target gets to know, and how it reports: `context`, or in a cell names of their own.

    def train(context, steps):
        for step in range(steps):
            ...
            context.record(step=step, loss=loss)     a row of run.records
            context.progress(step + 1, steps)        the bar, moved by rank 0

Both write a line of JSON into the rank's event file, which the notebook reads meanwhile.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch


class EventFile:
    """One JSON line an event, flushed when written: the notebook reads it while the rank runs."""

    def __init__(self, file):
        self.file = file

    def write(self, kind, **fields):
        self.file.write(json.dumps({"kind": kind, **fields}, default=plain) + "\n")


class Log:
    """JSON lines, appended; without a path, nothing. OSError where it cannot be written."""

    def __init__(self, path):
        self.path = path
        if path:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            open(path, "a").close()

    def write(self, **fields):
        if self.path:
            with open(self.path, "a") as file:
                file.write(json.dumps(fields) + "\n")


def plain(value):
    """Tensors and numpy values of one element as Python numbers; what JSON cannot hold raises."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (torch.dtype, torch.device, Path)):
        return str(value)
    raise TypeError(f"record() takes numbers, strings, lists and dicts, not {type(value).__name__}")


@dataclass
class Context:
    """What the target gets: who this rank is, and how it reports.

    node counts the machines of the job, local_rank the ranks of one. attempt: how often these ranks
    have been started before.
    record(**fields) adds a row to run.records; progress(step, total) moves the bar (rank 0's).
    """

    rank: int
    world_size: int
    local_rank: int
    node: int
    device: torch.device
    events: EventFile = field(repr=False)
    attempt: int = 0

    def record(self, **fields):
        if "rank" in fields or "kind" in fields:
            raise ValueError(
                "record() notes the rank by itself: give fields other names than rank and kind"
            )
        self.events.write("record", rank=self.rank, **fields)

    def progress(self, step, total):
        if self.rank == 0:
            self.events.write("progress", step=step, total=total)
