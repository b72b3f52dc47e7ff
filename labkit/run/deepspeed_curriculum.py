"""DeepSpeed's section `curriculum_learning` of older releases: sequences grow, as in this lab.

DeepSpeed 0.19.8 has removed it, so that it is read and not written. The section that 0.19.8 names
instead, data_efficiency.data_sampling.curriculum_learning, chooses samples by a metric, which this
lab does not have (deepspeed/runtime/data_pipeline/data_sampling/data_sampler.py).
"""

import json

from labkit.run.choices import CHOICES
from labkit.run.experiment import Experiment
from labkit.run.framework_values import Parts, chosen, whole

SECTION = "curriculum_learning."
INNER = f"{SECTION}schedule_config."
GROWING = {name: name for name in CHOICES["curriculum"] if name != "none"}
NUMBERS = {f"{SECTION}min_difficulty": "curriculum_from"}
NUMBERS |= {f"{INNER}total_curriculum_step": "curriculum_steps"}


def curriculum_of(values):
    """Return {field: value} of the section; {} if it is off."""
    if values[f"{SECTION}enabled"] is not True:
        return {}
    name = f"{SECTION}schedule_type"
    kind = chosen(name, values[name], GROWING)
    parts = Parts({"model": "gpt", "curriculum": kind})
    for name, (here, why) in fixed(kind).items():
        parts.add(check_fixed, name, values[name], here, why)
    for name, ours in NUMBERS.items():
        parts.add(whole_of, ours, name, values)
    return parts.result()


def fixed(kind):
    """Return {field: (the lab's value, why)} of a schedule."""
    tokens = longest()
    found = {
        f"{SECTION}curriculum_type": ("seqlen", "the lab's curriculum is of sequence lengths"),
        f"{SECTION}max_difficulty": (tokens, f"the lab's sequences have {tokens} tokens"),
        f"{INNER}difficulty_step": (8, "the lab's lengths are multiples of 8"),
    }
    if kind == "fixed_root":
        why = 'the lab\'s root is the square root; for degree 1, schedule_type "fixed_linear"'
        found[f"{INNER}root_degree"] = (2, why)
    return found


def check_fixed(name, value, here, why):
    """Raise ValueError for another value than the lab's. Returns no field."""
    if value == here:
        return {}
    here = json.dumps(here)
    what = f"{name} must be there" if value is None else f"{name}={json.dumps(value)}"
    raise ValueError(f"{what}: here it is {here}, as {why}; write {here}")


def whole_of(ours, name, values):
    return {ours: whole(name, values[name])}


def longest():
    """Return the tokens of the lab's sequences."""
    from labkit.run.experiment_mesh import gpt_sizes  # imports torch

    return gpt_sizes(Experiment(model="gpt"))["context"]
