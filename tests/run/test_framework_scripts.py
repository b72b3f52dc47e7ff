"""Files that people have: Megatron-LM's shell scripts, torchtitan's TOML, Accelerate with a file of DeepSpeed."""

import json
import shutil
import subprocess

import pytest

from labkit.run import framework_files, frameworks, megatron_shell
from labkit.run.framework_values import Refused

SCRIPT = """\
#!/bin/bash
# --lr 9 is a comment
export MICRO=4  # of a GPU
GPUS=8
OUT=$1
DISTRIBUTED=(
    --nproc_per_node $GPUS
)
TRAINING=(
    --micro-batch-size $MICRO # samples
    --lr 6.0e-5
    --weight-decay .1
    --lr-decay-style cosine
)
MODEL="
    --num-layers 24
    --bf16
"
torchrun ${DISTRIBUTED[@]} pretrain_gpt.py \\
    "${TRAINING[@]}" \\
    $MODEL \\
    --save $OUT --split 949,50,1 2>&1 | tee /dev/null
"""
ARGUMENTS = {"micro-batch-size": 4, "lr": 6e-5, "weight-decay": 0.1, "lr-decay-style": "cosine", "num-layers": 24}
ARGUMENTS |= {"bf16": True, "save": "$1", "split": "949,50,1"}


def test_arguments_of_a_shell_script_are_found_in_its_variables():
    assert framework_files.parse(SCRIPT) == ("megatron", ARGUMENTS)
    found = frameworks.read(ARGUMENTS, "megatron", 8).experiment
    assert (found.batch_size, found.lr, found.precision) == (32, 6e-5, "bf16")


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_a_script_has_the_words_that_bash_gives_it():
    """With a torchrun that prints its arguments, and $1 as the script's first one."""
    script = "torchrun() { printf '%s\\n' \"$@\"; }\n" + SCRIPT
    command = ["bash", "-c", script, "script", "$1"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split("\n")[:-1]
    assert printed[:2] == ["--nproc_per_node", "8"]
    assert printed[3:] == megatron_shell.words_of(SCRIPT)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("pretrain_gpt.py --micro-batch-size $MICRO --lr-decay-style constant", "--micro-batch-size $MICRO: write the"),
        ("--micro-batch-size ${MICRO:-0} --lr-decay-style constant", "micro-batch-size=0: must be a whole number"),
        ("A=$B\nB=$A\npretrain_gpt.py --lr-decay-style constant --seed $A --micro-batch-size 4", "--seed $"),
        ("N=$(nproc)\npretrain_gpt.py --lr-decay-style constant --micro-batch-size $N", "--micro-batch-size $N: write"),
        ("pretrain_gpt.py --lr '3", "is not a shell line: No closing quotation"),
        ("pretrain_gpt.py ${ARGS[@]}", "'${ARGS[@]}': must be an argument"),
    ],
)
def test_a_variable_that_the_script_does_not_set_is_refused_where_it_matters(line, words):
    with pytest.raises(ValueError) as said:
        frameworks.read(megatron_shell.parse(line), "megatron", 4)
    assert words in str(said.value) and "\n" not in str(said.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("horovodrun -np 4 python train.py", "belongs to Horovod: its settings are calls in the training script"),
        ("#!/bin/bash\nA=1 horovodrun -np 4 \\\n  python train.py --lr 3", "give an experiment with strategy: horovod"),
        ("mpirun -np 4 -x HOROVOD_CYCLE_TIME=1 python train.py --lr 3", "belongs to Horovod"),
        ("import horovod.torch as hvd\nhvd.init()", "belongs to Horovod"),
        ("optimizer = hvd.DistributedOptimizer(optimizer)", "belongs to Horovod"),
        ("accelerate launch --config_file a.yaml train.py --lr 3", "starts Accelerate: give the file of its --config"),
        ("deepspeed train.py --deepspeed zero.json", "starts DeepSpeed: give its JSON file"),
        ("deepspeed train.py --deepspeed --deepspeed_config=zero.json", "starts DeepSpeed: give its JSON file"),
        ("torchrun -m torchtitan.train --module mine --config small", "give the Python file of its --module"),
    ],
)
def test_a_command_of_another_framework_is_not_taken_for_megatrons(text, words):
    with pytest.raises(ValueError) as said:
        framework_files.parse(text)
    assert words in str(said.value) and "\n" not in str(said.value)


