"""A training in fp64 whose loss says which samples each step had: labkit.train --model marked_samples:task.

loss = mean over the batch of (error^2 + MARK x 2^sample)

The second part is constant for the gradients, and an exact integer in the sum over the batch: its binary digits are
the samples. The first part is an ordinary training. Only double precision has room for both.
"""

import os
import time

import torch
from torch import nn
from torch.utils.data import Dataset

from labkit.models import Task

SAMPLES, BATCH = 12, 6  # divisible by 1, 2 and 3 ranks
MARK = 256.0  # more than the errors of a batch
DELAY = "SAMPLE_SECONDS"  # environment variable: a sample takes so long, as a test changes the nodes meanwhile


class Marked(Dataset):
    """input: 4 random numbers; target: another, and the sample's mark."""

    def __init__(self):
        draw = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(SAMPLES, 4, generator=draw, dtype=torch.float64)
        self.targets = torch.randn(SAMPLES, 1, generator=draw, dtype=torch.float64)

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        time.sleep(float(os.environ.get(DELAY, "0")))
        mark = torch.tensor([MARK * 2.0**index], dtype=torch.float64)
        return self.inputs[index], torch.cat([self.targets[index], mark])


def loss(output, target):
    error = (output - target[:, :1]).square()
    return (error + target[:, 1:]).mean()


def model():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def task():
    return Task(model, Marked(), Marked(), loss, unit=nn.Linear)


def samples_and_errors(rows):
    """{step: (its samples, a set; the errors of its batch)} of a log; the last of repeated steps counts."""
    found = {}
    for row in rows:
        marks, errors = divmod(row["loss"] * BATCH, MARK)
        found[row["step"]] = {bit for bit in range(SAMPLES) if int(marks) >> bit & 1}, errors
    return found


def check_each_sample_once_an_epoch(rows):
    """Raise AssertionError unless the steps of each epoch together had each sample once."""
    taken = [samples for samples, _ in samples_and_errors(rows).values()]
    steps = SAMPLES // BATCH
    for begin in range(0, len(taken), steps):
        epoch = taken[begin : begin + steps]
        assert sum(map(len, epoch)) == SAMPLES and set().union(*epoch) == set(range(SAMPLES)), (begin, epoch)


def check_equal(rows, others):
    """Raise AssertionError unless all steps of two logs had the same samples and errors, up to the order of sums."""
    ours, theirs = samples_and_errors(rows), samples_and_errors(others)
    assert ours.keys() == theirs.keys()
    for step, (samples, errors) in theirs.items():
        assert ours[step][0] == samples, (step, ours[step], samples)
        assert abs(ours[step][1] - errors) < 1e-7, (step, ours[step], errors)
