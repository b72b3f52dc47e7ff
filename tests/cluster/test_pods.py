"""Pods of the StatefulSet, in real containers: they train to the same weights as warm ranks, and leave nothing."""

from pathlib import Path

import pods
import pytest
import train_command

from labkit.cluster.kubernetes import USER, statefulset
from labkit.run import launch
from labkit.run.experiment import Experiment

SMALL = Experiment(model="mlp", strategy="fsdp", batch_size=12, steps=6, optimizer="adamw", lr=0.01)
MISSING = pods.missing()


@pytest.mark.slow
@pytest.mark.skipif(MISSING is not None, reason=f"pods of the StatefulSet do not run: {MISSING}")
def test_two_pods_of_the_stateful_set_train_to_the_same_weights(tmp_path):
    before = mounted()
    options = {"memory": "2Gi", "shm": "64Mi", "cpus": 1}
    pods.run(statefulset(SMALL, nodes=2, gpus=1, name="gpt", **options), tmp_path)
    assert mounted() == before
    path = tmp_path / "checkpoints" / "gpt" / "log.jsonl"
    rows = train_command.steady(path)

    log = tmp_path / "warm.jsonl"
    launch("labkit.run.training:launched", nproc=2, arguments=[*SMALL.arguments(), "--log-file", str(log)], quiet=True)
    assert len(rows) == SMALL.steps and rows == train_command.steady(log)
    assert rows[-1]["weights_sha256"]
    assert path.stat().st_uid == USER
    assert "dp 2, gloo" in (tmp_path / "pod-0.log").read_text()


def mounted():
    return [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
