"""DeepSpeed's ZeRO, run from the JSON that the lab writes: the same weights as the lab's, to the last bit.

DeepSpeed is not among the tests' packages. LABKIT_FRAMEWORKS names a folder that has it:
    pip install --target FOLDER --no-deps deepspeed einops hjson msgpack ninja py-cpuinfo
"""

import json
import os
import sys

import pytest
import torch
from torch.nn import functional as F

from labkit.run import frameworks, launch
from labkit.run.experiment import Experiment
from labkit.run.experiment_runner import Participant

FOLDER = os.environ.get("LABKIT_FRAMEWORKS")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(FOLDER is None, reason="LABKIT_FRAMEWORKS names no folder with DeepSpeed"),
]
STEPS = 13
STRATEGIES = ("ddp_bucketed", "zero1", "zero2", "fsdp")


def batches(participant):
    """A step's micro-batches of this rank, as the lab takes them."""
    for _ in range(STEPS):
        inputs, targets = next(participant.batches)
        parts = participant.trainer.accumulation
        yield list(zip(inputs.chunk(parts), targets.chunk(parts), strict=True))


def deepspeeds(config, model, steps):
    """The parameters after DeepSpeed's steps."""
    import deepspeed

    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for parts in steps:
        for inputs, targets in parts:
            engine.backward(F.cross_entropy(engine(inputs), targets))
            engine.step()
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters, enabled=config["zero_optimization"]["stage"] == 3):
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def both(context, folder, fields):
    os.environ["DS_ACCELERATOR"] = "cpu"
    sys.path.insert(0, folder)
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    experiment = Experiment(**fields)
    config = frameworks.write(experiment, "deepspeed", context.world_size).config
    single = Participant(context, experiment.replace(strategy="ddp_naive"))
    model = single.model.module
    steps = list(batches(Participant(context, experiment)))
    theirs = deepspeeds(config, model, steps)
    ours = Participant(context, experiment)
    for parts in steps:
        ours.trainer.train_step(*(torch.cat(column) for column in zip(*parts, strict=True)))
    whole = getattr(ours.model, "full_state_dict", ours.model.state_dict)()
    whole = {name.removeprefix("module."): value for name, value in whole.items()}
    gaps = {name: (value - whole[name]).abs().max().item() for name, value in theirs.items()}
    context.record(gaps=json.dumps(gaps))


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_zero_trains_the_same_weights_to_the_bit(strategy, clip):
    fields = {"strategy": strategy, "optimizer": "adamw", "lr": 1e-2, "weight_decay": 0.01, "batch_size": 32}
    fields |= {"accumulation": 1 + (clip == 0), "clip": clip}
    records = launch("test_deepspeed:both", folder=FOLDER, fields=fields, quiet=True).records
    for gaps in map(json.loads, records["gaps"]):
        assert len(gaps) == 6 and set(gaps.values()) == {0.0}
