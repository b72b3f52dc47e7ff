"""Configurations of other frameworks: there and back, the defaults that are not written, and what is refused."""

import json
import random

import pytest
import yaml
from config import as_yaml

from labkit.learning_rate import schedule_factor
from labkit.run import framework_files, frameworks
from labkit.run.choices import CHOICES
from labkit.run.experiment import Experiment
from labkit.run.options import fitting
from labkit.run.options import read as command_line

USUAL = {"train_batch_size": 64}
OFFLOAD = {"device": "cpu"}
NVME = {"device": "nvme", "nvme_path": "/nvme"}
RATES = ("lr", "momentum", "weight_decay", "clip", "warmup_steps", "schedule")
PROGRAM = {  # what a framework's file does not have
    "deepspeed": ("model", "size", "depth", "width", "data", "seed", "steps", "recompute", "attention"),
    "torchtitan": ("size", "depth", "width", "data", "attention", "bucket_cap_mb"),
    "megatron": ("data", "attention"),
}
PROGRAM["accelerate"] = (*PROGRAM["deepspeed"], *RATES, "batch_size", "accumulation", "optimizer", "bucket_cap_mb")
PROGRAM["accelerate"] += ("lr_rule", "reference_batch", "curriculum", "curriculum_from", "curriculum_steps")


def warm_up(**params):
    return {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9, "warmup_type": "linear"} | params}}


def cosine(**params):
    known = {"warmup_num_steps": 9, "warmup_type": "linear", "cos_min_ratio": 0, "warmup_min_ratio": 0}
    return {"scheduler": {"type": "WarmupCosineLR", "params": known | params}}


def read(config, ranks=2):
    return frameworks.read(config, "deepspeed", ranks).experiment


def some(seed):
    """An experiment of random fields that is valid on 4 ranks."""
    pick = random.Random(seed)
    usual = ("ddp_bucketed", "ddp_naive", "zero1", "fsdp", *CHOICES["strategy"])
    fields = {"batch_size": 16 * pick.randint(1, 9), "accumulation": pick.choice((1, 2, 4))}
    fields |= {name: pick.choice(CHOICES[name]) for name in ("optimizer", "precision", "schedule", "size")}
    fields |= {"strategy": pick.choice(usual), "recompute": pick.choice(("none", "none", *CHOICES["recompute"]))}
    fields |= {"lr": pick.uniform(1e-4, 1), "weight_decay": pick.choice((0.0, 0.1)), "clip": pick.choice((0.0, 0.5))}
    fields |= {"steps": pick.randint(20, 90), "warmup_steps": pick.choice((0, 10)), "seed": pick.randint(1, 9)}
    fields |= {"bucket_cap_mb": pick.choice((1.0, 25.0)), "momentum": pick.choice((0.0, 0.9))}
    rare = {"lr_rule": "sqrt", "reference_batch": 32, "every": 4, "comm_hook": "fp16", "experts": 4, "tensor": 2}
    rare |= {"pipeline": 2, "context": 2, "sequence_parallel": "on", "attention": "flash", "expert": 2}
    rare |= {"depth": 8, "width": 192}
    if pick.random() < 0.08:
        fields |= {"curriculum": "fixed_root", "curriculum_from": 8, "curriculum_steps": 10}
    for name, value in rare.items():
        if pick.random() < 0.08:
            fields[name] = value
    try:
        if fields["strategy"] == "fsdp_nvme":
            fields["nvme_path"] = pick.choice(("", "/nvme"))
        found = Experiment(model="gpt", **fields)
        found.check_ranks(4)
        return found
    except ValueError:
        return some(seed + 10_000)


def kept_by_program(experiment, framework):
    """The fields that the framework's file does not have."""
    names = set(PROGRAM[framework])
    if framework == "accelerate" and experiment.strategy.startswith("zero"):
        names -= {"accumulation", "clip"}
    if framework == "accelerate" and experiment.strategy.startswith("fsdp"):
        names -= {"recompute"}
    names |= {"momentum"} if experiment.optimizer == "adamw" else set()  # which has none
    return Experiment(model="gpt", **{name: getattr(experiment, name) for name in names - {"model"}})


@pytest.mark.parametrize("framework", PROGRAM)
def test_an_experiment_comes_back_or_is_refused_by_its_field(framework):
    came_back = refused = 0
    for seed in range(500):
        experiment = some(seed)
        try:
            config = frameworks.write(experiment, framework, 4).config
        except ValueError as error:
            refused += 1
            assert frameworks.FRAMEWORKS[framework].NAME in str(error) and str(error).startswith("Experiment(")
            continue
        base = kept_by_program(experiment, framework)
        found, parsed = framework_files.parse(framework_files.as_text(config, framework))
        assert found == framework
        for again in (config, parsed):
            assert frameworks.read(again, framework, 4, base=base).experiment == experiment
        came_back += 1
    assert came_back > 20 and refused > 50


