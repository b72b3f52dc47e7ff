"""What a person reads of a translation: all refusals at once, short tables, and marks on the lab's own defaults."""

import json

import pytest

from labkit.run import framework_files, frameworks
from labkit.run.experiment import Experiment
from labkit.run.framework_lines import OURS
from labkit.run.framework_values import Refused, as_number
from labkit.run.options import fitting
from labkit.run.options import read as command_line

FSDP = "distributed_type: FSDP\nnum_processes: 4\nfsdp_config: {fsdp_version: 2}\n"
PLAIN = "--micro-batch-size 4 --lr-decay-style constant "


def read(text, ranks=4):
    framework, config = framework_files.parse(text)
    return frameworks.read(config, framework, ranks)


def reasons(text):
    with pytest.raises(Refused) as said:
        read(text)
    return said.value.reasons


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            json.dumps(
                {
                    "train_batch_size": 6,
                    "zero_optimization": {"stage": 4},
                    "optimizer": {"type": "Lion", "params": {"betas": [0.9, 0.99]}},
                    "scheduler": {"type": "WarmupCosineLR"},
                    "bf16": {"enabled": True},
                    "fp16": {"enabled": True},
                }
            ),
            (
                "optimizer.params.betas=[0.9, 0.99]: here",
                "train_batch_size=6 must be a multiple of 4",
                "stage=4: must be 0, 1, 2 or 3",
                "bf16 and fp16 are both enabled",
                "optimizer.type='Lion'",
                "warmup_type is log",
                "cos_min_ratio is 0.0001",
            ),
        ),
        (
            FSDP + "mixed_precision: fp8\nmachine_rank: 1\nparallelism_config: {parallelism_config_tp_size: 3}\n"
            "dynamo_config: {}\nfp8_config: {backend: TE}\nfp16: true\n",
            (
                "this lab has no fp8_config (fp8); remove it",
                "fp16=true: not in this lab",
                "machine_rank=1: must be less than num_machines=1",
                "mixed_precision='fp8'",
                "4 ranks must be a multiple of 3",
            ),
        ),
        (
            "--micro-batch-size 3 --global-batch-size 16 --bf16 --fp16 --adam-beta2 0.95 --optimizer muon",
            (
                "adam-beta2=0.95: here it is 0.999",
                "global-batch-size=16 must be a multiple of 12",
                "bf16 and fp16 are both there",
                "optimizer='muon'",
                "lr-decay-style is linear",
            ),
        ),
        (
            "Trainer.Config(training=TrainingConfig(dtype='bfloat16', steps=0, global_batch_size=20), "
            "optimizer=default_adamw())",
            (
                'training.dtype="bfloat16"',
                "global_batch_size=20 must be a multiple of 32",
                "training.steps=0",
                "optimizer.betas is [0.9, 0.95]",
                "lr_scheduler.decay_type is linear",
            ),
        ),
    ],
    ids=("deepspeed", "accelerate", "megatron", "torchtitan"),
)
def test_a_file_is_refused_for_all_its_reasons_at_once(text, words):
    found = reasons(text)
    assert len(found) == len(words)
    for reason, part in zip(found, words, strict=True):
        assert part in reason and "\n" not in reason


def test_one_wrong_value_has_one_reason():
    """Parts that need it, or the field that a misspelt one means, are left out."""
    assert len(reasons('{"train_batch_size": "auto", "gradient_accumulation_steps": 3}')) == 1
    assert len(reasons('{"train_batch_size": 64, "zero_optimisation": {"stage": 3}}')) == 1
    assert len(reasons(PLAIN + "--tensor-model-parallel-size 3")) == 1
    assert len(reasons("distributed_typ: FSDP\nmixed_precision: bf16\n")) == 1


def test_an_experiment_is_refused_for_all_its_fields_at_once():
    experiment = Experiment(model="gpt", strategy="zero1", optimizer="adamw", tensor=1, comm_hook="none", seed=3)
    experiment = experiment.replace(lr_rule="sqrt", every=4, precision="fp16")
    with pytest.raises(Refused) as said:
        frameworks.write(experiment, "torchtitan", 4)
    named = [reason.partition("(")[2].partition("=")[0] for reason in said.value.reasons]
    assert named == ["strategy", "lr_rule", "precision", "every"]


def test_auto_is_taken_where_it_changes_time_only():
    usual = {"train_batch_size": 64, "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto"}}
    assert read(json.dumps(usual)).experiment.strategy == "fsdp"
    usual["zero_optimization"]["reduce_bucket_size"] = "auto"
    assert reasons(json.dumps(usual))[0].startswith('zero_optimization.reduce_bucket_size="auto": Hugging Face')


