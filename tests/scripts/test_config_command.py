"""./scripts/lab config as a person types it: an experiment in, a file for a cluster out, or one line, exit code 2."""

import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import config as command
import pytest
import terminal
import yaml
from repository import ROOT

from labkit.cluster.kubernetes import pytorchjob, statefulset, trainjob
from labkit.run.experiment import Experiment
from labkit.run.options import fitting

FIELDS = {"model": "gpt", "strategy": "fsdp", "optimizer": "sgd", "batch_size": 64}
GPT = Experiment(**FIELDS)
TARGETS = {"statefulset": statefulset, "trainjob": trainjob, "pytorchjob": pytorchjob}


def config(*arguments, stdin=""):
    """The command in this process: its exit code and what it printed."""
    out, error, handler = io.StringIO(), io.StringIO(), signal.getsignal(signal.SIGTERM)
    try:
        with mock.patch("sys.stdin", io.StringIO(stdin)), redirect_stdout(out), redirect_stderr(error):
            code = terminal.main(command.run, arguments)
    except SystemExit as ended:  # argparse, after --help
        code = ended.code
    finally:
        signal.signal(signal.SIGTERM, handler)
    return SimpleNamespace(returncode=code, stdout=out.getvalue(), stderr=error.getvalue())


def in_a_process(*arguments, stdin=""):
    line = [sys.executable, str(ROOT / "scripts" / "config.py"), *arguments]
    where = {"cwd": ROOT, "env": os.environ | {"PYTHONPATH": str(ROOT)}}
    return subprocess.run(line, capture_output=True, text=True, input=stdin, timeout=120, **where)


@pytest.mark.parametrize(
    ("arguments", "stdin", "code"),
    [
        (("-", "--to", "deepspeed", "--gpus", "2"), "model: gpt", 0),
        (("-", "--to", "experiment"), '{"train_batch_size": "auto"}', 2),
        (("-", "--check"), "apiVersion: v1\nkind: Pod\n", 2),
        (("--help",), "", 0),
    ],
    ids=str,
)
def test_a_process_prints_the_same(arguments, stdin, code):
    said, here = in_a_process(*arguments, stdin=stdin), config(*arguments, stdin=stdin)
    assert (said.returncode, said.stdout, said.stderr) == (code, here.stdout, here.stderr)
    assert said.stdout or said.stderr


@pytest.mark.parametrize("target", TARGETS)
def test_the_yaml_is_the_objects_in_their_order(target):
    said = config("-", "--to", target, "--nodes", "2", "--gpus", "4", "--shm", "4Gi", stdin=yaml.safe_dump(FIELDS))
    assert (said.returncode, said.stderr) == (0, "")
    objects = list(yaml.safe_load_all(said.stdout))
    assert objects == json.loads(json.dumps(TARGETS[target](GPT, nodes=2, gpus=4, shm="4Gi")))
    assert "&id" not in said.stdout and [next(iter(one)) for one in objects] == ["apiVersion"] * len(objects)


def test_what_it_writes_it_finds_right_and_a_mistake_by_its_path(tmp_path):
    (tmp_path / "gpt.json").write_text(json.dumps(FIELDS))
    text = config(str(tmp_path / "gpt.json"), "--to", "statefulset").stdout
    checked = config("-", "--check", stdin=text)
    assert (checked.returncode, checked.stdout) == (0, "3 objects, no mistakes found\n")
    wrong = config("-", "--check", stdin=text.replace("restartPolicy: Always", "restartPolicy: OnFailure"))
    assert wrong.returncode == 1 and wrong.stdout.count("\n") == 1
    assert wrong.stdout.startswith("StatefulSet/gpt-fsdp spec.template.spec.restartPolicy: must be Always")
    as_list = yaml.safe_dump({"kind": "List", "apiVersion": "v1", "items": list(yaml.safe_load_all(text))})
    assert config("-", "--check", stdin=as_list).stdout == "3 objects, no mistakes found\n"


def test_the_defaults_are_those_of_training_from_the_same_file():
    """labkit.train --config: a GPT without an optimizer gets AdamW."""
    said = config("-", "--to", "pytorchjob", stdin="model: gpt\n").stdout
    assert "- --optimizer\n            - adamw" in said


@pytest.mark.skipif(not importlib.util.find_spec("labkit.cluster.slurm"), reason="labkit.cluster.slurm is not there")
def test_slurm_gets_the_text_of_its_script():
    from labkit.cluster import slurm

    given = {"nodes": 2, "gpus": 8, "time": "90"}
    given |= {"account": "abc@v100", "interface": "ib0", "checkpoints": "/scratch/me"}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    said = config("-", "--to", "slurm", *words, stdin=yaml.safe_dump(FIELDS))
    here = str(Path(sys.executable).parent)
    assert (said.returncode, said.stdout) == (0, slurm.script(GPT, path=here, **given))


