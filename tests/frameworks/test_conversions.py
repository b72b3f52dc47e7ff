"""What a conversion loses or changes is in a table: fields of the program, of time and memory, and other versions."""

import os
import re
import subprocess
import sys

import pytest
from repository import ROOT

from labkit.run import framework_files, framework_lines, frameworks
from labkit.run.experiment import Experiment
from labkit.run.framework_lines import IN_PROGRAM, LOST

FSDP = "distributed_type: FSDP\nfsdp_config: {%s}\n"
DISK = {"device": "nvme", "nvme_path": "/nvme"}
ZERO = {
    "stage": 3,
    "stage3_param_persistence_threshold": 10_000,
    "stage3_prefetch_bucket_size": "auto",
    "contiguous_gradients": True,
    "offload_param": DISK | {"buffer_size": 1e9, "pin_memory": False},
    "offload_optimizer": DISK | {"buffer_count": 6},
}
LARGE = {
    "train_batch_size": 64,
    "zero_optimization": ZERO,
    "aio": {"block_size": 262_144, "queue_depth": 32},
    "wandb": {"enabled": True},
}
LOST_OF_LARGE = {
    "zero_optimization.stage3_param_persistence_threshold",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.offload_param.buffer_size",
    "zero_optimization.offload_param.pin_memory",
    "zero_optimization.offload_optimizer.buffer_count",
    "aio.block_size",
    "aio.queue_depth",
}


def in_program(experiment, target, ranks=4):
    lines = frameworks.write(experiment, target, ranks).lines
    return {line[0]: line[1] for line in lines if line[2] == IN_PROGRAM}


def changed(config, framework, target):
    """({field: new value}, fields of the program) of a conversion."""
    found = frameworks.read(config, framework, 4)
    written = frameworks.write(found.experiment, target, 4)
    new = frameworks.flattened(written.config) if target == framework else {}
    known = frameworks.fields_for(config, framework)
    rows, of_program = framework_lines.changes(found.lines, known, new)
    return {row[0]: row[2] for row in rows}, of_program


def yaml(text):
    return framework_files.parse(text)[1]


def test_recomputation_of_accelerate_is_left_to_deepspeeds_program():
    found = frameworks.read(yaml(FSDP % "fsdp_activation_checkpointing: true"), "accelerate", 4)
    written = frameworks.write(found.experiment, "deepspeed", 4, given=found.given)
    words = "DeepSpeed has no field for it: the program must set it"
    line = ("recompute", '"every"', IN_PROGRAM, "recompute", words)
    assert line in written.lines and line in frameworks.short(written, "deepspeed")


OTHER = {"model": "gpt", "size": "small", "depth": 3, "width": 96, "data": "stdlib_text", "seed": 7, "steps": 90}
OTHER |= {"attention": "flash", "recompute": "every"}


def test_a_value_that_the_file_cannot_hold_is_in_the_table():
    experiment = Experiment(**OTHER, strategy="zero1", clip=1.0)
    for target in ("deepspeed", "accelerate"):
        assert set(in_program(experiment, target)) == set(OTHER)
        assert in_program(Experiment(), target) == {}
    assert in_program(experiment, "deepspeed")["steps"] == "90"
    assert "steps" not in in_program(experiment.replace(schedule="cosine", warmup_steps=2), "deepspeed")
    assert "recompute" not in in_program(experiment.replace(strategy="fsdp"), "accelerate")


def test_a_written_value_that_is_a_default_of_the_lab_is_in_it_too():
    sgd = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.0}}
    found = frameworks.read({"train_batch_size": 64, "optimizer": sgd}, "deepspeed", 4)
    lines = frameworks.write(found.experiment, "accelerate", 4, given=found.given).lines
    named = {line[0]: line[1] for line in lines if line[2] == IN_PROGRAM}
    assert {"batch_size": "64", "optimizer": '"sgd"', "lr": "0.05", "momentum": "0.9"}.items() <= named.items()
    assert "weight_decay" not in named  # off


def test_an_axis_of_one_rank_needs_no_field():
    ones = {"tensor-model-parallel-size": 1, "context-parallel-size": 1, "pipeline-model-parallel-size": 1}
    ones |= {"micro-batch-size": 16, "lr-decay-style": "constant"}
    for rank in (ones, ones | {"expert-model-parallel-size": 1}):
        found = frameworks.read(rank, "megatron", 4)
        for target in ("accelerate", "deepspeed"):
            lines = frameworks.write(found.experiment, target, 4, given=found.given).lines
            named = {line[0] for line in lines if line[2] == IN_PROGRAM}
            assert not named & {"tensor", "context", "pipeline", "expert", "accumulation"}


