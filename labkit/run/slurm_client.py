"""launch(..., on="slurm"): the client of one job, as client.py is of the warm agent.

    notebook                               login node        nodes
    launch -> job.json, job.sbatch      -> sbatch       ->   srun -> torchrun -> ranks
    shows rank-0.log, rank-0.jsonl ...  <----------- a folder that all of them see
    looks whether the job has ended     <- squeue
    Ctrl-C, timeout                     -> scancel      ->   SIGTERM, then SIGKILL

Slurm's commands are those on the PATH. The job runs as the current user, with this environment.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

from labkit.cluster.network_namespaces import Link
from labkit.cluster.slurm import Slurm, launch_script
from labkit.run.client import STOP_LIMIT, AgentError
from labkit.run.job import choose_device

COMMANDS = ("sbatch", "squeue", "scancel")
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT")
LIVING = (*WAITING, "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT")
POLL = 0.1  # seconds between looks at the queue; the pause grows to LONGEST_POLL
LONGEST_POLL = 5.0
GRACE = 1.0  # seconds between scancel's SIGTERM and its SIGKILL
TELL = 1.0  # seconds in the queue after which a line says so


class SlurmError(AgentError):
    """Raised where Slurm does not run a job; the message is one line."""


def describe(on, nodes, device, link):
    """Return the job's part about Slurm: {"on": fields of a Slurm, "nodes", "device"}.

    on: "slurm" or a Slurm. Raises ValueError.
    """
    if on != "slurm" and not isinstance(on, Slurm):
        raise ValueError(f'on={on!r}: must be "slurm", a labkit.cluster.slurm.Slurm, or None')
    if type(nodes) is not int or nodes < 1:
        raise ValueError(f"nodes={nodes!r}: must be a whole number of at least 1")
    if Link(*link) != Link():
        raise ValueError(
            'link_mbit, link_ms and link_mtu are for nodes on this machine: not with on="slurm"'
        )
    slurm = Slurm() if on == "slurm" else on
    folder = Path(slurm.folder or "").absolute()
    if not folder.is_dir():
        raise ValueError(f"folder={slurm.folder!r}: no such folder on this machine")
    # The GPUs are not those of this machine, so Slurm counts them.
    device = device if device == "cuda" else choose_device("cpu" if device == "auto" else device, 1)
    fields = asdict(replace(slurm, folder=str(folder)))
    return {"on": fields, "nodes": nodes, "device": device}


class SlurmClient:
    """Owner of one job. why: a sentence about an end that no rank reports, or None."""

    here = False  # the ranks are not processes of this machine

    def __init__(self, run, limit, quiet):
        self.slurm = Slurm(**run.job["on"])
        self.folder = run.folder  # its name is the name of the job
        self.limit = limit
        self.quiet = quiet
        self.job = "?"
        self.why = None
        self.next_look = 0.0
        self.pause = POLL

    def start(self, job_path, nproc, command):
        """Submit the job and wait until it leaves the queue. Raises SlurmError.

        command: as AgentClient.start; a job always uses a plain torchrun.
        """
        job = json.loads(Path(job_path).read_text())
        gpus = nproc if job["device"] == "cuda" else 0
        text = launch_script(
            self.slurm, job_path, job["cwd"], job["nodes"], nproc, gpus, self.limit, sys.executable
        )
        (self.folder / "job.sbatch").write_text(text)
        self.job = self.submit()
        self.wait_in_queue()

    def submit(self):
        """Submit job.sbatch; return the number of the job, as text."""
        for name in COMMANDS:
            if not shutil.which(name):
                raise SlurmError(
                    f"cannot find {name}: run this on the login node of a Slurm cluster, or in "
                    "`with labkit.cluster.slurm_namespaces.cluster():`"
                )
        # The ranks import the labkit that this process has imported.
        paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        log = self.folder / "job.log"
        done = run("sbatch", "--parsable", f"--output={log}", self.folder / "job.sbatch", env=env)
        if done.returncode:
            words = done.stderr.strip().splitlines() or ["sbatch failed"]
            raise SlurmError(words[-1])
        number, _, _ = done.stdout.strip().partition(";")  # ;cluster
        return number

    def look(self):
        """Return (state, reason, nodes) of the job, as squeue reports them; None if unknown."""
        which = ["--states=all", f"--name={self.folder.name}"]
        done = run("squeue", "--noheader", *which, "--format=%T|%r|%N")
        lines = done.stdout.strip().splitlines()
        return tuple(lines[0].split("|")) if lines else None

    def wait_in_queue(self):
        begun = time.monotonic()
        told = self.quiet
        pause = POLL
        while (found := self.look()) and found[0] in WAITING:
            if not told and time.monotonic() - begun > TELL:
                told = True
                print(f"[launch] Slurm job {self.job} waits in the queue ({found[1]})", flush=True)
            time.sleep(pause)
            pause = min(LONGEST_POLL, 1.2 * pause)
        if found and found[0] == "CANCELLED" and not (self.folder / "job.log").exists():
            raise SlurmError(f"Slurm job {self.job} was cancelled while it waited in the queue")

    def poll(self, seconds):
        """Return the exit status of torchrun, or None if the job still runs after `seconds`."""
        time.sleep(seconds)
        status = self.folder / "status"
        if status.exists() and (text := status.read_text().strip()):
            return int(text)
        if time.monotonic() < self.next_look:
            return None
        found = self.look()
        self.pause = min(LONGEST_POLL, 1.5 * self.pause)
        self.next_look = time.monotonic() + self.pause
        if found is None or found[0] in LIVING:
            return None
        if status.exists():  # it ended between the two looks
            return None
        self.conclude(*found)
        return 1

    def conclude(self, state, reason, nodes):
        """Say why the job ended without a status. Raises SlurmError if no rank had begun."""
        refused = self.folder / "refused"
        words = refused.read_text().strip() if refused.exists() else ""
        if words:
            raise SlurmError(" ".join(words.split("\n")[0].split()))
        if state == "FAILED" and not (self.folder / "job.log").exists():
            raise SlurmError(
                f"Slurm job {self.job} failed at once: can {nodes} read and write {self.folder}? "
                "Pass on=Slurm(folder=...), a folder that all nodes share"
            )
        self.why = f"Slurm ended job {self.job}: {state}" + (
            f" ({reason})" if reason not in ("None", "") else ""
        )

    def stop(self):
        """Cancel the job and wait until it is gone."""
        # By name: an interrupt may have come before sbatch has said the number.
        name = f"--name={self.folder.name}"
        deadline = time.monotonic() + STOP_LIMIT
        kill_at = time.monotonic() + GRACE
        run("scancel", name)
        while (found := self.look()) and found[0] in LIVING:
            now = time.monotonic()
            if now > kill_at:
                run("scancel", "--signal=KILL", "--full", name)
                kill_at = now + GRACE
            if now > deadline:
                print(f"[launch] Slurm job {self.job} is cancelled, and not yet gone: {found[0]}")
                return
            time.sleep(POLL)


def run(command, *words, env=None):
    """Run one of Slurm's commands; return its CompletedProcess, with text."""
    return subprocess.run(
        [command, *map(str, words)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=env,
        # Ctrl-C must not reach it: the job would be submitted, and its number lost
        start_new_session=True,
    )