BASE = 'OPTS="--micro-batch-size 2 --lr $LR --lr-decay-style constant"'
START = "torchrun pretrain_gpt.py $OPTS"


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    "lines",
    [
        ["LR=1", BASE, 'OPTS+=" --bf16"'],
        ["LR=1", BASE, 'OPTS="$OPTS --bf16"'],
        ["OPTS=(--micro-batch-size 2)", "OPTS+=(--bf16", "  --seed 4)"],
        ["LR=1e-3", BASE, "LR=5e-3"],
        ["LR=1e-3", "LR=2e-3", BASE],
        ["if true; then", "  OTHER=1", "fi", "LR=3e-3", BASE],
        ["# LR of all", "LR=${LR:-2}", BASE],
        ["LR=${OTHER-2e-3}", BASE],
        ["OTHER=3", "LR=${OTHER:-2}", BASE],
        ["OTHER=", "LR=1${OTHER:-2}${OTHER-4}", BASE],
        ['LR="${OTHER:-${MORE:-5}}"', BASE],
        ["LR=${1:-2}", BASE, "SEED=${SEED:-}7", 'OPTS+=" --seed ${SEED} ${FLAG:-}"'],
        ["OPTS=(--micro-batch-size ${MICRO:-2}", '  --seed "${SEED:-1}"4  # SEED', "  )"],
    ],
    ids=str,
)
def test_variables_have_the_values_that_bash_gives_them(lines):
    start = START.replace("$OPTS", '"${OPTS[@]}"') if "OPTS=(" in lines[0] else START
    ours = megatron_shell.words_of("\n".join([*lines, start, "LR=9"]))
    script = "\n".join(["torchrun() { printf '%s\\n' \"$@\"; }", *lines, start])
    given = {"env": {}, "capture_output": True, "text": True, "check": True, "timeout": 60}
    assert ours == subprocess.run(["bash", "-c", script], **given).stdout.split()[1:]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([BASE, '[[ $1 == 1 ]] && OPTS="$OPTS --bf16"'], "'$OPTS': must be an argument"),
        ([BASE, 'if [ $1 ]; then OPTS="$OPTS --bf16"; fi'], "'$OPTS': must be an argument"),
        ([BASE, "case $P in", 'a) OPTS+=" --bf16";;', "esac"], "'$OPTS': must be an argument"),
        (["case $S in", "big)", "  LR=1e-4", ";; *)", "  LR=1e-3", "esac", BASE], "--lr $LR: write the value"),
        (["for LR in 1 2; do", "  LR=1e-4", "done", BASE], "--lr $LR: write the value"),
        (["for A in 1 2; do :; done", "LR=${A:-3}", BASE], "--lr ${A:-3}: write the value"),
        (["A=$(nproc)", "LR=${A:-3}", BASE], "--lr ${A:-3}: write the value"),
        (["[[ $1 ]] && A=2", "LR=${A-3}", BASE], "--lr ${A-3}: write the value"),
        (["source settings.sh", "LR=${A:-3}", BASE], "--lr ${A:-3}: write the value"),
        (["shift", "LR=${1:-3}", BASE], "--lr ${1:-3}: write the value"),
    ],
    ids=str,
)
def test_a_variable_that_a_branch_sets_is_refused_where_it_matters(lines, words):
    with pytest.raises(ValueError) as said:
        frameworks.read(megatron_shell.parse("\n".join([*lines, START])), "megatron", 4)
    assert words in str(said.value)


