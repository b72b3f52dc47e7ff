"""sbatch files: what a person reads in them, and what is refused before one is written."""

import re
import shlex
import subprocess

import pytest

from labkit.cluster.slurm import Slurm, launch_script, script, seconds
from labkit.run import LaunchError, launch
from labkit.run.experiment import Experiment
from labkit.run.options import read
from labkit.run.slurm_client import SlurmError

GPT = Experiment(model="gpt", strategy="fsdp", optimizer="adamw", lr=3e-4, batch_size=48, steps=300)
# One of each kind; --test-only asks Slurm about their scripts.
EXPERIMENTS = {
    "mlp": Experiment(batch_size=48),
    "gpt fsdp": GPT,
    "gpt with another optimizer": GPT.replace(optimizer="sgd", warmup_steps=5, schedule="cosine"),
    "resnet": Experiment(model="resnet", strategy="zero1", batch_size=48, precision="bf16"),
    "zero2": Experiment(strategy="zero2", batch_size=48, accumulation=2, precision="fp16"),
    "compressed": Experiment(strategy="ddp_naive", batch_size=48, comm_hook="powersgd"),
    "diloco": Experiment(strategy="diloco", every=4, batch_size=48, lr=0.1),
    "torch": Experiment(strategy="torch_ddp", batch_size=48, bucket_cap_mb=0.5),
    "tensor": GPT.replace(tensor=2, sequence_parallel="on"),
    "pipeline": GPT.replace(pipeline=2, strategy="ddp_naive", accumulation=4),
    "experts": GPT.replace(experts=4, expert=2, strategy="ddp_bucketed"),
    "emulated": Experiment(compute="emulated", block_ms=2.5, batch_size=48, seed=7),
}


def options_in(text):
    """The #SBATCH options of a file, as {name: value}."""
    words = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]
    return dict(word.partition("=")[::2] for word in words)


def training_in(text):
    """The arguments of labkit.train in a file."""
    (line,) = re.findall(r"-m -- labkit\.train (.*) &$", text, flags=re.MULTILINE)
    return shlex.split(line)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_labkit_train_reads_the_experiment_back(name):
    assert read(EXPERIMENTS[name].arguments())[0] == EXPERIMENTS[name]
    text = script(EXPERIMENTS[name], nodes=2, ranks=2, checkpoints="/data/my runs/it's")
    experiment, options = read(training_in(text))
    assert experiment == EXPERIMENTS[name] and options.checkpoint_dir == "/data/my runs/it's"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_bash_can_parse_it(name, tmp_path):
    for text in (
        script(EXPERIMENTS[name], nodes=(1, 2), ranks=4, interface="ib0", options=["--metrics", "a b"]),
        launch_script(Slurm(interface="ib0"), tmp_path / "it's a job.json", "/tmp", 2, 2, 0, 60.0, "/usr/bin/python3"),
    ):
        done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        assert all(len(line) <= 100 for line in text.splitlines() if line.startswith("#"))


def test_the_options_of_sbatch():
    where = {"partition": "a100", "account": "abc@v100"}
    text = script(GPT, nodes=2, gpus=8, time="2-12", checkpoint_every=25, save_seconds=120, **where)
    assert options_in(text) == {
        "job-name": "gpt-fsdp",
        "partition": "a100",
        "account": "abc@v100",
        "nodes": "2",
        "ntasks-per-node": "1",
        "gpus-per-node": "8",
        "exclusive": "",
        "time": "2-12",
        "output": "gpt-fsdp-%j.out",
        "open-mode": "append",
        "requeue": "",
        "signal": "TERM@120",
    }
    assert text.startswith("#!/bin/bash\n#SBATCH ")
    assert "--nproc-per-node 8" in text and "--shutdown-timeout 120" in text
    _, options = read(training_in(text))
    assert (options.checkpoint_dir, options.checkpoint_every) == ("runs/gpt-fsdp", 25)
    on_cpus = script(GPT, nodes=(2, 3), ranks=4, name="a")
    assert not any(word in on_cpus for word in ("gpus", "--account", "SBATCH --partition", "IFNAME"))
    assert (
        options_in(on_cpus)["nodes"] == "2-3"
        and "ntasks-per-node" not in options_in(on_cpus)
        and "--nproc-per-node 4" in on_cpus
    )
    assert "export GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0" in script(GPT, interface="ib0")


