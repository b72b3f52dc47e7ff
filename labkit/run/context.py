"""What a target receives, and how it reports: `context`; in a cell its members are global names.

    def train(context, steps):
        for step in range(steps):
            ...
            context.record(step=step, loss=loss)     a row of run.records
            context.progress(step + 1, steps)        the progress bar, moved by rank 0

Both write a line of JSON to the rank's event file, which the notebook reads while the rank runs.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch


class EventFile:
    """Writer of one JSON line per event, flushed at once for the notebook to read."""

    def __init__(self, file):
        self.file = file

    def write(self, kind, **fields):
        self.file.write(json.dumps({"kind": kind, **fields}, default=plain) + "\n")


class Log:
    """Writer that appends JSON lines to a file; without a path it does nothing. Raises OSError."""

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
    """Convert tensors and numpy values to Python numbers and lists.

    Raises TypeError for other types.
    """
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (torch.dtype, torch.device, Path)):
        return str(value)
    raise TypeError(f"record() takes numbers, strings, lists and dicts, not {type(value).__name__}")


@dataclass
class Context:
    """The first argument of a target: which rank this is, and how it reports.

    node: index of the machine in the job. local_rank: index of the rank on its node. attempt: how
    often these ranks were started before.
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
                "record() adds the rank itself: use field names other than rank and kind"
            )
        self.events.write("record", rank=self.rank, **fields)

    def progress(self, step, total):
        if self.rank == 0:
            self.events.write("progress", step=step, total=total)
