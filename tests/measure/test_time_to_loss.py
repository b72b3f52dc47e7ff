"""Time to a loss: what is on the clock, when it ends, and that ranks end together."""

from unittest import mock

import pytest
import torch
from torch import nn

from labkit import comm, comm_log
from labkit.measure.time_to_loss import laps


class Slope(nn.Module):
    """How far is left. To look takes 50 s, and it is further by one on rank 1."""

    def __init__(self, rank):
        super().__init__()
        self.left, self.now = 10.0 + rank, 0.0

    def forward(self, input):
        assert not self.training and not torch.is_grad_enabled()
        self.now += 50.0
        return torch.tensor(self.left)


class Downhill:
    """A trainer whose every step takes a second, lowers the loss by one and sends 40 bytes."""

    def __init__(self, rank):
        self.model = Slope(rank)

    def train_step(self, input, target):
        assert self.model.training and torch.is_grad_enabled()
        self.model.left -= 1
        self.model.now += 1.0
        comm.all_reduce(torch.zeros(10))

    def loss(self, output, target):
        return output


def slow_ends(rank, world_size, target, most_steps):
    trainer = Downhill(rank)
    with mock.patch.object(comm_log, "perf_counter", lambda: trainer.model.now):
        return list(laps(trainer, [(0, 0)] * most_steps, (0, 0), target, lap=2))


def test_the_worst_rank_decides_when_the_loss_is_reached(ranks):
    for rank, rows in enumerate(ranks(2, slow_ends, target=5.0, most_steps=100)):
        assert [row["step"] for row in rows] == [0, 2, 4, 6], f"rank {rank}"
        assert [row["loss"] for row in rows] == [11.0, 9.0, 7.0, 5.0], f"rank {rank}"


def test_it_counts_what_training_sends_and_nothing_else(ranks):
    last = ranks(2, slow_ends, target=5.0, most_steps=100)[0][-1]
    assert (last["messages"], last["sent_bytes"]) == (6, 6 * 40)


def test_evaluation_is_off_the_clock(ranks):
    rows = ranks(2, slow_ends, target=5.0, most_steps=100)[0]
    assert [row["seconds"] for row in rows] == [0.0, 2.0, 4.0, 6.0]


@pytest.mark.parametrize(("most_steps", "last"), [(5, 4), (6, 6), (1, 0)])
def test_it_ends_where_the_batches_do(ranks, most_steps, last):
    assert ranks(2, slow_ends, target=-100.0, most_steps=most_steps)[0][-1]["step"] == last
