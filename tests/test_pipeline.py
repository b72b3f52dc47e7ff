"""A model in stages on several ranks, against one process that holds it all."""


import pytest
import torch
from torch import nn
from torch.nn import functional as F

from labkit.parts.dependencies import check
from labkit.pipeline import (
    Pipeline,
    gpipe,
    interleaved,
    one_f_one_b,
    v_shaped,
    zero_bubble,
)

F64, WIDTH, STEPS = torch.float64, 6, 3
SCHEDULES = {one.__name__: one for one in (gpipe, one_f_one_b, interleaved, zero_bubble, v_shaped)}
A_RANK = {"interleaved": 2, "v_shaped": 2, "gpipe, two a rank": 2}


class Layer(nn.Module):
    """Drops by a mask of its own for every micro-batch, which the rows that are dropped from tell."""

    def __init__(self, number, drop):
        super().__init__()
        self.number, self.drop = number, drop
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.norm(x + self.second(torch.tanh(self.first(x))))


def layers(count, drop=0.0):
    torch.manual_seed(1)
    return [Layer(number, drop).to(F64) for number in range(count)]


def batch(step, size=8):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, size, WIDTH, generator=generator, dtype=F64)


def trained(step_of, parameters, size=8):
    """The losses of some steps of SGD with momentum."""
    optimizer, losses = torch.optim.SGD(parameters, lr=0.1, momentum=0.9), []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(step_of(*batch(step, size)))
        optimizer.step()
    return losses


def in_one_process(model, size=8):
    def step(x, target):
        loss = F.mse_loss(model(x), target)
        loss.backward()
        return loss.item()

    return trained(step, model.parameters(), size)


def beside_one_process(rank, world_size, name, a_rank=1, micro_batches=8):
    stages = a_rank * world_size
    whole = nn.Sequential(*layers(stages))
    theirs = in_one_process(whole, micro_batches)
    own = {s: r for s, r in check_of(name, stages, micro_batches, world_size).items() if r == rank}
    made = layers(stages)
    pipeline = Pipeline(
        {s: made[s] for s in own}, None, SCHEDULES[name], micro_batches, F.mse_loss, names=lambda s, n: f"{s}.{n}"
    )

    def step(x, target):
        loss = pipeline.step(x, target)
        return None if loss is None else loss.item()

    ours = trained(step, pipeline.parameters(), micro_batches)
    apart = [abs(a - b) for a, b in zip(ours, theirs, strict=True) if a is not None]
    found = pipeline.full_state_dict()
    assert found.keys() == whole.state_dict().keys()
    apart += [(found[n] - t).abs().max().item() for n, t in whole.state_dict().items()]
    return max(apart), (stages - 1 in own) == (ours[0] is not None)


def check_of(name, stages, micro_batches, ranks):
    return check(SCHEDULES[name](stages, micro_batches, ranks), ranks, micro_batches)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_it_is_the_training_of_one_process(ranks, world_size, name):
    told = ranks(world_size, beside_one_process, name=name, a_rank=A_RANK.get(name, 1), micro_batches=2 * world_size)
    for apart, where in told:
        assert apart < 1e-12 and where
