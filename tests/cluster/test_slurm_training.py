"""Trained by a real Slurm on two nodes: the weights of the warm ranks, preempted and requeued or not.

PYTHONPATH=.:tests/helpers python tests/cluster/test_slurm_training.py 10 7     preempt ten times; 7: the seed
"""

import itertools
import random
import re
import sys
import tempfile
import time
from pathlib import Path

import marked_samples
import pytest
from slurm_jobs import environment, preempt, start_or_skip, state, submit, told, wait_for, wait_until_over
from test_slurm import EXPERIMENTS
from train_command import steady

from labkit.cluster.slurm import script
from labkit.run import launch
from labkit.run.experiment import Experiment

pytestmark = pytest.mark.slow

SLOW = Experiment(  # long enough to be preempted, with little to compute
    strategy="fsdp", optimizer="adamw", lr=0.01, batch_size=12, steps=40, compute="emulated", block_ms=20
)
MARKED = Experiment(
    model="marked_samples:task", strategy="fsdp", precision="fp64", lr=0.01, batch_size=marked_samples.BATCH, steps=60
)
TRAINS = re.compile(r"dp (\d+), gloo")


@pytest.fixture(scope="module")
def slurm():
    with start_or_skip(nodes=2) as found:
        yield found


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """two_ranks(experiment): what the log of an unbroken run on two warm ranks says."""
    known = {}

    def log(experiment):
        if experiment not in known:
            path = tmp_path_factory.mktemp("warm") / "log.jsonl"
            arguments = [*experiment.replace(block_ms=0).arguments(), "--log-file", str(path)]
            launch("labkit.run.training:launched", nproc=2, arguments=arguments, quiet=True)
            known[experiment] = steady(path)
        return known[experiment]

    return log


def text_for(experiment, folder, **options):
    """The sbatch file of an experiment that logs into the folder."""
    options = {"nodes": 2, "checkpoint_every": 7, "save_seconds": 15} | options
    log = ["--log-file", str(folder / "log.jsonl")]
    return script(experiment, checkpoints=str(folder / "checkpoints"), options=log, **options)


def logged(folder):
    log = folder / "log.jsonl"
    return len(log.read_text().splitlines()) if log.exists() else 0


def is_left(folder):
    """Files of the script's own that are still there."""
    return list(folder.glob("*.outcome"))


def preempted(slurm, folder, moment):
    """Train SLOW, preempt it once at a moment, and wait for its end; return (state, restarts).

    moment: the number of steps that the log has by then; negative: seconds after the job begins.
    """
    job = submit(slurm, text_for(SLOW, folder), folder)
    wait_for(lambda: state(slurm, job) == "RUNNING", "the job to begin")
    if moment < 0:
        time.sleep(-moment)
    else:
        wait_for(lambda: logged(folder) >= moment, f"step {moment}")
    preempt(slurm)
    wait_for(lambda: state(slurm, job) in ("PENDING", "REQUEUED"), lambda: f"{job} to be requeued: {state(slurm, job)}")
    ended = wait_until_over(slurm, job, folder)
    shown = slurm.run(["scontrol", "show", "job", job]).stdout
    return ended, int(shown.split("Restarts=")[1].split()[0])


def wait_for_nodes(slurm, job, folder, count):
    """Wait until the requeued job trains on so many nodes, and has logged some steps there."""
    (output,) = folder.glob("*.out")
    attempts = len(TRAINS.findall(output.read_text()))

    def trains():
        return str(count) in TRAINS.findall(output.read_text())[attempts:]

    wait_for(trains, lambda: f"{count} nodes:\n{told(slurm, job, folder)}")
    enough = logged(folder) + 3
    wait_for(lambda: logged(folder) >= enough, "three steps")


def test_slurm_accepts_the_files_of_all_experiments(slurm, tmp_path):
    for name, experiment in EXPERIMENTS.items():
        for options in ({"ranks": 2}, {"gpus": 2, "account": "abc@v100", "partition": "lab,urgent"}):
            (tmp_path / "job.sbatch").write_text(script(experiment, nodes=2, **options))
            done = slurm.run(["sbatch", "--test-only", "job.sbatch"], cwd=tmp_path, check=False)
            assert done.returncode == 0 and "to start at" in done.stderr, (name, options, done.stderr)


def test_preempted_and_requeued_it_ends_as_the_unbroken_run(slurm, two_ranks, tmp_path):
    assert preempted(slurm, tmp_path, random.randrange(1, SLOW.steps - 10)) == ("COMPLETED", 1)
    (output,) = tmp_path.glob("*.out")
    assert "stopped after step" in output.read_text() and "resumes after step" in output.read_text()
    assert steady(tmp_path / "log.jsonl") == two_ranks(SLOW)
    assert is_left(tmp_path) == []


