"""python -m labkit.train, as a process, under a real torchrun and on warm ranks, and its log."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from pool import forked

from labkit import train
from labkit.run import LaunchError, launch

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file"]
STEPS, EMULATED = 12, ("--compute", "emulated")
FIELDS = ["--batch-size", "12", "--steps", str(STEPS), "--optimizer", "adamw", "--lr", "0.01", "--clip", "0.5"]


def start(nproc, *options, restarts=0):
    """labkit.train under torchrun, as a process that has just begun, in a session of its own."""
    command = [*TORCHRUN, "--rdzv-endpoint", f"{tempfile.mkdtemp()}/meeting", "--nproc-per-node", str(nproc)]
    command += ["--max-restarts", str(restarts), "-m", "--", "labkit.train"]
    command += [*FIELDS, *map(str, options)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if restarts else None
    return subprocess.Popen(command, **pipes, env=environment, start_new_session=True)


def run(nproc, *options):
    """labkit.train on warm ranks: (0 or 1, what rank 0 printed, what went wrong)."""
    arguments = [*FIELDS, *map(str, options)]
    try:
        done = launch("labkit.run.training:launched", nproc=nproc, arguments=arguments, quiet=True)
    except LaunchError as error:
        return 1, error.run.logs[0].read_text(), str(error)
    return 0, done.logs[0].read_text(), ""


def lines(path):
    """The rows of a log."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def steady(path):
    """What a log says that is the same in every run."""
    return [{name: value for name, value in line.items() if not name.endswith("_s")} for line in lines(path)]


class Forked:
    """python -m labkit.train, forked from a process that has loaded torch, which takes seconds; as a Popen."""

    def __init__(self, *words, cwd="."):
        self.folder = tempfile.TemporaryDirectory()
        self.files = [Path(self.folder.name, name) for name in ("out", "error")]
        self.process = forked(main, [*map(str, words)], os.path.abspath(cwd), dict(os.environ), self.files)
        self.pid, self.kill = self.process.pid, self.process.kill

    def poll(self):
        return self.process.exitcode

    def communicate(self, timeout=150):
        self.process.join(timeout)
        if self.poll() is None:
            self.kill()
            self.process.join()
        self.returncode = self.poll()
        return tuple(file.read_text() for file in self.files)


def main(words, cwd, environment, files):
    """What the forked process runs, in the folder cwd; its temporary files are beside its output."""
    tempfile.tempdir = str(files[0].parent)
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.path.insert(0, cwd)
    sys.exit(train.main(words))


def command(*words, cwd="."):
    """labkit.train with these words, forked, to its end."""
    process = Forked(*words, cwd=cwd)
    out, error = process.communicate()
    return subprocess.CompletedProcess(words, process.returncode, out, error)


def cold(*words):
    """python -m labkit.train with these words, to its end."""
    line = [sys.executable, "-m", "labkit.train", *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, timeout=150)