@pytest.mark.parametrize(
    ("options", "ranks", "nodes"),
    [
        ("--nnodes 2 --nproc_per_node 8", 16, 2),
        ("--nproc-per-node=4", 4, 1),
        ("--nproc_per_node $EACH", 8, 1),
        ("--nproc-per-node gpu", None, 1),
        ("--standalone", None, 1),
    ],
)
def test_the_ranks_of_torchruns_options_are_the_files(options, ranks, nodes):
    config = megatron_shell.parse(f"EACH=8\ntorchrun {options} pretrain_gpt.py --micro-batch-size 2")
    assert (frameworks.ranks_of(config, "megatron"), frameworks.nodes_of(config, "megatron")) == (ranks, nodes)
    assert config == {"micro-batch-size": 2}


def test_a_key_that_is_there_twice_is_refused_in_yaml_too():
    with pytest.raises(ValueError, match="has the key strategy twice"):
        framework_files.parse("model: gpt\nstrategy: fsdp\nstrategy: zero1\n")


def test_the_lines_that_the_lab_writes_for_horovod_are_known_as_horovods():
    written = frameworks.write(frameworks.Experiment(clip=1.0), "horovod", 2).config
    with pytest.raises(ValueError, match="belongs to Horovod"):
        framework_files.parse(framework_files.as_text(written, "horovod"))


def test_megatrons_arguments_are_read_behind_deepspeeds_launcher():
    text = "deepspeed --num_gpus 4 pretrain_gpt.py --micro-batch-size 4 --lr-decay-style constant"
    assert framework_files.parse(text) == ("megatron", {"micro-batch-size": 4, "lr-decay-style": "constant"})


TOML = """\
# torchtitan
[job]
description = "Llama 3"
[model]
name = "llama3"
flavor = "8B"
[optimizer]
lr = 3e-4
beta2 = 0.999
implementation = "fused"
[lr_scheduler]
decay_type = "cosine"
[training]
local_batch_size = 2
seed = 5
dataset = "c4"
[float8]
filter_fqns = ["output"]
[activation_checkpoint]
selective_ac_option = "op"
"""


def test_toml_of_torchtitan_is_the_python_of_today():
    framework, config = framework_files.parse(TOML)
    found = frameworks.read(config, framework, 4).experiment
    fields = {"strategy": "fsdp", "batch_size": 8, "lr": 3e-4, "weight_decay": 0.1, "optimizer": "adamw", "clip": 1.0}
    fields |= {"schedule": "cosine", "warmup_steps": 199, "recompute": "matmul", "precision": "bf16", "seed": 5}
    assert {name: getattr(found, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("beta2 = 0.999\n", ""), "also where it is not written: write beta2 = 0.999"),
        (("beta2 = 0.999\n", "beta2 = 0.98\n"), "optimizer.[beta1, beta2]=[0.9, 0.98]: here it is [0.9, 0.999]"),
        (("[optimizer]\n", ""), "torchtitan has no field model_spec"),
        (('[lr_scheduler]\ndecay_type = "cosine"\n', ""), "lr_scheduler.decay_type is linear"),
        (('selective_ac_option = "op"\n', ""), "has activation_checkpoint.selective_ac_option='2', which is 2 where"),
        (("[model]\n", '[model]\nconverters = ["float8"]\n'), "this lab has no float8"),
        (("seed = 5", "sed = 5"), "no field training.sed; did you mean training.steps?"),
        (("seed = 5", "seed = "), "is not TOML: Invalid value"),
        (("# torchtitan\n", "steps = 3\n"), "has steps in no section: write it into one, such as [training]"),
        (
            ('selective_ac_option = "op"\n', 'selective_ac_option = "op"\nmod = "full"\n'),
            "activation_checkpoint.mod; did",
        ),
    ],
)
def test_what_toml_cannot_have(change, words):
    assert change[0] in TOML
    text = TOML.replace(*change)
    if "model_spec" in words:  # lr and betas are then in another section: those of the optimizer are its defaults
        words = "write beta2 = 0.999"
    with pytest.raises(ValueError) as said:
        framework, config = framework_files.parse(text)
        frameworks.read(config, framework, 4)
    assert words in str(said.value)