def test_sizes_that_an_experiment_has_are_carried_over_and_another_dropout_is_not():
    small = {"num-layers": 4, "hidden-size": 128, "num-attention-heads": 4, "micro-batch-size": 2}
    small |= {"global-batch-size": 16, "train-iters": 9, "lr": 0.001, "lr-decay-style": "constant"}
    for dropout, expected in ((0, {}), (0.1, {"hidden-dropout": LOST})):
        rows, of_program = changed(small | {"hidden-dropout": dropout, "log-interval": 5}, "megatron", "deepspeed")
        assert (rows, of_program) == (expected, ["log-interval"])


def test_a_section_is_a_frameworks_field():
    assert frameworks.framework_of({"optimizer": {"type": "AdamW"}}) == "deepspeed"
    assert frameworks.framework_of({"optimizer": "adamw"}) is None


def test_values_that_change_nothing_are_not_in_it():
    """The momentum of AdamW, the base of a rule that is not used, the buckets of FSDP."""
    experiment = Experiment(optimizer="adamw", momentum=0.5, reference_batch=32, strategy="fsdp", bucket_cap_mb=1.0)
    assert set(in_program(experiment, "accelerate")) == {"optimizer"}
    used = experiment.replace(optimizer="sgd", lr_rule="sqrt", strategy="ddp_bucketed")
    assert set(in_program(used, "accelerate")) == {"momentum", "reference_batch", "lr_rule", "bucket_cap_mb"}


@pytest.mark.parametrize("target", frameworks.FRAMEWORKS)
def test_every_value_of_an_experiment_is_in_the_file_or_in_the_table(target):
    """Also in the targets that have another model: each field that differs is written, or named."""
    experiment = Experiment(model="gpt", depth=3, optimizer="adamw", steps=90, seed=7)
    lines = frameworks.write(experiment, target, 4).lines
    known = frameworks.fields(target)
    named = {line[0] for line in lines if line[2] == IN_PROGRAM}
    written = [framework_lines.row_of(line[0], known) for line in lines if line[2] != IN_PROGRAM]
    rows = set().union(*map(framework_lines.fields_of, written))
    assert {"steps", "seed", "optimizer"} <= named | rows
    assert "depth" in named or "size" in rows
    assert not named & rows


@pytest.mark.parametrize("target", ["deepspeed", "accelerate"])
def test_what_changes_time_and_memory_is_not_carried_over(target):
    zero = ZERO | {part: ZERO[part] | {"device": "cpu"} for part in ("offload_param", "offload_optimizer")}
    rows, of_program = changed(LARGE | {"zero_optimization": zero}, "deepspeed", target)
    assert rows == dict.fromkeys(LOST_OF_LARGE, LOST)  # contiguous_gradients has its default
    assert of_program == ["wandb.enabled"]


def test_the_threshold_of_persistence_is_an_argument_in_python():
    note = frameworks.fields("deepspeed")["zero_optimization.stage3_param_persistence_threshold"].note
    assert "labkit.fsdp.FSDP(persistence_threshold=)" in note


def test_another_precision_or_optimizer_is_a_change():
    """The lab's form of bf16 is autocast, and its Adam AdamW."""
    optimizer = {"type": "Adam", "params": {"torch_adam": False, "fused": True}}
    rows, _ = changed(
        {"train_batch_size": 64, "bf16": {"enabled": True}, "optimizer": optimizer}, "deepspeed", "deepspeed"
    )
    assert rows == {
        "bf16.enabled": LOST,
        "optimizer.type": '"AdamW"',
        "optimizer.params.torch_adam": "true",
        "optimizer.params.fused": LOST,
    }
    static = {"train_batch_size": 64, "fp16": {"enabled": True, "loss_scale": 128}}
    assert changed(static, "deepspeed", "accelerate")[0] == {"fp16.loss_scale": LOST}


@pytest.mark.parametrize("section", ["fsdp_version: 1", "fsdp_offload_params: false"])
def test_version_1_of_fsdp_becomes_version_2(section):
    """Also where the file does not say its version, which is then 1."""
    assert changed(yaml(FSDP % section), "accelerate", "accelerate")[0] == {"fsdp_config.fsdp_version": "2"}
    assert changed(yaml(FSDP % "fsdp_version: 2"), "accelerate", "accelerate")[0] == {}


