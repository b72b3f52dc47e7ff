"""The tokens that are left in a run: those of each step, also of a billion steps."""

from types import SimpleNamespace

import pytest
import torch

from labkit.run.experiment import Experiment
from labkit.run.training import Pace


def pace_of(start=0, **fields):
    experiment = Experiment(model="gpt", batch_size=8, **fields)
    dataset = [(None, torch.zeros(64, dtype=torch.int64))]
    return Pace(SimpleNamespace(experiment=experiment, batches=SimpleNamespace(dataset=dataset)), start)


@pytest.mark.parametrize("kind", ["fixed_linear", "fixed_root"])
@pytest.mark.parametrize(("shortest", "grows"), [(1, 7), (8, 10), (9, 200), (60, 1), (64, 5)])
def test_the_tokens_left_are_those_of_each_step(kind, shortest, grows):
    growing = {"curriculum": kind, "curriculum_from": shortest, "curriculum_steps": grows}
    for steps in (1, 10, 99):
        for start in {0, 1, steps // 2, steps}:
            pace = pace_of(start, steps=steps, **growing)
            assert pace.left == sum(pace.count(step) for step in range(start + 1, steps + 1))


def test_a_billion_steps_are_counted_by_their_lengths():
    steps = 10**9
    assert pace_of(steps=steps).left == 8 * 64 * steps
    growing = {"curriculum": "fixed_linear", "curriculum_from": 8, "curriculum_steps": steps}
    lengths = range(8, 64, 8)  # 1/7 of the steps each, and the last step has 64 tokens
    assert pace_of(steps=steps, **growing).left == pytest.approx(8 * steps * sum(lengths) / 7, rel=1e-8)