def test_toml_of_another_program():
    with pytest.raises(ValueError, match=r"is TOML without a section of torchtitan, such as \[training\]"):
        framework_files.parse('[project]\nname = "mine"\n')


BEHIND = {"distributed_type": "DEEPSPEED", "num_processes": 16, "num_machines": 2}
BEHIND |= {"deepspeed_config": {"deepspeed_config_file": "zero.json", "zero3_init_flag": True}}


def test_the_file_of_deepspeed_is_read_beside_the_one_of_accelerate(tmp_path):
    theirs = {"train_batch_size": 64, "zero_optimization": {"stage": 3}}
    (tmp_path / "zero.json").write_text(json.dumps(theirs))
    assert framework_files.with_file_behind("accelerate", BEHIND, tmp_path) == ("deepspeed", theirs)
    plain = {"distributed_type": "MULTI_GPU"}
    assert framework_files.with_file_behind("accelerate", plain, tmp_path) == ("accelerate", plain)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "names NOWHERE/zero.json as deepspeed_config_file, which cannot be read: No such file"),
        ({"mixed_precision": "bf16"}, "mixed_precision: remove it, the value of zero.json holds"),
        ({"main_proces_ip": "a"}, "no field main_proces_ip; did you mean main_process_ip?"),
        (
            {"deepspeed_config": {"deepspeed_config_file": "zero.json", "zero_stage": 3, "gradient_clipping": 1.0}},
            "deepspeed_config.gradient_clipping: remove it, the value of zero.json holds\n"
            "deepspeed_config.zero_stage: remove it",
        ),
        ({"deepspeed_config": {"deepspeed_config_file": 3}}, "deepspeed_config_file=3: must be the path of a file"),
    ],
    ids=str,
)
def test_a_file_of_deepspeed_that_cannot_be_read(tmp_path, change, words):
    with pytest.raises(ValueError) as said:
        framework_files.with_file_behind("accelerate", BEHIND | change, tmp_path / "nowhere")
    assert words.replace("NOWHERE", str(tmp_path / "nowhere")) in str(said.value)


@pytest.mark.parametrize(
    ("machines", "words"),
    [
        ({"num_machines": 3}, "num_machines=3: must divide the 8 processes"),
        ({"num_machines": 0}, "num_machines=0: must be a whole number of at least 1"),
        ({"num_machines": "2"}, 'num_machines="2": must be a whole number'),
        ({"num_machines": 2, "machine_rank": 2}, "machine_rank=2: must be less than num_machines=2"),
        ({"machine_rank": -1}, "machine_rank=-1: must be a whole number of at least 0"),
        ({"num_processes": 4}, "num_processes=4: must be the number of ranks of the run, 8, on all machines together"),
    ],
)
def test_machines_that_accelerate_cannot_have(machines, words):
    with pytest.raises(Refused) as said:
        frameworks.read({"distributed_type": "MULTI_GPU", "num_processes": 8} | machines, "accelerate", 8)
    assert words in str(said.value)


@pytest.mark.parametrize("strategy", ["fsdp", "zero2"])
def test_nodes_are_accelerates_machines(strategy):
    experiment = frameworks.Experiment(strategy=strategy, clip=1.0)
    found = frameworks.write(experiment, "accelerate", 16, nodes=2).config
    assert (found["num_machines"], found["num_processes"]) == (2, 16)
    launcher = found.get("deepspeed_config", {}).get("deepspeed_multinode_launcher")
    assert launcher == ("standard" if strategy == "zero2" else None)
    assert frameworks.nodes_of(found, "accelerate") == 2 and frameworks.ranks_of(found, "accelerate") == 16
    assert frameworks.read(found, "accelerate", 16, base=experiment).experiment == experiment
    assert "num_machines" not in frameworks.write(experiment, "accelerate", 16).config