def test_preempted_before_it_trains_it_returns_to_the_queue(slurm, tmp_path):
    job = submit(slurm, text_for(SLOW, tmp_path), tmp_path)
    wait_for(lambda: state(slurm, job) == "RUNNING" and len(slurm.processes()) >= 5, "its torchruns")
    preempt(slurm)
    wait_for(lambda: state(slurm, job) in ("PENDING", "REQUEUED"), lambda: f"{job} to be requeued: {state(slurm, job)}")
    slurm.run(["scancel", job])
    assert not (tmp_path / "log.jsonl").exists()


def test_nodes_come_and_go_and_each_sample_is_used_once_an_epoch(slurm, tmp_path):
    """1, 2, 1 nodes: one comes back, and one dies, which Slurm finds out by itself. As one process."""
    wait_for(lambda: not slurm.run(["squeue", "--noheader"]).stdout, "an empty cluster")
    slurm.run(["scontrol", "update", "NodeName=node1", "State=DRAIN", "Reason=away"])
    text = text_for(MARKED, tmp_path, nodes=(1, 2), grow_seconds=1)
    job = submit(slurm, text, tmp_path, **{marked_samples.DELAY: "0.1"})
    try:
        wait_for(lambda: logged(tmp_path) >= 3, "step 3")
        slurm.run(["scontrol", "update", "NodeName=node1", "State=RESUME"])
        wait_for_nodes(slurm, job, tmp_path, 2)
        slurm.kill_node(1)
        wait_for_nodes(slurm, job, tmp_path, 1)
        assert wait_until_over(slurm, job, tmp_path) == "COMPLETED"
    finally:
        slurm.start_node(1)
        slurm.run(["scontrol", "update", "NodeName=node1", "State=RESUME"], check=False)
    (output,) = tmp_path.glob("*.out")
    # A job may start before its second node is free, and then grows once more.
    numbers = [number for number, _ in itertools.groupby(TRAINS.findall(output.read_text()))]
    assert numbers == ["1", "2", "1"], output.read_text()
    rows = steady(tmp_path / "log.jsonl")
    marked_samples.check_each_sample_once_an_epoch(rows)
    alone = [*MARKED.arguments(), "--log-file", str(tmp_path / "alone.jsonl")]
    launch("labkit.run.training:launched", nproc=1, arguments=alone, quiet=True)
    marked_samples.check_equal(rows, steady(tmp_path / "alone.jsonl"))


def test_a_cancelled_job_stays_cancelled(slurm, tmp_path):
    job = submit(slurm, text_for(SLOW, tmp_path), tmp_path)
    wait_for(lambda: state(slurm, job) == "RUNNING", "the job to begin")
    slurm.run(["scancel", job])
    wait_for(lambda: state(slurm, job) == "CANCELLED", lambda: f"its end: {state(slurm, job)}")
    assert slurm.processes() == []


def test_an_unknown_interface_is_said_in_one_line(slurm, tmp_path):
    job = submit(slurm, text_for(SLOW, tmp_path, interface="ib7"), tmp_path)
    assert wait_until_over(slurm, job, tmp_path) == "FAILED"
    (output,) = tmp_path.glob("*.out")
    assert output.read_text() == "node0 has no network interface ib7\n"


def test_more_nodes_or_gpus_than_there_are_is_slurms_own_line(slurm, tmp_path):
    for options in ({"nodes": 3}, {"gpus": 3}):
        (tmp_path / "job.sbatch").write_text(text_for(SLOW, tmp_path, **options))
        done = slurm.run(["sbatch", "job.sbatch"], cwd=tmp_path, env=environment(), check=False)
        assert done.returncode and done.stderr.count("\n") == 1
        assert done.stderr.startswith("sbatch: error: Batch job submission failed: ")


def soak(times, seed):
    """Preempt SLOW at random moments, also before it trains; print a line for each."""
    draw = random.Random(seed)
    folder = Path(tempfile.mkdtemp())
    arguments = [*SLOW.replace(block_ms=0).arguments(), "--log-file", str(folder / "log.jsonl")]
    launch("labkit.run.training:launched", nproc=2, arguments=arguments, quiet=True)
    unbroken = steady(folder / "log.jsonl")
    equal = 0
    with start_or_skip(nodes=2) as slurm:
        for number in range(times):
            place = Path(tempfile.mkdtemp())
            moment = draw.choice([-draw.uniform(0, 8), draw.randrange(1, SLOW.steps - 5)])
            ended = preempted(slurm, place, moment)
            same = steady(place / "log.jsonl") == unbroken
            equal += same
            when = f"{-moment:.1f} s after the start" if moment < 0 else f"after step {moment}"
            print(f"{number + 1}: preempted {when}: {ended}, {'equal' if same else 'DIFFERENT'}", flush=True)
    print(f"{equal} of {times} equal to the unbroken run")
    return equal == times


if __name__ == "__main__":
    sys.exit(not soak(*map(int, sys.argv[1:])))
