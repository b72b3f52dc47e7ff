"""A reader's path is short: the files and functions of labkit that one training step enters, on two ranks.

The messages (labkit/comm.py and the files around it) do not count, because every algorithm sends through them; nor do
one-line calls of torch (labkit/torch_private.py).
"""

import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from pool import Pool
from torch import nn

import labkit
from labkit.ddp import DDP
from labkit.fsdp import FSDP
from labkit.trainer import Trainer
from labkit.zero import ZeRO1

ROOT = Path(labkit.__file__).parent
MESSAGES = {"comm.py", "comm_log.py", "gloo_workarounds.py", "replicas.py", "torch_private.py"}


@contextmanager
def entered():
    """Yield a set that gets (file below labkit, function) of each Python function that is called."""
    found = set()

    def note(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        inner = frame.f_code.co_name.startswith("<")  # a comprehension or a lambda is its function's
        if event == "call" and not inner and ROOT in path.parents and path.name not in MESSAGES:
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
    trainer = Trainer(ddp, torch.optim.SGD(ddp.parameters(), lr=0.01), nn.functional.mse_loss)
    for _ in range(2):
        with entered() as found["Trainer with DDP"]:
            trainer.train_step(input, torch.zeros(4, 1))

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

    return {name: sorted(pairs) for name, pairs in found.items()}


# {step: (most files, most functions)}
LIMITS = {
    "DDP backward": (3, 15),
    "ZeRO-1 step": (6, None),
    "FSDP step": (6, None),
    "Trainer with DDP": (6, None),
}


def listed(pairs):
    """A line for each file, with the functions that were entered."""
    files = sorted({file for file, _ in pairs})
    return "\n".join(f"{file}: {', '.join(name for path, name in pairs if path == file)}" for file in files)


def too_long(pairs, most_files, most_functions):
    """Why a path is too long, or None."""
    files = {file for file, _ in pairs}
    if len(files) > most_files:
        return f"{len(files)} files, {most_files} at most:\n{listed(pairs)}"
    if most_functions and len(pairs) > most_functions:
        return f"{len(pairs)} functions, {most_functions} at most:\n{listed(pairs)}"
    return None


@pytest.fixture(scope="module")
def measured():
    """{step: pairs} of rank 0. On fresh ranks: a hook that another test has registered would count."""
    pool = Pool(2, [path for path in sys.path if path])
    try:
        return pool.run(paths)[0]
    finally:
        pool.close()


@pytest.mark.slow
@pytest.mark.parametrize("step", LIMITS)
def test_a_readers_path_is_short(measured, step):
    assert measured[step], "nothing was entered: the profiler saw no call"
    problem = too_long(measured[step], *LIMITS[step])
    assert problem is None, problem


def test_a_path_that_is_too_long_is_found():
    pairs = [("ddp/ddp.py", "DDP.forward"), ("ddp/bucket.py", "Bucket.put"), ("ddp/bucket.py", "Bucket.skip")]
    assert too_long(pairs, 2, 3) is None
    assert too_long(pairs, 1, None).startswith("2 files, 1 at most:\nddp/bucket.py: Bucket.put, Bucket.skip\n")
    assert too_long(pairs, 2, 2).startswith("3 functions, 2 at most")
