"""Jobs on a real Slurm in namespaces: submit, wait, preempt, and what the log of a training says."""

import os
import sys
import time
from pathlib import Path

import pytest
from repository import ROOT

from labkit.cluster.slurm_namespaces import Refused, cluster, missing

OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY")


def start_or_skip(**options):
    """A Cluster; where none can be, the test is skipped, with the reason."""
    if reason := missing():
        pytest.skip(f"no real Slurm: {reason}")
    try:
        return cluster(**options)
    except Refused as reason:
        pytest.skip(f"no real Slurm: {reason}")


def environment():
    """What a person's shell has on the login node: torchrun on the PATH, and labkit."""
    folders = [str(Path(sys.executable).parent), os.environ["PATH"]]
    return {"PATH": os.pathsep.join(folders), "PYTHONPATH": f"{ROOT}:{ROOT}/tests/helpers"}


def submit(slurm, text, folder, *options, **variables):
    """The number of the job of an sbatch file, submitted from a folder. variables: of its environment."""
    (folder / "job.sbatch").write_text(text)
    command = ["sbatch", "--parsable", *options, "job.sbatch"]
    return slurm.run(command, cwd=folder, env=environment() | variables).stdout.strip()


def state(slurm, job):
    """PENDING, RUNNING ... as squeue says."""
    return slurm.run(["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T"]).stdout.strip()


def wait_for(holds, what, seconds=120):
    """Wait until holds() is true; what: of the message, a text or a function that gives one."""
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds} s without success for {what() if callable(what) else what}")
        time.sleep(0.1)
    return found


def wait_until_over(slurm, job, folder, seconds=200):
    """Wait for the end of a job; return its state."""

    def over():
        now = state(slurm, job)
        return now if now in OVER else None

    return wait_for(over, lambda: f"the end of job {job}:\n{told(slurm, job, folder)}", seconds)


def told(slurm, job, folder):
    """What the job printed, and what Slurm says about it, for the message of a failure."""
    outputs = [path.read_text()[-2000:] for path in folder.glob("*.out")]
    commands = (["scontrol", "show", "job", job], ["sinfo", "--Node", "--long"])
    says = [slurm.run(command, check=False).stdout for command in commands]
    log = (slurm.folder / "log" / "slurmctld.log").read_text()
    return "\n".join([*outputs, *says, log[-2000:]])


def preempt(slurm):
    """Submit a job of the partition `urgent` to all nodes; it lasts a second."""
    nodes = f"--nodes={len(slurm.names)}"
    slurm.run(["sbatch", "--partition=urgent", nodes, "--exclusive", "--output=/dev/null", "--wrap=sleep 1"])
