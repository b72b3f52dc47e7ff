"""Inject faults: failures of a large machine, at a chosen step and rank.

    plan = [Fault("kill", rank=1, step=5), Fault("slow", rank=0, step=3, seconds=0.05)]
    for step in ...:
        inject(plan, context, step)         rank 1, step 5: SIGKILL; rank 0, from step 3: 50 ms each

    raise, kill, stop    an exception; SIGKILL; SIGSTOP
    stall, slow          sleep once; sleep in every step from this one on
    nan                  sets one element of inject's tensors, such as gradients or an input
    flip, cut short      flips one bit of one of inject's files; truncates one to half its length
    disk full            inject's store accepts `free_bytes` more of a file, and raises ENOSPC
    link down            calls inject's cut(), such as labkit.cluster.network_namespaces.cut

A fault occurs in one attempt only (launch(..., restarts=k)), because restarted ranks repeat the
step. The seed chooses bit, element and file, so a fault is reproducible.
Avizienis et al., Basic Concepts and Taxonomy of Dependable and Secure Computing, TDSC 2004.
"""

import errno
import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

KINDS = (
    "raise", "kill", "stop", "stall", "slow", "nan", "flip", "cut short", "disk full", "link down",
)  # fmt: skip


class Injected(RuntimeError):
    """The exception of a Fault("raise")."""


@dataclass(frozen=True)
class Fault:
    """A fault at one rank and step. kind: one of KINDS, otherwise raises ValueError.

    seconds: for stall and slow. free_bytes: for disk full. seed: chooses bit, element and
    file. attempt: of launch(..., restarts=k), 0 for the first; None: in every attempt.
    """

    kind: str
    rank: int
    step: int
    seconds: float = 3600.0
    free_bytes: int = 0
    seed: int = 0
    attempt: int | None = 0

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"unknown fault {self.kind!r}: choose from {', '.join(KINDS)}")

    def is_due(self, context, step):
        """Return whether the fault occurs on the context's rank and attempt in this step."""
        late = step >= self.step if self.kind == "slow" else step == self.step
        return late and context.rank == self.rank and self.attempt in (None, context.attempt)


def draw(kinds, ranks, steps, seed, **options):
    """Return one Fault of each kind, at a random rank and a random step of 1, ..., steps.

    options: further fields of each Fault.
    """
    chance = random.Random(seed)
    return [
        Fault(kind, chance.randrange(ranks), 1 + chance.randrange(steps), seed=seed, **options)
        for kind in kinds
    ]


def inject(plan, context, step, tensors=(), files=(), store=None, cut=None):
    """Trigger the faults of the plan that are due on this rank in this step.

    plan: list of Fault. context: has rank and attempt. tensors: for nan. files: paths, for flip and
    cut short. store: one of labkit.checkpoint.storage, for disk full. cut: function without
    arguments, for link down. Raises Injected for the kind "raise".
    """
    for fault in plan:
        if not fault.is_due(context, step):
            continue
        chance = random.Random(fault.seed)
        if fault.kind == "raise":
            raise Injected(f"injected fault in step {step}")
        elif fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.kind in ("stall", "slow"):
            time.sleep(fault.seconds)
        elif fault.kind == "nan":
            tensor = chance.choice(list(tensors))
            tensor.detach().view(-1)[chance.randrange(tensor.numel())] = float("nan")
        elif fault.kind == "flip":
            flip(chance.choice(sorted(files)), chance)
        elif fault.kind == "cut short":
            path = chance.choice(sorted(files))
            os.truncate(path, Path(path).stat().st_size // 2)
        elif fault.kind == "disk full":
            fill_up(store, fault.free_bytes)
        else:
            cut()


def flip(path, chance):
    """Flip one random bit of a file in place. chance: a random.Random."""
    with open(path, "r+b") as file:
        at = chance.randrange(Path(path).stat().st_size)
        file.seek(at)
        byte = file.read(1)[0] ^ 1 << chance.randrange(8)
        file.seek(at)
        file.write(bytes([byte]))


def fill_up(store, free_bytes):
    """Let the store (labkit.checkpoint.storage) accept only `free_bytes` of a file from now on.

    A larger file raises OSError(ENOSPC).
    """
    write = store.write
    store.write = lambda name, fill, **how: write(
        name, lambda file: fill(Full(file, free_bytes)), **how
    )


class Full:
    """A file on a disk with `free_bytes` left."""

    def __init__(self, file, free_bytes):
        self.file = file
        self.free_bytes = free_bytes

    def write(self, data):
        self.free_bytes -= memoryview(data).nbytes
        if self.free_bytes < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.file.write(data)

    def __getattr__(self, name):
        return getattr(self.file, name)
