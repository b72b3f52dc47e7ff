"""DeepSpeed's CurriculumScheduler and ours: the same length at each of more than 10,000 steps."""

import itertools
import json
import os
import subprocess
import sys

import pytest
from installed_frameworks import FOLDER, MISSING

from labkit.models.curriculum import length_of

pytestmark = [pytest.mark.slow, pytest.mark.skipif(FOLDER is None, reason=MISSING)]
# In a process of its own: importing DeepSpeed takes seconds, and changes torch.
PROGRAM = """
import json, sys
from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler
for config, steps in json.load(sys.stdin):
    one, other = CurriculumScheduler(config), CurriculumScheduler(config)
    lengths = [one.get_difficulty(step) for step in range(1, steps + 1)]
    updated = [other.update_difficulty(step) for step in range(1, steps + 1)]  # as in training: it keeps the last
    print("lengths", json.dumps([lengths, updated]))
"""


def configs():
    """[(DeepSpeed's fields, steps)]."""
    grid = itertools.product((10, 37, 100), (7, 8, 16), (64, 100, 128), (1, 8, 16), (None, 1, 2, 3))
    for total, shortest, longest, multiple, degree in grid:
        inner = {"total_curriculum_step": total, "difficulty_step": multiple}
        kind = "fixed_linear" if degree is None else "fixed_root"
        inner |= {} if degree is None else {"root_degree": degree}
        ends = {"min_difficulty": shortest, "max_difficulty": longest}
        yield ends | {"schedule_type": kind, "schedule_config": inner}, 2 * total
    for lengths, last in (([8, 64], [5]), ([8, 16, 64], [1, 30]), ([8, 8, 24, 64], [3, 4, 40])):
        ends = {"min_difficulty": lengths[0], "max_difficulty": lengths[-1]}
        inner = {"difficulty": lengths, "max_step": last}
        yield ends | {"schedule_type": "fixed_discrete", "schedule_config": inner}, 60


def deepspeeds_lengths(chosen):
    """The lengths of each (fields, steps), asked for in any order and updated step by step."""
    environment = os.environ | {"PYTHONPATH": str(FOLDER), "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(chosen),
        capture_output=True,
        text=True,
        env=environment,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    found = [line.removeprefix("lengths ") for line in done.stdout.splitlines() if line.startswith("lengths ")]
    return [json.loads(text) for text in found]


def test_each_length_is_deepspeeds():
    chosen = list(configs())
    compared = 0
    for (config, steps), theirs in zip(chosen, deepspeeds_lengths(chosen), strict=True):
        ours = [length_of(step, config) for step in range(1, steps + 1)]
        assert [ours, ours] == theirs, config
        compared += steps
    assert compared > 10_000
