"""The warm agent: a process that has imported torch and forks the ranks of one job after another.

    kernel                         agent                     job                ranks
    +----------+  {"job": ...}     +----------+              +--------------+       +--------+
    |          | ----------------> |  torch   |  fork, once  | torchelastic | fork  | rank 0 |
    |   your   |  {"stop": job}    |    is    |    a job     |  starts and  | ----> +--------+
    | notebook | <---------------- | imported | -----------> |   watches    |       | rank 1 |
    +----------+  {"ended": ...}   +----------+              +--------------+       +--------+

Importing torch is nearly the whole cost of a bare `torchrun`. The agent pays it once instead of
once per process. The agent only imports, because a fork needs CUDA uninitialised and OpenMP unused;
the job process runs torchrun's own launcher. torch imports some modules only when a process makes
its first optimizer; the agent imports them after the first job that did so.

Nothing outlives the notebook. When the kernel dies, its pipe closes, and the agent kills all its
descendants. It is their subreaper, so orphans become its children. If the agent itself is killed,
the system kills the job, and then the ranks (PR_SET_PDEATHSIG, Linux).
"""

import ctypes
import fcntl
import gc
import importlib
import json
import os
import selectors
import shutil
import signal
import sys
import time
import traceback
from contextlib import contextmanager
from multiprocessing import popen_fork
from pathlib import Path

import psutil
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from labkit.run import node_agents, worker
from labkit.torch_private import shorten_rendezvous

PR_SET_CHILD_SUBREAPER = 36
GRACE = 1.0  # seconds between SIGTERM and SIGKILL
KILL_LIMIT = 10.0  # seconds within which killed processes must be gone, also on a busy machine
POLL = 0.02  # seconds


def serve():
    """Run jobs until the kernel closes the pipe."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # from here on the loop notices a closed pipe, without SIGIO (__main__.py)
    fcntl.fcntl(sys.stdin, fcntl.F_SETFL, 0)
    requests = selectors.DefaultSelector()
    requests.register(sys.stdin.fileno(), selectors.EVENT_READ)
    share_imports()
    pending = b""
    job = None
    name = None
    stopping = None
    late = False
    folders = set()
    say(ready=True)
    while True:
        if requests.select(timeout=POLL if job else None):
            received = os.read(sys.stdin.fileno(), 1 << 20)
            if not received:
                end_descendants(grace=0.0)
                # the folders of runs that a killed kernel could not remove
                for folder in folders:
                    shutil.rmtree(folder, ignore_errors=True)
                return
            pending += received
            *lines, pending = pending.split(b"\n")
            for line in lines:
                request = json.loads(line)
                if "stop" in request:
                    end_descendants(GRACE)
                    stopping = request["stop"]
                else:
                    folders.add(Path(request["job"]).parent)
                    job = start_job(request)
                    name = request["job"]
        if job:
            status = reap().get(job)
            if status is not None:
                end_descendants(grace=0.0)
                reap_orphans()
                job = None
                late = (Path(name).parent / worker.LATE_IMPORT).exists()
                say(ended=os.waitstatus_to_exitcode(status), job=name)
        if stopping is not None and not job:
            say(stopped=stopping)
            stopping = None
        if late and not job and worker.LATE_IMPORT not in sys.modules:
            importlib.import_module(worker.LATE_IMPORT)
            share_imports()


def say(**message):
    """Send a message in one write, so that an interrupted kernel never reads half of one."""
    os.write(sys.stdout.fileno(), json.dumps(message).encode() + b"\n")


def share_imports():
    """Keep imports in pages that all forks share; garbage collection would copy them."""
    gc.collect()
    gc.freeze()


def start_job(request):
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        worker.die_with_parent()
        os.environ.clear()
        os.environ.update(request["env"])
        # Otherwise the launcher and rank 0 listen on all interfaces with a store that is not
        # needed.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        folder = Path(request["job"]).parent
        worker.redirect_output(folder / "job.log")
        close_input()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        job = json.loads(Path(request["job"]).read_text())

        def run_torchrun(place):
            if request["command"]:
                os.environ |= {} if place is None else node_environment(place)
                os.execv(request["command"][0], request["command"])
            return run_job(request["job"], request["nproc"], folder, place)

        status = (
            run_torchrun(None)
            if job["nodes"] == 1
            else node_agents.run_nodes(job, folder, run_torchrun)
        )
    except Exception:
        traceback.print_exc()  # into job.log
    finally:
        os._exit(status)


def close_input():
    """Replace the pipe of requests by an empty stdin for the ranks: input() raises EOFError."""
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)


def node_environment(place):
    """Return the environment variables for torchrun that differ between nodes."""
    host = {
        "PET_RDZV_CONF": f"is_host={str(place.node == 0).lower()},store_type={place.store_type}"
    }
    return host | {"PET_RDZV_ENDPOINT": place.meeting, "PET_LOCAL_ADDR": place.address}


def run_job(job_path, nproc, folder, place=None):
    """Run torchrun's launcher in this process.

    On one node the rendezvous is a file, not a listening store.
    """
    place = place or node_agents.Place(0, 1, "127.0.0.1", str(folder / "rendezvous"), "file")
    with gpus_hidden():
        config = elastic_config(place, nproc, folder.name, folder / f"elastic-{place.node}")
    log_exits(folder / "exits.jsonl")
    shorten_rendezvous(one_node=place.count == 1)
    try:
        elastic_launch(config, worker.main)(job_path)
    except ChildFailedError:
        return 1
    return 0


def elastic_config(place, nproc, name, logs):
    """Return torchelastic's configuration for the ranks of one node, forked from this process."""
    return LaunchConfig(
        min_nodes=place.count,
        max_nodes=place.count,
        nproc_per_node=nproc,
        run_id=name,
        rdzv_backend="c10d",
        rdzv_endpoint=place.meeting,
        # Explicit, because torch's guess from the host name finds no host among the namespaces.
        rdzv_configs={"store_type": place.store_type, "is_host": place.node == 0},
        local_addr=place.address,
        max_restarts=0,
        monitor_interval=POLL,
        start_method="fork",
        logs_specs=DefaultLogsSpecs(log_dir=str(logs)),
    )