TO = ("-", "--to", "statefulset")


@pytest.mark.parametrize(
    ("arguments", "stdin", "line"),
    [
        (
            ("-",),
            "",
            "give --to KIND, one of slurm, statefulset, trainjob, pytorchjob, experiment, deepspeed, ",
        ),
        (("-", "--to", "docker"), "", "invalid choice: 'docker'"),
        (("-", "--check", "--gpus", "2"), "", "--gpus needs --to KIND"),
        (("-", "--check", "--all"), "", "--all needs --to KIND"),
        ((*TO, "--time", "90"), "", "--time does not fit --to statefulset: it is for slurm"),
        ((*TO, "--account", "a"), "", "--account does not fit --to statefulset: it is for slurm"),
        (("-", "--to", "slurm", "--image", "a"), "", "--image does not fit --to slurm: it is for statefulset"),
        (("/nowhere.yaml", "--check"), "", "cannot read /nowhere.yaml: No such file or directory"),
        (TO, "a: [", "standard input is not YAML (line 1): "),
        (TO, "", "standard input is empty"),
        (TO, "- 1\n- 2", "must have the fields of one experiment"),
        (TO, "modle: gpt", "standard input: unknown key 'modle': did you mean 'model'?"),
        (TO, "steps: many", "Experiment(steps='many'): must be of type int"),
        (TO, "model: gtp", "Experiment(model='gtp'): choose from"),
        ((*TO, "--gpus", "0"), "model: gpt", "gpus=0: must be a whole number of at least 1"),
        ((*TO, "--nodes", "0"), "model: gpt", "'0' must be a whole number of at least 1"),
        ((*TO, "--nodes", "3"), "model: gpt", "batch_size=64 must be a multiple of 3"),
        ((*TO, "--name", "my\njob"), "model: gpt", r"name='my\njob': must be 1 to 52"),
        ((*TO, "--memory", "64 GB"), "model: gpt", "resources.limits.memory: must be a quantity such as 64Gi"),
        ((*TO, "--shm", "65Gi"), "model: gpt", "/dev/shm is larger than the memory limit"),
        (("-", "--check"), "", "standard input: has no Kubernetes objects"),
        (TO, "lr: 0.1\nlr: 0.2", "standard input has the key lr twice"),
        (("-", "--check"), "a: [", "standard input is not YAML (line 1): "),
        (
            ("-", "--check"),
            "!!python/object/apply:os.system [ls]",
            "standard input is not YAML (line 1): could not determine",
        ),
        (("-", "--check"), "model: gpt", "standard input: object 1 is not a Kubernetes object: it has no kind"),
        (("-", "--check"), "hello", "standard input: object 1 is not a Kubernetes object"),
        (("-", "--check"), "kind: List", "standard input: has no Kubernetes objects"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, stdin, line):
    said = config(*arguments, stdin=stdin)
    assert (said.returncode, said.stdout) == (2, "")
    assert said.stderr.startswith("lab: config: ") and line in said.stderr and said.stderr.count("\n") == 1


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / "a").write_bytes(b"\xff\xfe\x00")
    assert (
        config(str(tmp_path / "a"), "--check").stderr
        == f"lab: config: {tmp_path}/a is not text: it must be YAML or JSON\n"
    )


def test_help_names_each_option_with_its_default():
    said = config("--help").stdout
    assert said.count("(default") >= 12 and said.count("./scripts/lab config ") >= 3


def test_deepspeeds_json_and_an_experiment_are_each_others_file():
    """1e-3 is a number of JSON, and a text of YAML."""
    theirs = '{"train_batch_size": 64, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}, "gradient_clipping": 0}'
    said = config("-", "--to", "experiment", "--gpus", "2", "--all", stdin=theirs)
    assert said.returncode == 0 and "zero_optimization.stage" not in said.stderr
    assert "optimizer.params.weight_decay  0.0" in said.stderr
    short = config("-", "--to", "experiment", "--gpus", "2", stdin=theirs)
    assert short.stdout == said.stdout and "optimizer.params.weight_decay" not in short.stderr
    assert "more rows change nothing here; --all prints them\n" in short.stderr
    assert (
        "not in the file, so the lab's defaults for mlp: model='mlp', size='tiny', data='auto', schedule="
        in short.stderr
    )
    fields = yaml.safe_load(said.stdout)
    strategy = {"strategy": "ddp_bucketed"}
    assert fields == strategy | {"optimizer": "adamw", "lr": 0.001, "bucket_cap_mb": 500_000_000 * 4 / 2**20}
    back = json.loads(config("-", "--to", "deepspeed", "--gpus", "2", stdin=said.stdout).stdout)
    assert (back["train_batch_size"], back["gradient_clipping"]) == (64, 0.0)
    script = config("-", "--to", "slurm", "--gpus", "2", stdin=theirs)
    assert "--optimizer adamw" in script.stdout and "gradient_clipping" in script.stderr
    for wrong, words in NOT_JSON.items():
        refused = config("-", "--to", "experiment", stdin=wrong)
        assert refused.returncode == 2 and words in refused.stderr and refused.stderr.count("\n") == 1


def test_a_file_with_a_byte_order_mark_is_read(tmp_path):
    """As some editors write it: DeepSpeed's own, and the one that Accelerate names."""
    (tmp_path / "zero.json").write_text('\ufeff{"train_batch_size": 64, "gradient_clipping": 5e-1}', encoding="utf-8")
    behind = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "zero.json"}}
    (tmp_path / "outer.yaml").write_text(f"\ufeff{yaml.safe_dump(behind)}", encoding="utf-8")
    for name in ("zero.json", "outer.yaml"):
        said = config(str(tmp_path / name), "--to", "experiment")
        assert said.returncode == 0, said.stderr
        assert yaml.safe_load(said.stdout)["clip"] == 0.5
    assert config("-", "--to", "experiment", stdin=(tmp_path / "zero.json").read_text()).stdout == said.stdout


