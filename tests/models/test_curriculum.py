"""Lengths of a curriculum, worked out by hand; tests/frameworks compares them with DeepSpeed's."""

import pytest
import torch
from torch.utils.data import default_collate

from labkit import models
from labkit.models.curriculum import fixed_discrete, fixed_linear, fixed_root, length_of, shorten
from labkit.models.text import stdlib_text

# From 8 to 64 tokens in 100 steps: 8 + 56 x step / 100, down to a multiple of 8.
LINEAR = {1: 8, 14: 8, 15: 16, 29: 24, 50: 32, 99: 56, 100: 64, 101: 64, 1000: 64}
# 8 + 56 x root of (step / 100): of 4 steps 19.2, of 25 steps 36, of 36 steps 41.6, of 99 steps 63.7.
SQUARE_ROOT = {1: 8, 4: 16, 25: 32, 36: 40, 99: 56, 100: 64}
# The cube root of 0.008 is 0.2, of 0.125 0.5.
CUBE_ROOT = {8: 16, 125: 32, 1000: 64}
DISCRETE = {1: 16, 5: 16, 6: 32, 10: 32, 11: 64, 99: 64}


def test_linear_lengths():
    assert {step: fixed_linear(step, 8, 64, 100) for step in LINEAR} == LINEAR


def test_lengths_by_a_root():
    assert {step: fixed_root(step, 8, 64, 100) for step in SQUARE_ROOT} == SQUARE_ROOT
    assert {step: fixed_root(step, 8, 64, 1000, degree=3) for step in CUBE_ROOT} == CUBE_ROOT


def test_lengths_from_a_list():
    assert {step: fixed_discrete(step, [16, 32, 64], [5, 10]) for step in DISCRETE} == DISCRETE


def test_ends_that_are_no_multiples():
    assert [fixed_linear(step, 10, 64, 100, multiple=16) for step in (1, 99)] == [16, 48]  # 10 is rounded up
    assert [fixed_linear(step, 8, 60, 10) for step in (10, 11)] == [56, 60]  # 60, then 65.2 and at most 60
    assert fixed_linear(1, 9, 12, 10, multiple=16) == 12  # no multiple fits


def test_deepspeeds_fields():
    both = {"min_difficulty": 8, "max_difficulty": 64}
    inner = {"total_curriculum_step": 100, "difficulty_step": 8}
    linear = both | {"schedule_type": "fixed_linear", "schedule_config": inner}
    root = both | {"schedule_type": "fixed_root", "schedule_config": inner | {"root_degree": 2}}
    discrete = {"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [16, 32, 64], "max_step": [5, 10]}}
    for config, lengths in ((linear, LINEAR), (root, SQUARE_ROOT), (discrete, DISCRETE)):
        assert {step: length_of(step, config) for step in lengths} == lengths
    with pytest.raises(ValueError, match="a fixed_root curriculum needs root_degree"):
        length_of(1, linear | {"schedule_type": "fixed_root"})
    with pytest.raises(ValueError, match="schedule_type 'custom'"):
        length_of(1, linear | {"schedule_type": "custom"})


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: fixed_root(1, 0, 64, 100), "shortest=0 must be at least 1 and at most longest=64"),
        (lambda: fixed_root(1, 65, 64, 100), "shortest=65 must be at least 1 and at most longest=64"),
        (lambda: fixed_root(1, 8, 64, 0), "total_steps=0, multiple=8 and degree=2 must be at least 1"),
        (lambda: fixed_discrete(1, [8, 16], []), r"last_steps=\[\] must be 1 increasing steps"),
        (lambda: fixed_discrete(1, [8, 16, 32], [9, 4]), r"last_steps=\[9, 4\] must be 2 increasing steps"),
    ],
)
def test_settings_that_give_no_lengths(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_a_shortened_batch_is_the_beginning_of_the_whole_one():
    """Attention looks back only: the outputs of a prefix do not depend on what was cut off."""
    torch.manual_seed(0)
    model = models.build("gpt", "tiny").double()
    batch = default_collate([stdlib_text(64)[i] for i in range(3)])
    tokens, targets = shorten(batch, 24)
    assert tokens.shape == targets.shape == (3, 24) and tokens.data_ptr() == batch[0].data_ptr()
    torch.testing.assert_close(model(tokens), model(batch[0])[:, :24], rtol=0, atol=1e-12)
    torch.testing.assert_close(targets, batch[0][:, 1:25])
