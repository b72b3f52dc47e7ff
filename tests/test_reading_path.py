"""A reader's path is short: the files and functions of labkit that one training step enters, on two ranks.

Outside the messages (labkit/comm.py and what it stands on), because every algorithm sends through them.
"""

import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import labkit
from labkit.ddp import DDP
from labkit.fsdp import FSDP
from labkit.trainer import Trainer
from labkit.zero import ZeRO1

ROOT = Path(labkit.__file__).parent
MESSAGES = {"comm.py", "comm_log.py", "gloo_workarounds.py"}


@contextmanager
def entered():
    """Yield a set that gets (file below labkit, function) of each Python function that is called."""
    found = set()

    def note(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if event == "call" and ROOT in path.parents and path.name not in MESSAGES:
            found.add((str(path.relative_to(ROOT)), frame.f_code.co_qualname))

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))


def paths(rank, world_size):
    """{name: (file, function) pairs entered by its second step}; the first step has set everything up."""
    found = {}
    input = torch.randn(4, 8)

    ddp = DDP(model(), bucket_cap_mb=0.0001)
    for _ in range(2):
        loss = ddp(input).square().mean()
        with entered() as found["DDP backward"]:
            loss.backward()

    module = model()
    optimizer = ZeRO1(module.parameters(), torch.optim.AdamW, lr=0.01)
    for _ in range(2):
        with entered() as found["ZeRO-1 step"]:
            module(input).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    fsdp = FSDP(model(), unit=(nn.Linear,))
    optimizer = torch.optim.AdamW(fsdp.parameters(), lr=0.01)
    for _ in range(2):
        with entered() as found["FSDP step"]:
            fsdp(input).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return found


def show(found):
    files = sorted({file for file, _ in found})
    return "\n".join(f"{file}: {', '.join(sorted(f for name, f in found if name == file))}" for file in files)
