"""launch(..., on="slurm"): the same Run from the nodes of a real Slurm, and no job and no process left."""

import os
import signal
import threading
import time

import pytest
from slurm_jobs import start_or_skip, wait_for

from labkit.cluster.slurm import Slurm
from labkit.run import LaunchError, launch
from labkit.run.slurm_client import SlurmError

pytestmark = pytest.mark.slow

QUICK = {"timeout": 100, "collective_timeout": 30}


@pytest.fixture(scope="module")
def slurm():
    with start_or_skip(nodes=2) as found:
        yield found


@pytest.fixture(autouse=True)
def nothing_stays(slurm, tmp_path, monkeypatch):
    """No job and no process of one is left after 5 s."""
    monkeypatch.chdir(tmp_path)
    yield
    wait_for(lambda: jobs(slurm) == [] and slurm.processes() == [], lambda: f"the end of {jobs(slurm)}", 5)


def jobs(slurm):
    return slurm.run(["squeue", "--noheader", "--format=%i %T"]).stdout.splitlines()


def refused(target="pass", **options):
    """The line of a launch that Slurm does not start."""
    with pytest.raises(SlurmError) as caught:
        launch(target, on=options.pop("on", "slurm"), quiet=True, **QUICK, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_records_lines_progress_and_an_error_of_the_other_node(slurm, tmp_path, capsys):
    source = (
        "import socket\nx = torch.full((4,), rank + 1.0)\ncomm.all_reduce(x)\n"
        "record(sum=x[0].item(), node=node, host=socket.gethostname(), threads=torch.get_num_threads())\n"
        "print('added up')\nprogress(1, 2)\n"
        "comm.barrier()\nif rank == 1:\n    raise ValueError('no')\ncomm.all_reduce(x)"
    )
    with pytest.raises(LaunchError) as caught:
        launch(source, on="slurm", nodes=2, nproc=1, **QUICK)
    assert str(caught.value).startswith("rank 1 raised ValueError: no")
    run = caught.value.run
    assert (run.nodes, run.nproc, run.world_size, run.device) == (2, 1, 2, "cpu")
    assert run.command == f"sbatch {run.folder}/job.sbatch" and run.folder.parent == tmp_path
    assert "[rank 0] added up" in capsys.readouterr().out
    assert run.records["threads"].tolist() == [1, 1]  # more would add up in another order
    assert run.records[["rank", "sum", "node", "host"]].values.tolist() == [[0, 3.0, 0, "node0"], [1, 3.0, 1, "node1"]]
    assert [event["step"] for event in run.events[0] if event["kind"] == "progress"] == [1]


def test_an_interrupted_cell_leaves_no_job_and_no_process(slurm, capsys):
    def interrupt():
        wait_for(lambda: any("RUNNING" in line for line in jobs(slurm)), "the job")
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        launch("import time; time.sleep(100)", on="slurm", nodes=2, nproc=1, **QUICK)
    assert "[launch] interrupted: all 2 ranks have ended" in capsys.readouterr().out
    wait_for(lambda: jobs(slurm) == [] and slurm.processes() == [], "its end", 5)


def test_the_timeout_cancels_the_job(slurm):
    with pytest.raises(LaunchError, match="stopped after 1 s, the limit of this launch"):
        launch("import time; time.sleep(100)", on="slurm", nodes=2, nproc=1, quiet=True, timeout=1)


def test_waiting_in_the_queue_and_cancelled_there(slurm, capsys):
    hold = ["sbatch", "--parsable", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 100"]
    number = slurm.run(hold).stdout.strip()

    def cancel():
        waiting = wait_for(
            lambda: [line for line in jobs(slurm) if "PENDING" in line and not line.startswith(f"{number} ")],
            "the job to wait",
        )
        time.sleep(1.5)
        slurm.run(["scancel", waiting[0].split()[0]])

    thread = threading.Thread(target=cancel)
    thread.start()
    try:
        with pytest.raises(SlurmError, match=r"^Slurm job \d+ was cancelled while it waited in the queue$"):
            launch("pass", on="slurm", nodes=2, nproc=1, **QUICK)
    finally:
        thread.join()
        slurm.run(["scancel", number])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 and lines[0].startswith("[launch] Slurm job ") and " waits in the queue (" in lines[0]


def test_more_nodes_or_gpus_than_there_are_is_slurms_own_line(slurm):
    for options in ({"nodes": 3, "nproc": 1}, {"nodes": 2, "nproc": 3, "device": "cuda"}):
        assert refused(**options).startswith("sbatch: error: Batch job submission failed: ")


def test_a_folder_that_a_node_cannot_read_is_named_with_the_node(slurm, tmp_path):
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    for node in (0, 1):
        slurm.run_on_node(node, ["mount", "-t", "tmpfs", "tmpfs", str(hidden)])
        try:
            line = refused(on=Slurm(folder=str(hidden)), nodes=2, nproc=1)
        finally:
            slurm.run_on_node(node, ["umount", str(hidden)])
        if node == 0:  # the batch script itself is not there
            assert f"can node[0-1] read and write {hidden}/labkit-" in line
        else:
            assert line.startswith(f"node1 cannot read {hidden}/labkit-") and line.endswith("/job.json")


def test_an_interface_that_a_node_lacks_is_named(slurm):
    line = refused(on=Slurm(interface="ib7"), nodes=2, nproc=1)
    assert line in [f"node{node} has no network interface ib7" for node in (0, 1)]
