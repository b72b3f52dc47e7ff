"""A process that runs what learners wrote: it has no network and no files but its own, and its use of the machine ends.

bubblewrap gives it new namespaces: it sees Python, .venv and labkit, read-only, and an empty /tmp in memory; its only
network is a loopback of its own. Without bubblewrap, only the limits hold.

    limit             by                                  what happens
    memory            RLIMIT_AS, of a process             the allocation fails, at the learner's line
                      the watch, all processes together   the sandbox is killed
    processes         RLIMIT_NPROC (not for root), watch  fork fails; the sandbox is killed
    CPU time, files   RLIMIT_CPU, RLIMIT_FSIZE, tmpfs     a signal; the write fails
    wall-clock time   the watch                           the sandbox is killed

The watch is the parent. Killing the sandbox's first process ends all others in its namespace.
"""

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from select import select

import psutil

ROOT = Path(__file__).resolve().parents[2]
GB = 10**9
HOME = "/lab"  # of labkit and this package, in the sandbox
HOSTS = b"127.0.0.1 localhost sandbox\n"  # torchrun looks up its own host name
# libraries of the system, and its programs: a checker of 60 runs bash
SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/bin", "/usr/bin")
LIMITS = {"AS": 6 * GB, "NPROC": 400, "CPU": 300, "FSIZE": 2**26, "CORE": 0, "MEMLOCK": 2**16}
MEMORY = 4 * GB  # of all processes of a sandbox
PROCESSES = 100  # of a sandbox; ranks, their launcher and its agent are 3 to 10
DISK = {"/tmp": 2**28, "/dev/shm": 2**26}  # bytes
LOOK = 0.1  # seconds between two looks of the watch
LONGEST = 10**6  # bytes of an answer
PIPE = 2**12  # bytes that a pipe takes at once, or not at all


class Ended(Exception):
    """Raised if the sandbox has ended or was killed; the message is one line."""


def arguments(python=sys.executable):
    """Return bubblewrap's arguments: a list of folders, never `/`, and never the course's solutions.

    The repository is covered by an empty folder in case Python's own folder contains it.
    """
    bound = [*SYSTEM, sys.base_prefix]
    words = ["--proc", "/proc", "--dev", "/dev"]
    words += [word for place, size in DISK.items() for word in ("--size", str(size), "--tmpfs", place)]
    words += [word for place in bound if os.path.exists(place) for word in ("--ro-bind", place, place)]
    inside = any(ROOT.is_relative_to(place) for place in bound)
    words += ["--tmpfs", str(ROOT)] if inside else []
    words += ["--ro-bind", sys.prefix, sys.prefix] if sys.prefix != sys.base_prefix else []
    words += ["--ro-bind", str(ROOT / "labkit"), f"{HOME}/labkit"]
    words += ["--ro-bind", str(ROOT / "scripts" / "grading"), f"{HOME}/grading"]
    # To the kernel, root in a sandbox is root: it could write /proc/sys.
    words += ["--ro-bind", "/proc/sys", "/proc/sys"]
    words += ["--remount-ro", "/dev", "--unshare-all", "--unshare-user", "--disable-userns"]
    words += ["--uid", "65534", "--gid", "65534", "--hostname", "sandbox", "--new-session", "--die-with-parent"]
    words += ["--chdir", "/tmp", "--clearenv"]
    return words + [word for pair in environment(HOME, "/tmp").items() for word in ("--setenv", *pair)]