def test_an_experiment_comes_back_from_its_arguments_and_its_file():
    """Also with the lab's rates in place of a GPT's, which are then written."""
    for seed in range(500):
        experiment = some(seed)
        experiment = experiment if seed % 2 else experiment.replace(lr=0.05)
        assert command_line(experiment.arguments())[0] == experiment
        fields = yaml.safe_load(as_yaml(experiment))
        assert Experiment.from_dict(fitting(fields) | fields) == experiment


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        ({"optimizer": {"type": "Adam"}}, {"optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.0}),
        ({"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}, {"weight_decay": 0.01}),
        ({"optimizer": {"type": "SGD", "params": {"lr": 1}}}, {"optimizer": "sgd", "lr": 1.0, "momentum": 0.0}),
        (
            {"zero_optimization": {"stage": 1, "reduce_bucket_size": 2.0**20}},
            {"strategy": "zero1", "bucket_cap_mb": 4.0},  # elements of 4 bytes, written as 1048576.0
        ),
        ({"zero_optimization": {"stage": 2}}, {"strategy": "zero2"}),
        ({"zero_optimization": {"stage": 3}}, {"strategy": "fsdp"}),
        (
            {"zero_optimization": {"stage": 3, "offload_param": OFFLOAD, "offload_optimizer": OFFLOAD}},
            {"strategy": "fsdp_offload"},
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": NVME, "offload_optimizer": NVME}},
            {"strategy": "fsdp_nvme", "nvme_path": "/nvme"},
        ),
        ({"torch_autocast": {"enabled": True, "dtype": "torch.float16"}}, {"precision": "fp16"}),
        ({"bf16": {"enabled": True}}, {"precision": "bf16"}),
        ({"gradient_clipping": 2}, {"clip": 2.0}),
        ({"train_micro_batch_size_per_gpu": 8}, {"accumulation": 4}),
        (
            {"train_batch_size": None, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 3},
            {"batch_size": 48, "accumulation": 3},  # on 2 ranks
        ),
        ({"autotuning": {"enabled": False, "fast": True}, "wandb": {"enabled": True}}, {}),
    ],
    ids=str,
)
def test_what_a_field_means_here(config, fields):
    experiment = read(USUAL | config)
    assert {name: getattr(experiment, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"gradient_cliping": 1.0}, "DeepSpeed has no field gradient_cliping; did you mean gradient_clipping?"),
        ({"zero_optimisation": {"stage": 2}}, "zero_optimisation.stage; did you mean zero_optimization.stage?"),
        ({"zero_optimization": {"stag": 2}}, "did you mean zero_optimization.stage?"),
        ({"zero_optimization": {"stage": "3"}}, 'zero_optimization.stage="3": must be a whole number'),
        ({"zero_optimization": {"stage": 4}}, "must be 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "disk"}}}, "must be none, cpu or nvme"),
        ({"zero_optimization": {"stage": 3, "offload_param": NVME}}, "offloads parameters and optimizer together"),
        ({"zero_optimization": {"stage": 2, "offload_param": NVME, "offload_optimizer": NVME}}, "together, in stage 3"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}, "offload_optimizer": NVME}},
            "offload_param.nvme_path must be there with device nvme: write a folder",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": NVME | {"nvme_path": "/b"}, "offload_optimizer": NVME}},
            "must be equal",
        ),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": OFFLOAD}}, "offloads parameters and"),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": OFFLOAD}},
            "offloads parameters and optimizer together",
        ),
        ({"zero_optimization": True}, "zero_optimization=true: must be a section, with stage in it"),
        ({"train_batch_size": "auto"}, "Hugging Face's Trainer replaces it"),
        ({"train_batch_size": 65}, "must be a multiple of 2"),
        ({"train_micro_batch_size_per_gpu": 10, "gradient_accumulation_steps": 3}, "must be the product"),
        ({"train_batch_size": 0}, "at least 1"),
        ({"train_batch_size": None}, "DeepSpeed has no default"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "bf16 and fp16 are both enabled"),
        ({"fp16": True}, "fp16=true: must be a section, with enabled in it"),
        ({"autotuning": {"enabled": True}}, "this lab has no autotuning"),
        ({"tensor_parallel": {"autotp_size": 2}}, "AutoTP; here: Experiment(tensor=)"),
        ({"compression_training": {"weight_quantization": {}}}, "pruning and quantization"),
        ({"expert_parallel": {"enabled": True}}, "Experiment(expert=, experts=)"),
        ({"optimizer": {"type": "Lion"}}, "this lab has Adam, AdamW, SGD"),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "not Adam with L2 decay"),
        ({"optimizer": {"type": "Adam", "params": {"betas": [0.8, 0.99]}}}, "optimizer.params.betas=[0.8, 0.99]: here"),
        ({"optimizer": {"type": "Adam", "params": {"lr": "1e-3"}}}, "must be a number"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}}, "warmup_type is log"),
        ({"scheduler": {"type": "OneCycle"}}, "this lab has WarmupLR, WarmupCosineLR"),
        (warm_up(warmup_num_steps="9"), "scheduler.params.warmup_num_steps="),
        (warm_up(warmup_num_steps=1e2), "scheduler.params.warmup_num_steps=100.0: must be a whole number"),
        (cosine(total_num_steps="1000"), "scheduler.params.total_num_steps='1000': must be a whole number"),
    ],
    ids=str,
)
def test_what_it_refuses_and_why(config, words):
    with pytest.raises(ValueError) as said:
        read(USUAL | config)
    assert words in str(said.value) and "\n" not in str(said.value)


