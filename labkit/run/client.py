"""The notebook's client of the warm agent: start it once, send it jobs, stop it."""

import atexit
import functools
import json
import os
import select
import subprocess
import sys
import tempfile
import time

START_LIMIT = 60.0  # seconds the agent may take to import torch
STOP_LIMIT = 5.0  # seconds within which a stopped job must have ended
COMMAND = [sys.executable, "-m", "labkit.run"]


class AgentError(RuntimeError):
    """Raised when the warm agent cannot be started, or has died."""


class AgentClient:
    """Owner of the agent process.

    The agent exits when this object's pipe closes, for any reason. here: the ranks are processes of
    this machine. why: as in slurm_client.py; the agent reports all ends of a job.
    """

    here = True
    why = None

    def __init__(self):
        self.log = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            # Ctrl-C in a terminal must reach only the notebook, which then stops the job
            start_new_session=True,
        )
        self.buffer = b""
        self.job = ""

    def start(self, job_path, nproc, command):
        """Start a job. command: None for the warm path, or the arguments of a plain torchrun."""
        env = {"OMP_NUM_THREADS": "1", **os.environ}
        self.job = str(job_path)
        self.send(job=self.job, nproc=nproc, command=command, env=env)

    def send(self, **message):
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self.death() from None

    def poll(self, seconds):
        """Return the exit status of the job, or None if it still runs after `seconds`."""
        message = self.receive(seconds)
        # If the user pressed stop twice, a late message about an earlier job can arrive here.
        return message.get("ended") if message and message.get("job") == self.job else None

    def receive(self, seconds):
        """Return the agent's next message, or None after `seconds`."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self.buffer:
            if not select.select(
                [self.process.stdout], [], [], max(0.0, deadline - time.monotonic())
            )[0]:
                return None
            received = os.read(self.process.stdout.fileno(), 1 << 16)
            if not received:
                raise self.death()
            self.buffer += received
        line, _, self.buffer = self.buffer.partition(b"\n")
        return json.loads(line)

    def stop(self):
        """End the job and all its descendants, and wait until they are gone."""
        self.send(stop=self.job)
        deadline = time.monotonic() + STOP_LIMIT
        while time.monotonic() < deadline:
            message = self.receive(0.05)
            if message and message.get("stopped") == self.job:
                return
        # An agent that cannot end its job is killed; the operating system then kills the ranks.
        self.process.kill()
        self.process.wait()
        agent.cache_clear()
        print(f"[launch] the job did not end within {STOP_LIMIT:g} s: killed it and its agent")

    def death(self):
        self.process.kill()  # its pipe is closed: at most, it has not quite ended
        status = self.process.wait()
        self.log.seek(0)
        last = self.log.read().decode(errors="replace").strip().splitlines()[-1:]
        agent.cache_clear()
        return AgentError(f"the launching agent died ({status}): {''.join(last) or 'no message'}")


@functools.cache
def agent():
    """Return the agent of this process, and start it on first use."""
    client = AgentClient()
    try:
        if client.receive(START_LIMIT):
            # at the start of interpreter shutdown, which can be slow
            atexit.register(client.process.stdin.close)
            return client
        raise AgentError(f"the launching agent did not start within {START_LIMIT:g} s")
    except BaseException:  # also KeyboardInterrupt: nothing else holds a reference to this process
        client.process.kill()
        client.process.wait()
        raise