NOT_JSON = {
    '{"a": 1, "a": 2}': "has the key a twice",
    '{"a": 1, // b': "JSON has no comments",
    '// a comment\n{"a": 1}': "JSON has no comments",
    'ds_config = {"a": 1}': "leave out what stands before the {",
    '{"a": 1,}': "JSON has no comma before }",
    "{'a': 1}": "JSON has text in double quotes",
    '{"a": True}': "JSON writes true, false and null",
    " \n": "is empty",
}
FSDP = "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nmixed_precision: bf16\nnum_processes: 4\n"


def test_a_file_of_one_framework_becomes_that_of_another():
    """The ranks are those of the file; what a file leaves to the program is the lab's GPT."""
    arguments = config("-", "--to", "megatron", stdin=FSDP)
    assert arguments.returncode == 0 and "\n--micro-batch-size 16\n" in arguments.stdout
    assert "distributed_type" in arguments.stderr and "data-parallel-sharding-strategy" in arguments.stderr
    python = config("-", "--to", "torchtitan", "--gpus", "4", stdin=arguments.stdout)
    assert python.returncode == 0 and "mixed_precision_param='bfloat16'" in python.stdout
    back = config("-", "--to", "accelerate", "--gpus", "4", stdin=python.stdout)
    assert yaml.safe_load(FSDP).items() <= (yaml.safe_load(back.stdout) | {"fsdp_config": {"fsdp_version": 2}}).items()
    assert config("-", "--to", "horovod", stdin="model: gpt").stdout.startswith("# horovodrun -np 1")


def test_a_rate_that_the_file_has_not_is_the_default_of_the_model():
    """Which a file of Megatron-LM or torchtitan has, whatever the target; that of Accelerate has none."""
    theirs = "--micro-batch-size 4 --lr-decay-style constant"
    assert yaml.safe_load(config("-", "--to", "experiment", stdin=theirs).stdout)["lr"] == 0.003
    for target, stdin, line in (
        ("deepspeed", theirs, "optimizer.params.lr 0.003 the lab's default for gpt lr"),
        ("megatron", FSDP, "\nlr 0.003 the lab's default for gpt lr"),
        ("deepspeed", FSDP, "optimizer.params.lr 0.05 the lab's default for mlp lr"),
    ):
        rows = config("-", "--to", target, stdin=stdin).stderr.splitlines()
        assert line in "\n".join(" ".join(row.split()) for row in rows)


def test_a_file_that_makes_the_model_a_gpt_gets_the_defaults_of_a_gpt():
    theirs = FSDP + "parallelism_config: {parallelism_config_tp_size: 2, parallelism_config_dp_shard_size: 2}\n"
    said = config("-", "--to", "experiment", stdin=theirs)
    fields = yaml.safe_load(said.stdout)
    assert said.returncode == 0, said.stderr
    assert {name: fields[name] for name in ("model", "tensor", "optimizer", "lr", "warmup_steps")} == {
        "model": "gpt",
        "tensor": 2,
        "optimizer": "adamw",
        "lr": 0.003,
        "warmup_steps": 10,
    }


def test_a_model_that_is_not_the_labs_is_said():
    theirs = "--micro-batch-size 4 --lr-decay-style constant --seq-length 256"
    for target in ("megatron", "experiment"):
        said = config("-", "--to", target, stdin=theirs)
        assert said.returncode == 0 and "seq-length         256         replaced  the lab's GPT has 64" in said.stderr
        assert "replaced: 1 of these; an experiment has the lab's own GPT, and its size, depth and width" in said.stderr