@contextmanager
def gpus_hidden():
    """Hide GPUs while LaunchConfig looks for them: after a driver query, no fork could use CUDA."""
    before = dict(os.environ)
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def log_exits(path):
    """Log the exit code of every rank as it ends; torchelastic reports only failures."""
    path.touch()
    learn = popen_fork.Popen.poll

    def poll(self, *flag):
        known = self.returncode
        code = learn(self, *flag)
        if known is None and code is not None:
            with open(path, "a") as file:
                file.write(json.dumps({"pid": self.pid, "exit_code": code}) + "\n")
        return code

    popen_fork.Popen.poll = poll


def end_descendants(grace):
    """Send SIGTERM, then SIGKILL, to all descendants; psutil recognises a reused pid."""
    below = descendants()
    for process in below if grace else []:
        send(process, signal.SIGTERM)
        send(process, signal.SIGCONT)  # a stopped process handles SIGTERM only when it continues
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline and any(alive(process) for process in below):
        time.sleep(POLL)
    deadline = time.monotonic() + KILL_LIMIT
    while left := [process for process in descendants() if alive(process)]:
        for process in left:  # a descendant may have started another process meanwhile
            send(process, signal.SIGKILL)
        if time.monotonic() > deadline:
            return
        time.sleep(POLL / 4)


def descendants():
    return psutil.Process().children(recursive=True)


def reap_orphans():
    """Wait for killed processes, so that a job that is reported as ended leaves no zombie."""
    deadline = time.monotonic() + KILL_LIMIT
    while psutil.Process().children() and time.monotonic() < deadline:
        reap()
        time.sleep(POLL / 4)


def send(process, signal_number):
    try:
        process.send_signal(signal_number)
    except psutil.NoSuchProcess:
        return


def alive(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def reap():
    """Return the exit statuses by pid of all ended children, including adopted orphans."""
    ended = {}
    try:
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            ended[child[0]] = child[1]
    except ChildProcessError:
        return ended
    return ended
