"""A real Slurm in namespaces: it says what a real one says, and leaves nothing behind however it ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from repository import ROOT
from slurm_jobs import start_or_skip, wait_for

from labkit.cluster import slurm_namespaces
from labkit.cluster.slurm_namespaces import Refused, cluster, switches

OWNER = """
import sys, time
from labkit.cluster.slurm_namespaces import cluster
slurm = cluster(nodes=2)
slurm.run(["sbatch", "--output=/dev/null", "--wrap=sleep 600"])
print(slurm.folder, slurm.first, flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def real():
    """Skips, with the reason, where no Slurm can run in namespaces."""
    start_or_skip(nodes=1).close()


def interfaces():
    return sorted(psutil.net_if_addrs())


def test_the_nodes_their_gpus_and_leaves_are_slurms(real):
    before, path = interfaces(), os.environ["PATH"]
    with cluster(nodes=3, cpus=4, gpus=2, leaf=2, link_mbit=100) as slurm:
        assert interfaces() == before  # nothing outside is changed
        told = slurm.run(["sinfo", "--noheader", "--Node", "--partition=lab", "--format=%N %c %G %t"]).stdout
        assert told.split("\n")[:-1] == [f"node{node} 4 gpu:2 idle" for node in range(3)]
        assert "leaf1" in slurm.run(["scontrol", "show", "topology"]).stdout
        # By the wrappers on the PATH, as a notebook or a person calls it.
        done = subprocess.run(["srun", "--nodes=3", "hostname"], capture_output=True, text=True, timeout=60)
        assert sorted(done.stdout.split()) == ["node0", "node1", "node2"], done.stderr
        assert slurm.run_on_node(2, ["hostname"]).stdout == "node2\n"
        assert "10.77.0.102" in slurm.run_on_node(2, ["ip", "address", "show", "eth0"]).stdout
        gpus = slurm.run(["srun", "--gpus-per-node=1", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES"]).stdout
        assert gpus == "0\n"
        folder = slurm.folder
    assert not folder.exists() and os.environ["PATH"] == path and interfaces() == before


def test_a_killed_node_is_down_and_can_be_started_again(real):
    with cluster(nodes=2) as slurm:
        slurm.run(["sbatch", "--output=/dev/null", "--nodes=2", "--wrap=srun sleep 600"])
        wait_for(lambda: len(slurm.processes()) >= 4, "the job's processes")  # srun, bash, two sleeps
        slurm.kill_node(1)
        assert list(slurm_namespaces.names(slurm.processes()).values()).count("sleep") <= 1
        slurm.start_node(1)
        answer = slurm.run_on_node(1, ["hostname"]).stdout
        assert answer == "node1\n"


def test_a_process_that_ends_meanwhile_is_left_out():
    child = subprocess.Popen(["sleep", "600"])
    process = psutil.Process(child.pid)
    assert slurm_namespaces.names([process]) == {process: "sleep"}
    child.kill()
    child.wait()
    assert slurm_namespaces.names([process]) == {}


@pytest.mark.parametrize("how", ["interrupt", "kill"])
def test_nothing_is_left(real, how):
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    folder, first = owner.stdout.readline().split()
    all_of_it = [psutil.Process(int(first)), *psutil.Process(int(first)).children(recursive=True)]
    assert {"slurmctld", "munged", "slurmd"} <= {*slurm_namespaces.names(all_of_it).values()}
    owner.send_signal({"interrupt": signal.SIGINT, "kill": signal.SIGKILL}[how])
    owner.wait(timeout=60)
    assert psutil.wait_procs(all_of_it, timeout=20)[1] == []
    wait_for(lambda: not Path(folder).exists(), "the folder to go")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"nodes": 0}, "nodes=0: must be a whole number of at least 1"),
        ({"nodes": 65}, "nodes=65: must be at most 64"),
        ({"gpus": -1}, "gpus=-1"),
        ({"cpus": 0.5}, "cpus=0.5"),
        ({"leaf": 0}, "leaf=0: must be a whole number of at least 1, or None"),
        ({"link_mbit": 0}, "link_mbit=0"),
    ],
)
def test_what_cannot_be_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        cluster(**wrong)


def test_a_missing_program_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(slurm_namespaces, "program", lambda name: None if name == "munged" else name)
    with pytest.raises(Refused, match=r"cannot find munged \(Debian, Ubuntu: apt install slurm-wlm munge\)"):
        cluster()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(Refused, match="needs Linux and root"):
        cluster()


def test_leaves():
    assert switches(3, 3) == ["SwitchName=leaf0 Nodes=node[0-2]"]
    assert switches(5, 2) == [
        "SwitchName=leaf0 Nodes=node[0-1]",
        "SwitchName=leaf1 Nodes=node[2-3]",
        "SwitchName=leaf2 Nodes=node[4-4]",
        "SwitchName=root Switches=leaf[0-2]",
    ]