def environment(path, home):
    given = {"PYTHONPATH": path, "HOME": home, "TMPDIR": home, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
    return given | {"OMP_NUM_THREADS": "1", "USER": "learner", "CUDA_VISIBLE_DEVICES": ""}


def bubblewrap(command, **options):
    """Start a command in bubblewrap, and return its Popen. OSError if there is no bubblewrap."""
    read, write = os.pipe()
    os.write(write, HOSTS)
    os.close(write)
    words = ["bwrap", *arguments(), "--ro-bind-data", str(read), "/etc/hosts", "--remount-ro", "/", "--", *command]
    try:
        return subprocess.Popen(words, pass_fds=[read], start_new_session=True, **options)
    finally:
        os.close(read)


@functools.cache
def refusal():
    """Return why bubblewrap cannot be used here, in one line, or None."""
    if not shutil.which("bwrap"):
        return "bubblewrap is not installed (Debian: apt install bubblewrap)"
    trial = bubblewrap([sys.executable, "-c", ""], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    _, errors = trial.communicate(timeout=60)
    lines = errors.strip().splitlines()
    return None if trial.returncode == 0 else f"bubblewrap does not start here: {lines[-1] if lines else 'no message'}"


class Sandbox:
    """A worker.py in a sandbox. ask() sends it a request, and returns its answer. close() ends all its processes."""

    def __init__(self):
        self.folder = None
        self.buffer = b""
        self.looked = 0.0
        command = [sys.executable, "-m", "grading.worker"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "bufsize": 0}
        limits = dict(LIMITS)
        if sys.platform != "linux":  # macOS refuses this limit; the watch counts memory
            limits.pop("AS")
        if refusal() is None:
            self.process = bubblewrap(command, **pipes)
        else:
            self.folder = tempfile.TemporaryDirectory(prefix="lab-grade-", ignore_cleanup_errors=True)
            path = os.pathsep.join([str(ROOT), str(ROOT / "scripts")])
            given = environment(path, self.folder.name)
            pipes |= {"cwd": self.folder.name, "env": given, "start_new_session": True}
            self.process = subprocess.Popen(command, **pipes)
            limits["NPROC"] += own_threads()
        os.set_blocking(self.process.stdin.fileno(), False)
        self.first = {"limits": limits}

    def ask(self, request, seconds, stopping):
        """Return the answer. Raises Ended; KeyboardInterrupt when the Event `stopping` is set."""
        end = time.monotonic() + seconds
        if self.first:
            self.send(self.first, end, stopping)
            self.first = None
        self.send(request, end, stopping)
        while b"\n" not in self.buffer:
            if self.wait([self.process.stdout], [], end, stopping):
                received = os.read(self.process.stdout.fileno(), 1 << 16)
                if not received:
                    raise Ended(self.words_of_end())
                self.buffer += received
            if len(self.buffer) > LONGEST:
                raise Ended("the sandbox wrote too much to the grader")
        line, _, self.buffer = self.buffer.partition(b"\n")
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            raise Ended("the sandbox wrote something else than results to the grader") from None

    def send(self, request, end, stopping):
        """Write a request, without waiting for a process that does not read: a learner's code may have stopped it."""
        left = json.dumps(request).encode() + b"\n"
        while left:
            try:
                if self.wait([], [self.process.stdin], end, stopping):
                    left = left[os.write(self.process.stdin.fileno(), left[:PIPE]) :]
            except BrokenPipeError:
                raise Ended(self.words_of_end()) from None

    def wait(self, readable, writable, end, stopping):
        """Return whether a pipe is ready within LOOK seconds. Raises Ended if the sandbox uses too much."""
        if stopping.is_set():
            raise KeyboardInterrupt
        ready = any(select(readable, writable, [], LOOK))
        now = time.monotonic()
        if now - self.looked > LOOK:
            self.looked = now
            if reason := self.excess():
                raise Ended(reason)
        if now > end:
            raise Ended("stopped at the time limit: it does not answer")
        return ready

    def excess(self):
        """Return a sentence if the sandbox uses too much, or None."""
        below = self.processes()
        if len(below) > PROCESSES:
            return f"more than {PROCESSES} processes: stopped"
        used = sum(map(own_bytes, below))
        if used > MEMORY:
            return f"more than {MEMORY / GB:g} GB of memory: stopped"
        return None

    def processes(self):
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def words_of_end(self):
        try:
            return f"the sandbox ended (exit code {self.process.wait(timeout=2)})"
        except subprocess.TimeoutExpired:  # something in it has closed the pipes
            return "the sandbox closed its connection to the grader"

    def close(self):
        """Kill all processes, wait until they are gone, and remove the files."""
        below = self.processes()
        if below and not self.folder:
            kill(below[0])  # the first process of the namespace; bubblewrap waits for it, and ends
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=10)
        self.process.kill()
        deadline = time.monotonic() + 10
        while below and time.monotonic() < deadline:
            for process in below if self.folder else []:
                kill(process)
            _, below = psutil.wait_procs(below, timeout=0.05)
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        if self.folder:
            self.folder.cleanup()


def kill(process):
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


def own_threads():
    """Return the number of threads of this user, which RLIMIT_NPROC counts."""
    known = [process.info for process in psutil.process_iter(["uids", "num_threads"])]
    return sum(one["num_threads"] or 0 for one in known if one["uids"] and one["uids"].real == os.getuid())


def own_bytes(process):
    """Return the bytes of a process that no file backs: resident, less shared. 0 if it has ended."""
    try:
        memory = process.memory_info()
    except psutil.NoSuchProcess:
        return 0
    return memory.rss - getattr(memory, "shared", 0)  # macOS does not say what is shared
