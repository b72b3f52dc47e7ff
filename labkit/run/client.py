"""The notebook's end of the pipe to the warm agent: start it once, hand it jobs, stop it."""

import atexit
import fcntl
import functools
import json
import os
import select
import subprocess
import sys
import tempfile
import time

START_LIMIT = 60.0  # seconds the agent may take to import torch
STOP_LIMIT = 5.0  # seconds in which a stopped job has to be gone
COMMAND = [sys.executable, "-m", "labkit.run.agent"]


class AgentError(RuntimeError):
    """The warm agent could not be started, or died."""


class AgentClient:
    """Owns the agent process, which ends when this object's pipe closes, however that happens."""

    def __init__(self):
        self.log = tempfile.TemporaryFile()
        read, write = os.pipe()
        self.process = subprocess.Popen(
            COMMAND,
            stdin=read,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            # Ctrl-C in a terminal reaches the notebook only, which then stops the job
            start_new_session=True,
        )
        self.process.stdin = os.fdopen(write, "wb")
        end_with_pipe(read, self.process.pid)
        os.close(read)
        self.buffer = b""
        self.job = ""

    def start(self, job_path, nproc, command):
        """Begin a job. command: None for the warm path, or the arguments of a plain torchrun."""
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
        """The exit status of the job if it has ended, else None, after at most so many seconds."""
        message = self.receive(seconds)
        # What is said of an earlier job comes late, where the person pressed stop twice.
        return message.get("ended") if message and message.get("job") == self.job else None

    def receive(self, seconds):
        """The agent's next message, or None after so many seconds."""
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
        """End the job, if it still runs, and everything below it, and wait until it is gone."""
        self.send(stop=self.job)
        deadline = time.monotonic() + STOP_LIMIT
        while time.monotonic() < deadline:
            message = self.receive(0.05)
            if message and message.get("stopped") == self.job:
                return
        # An agent that cannot end its job goes itself: the operating system binds the ranks to it.
        self.process.kill()
        self.process.wait()
        agent.cache_clear()
        print(f"[launch] the job did not end within {STOP_LIMIT:g} s: killed with its agent")

    def death(self):
        self.log.seek(0)
        last = self.log.read().decode(errors="replace").strip().splitlines()[-1:]
        agent.cache_clear()
        return AgentError(
            f"the launching agent died ({self.process.poll()}): {''.join(last) or 'no message'}"
        )


def end_with_pipe(read, pid):
    """Linux: while it imports, and does not look, the end of its pipe ends the agent by SIGIO."""
    if sys.platform == "linux":
        fcntl.fcntl(read, fcntl.F_SETOWN, pid)
        fcntl.fcntl(read, fcntl.F_SETFL, os.O_ASYNC)


@functools.cache
def agent():
    """The agent of this process, started on first use."""
    client = AgentClient()
    try:
        if client.receive(START_LIMIT):
            atexit.register(client.process.stdin.close)  # before this program takes its time to go
            return client
        raise AgentError(f"the launching agent did not start within {START_LIMIT:g} s")
    except BaseException:  # KeyboardInterrupt, too: nobody else knows of it
        client.process.kill()
        client.process.wait()
        raise
