"""Compressors under a loss scale: an inf on one rank is everyone's, and what waits in residuals follows the scale."""

from functools import partial

import pytest
import torch
from tensors import flat, mlp, noise
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labkit.amp import GradScaler
from labkit.compression import COMPRESSORS, Cast
from labkit.ddp import DDP
from labkit.trainer import Trainer

STEPS, BAD = 9, 4
MAKE = COMPRESSORS | {"bf16_feedback": partial(Cast, torch.bfloat16, feedback=True)}
SCALING = {"init_scale": 2.0**10, "growth_interval": 3}
UNSCALED = {"init_scale": 1.0, "growth_interval": STEPS + 1, "min_scale": 1.0}


def train(rank, name, wrap, scaling, bad=True):
    """Weights after the last step; of the step in which rank 1 has an inf: weights and residuals before and after."""
    module, compressor = mlp(12, 30, 30, 4), MAKE[name]()
    model = wrap(module)
    model.register_comm_hook(None, compressor.hook)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler = GradScaler("cpu", **scaling)
    trainer = Trainer(model, optimizer, nn.functional.mse_loss, scaler=scaler, compressor=compressor)
    scales, around = [], []
    for step in range(STEPS):
        x = noise(8, 12, seed=10 * step + rank)
        if bad and (rank, step) == (1, BAD):
            x[3] = torch.inf
        if step in (BAD, BAD + 1):
            around.append((flat(module), compressor.state_dict()["residuals"]))
        trainer.train_step(x, torch.ones(8, 4))
        scales.append(scaler.get_scale())
    return flat(module), scales, around


def scaled_and_not(rank, world_size, name, wrap):
    return train(rank, name, wrap, SCALING), train(rank, name, wrap, UNSCALED)


@pytest.mark.filterwarnings("ignore:.*inf or NaN")
@pytest.mark.parametrize("wrap", [DDP, DistributedDataParallel])
@pytest.mark.parametrize("name", [name for name in MAKE if name != "fp16"])
def test_an_inf_on_one_rank_is_a_step_that_no_rank_takes(ranks, name, wrap):
    told = ranks(2, scaled_and_not, name=name, wrap=wrap)
    for rank, ((weights, scales, around), (unscaled, ones, _)) in enumerate(told):
        assert scales == [2.0**10] * 2 + [2.0**11] * 2 + [2.0**10] * 3 + [2.0**11] * 2, f"rank {rank}"
        assert ones == [1.0] * STEPS, f"rank {rank}"
        (before, owed), (after, owes) = around
        assert torch.equal(before, after), f"rank {rank}"
        if rank == 1:  # the scale has been halved
            assert all(torch.equal(owes[p], owed[p] / 2) for p in owed), f"rank {rank}"
        # Powers of two change no digit: with residuals that follow the scale it is the training without one.
        assert torch.equal(weights, unscaled), f"rank {rank}"
        assert bool(weights.isfinite().all()), f"rank {rank}"
    assert torch.equal(told[0][0][0], told[1][0][0])


def too_large_for_fp16(rank, world_size):
    """A scale at which every gradient is finite in float32, and none of them in a message of 16 bits."""
    weights, scales, _ = train(rank, "fp16", DDP, {"init_scale": 2.0**24}, bad=False)
    return scales, bool(weights.isfinite().all()), torch.equal(weights, flat(mlp(12, 30, 30, 4)))


@pytest.mark.filterwarnings("ignore:.*inf or NaN")
def test_a_scale_too_large_for_the_message_is_lowered(ranks):
    for rank, (scales, finite, untrained) in enumerate(ranks(2, too_large_for_fp16)):
        assert 2.0**14 < scales[-1] == scales[-2] < 2.0**22, f"rank {rank}"
        assert finite and not untrained, f"rank {rank}"