def test_a_default_that_is_not_written_stands_in_the_table():
    lines = frameworks.read(USUAL | {"optimizer": {"type": "Adam"}}, "deepspeed", 2).lines
    assert ("gradient_clipping", "1.0", "default", "clip") in [line[:4] for line in lines]
    assert read(USUAL).clip == 1.0
    assert [line[:3] for line in lines if line[0] == "optimizer.params.lr"] == [
        ("optimizer.params.lr", "0.001", "default")
    ]


def test_the_decay_of_torchs_adamw_is_its_default_in_the_table_too():
    """DeepSpeed's own Adam has none."""
    for params, row in (({"torch_adam": True}, ("0.01", "default")), ({}, ("0.0", "default"))):
        found = frameworks.read(USUAL | {"optimizer": {"type": "AdamW", "params": params}}, "deepspeed", 2)
        (line,) = (line for line in found.lines if line[0] == "optimizer.params.weight_decay")
        assert line[1:3] == row and found.experiment.weight_decay == float(row[0])
        assert (line in frameworks.short(found, "deepspeed")) == bool(params)


def test_without_a_rate_of_its_own_the_warm_up_ends_at_the_optimizers():
    optimizer = {"type": "AdamW", "params": {"lr": 2e-5}}
    assert read(USUAL | {"optimizer": optimizer} | warm_up()).lr == 2e-5
    assert read(USUAL | {"optimizer": optimizer} | warm_up(warmup_max_lr=0.5)).lr == 0.5


@pytest.mark.parametrize(("schedule", "warm"), [("cosine", 0), ("cosine", 1), ("constant", 1)])
def test_a_warm_up_that_deepspeed_changes_is_refused(schedule, warm):
    with pytest.raises(ValueError, match=r"warmup_steps=.*DeepSpeed cannot express it"):
        frameworks.write(Experiment(schedule=schedule, warmup_steps=warm), "deepspeed", 2)


def test_warm_up_has_the_rates_of_warmup_lr():
    """WarmupLR with warmup_type linear: min + (max - min) x step / steps, then max."""
    experiment = Experiment(lr=0.3, warmup_steps=7)
    params = frameworks.write(experiment, "deepspeed", 2).config["scheduler"]["params"]
    low, high, steps = params["warmup_min_lr"], params["warmup_max_lr"], params["warmup_num_steps"]
    for step in range(12):
        there = low + (high - low) * min(1.0, step / steps)
        assert there == pytest.approx(0.3 * schedule_factor(7, None, step), rel=1e-12)


@pytest.mark.parametrize("framework", frameworks.FRAMEWORKS)
def test_every_row_of_the_table_is_of_a_known_kind(framework):
    known = frameworks.fields(framework)
    assert {field.kind for field in known.values()} <= {"mapped", "near", *frameworks.WORDS}
    mapped = {field.here for field in known.values() if field.kind == "mapped"}
    own = set(Experiment().to_dict())
    assert {name for name in mapped if " " not in name} <= own | {"ranks", "nodes"}
    assert set(frameworks.FRAMEWORKS[framework].WRITES) <= own
    fixed = [json.loads(field.here) for field in known.values() if field.kind == "fixed"]
    assert all(isinstance(value, str | int | float | bool | list) for value in fixed)
    notes = [field.name for field in known.values() if field.kind == "refused" and not field.note]
    assert not notes