def test_what_the_file_leaves_to_the_program_is_marked_as_the_labs():
    found = read(FSDP + "mixed_precision: bf16\n")
    assert {"strategy", "precision", "recompute"} == found.given
    written = frameworks.write(found.experiment, "deepspeed", 4, given=found.given)
    source = {line[0]: line[2] for line in written.lines}
    for name in ("train_batch_size", "gradient_clipping", "optimizer.type", "optimizer.params.lr"):
        assert source[name] == f"{OURS} mlp"
    for name in ("zero_optimization.stage", "torch_autocast.dtype"):
        assert source[name] == "written"
    everything = frameworks.write(found.experiment, "deepspeed", 4).lines
    assert not [line for line in everything if line[2].startswith(OURS)]


def test_a_value_of_two_fields_is_the_labs_if_one_of_them_is():
    """A micro-batch of the file's accumulation and of the lab's batch; and the sizes of the model."""
    given = frozenset({"model", "accumulation", "strategy"})
    experiment = Experiment(model="gpt", optimizer="adamw", accumulation=2)
    lines = frameworks.write(experiment, "megatron", 2, given=given).lines
    ours = {line[0] for line in lines if line[2] == f"{OURS} gpt"}
    assert {"micro-batch-size", "global-batch-size", "num-layers", "seq-length", "lr"} <= ours
    assert "tensor-model-parallel-size" in ours
    lines = frameworks.write(experiment, "megatron", 2, given=given | {"batch_size", "size"}).lines
    assert not {"micro-batch-size", "num-layers"} & {line[0] for line in lines if line[2].startswith(OURS)}


def test_the_short_table_has_what_changes_the_training():
    found = read(PLAIN + "--save checkpoints --bf16 --overlap-grad-reduce --adam-beta2 0.999")
    names = [line[0] for line in frameworks.short(found, "megatron")]
    assert names[:4] == ["micro-batch-size", "lr-decay-style", "bf16", "overlap-grad-reduce"]
    defaults = {"clip-grad", "seed", "weight-decay", "hidden-dropout", "attention-dropout", "optimizer"}
    assert set(names[4:]) == defaults
    left_out = {line[0] for line in found.lines} - set(names)
    assert {"save", "adam-beta2", "fp16", "sgd-momentum", "initial-loss-scale", "use-torch-fsdp2"} <= left_out


def test_defaults_of_the_loss_scale_matter_with_fp16_only():
    found = read('{"train_batch_size": 64, "fp16": {"enabled": true}}')
    assert "fp16.initial_scale_power" in [line[0] for line in frameworks.short(found, "deepspeed")]
    found = read('{"train_batch_size": 64, "fp16": {"enabled": false}}')
    assert "fp16.initial_scale_power" not in [line[0] for line in frameworks.short(found, "deepspeed")]


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("3e-4", "3.0e-4"),
        ("1E6", "1.0e+6"),
        ("2.5e8", "2.5e+8"),
        ("-1e-3", "-1.0e-3"),
        ("0.1", None),
        ("3", None),
        ("2.5e-3", None),
        ("fast", None),
        ("e5", None),
        (0.1, None),
    ],
)
def test_how_yaml_writes_a_number_that_is_text(text, written):
    yaml = pytest.importorskip("yaml")
    assert as_number(text) == written
    if written:
        assert yaml.safe_load(written) == float(text)


def test_a_number_that_yaml_reads_as_text_is_named():
    for field, value in (("fsdp_min_num_params", "1e8"), ("fsdp_version", "2e0")):
        (reason,) = reasons(f"distributed_type: FSDP\nfsdp_config: {{{field}: {value}}}\n")
        assert f"{value} is text, also without quotes in YAML: write {as_number(value)}" in reason


def test_fields_of_another_program_are_named_as_such():
    with pytest.raises(ValueError, match="has fields of another program: learning_rate, per_device_train_batch_size"):
        framework_files.parse("learning_rate: 3e-4\nper_device_train_batch_size: 4\n")
    text = "base_model: a\ndatasets: []\nsequence_len: 3\ngradient_accumulation_steps: 4\noptimizer: adamw_8bit\n"
    with pytest.raises(ValueError, match="has fields of another program: base_model, datasets, sequence_len; convert"):
        framework_files.parse(text)