def test_stage_3_of_accelerates_deepspeed_becomes_fsdp():
    config = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}}
    assert changed(config, "accelerate", "accelerate")[0] == {"distributed_type": '"FSDP"'}


def test_memory_is_named_in_the_rows_that_set_it():
    rows = frameworks.fields("deepspeed")
    words = ("buffer_size", "buffer_count", "bucket_size", "max_live", "max_in_cpu", "max_reuse", "pin_memory")
    found = [name for name in rows if any(word in name for word in words) and rows[name].kind == "speed"]
    assert len(found) >= 10
    assert [name for name in found if "memory:" not in rows[name].note] == []


@pytest.mark.parametrize("target", ["deepspeed", "accelerate"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("overlap", [True, False])
def test_deepspeeds_default_of_a_stage_is_no_change(target, stage, overlap):
    """Stage 3 overlaps by default, the others do not."""
    config = {"train_batch_size": 64, "zero_optimization": {"stage": stage, "overlap_comm": overlap}}
    expected = {} if overlap == (stage == 3) else {"zero_optimization.overlap_comm": LOST}
    assert changed(config, "deepspeed", target)[0] == expected


def test_gradients_in_fp32_are_no_change():
    for dtype, expected in (("fp32", {}), ("bf16", {"data_types.grad_accum_dtype": LOST})):
        config = {"train_batch_size": 64, "data_types": {"grad_accum_dtype": dtype}}
        assert changed(config, "deepspeed", "deepspeed")[0] == expected


def run(*command, stdin=""):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    given = {"capture_output": True, "text": True, "input": stdin, "timeout": 120}
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, **given)


def test_the_command_prints_it():
    text = FSDP % "fsdp_version: 1, fsdp_activation_checkpointing: true, fsdp_forward_prefetch: true"
    said = run("scripts/config.py", "-", "--to", "deepspeed", "--gpus", "4", stdin=text)
    assert said.returncode == 0
    lost = said.stderr.partition("changed, or not carried over:")[2].partition("written for DeepSpeed:")
    assert "fsdp_config.fsdp_forward_prefetch  true   not carried over" in lost[0]
    assert re.search('recompute +"every" +in the program ', lost[2])
    said = run("scripts/config.py", "-", "--to", "accelerate", "--gpus", "4", stdin=text)
    assert "fsdp_config.fsdp_version           1      2 " in said.stderr
    said = run("scripts/config.py", "-", "--to", "experiment", stdin='{"train_batch_size": 8, "dump_state": true}')
    assert said.stderr.count("not carried over") == 1
    assert "part of the program, so not carried over: dump_state\n" in said.stderr


def test_numbers_that_yaml_reads_as_text_are_one_line_in_training_too(tmp_path):
    file = tmp_path / "a.yaml"
    for text, words in (
        (
            "lr: 3e-4\nsteps: 1e2\n",
            f"{file}: lr: 3e-4 is text in YAML: write 3.0e-4; steps: 1e2 is text in YAML: write 100",
        ),
        ("pipeline: 2e0\n", f"{file}: pipeline: 2e0 is text in YAML: write 2"),
        ("lr: 0.1\nlr: 0.2\n", f"{file}: has the key lr twice"),
        ("- 1\n", f"{file}: must have fields of an experiment, such as model: gpt"),
    ):
        file.write_text(text)
        said = run("-m", "labkit.train", "--config", str(file))
        assert (said.returncode, said.stderr) == (2, f"labkit.train: {words}\n")


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("distributed_type: MULTI_GPU\nnum_processes: 2\n", "strategy: ddp_bucketed\n"),
        (
            "distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: bf16\n",
            "strategy: ddp_bucketed\nprecision: bf16\n",
        ),
        (
            "model: gpt\noptimizer: adamw\n",
            "model: gpt\nstrategy: ddp_bucketed\noptimizer: adamw\nlr: 0.003\nweight_decay: 0.1\nwarmup_steps: 10\n",
        ),
    ],
)
def test_an_experiment_of_defaults_says_what_it_is(text, fields):
    said = run("scripts/config.py", "-", "--to", "experiment", stdin=text)
    assert (said.returncode, said.stdout) == (0, fields)