def test_torchrun_is_that_of_the_path_or_its_lack_is_one_line(tmp_path):
    tools = tmp_path / "my tools"
    tools.mkdir()
    for name, text in {"torchrun": "", "scontrol": "", "srun": "command -v torchrun"}.items():
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    usual = {"cwd": tmp_path, "env": {"PATH": "/usr/bin:/bin"}, "capture_output": True, "text": True}
    found = subprocess.run(["bash"], input=script(GPT, path=str(tools)), **usual)
    assert found.stdout == f"{tools}/torchrun\n", found.stderr
    lost = subprocess.run(["bash"], input=script(GPT), **usual)
    assert lost.returncode == 1 and lost.stderr.count("\n") == 1
    assert lost.stderr.endswith(" cannot find torchrun: activate .venv, then sbatch\n")


def test_a_model_from_a_module_has_a_name_for_slurm():
    mine = Experiment(model="my.models:small", batch_size=48)
    assert options_in(script(mine))["job-name"] == "my.models-small-ddp_bucketed"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90", 5400), ("1:30", 90), ("1:30:00", 5400), ("2-12", 216_000), ("1-0:30", 88_200), ("1-2:3:4", 93_784)],
)
def test_a_time_limit_in_sbatchs_formats(text, expected):
    assert seconds(text) == expected


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"nodes": 0}, "nodes=0: must be a whole number of at least 1"),
        ({"nodes": 2.0}, "nodes=2.0: must be a whole number of at least 1, or a pair (fewest, most)"),
        ({"nodes": (2, 1)}, "nodes=(2, 1): must be a whole number of at least 1, or a pair (fewest, most)"),
        ({"nodes": True}, "nodes=True: must be a whole number"),
        ({"gpus": -1}, "gpus=-1: must be a whole number of at least 0"),
        ({"ranks": 0}, "ranks=0: must be a whole number of at least 1"),
        ({"nodes": 5}, "batch_size=48 must be a multiple of 5"),
        ({"nodes": (1, 5)}, "batch_size=48 must be a multiple of 5"),
        ({"time": "soon"}, "time='soon': must be minutes, hours:minutes:seconds or days-hours"),
        ({"time": 90}, "time=90: must be minutes"),
        ({"time": "0"}, "time='0' leaves no time to train: must exceed save_seconds=60"),
        ({"time": "1", "save_seconds": 60}, "time='1' leaves no time to train"),
        ({"save_seconds": 0}, "save_seconds=0: must be a whole number of at least 1"),
        ({"grow_seconds": 0}, "grow_seconds=0: must be a whole number of at least 1"),
        ({"name": "two\nlines"}, r"name='two\nlines': must be 1 to 64 letters"),
        ({"name": "a b"}, "name='a b': must be 1 to 64 letters"),
        ({"partition": "a;b"}, "partition='a;b': must be a name that Slurm knows; `sinfo` lists them"),
        ({"account": "two\nlines"}, r"account='two\nlines': must be a name that Slurm knows"),
        ({"interface": "ib0; reboot"}, "interface='ib0; reboot': must be the name of a network interface"),
        ({"interface": "a-name-that-is-too-long"}, "must be the name of a network interface"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(wrong, message):
    with pytest.raises(ValueError) as caught:
        script(GPT, **wrong)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"on": "slrum"}, "on='slrum': must be \"slurm\""),
        ({"on": "slurm", "nodes": 0}, "nodes=0: must be a whole number of at least 1"),
        ({"on": "slurm", "link_mbit": 100}, 'not with on="slurm"'),
        ({"on": "slurm", "device": "tpu"}, "device='tpu'"),
        ({"on": Slurm(folder="/no/such/folder")}, "folder='/no/such/folder': no such folder on this machine"),
    ],
)
def test_a_launch_that_cannot_be_is_refused_in_one_line(wrong, message):
    with pytest.raises(ValueError) as caught:
        launch("pass", **wrong)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_machine_without_slurm(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SlurmError) as caught:
        launch("pass", on="slurm", quiet=True)
    assert str(caught.value).startswith("cannot find sbatch: run this on the login node of a Slurm cluster")
    assert "\n" not in str(caught.value) and not isinstance(caught.value, LaunchError)