RATES = [(0.003, 0.1, 10), (0.05, 0.0, 0), (0.003, 0.0, 10), (0.05, 0.1, 10), (0.01, 0.2, 3)]


@pytest.mark.parametrize(
    ("fields", "rates"),
    [
        ({"model": "gpt"}, (0.003, 0.1, 10)),
        ({"model": "gpt", "optimizer": "adamw"}, (0.003, 0.1, 10)),
        ({"tensor": 2, "optimizer": "adamw", "weight_decay": 0.0}, (0.003, 0.0, 10)),
        ({"model": "gpt", "optimizer": "adamw", "lr": 0.05}, (0.05, 0.1, 10)),
        ({"model": "gpt", "lr": 0.05, "warmup_steps": 0}, (0.05, 0.1, 0)),
        ({"model": "gpt", "optimizer": "sgd"}, (0.05, 0.0, 0)),
        ({"model": "mlp", "optimizer": "adamw"}, (0.05, 0.0, 0)),
    ],
    ids=str,
)
def test_a_default_of_a_gpt_holds_with_adamw_unless_it_is_written(fields, rates):
    """Also where the optimizer is written; in a file and on the command line."""
    words = [word for name, value in fields.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    found, _ = command_line(words)
    assert (found.lr, found.weight_decay, found.warmup_steps) == rates
    assert Experiment.from_dict(fitting(fields) | fields) == found


@pytest.mark.parametrize("model", ["gpt", "mlp"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("rates", RATES, ids=str)
def test_the_arguments_of_an_experiment_are_the_experiment(model, optimizer, rates):
    lr, decay, warm = rates
    experiment = Experiment(model=model, optimizer=optimizer, lr=lr, weight_decay=decay, warmup_steps=warm)
    assert command_line(experiment.arguments())[0] == experiment


def test_help_has_the_defaults_of_a_gpt(capsys):
    with pytest.raises(SystemExit):
        command_line(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    for words in ("(sgd; gpt: adamw)", "(0.05; gpt with adamw: 0.003)", "(0.0; gpt with adamw: 0.1)"):
        assert words in said
    assert "(0; gpt with adamw: 10)" in said


@pytest.mark.parametrize("target", ["deepspeed", "megatron", "torchtitan"])
def test_a_curriculum_is_refused_in_one_line(target):
    growing = {"curriculum": "fixed_linear", "curriculum_from": 8, "curriculum_steps": 9}
    experiment = Experiment(model="gpt", optimizer="adamw", strategy="fsdp", **growing)
    with pytest.raises(Refused) as said:
        frameworks.write(experiment, target, 4)
    (line,) = said.value.reasons
    assert line.startswith("Experiment(curriculum='fixed_linear'): ") and line.endswith("it needs 'none'")


PODS = "apiVersion: apps/v1\nkind: StatefulSet\nspec:\n  args: [--model, gpt]\n"
SLURM = "#!/bin/bash\n#SBATCH --nodes=2\ntrap stop TERM\nsrun torchrun -m -- labkit.train --model gpt &\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (PODS, "is a Kubernetes manifest: give the experiment that its pods train; --check looks for mistakes in it"),
        (f"---\n{PODS}---\n{PODS}", "is a Kubernetes manifest: "),
        ('{"kind": "List", "apiVersion": "v1", "items": []}', "is a Kubernetes manifest: "),
        (SLURM, "is a Slurm script: give the experiment or the framework's file that it starts"),
        ("#!/bin/bash\n#SBATCH -N 2\nsrun accelerate launch --config_file a.yaml b.py\n", "give the file of its"),
    ],
    ids=("pod", "pods", "list", "slurm", "accelerate"),
)
def test_a_file_for_a_cluster_is_named(text, line):
    with pytest.raises(ValueError) as said:
        framework_files.parse(text)
    assert line in str(said.value) and "\n" not in str(said.value)


def test_a_slurm_script_with_megatrons_arguments_is_read():
    text = f"#!/bin/bash\n#SBATCH --nodes=2\nsrun torchrun pretrain_gpt.py {PLAIN}\n"
    assert read(text).experiment.batch_size == 16


@pytest.mark.parametrize("caller", ['"$@"', "$*", '"${@}"', '"${@:2}"'])
def test_arguments_of_the_caller_are_no_value(caller):
    text = f'ARGS=({PLAIN} --lr 1e-3 {caller})\ntorchrun pretrain_gpt.py "${{ARGS[@]}}" {caller} --seed 7 {caller}\n'
    experiment = read(text).experiment
    assert (experiment.lr, experiment.seed) == (1e-3, 7)
