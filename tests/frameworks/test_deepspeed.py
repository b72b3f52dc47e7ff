"""DeepSpeed's ZeRO, run from the JSON that the lab writes: the same weights as the lab's, to the last bit."""

import json
import os
import subprocess
import sys

import pytest
import torch
from installed_frameworks import FOLDER, MISSING
from torch.nn import functional as F

from labkit.run import frameworks, launch
from labkit.run.experiment import Experiment
from labkit.run.experiment_runner import Participant

pytestmark = [pytest.mark.slow, pytest.mark.skipif(FOLDER is None, reason=MISSING)]
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


def gaps_of(**changes):
    """[the largest gap of the weights] of both ranks, after the steps."""
    fields = {"optimizer": "adamw", "lr": 1e-2, "weight_decay": 0.01, "batch_size": 32}
    records = launch("test_deepspeed:both", folder=FOLDER, fields=fields | changes, quiet=True).records
    gaps = [json.loads(text) for text in records["gaps"]]
    assert len(gaps) == 2 and all(len(of_rank) == 6 for of_rank in gaps)
    return [max(of_rank.values()) for of_rank in gaps]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_zero_trains_the_same_weights_to_the_bit(strategy):
    assert gaps_of(strategy=strategy) == [0.0, 0.0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_accumulation_and_clipping_add_up_in_another_order(strategy):
    """DeepSpeed's stages 2 and 3 average each micro-batch; the lab adds micro-batches first."""
    gaps = gaps_of(strategy=strategy, accumulation=2)
    assert max(gaps) == 0.0 if strategy in ("ddp_bucketed", "zero1") else 0.0 < max(gaps) < 1e-5
    assert max(gaps_of(strategy=strategy, clip=0.5)) < 1e-5


def test_every_field_of_deepspeeds_zero_config_has_a_row_with_its_default():
    """A new release that adds a field, or changes a default, fails here."""
    ask = (
        "import json; from deepspeed.runtime.zero.config import DeepSpeedZeroConfig as Zero; "
        "from deepspeed.runtime import constants as c; "
        "fields = {f.alias or name: f.default for name, f in Zero.model_fields.items()}; "
        "plain = (bool, int, float, str); "
        "kept = {name: v for name, v in fields.items() if v is None or isinstance(v, plain)}; "
        "print(json.dumps([kept, c.GRADIENT_CLIPPING_DEFAULT, c.GRADIENT_ALLREDUCE_OP_DEFAULT]))"
    )
    environment = os.environ | {"PYTHONPATH": FOLDER, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, env=environment, timeout=100)
    assert done.returncode == 0, done.stderr
    theirs, *others = json.loads(done.stdout.splitlines()[-1])
    rows = frameworks.fields("deepspeed")
    assert others == [rows[name].default for name in ("gradient_clipping", "gradient_allreduce_op")]
    ours = {name.partition(".")[2]: field for name, field in rows.items() if name.startswith("zero_optimization.")}
    missing = [name for name in theirs if not any(own == name or own.startswith(f"{name}.") for own in ours)]
    assert not missing
    other = {name: value for name, value in theirs.items() if name in ours and ours[name].default != value}
    assert not other
