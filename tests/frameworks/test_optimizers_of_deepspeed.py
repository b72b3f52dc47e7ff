"""DeepSpeed's optimizers: every parameter of their classes has a row, and torch's AdamW its own weight decay."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from installed_frameworks import FOLDER, MISSING

from labkit.run import frameworks

CLASSES = {
    "FusedAdam": "ops/adam/fused_adam.py",
    "DeepSpeedCPUAdam": "ops/adam/cpu_adam.py",
    "FusedLamb": "ops/lamb/fused_lamb.py",
    "FusedLion": "ops/lion/fused_lion.py",
    "DeepSpeedCPULion": "ops/lion/cpu_lion.py",
    "DeepSpeedCPUAdagrad": "ops/adagrad/cpu_adagrad.py",
}
OF_ENGINE = ("params", "model_params", "adamw_mode")  # a program has no field for them; adam_w_mode is one
# OneBitAdam, OneBitLamb and ZeroOneAdam, which DeepSpeed 0.19.8 has removed (releases up to 0.18, runtime/fp16/onebit).
ONE_BIT = ("freeze_step", "cuda_aware", "comm_backend_name", "eps_inside_sqrt", "max_coeff", "min_coeff", "coeff_beta")
ONE_BIT += ("factor_max", "factor_min", "factor_threshold", "var_freeze_step", "var_update_scaler")
ONE_BIT += ("local_step_scaler", "local_step_clipper")
PREFIX = "optimizer.params."
# DeepSpeedEngine's own choice of a class, with an engine that has no parts but the section `optimizer`.
PROGRAM = """
import json, sys, torch
from types import MethodType, SimpleNamespace
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
from deepspeed.runtime.engine import DeepSpeedEngine as Engine
for kind, params in json.load(sys.stdin):
    name = kind.lower() if kind.lower() in DEEPSPEED_OPTIMIZERS else kind
    engine = SimpleNamespace(optimizer_name=lambda: name, optimizer_params=lambda: params)
    engine.get_optimizer_configuration = MethodType(Engine.get_optimizer_configuration, engine)
    made = Engine._configure_basic_optimizer(engine, [torch.nn.Parameter(torch.ones(2))])
    print("decay", made.param_groups[0]["weight_decay"])
"""


def read(kind, params):
    config = {"train_batch_size": 64, "optimizer": {"type": kind, "params": params}}
    return frameworks.read(config, "deepspeed", 2)


def parameters(file, name):
    """The names of the arguments of a class, in a file of DeepSpeed."""
    tree = ast.parse(Path(FOLDER, "deepspeed", file).read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    (made,) = (node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    return [argument.arg for argument in made.args.args[1:]]


@pytest.mark.skipif(FOLDER is None, reason=MISSING)
@pytest.mark.parametrize("name", CLASSES)
def test_every_parameter_of_deepspeeds_optimizers_has_a_row(name):
    found = parameters(CLASSES[name], name)
    assert len(found) > 4
    rows = frameworks.fields("deepspeed")
    assert [one for one in found if one not in OF_ENGINE and f"{PREFIX}{one}" not in rows] == []


@pytest.mark.parametrize("name", ONE_BIT)
def test_parameters_of_one_bit_optimizers_are_named_with_a_reason(name):
    """cuda_aware and comm_backend_name change how bytes are sent; the others are refused."""
    row = frameworks.fields("deepspeed")[f"{PREFIX}{name}"]
    if row.kind == "speed":
        assert name in ("cuda_aware", "comm_backend_name")
        return
    with pytest.raises(ValueError) as said:
        read("OneBitLamb", {"lr": 1e-3, name: 7})
    params, kind = said.value.reasons
    assert params.startswith(f"{PREFIX}{name}=7: ") and row.note in params and "no field" not in params
    assert kind.startswith("optimizer.type='OneBitLamb': this lab has Adam, AdamW, SGD")


@pytest.mark.slow
@pytest.mark.skipif(FOLDER is None, reason=MISSING)
def test_the_decay_that_is_not_written_is_the_one_that_deepspeed_uses():
    """torch_adam takes torch.optim's class; its AdamW has a decay of 0.01. The lab refuses Adam with L2 decay."""
    torchs = {"torch_adam": True}
    cases = [("AdamW", torchs), ("Adam", torchs), ("AdamW", torchs | {"adam_w_mode": False})]
    cases += [("AdamW", torchs | {"weight_decay": 0.3}), ("SGD", {}), ("SGD", {"momentum": 0.9})]
    environment = os.environ | {"PYTHONPATH": FOLDER, "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-c", PROGRAM]
    given = {"capture_output": True, "text": True, "env": environment, "timeout": 200}
    done = subprocess.run(command, input=json.dumps(cases), **given)
    assert done.returncode == 0, done.stderr
    theirs = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("decay ")]
    assert theirs == [0.01, 0.01, 0.01, 0.3, 0.0, 0.0]
    for (kind, params), decay in zip(cases, theirs, strict=True):
        found = read(kind, params)
        (row,) = (line[1] for line in found.lines if line[0] == f"{PREFIX}weight_decay")
        assert float(row) == found.experiment.weight_decay == decay, (kind, params)