def test_a_curriculum_that_the_run_does_not_finish_is_said():
    theirs = {"model": "gpt", "curriculum": "fixed_linear", "curriculum_from": 8, "curriculum_steps": 15000}
    said = config("-", "--to", "experiment", stdin=yaml.safe_dump(theirs))
    words = "the curriculum ends at step 15000, the run at step 20: its last sequences have 8 of 64 tokens\n"
    assert (said.returncode, said.stderr) == (0, words)
    said = config("-", "--to", "experiment", stdin=yaml.safe_dump(theirs | {"curriculum_steps": 20}))
    assert (said.returncode, said.stderr) == (0, "")


@pytest.mark.parametrize(
    ("target", "stdin", "line"),
    [
        (
            "horovod",
            FSDP.replace("bf16", "'no'"),
            "Experiment(strategy='fsdp'): Horovod cannot express it; it needs 'ddp_bucketed' or 'horovod'",
        ),
        ("megatron", "model: mlp", "Experiment(model='mlp'): Megatron-LM cannot express it; it needs 'gpt'"),
        ("experiment", "train_batch_size: 8", "standard input is YAML with DeepSpeed's fields: DeepSpeed reads JSON"),
        ("experiment", "[project]\nname = 3\n", "standard input is TOML without a section of torchtitan"),
        ("experiment", "lr: 3e-4", "standard input: lr: 3e-4 is text in YAML: write 3.0e-4"),
        (
            "experiment",
            "--micro-batch-sise 2 --lr-decay-style constant",
            "no field micro-batch-sise; did you mean micro-batch-size?",
        ),
        ("experiment", FSDP.replace("4", "0"), "num_processes=0: must be a whole number of at least 1"),
    ],
)
def test_a_refusal_is_one_line_and_no_table(target, stdin, line):
    said = config("-", "--to", target, stdin=stdin)
    assert (said.returncode, said.stdout) == (2, "")
    assert line in said.stderr and said.stderr.count("\n") == 1


def test_an_experiment_keeps_its_optimizer_where_the_models_default_is_another():
    """labkit.train gives a GPT without an optimizer AdamW."""
    theirs = "--micro-batch-size 4 --optimizer sgd --lr 0.05 --lr-decay-style constant --weight-decay 0"
    fields = yaml.safe_load(config("-", "--to", "experiment", stdin=theirs).stdout)
    assert fields["optimizer"] == "sgd"
    again = Experiment.from_dict(fitting(fields) | fields)
    assert (again.optimizer, again.lr, again.weight_decay) == ("sgd", 0.05, 0.0)


def test_each_refusal_has_its_line():
    said = config("-", "--to", "experiment", stdin='{"train_batch_size": "auto", "bf16": {"enabled": "auto"}}')
    lines = said.stderr.splitlines()
    assert (said.returncode, said.stdout, len(lines)) == (2, "", 2)
    assert [line.partition("=")[0] for line in lines] == [
        "lab: config: train_batch_size",
        "lab: config: bf16.enabled",
    ]


def test_machines_of_accelerate_are_nodes_of_the_cluster(tmp_path):
    """Also behind a file of DeepSpeed, whose batch is of all ranks."""
    written = config("-", "--to", "accelerate", "--nodes", "2", "--gpus", "4", stdin="model: gpt\nstrategy: fsdp\n")
    found = yaml.safe_load(written.stdout)
    assert (found["num_machines"], found["num_processes"]) == (2, 8)
    assert "--machine_rank N --main_process_ip HOST" in written.stderr
    (tmp_path / "zero.json").write_text('{"train_batch_size": 64, "gradient_clipping": 1.0}')
    theirs = {"distributed_type": "DEEPSPEED", "num_processes": 8, "num_machines": 2}
    theirs["deepspeed_config"] = {"deepspeed_config_file": "zero.json"}
    (tmp_path / "accelerate.yaml").write_text(yaml.safe_dump(theirs))
    said = config(str(tmp_path / "accelerate.yaml"), "--to", "pytorchjob")
    assert said.returncode == 0 and "gradient_clipping" in said.stderr
    assert list(yaml.safe_load_all(said.stdout)) == json.loads(
        json.dumps(pytorchjob(Experiment(clip=1.0, bucket_cap_mb=500_000_000 * 4 / 2**20), nodes=2, gpus=4))
    )
    assert "accelerate.yaml names a file of DeepSpeed: only its processes and machines are used" in said.stderr
    back = config(str(tmp_path / "accelerate.yaml"), "--to", "deepspeed")
    assert "optimizer.params.lr                   0.05       the lab's default for mlp" in back.stderr
