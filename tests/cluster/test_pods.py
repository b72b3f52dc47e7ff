"""Pods of the StatefulSet, in real containers: they train as warm ranks do, and leave nothing."""

import re
from pathlib import Path

import marked_samples
import pods
import pytest
import train_command

from labkit.cluster.kubernetes import USER, statefulset
from labkit.run import launch
from labkit.run.experiment import Experiment

SMALL = Experiment(model="mlp", strategy="fsdp", batch_size=12, steps=6, optimizer="adamw", lr=0.01)
MARKED = Experiment(
    model="marked_samples:task", strategy="fsdp", precision="fp64", lr=0.01, batch_size=marked_samples.BATCH, steps=160
)
MISSING = pods.missing()


def run_pods(folder, experiment, nodes, changes=None, variables=(), **options):
    """Run pods of the experiment, with these changes; return (their checkpoints, the log of pod 0)."""
    options |= {"memory": "2Gi", "shm": "64Mi", "cpus": 1}
    before = mounted()
    objects = statefulset(experiment, nodes=nodes, gpus=1, name="gpt", **options)
    pods.run(objects, folder, changes, variables)
    assert mounted() == before
    return folder / "checkpoints" / "gpt", (folder / "pod-0.log").read_text()


def warm(folder, experiment, nproc):
    """The rows of the log of an unbroken run on warm ranks."""
    log = folder / "warm.jsonl"
    arguments = [*experiment.arguments(), "--log-file", str(log)]
    launch("labkit.run.training:launched", nproc=nproc, arguments=arguments, quiet=True)
    return train_command.steady(log)


@pytest.mark.slow
@pytest.mark.skipif(MISSING is not None, reason=f"pods of the StatefulSet do not run: {MISSING}")
def test_two_pods_of_the_stateful_set_train_to_the_same_weights(tmp_path):
    saved, said = run_pods(tmp_path, SMALL, 2)
    rows = train_command.steady(saved / "log.jsonl")
    assert len(rows) == SMALL.steps and rows == warm(tmp_path, SMALL, 2)
    assert rows[-1]["weights_sha256"]
    assert (saved / "log.jsonl").stat().st_uid == USER
    assert "dp 2, gloo" in said


@pytest.mark.slow
@pytest.mark.skipif(MISSING is not None, reason=f"pods that come and go do not run: {MISSING}")
def test_pods_come_and_go_and_each_sample_is_used_once_an_epoch(tmp_path):
    """1, 2, 3 pods, one is lost without a word, one is deleted as by kubectl scale: as one process."""
    changes = [["start", 0, 1], ["start", 1, 2], ["start", 2, 3], ["kill", 2, 2], ["stop", 1, 1]]
    variables = {"PYTHONPATH": f"{pods.ROOT}:{pods.ROOT}/tests/helpers", marked_samples.DELAY: "0.1"}
    variables["PET_RDZV_CONF"] = "last_call_timeout=2,keep_alive_interval=1"  # seconds; used by a range of pods
    saved, said = run_pods(tmp_path, MARKED, (1, 3), changes, variables, checkpoint_every=5)
    assert re.findall(r"dp (\d), gloo", said) == ["1", "2", "3", "2", "1"], said
    rows = train_command.steady(saved / "log.jsonl")
    marked_samples.check_each_sample_once_an_epoch(rows)
    marked_samples.check_equal(rows, warm(tmp_path, MARKED, 1))


def mounted():
    return [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
