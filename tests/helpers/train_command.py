"""python -m labkit.train, under a real torchrun and on warm ranks, and its log."""

import json
import os
import subprocess
import sys
import tempfile

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


def command(*words, **options):
    """python -m labkit.train with these words, to its end; options: of subprocess.run."""
    line = [sys.executable, "-m", "labkit.train", *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, timeout=150, **options)
