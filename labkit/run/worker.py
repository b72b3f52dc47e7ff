"""One rank: redirect its output, join the group, run the target, report how it ended.

    run folder/
      job.json         what to run, written by launch
      rank-1.log       everything that rank 1 prints, also from C++
      rank-1.jsonl     its events, which launch reads: start, record, progress, error, leaving, done
      rank-1.box       its last operation in each group (progress.py), in a memory map that survives
                       kill -9
      rank-1.stack     its stack when it was stopped
      torch._dynamo    empty: a rank needed this import, so the agent imports it for later jobs

The same file serves the warm path (a fork of labkit.run.warm_agent) and a plain shell:

    torchrun --nproc-per-node 2 ... -m labkit.run.worker labkit.run.compare:train steps=20

`run.command` has the complete command.
"""

import ctypes
import datetime
import faulthandler
import importlib
import inspect
import json
import linecache
import mmap
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from labkit import comm, comm_log, gloo_workarounds
from labkit.progress import Progress
from labkit.run import network_namespaces, report
from labkit.run.context import Context, EventFile
from labkit.torch_private import set_default_timeout, set_timeout

PR_SET_PDEATHSIG = 1
# Files that are not the target's own code in a traceback.
MACHINERY = (
    __file__,
    inspect.getfile(Context),
    *(module.__file__ for module in (comm, gloo_workarounds, comm_log)),
    str(Path(torch.__file__).parent),
    str(Path(os.__file__).parent),
)
BOX_BYTES = 1 << 20  # the file system stores only the pages that were written
ROOM = 200  # bytes for the changing part of a line
# seconds that a rank may start later than another; after that collective_timeout applies
JOIN_LIMIT = 60.0
# seconds, less than launch_monitor.OTHERS_REPORT: torchrun ends all ranks once one has left
REPORT_DELAY = 0.6
LATE_IMPORT = "torch._dynamo"  # takes 1.5 s or more, in every process that makes an optimizer


class BlackBox(Progress):
    """Progress of this rank, readable after the process was killed: one line per Row."""

    def __init__(self, path):
        super().__init__()
        path.touch()
        os.truncate(path, BOX_BYTES)
        with open(path, "r+b") as file:
            self.map = mmap.mmap(file.fileno(), BOX_BYTES)
        self.sent_bytes = 0
        self.slots = {}
        self.end = 0
        self.folder = path.parent
        self.imported = False

    def append(self, event):
        self.sent_bytes += event.sent_bytes
        if not self.imported and LATE_IMPORT in sys.modules:
            self.note_import()  # at once, because a killed rank cannot do it at its end
        return super().append(event)

    def keep(self, row):
        key = row.group, *row.ranks, row.message
        if key not in self.slots:
            fixed = {"group": row.group, "ranks": row.ranks, "message": row.message}
            head = json.dumps(fixed)[:-1]
            size = len(head) + ROOM
            self.slots[key] = head, slice(self.end, self.end + size)
            self.end += size
        head, slot = self.slots[key]
        line = (  # no json.dumps: it takes as long as sending a small message
            f'{head}, "scheduled": {row.scheduled}, "awaited": {row.awaited}, '
            f'"completed": {row.completed}, "op": "{row.op}", "bytes": {row.bytes}, '
            f'"at": {row.at}}}'
        )
        if slot.stop <= BOX_BYTES:
            self.map[slot] = line.encode().ljust(slot.stop - slot.start - 1) + b"\n"

    def note_import(self):
        self.imported = LATE_IMPORT in sys.modules
        if self.imported:
            (self.folder / LATE_IMPORT).touch()


def main(job_path):
    """Run the job on this rank.

    An error of the target is reported and ends the process with status 1.
    """
    die_with_parent()
    folder = Path(job_path).parent
    job = json.loads(Path(job_path).read_text())
    rank, *others = position()
    redirect_output(folder / f"rank-{rank}.log")
    stack_file = open(folder / f"rank-{rank}.stack", "w")
    # a fork inherits torchelastic's handler, which raises
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.register(signal.SIGTERM, file=stack_file, all_threads=False, chain=True)
    events = EventFile(open(folder / f"rank-{rank}.jsonl", "a", buffering=1))
    events.write("start", time=time.time(), pid=os.getpid())
    box = BlackBox(folder / f"rank-{rank}.box")
    sys.path[:0] = [path for path in job["sys_path"] if path not in sys.path]
    os.chdir(job["cwd"])
    context = Context(rank, *others, torch.device("cpu"), events, job["attempt"])
    try:
        with comm.record(box, timed=False):
            if job["kind"] == "script":
                run_script(job)
            else:
                meeting = (
                    "env://"
                    if network_namespaces.FOLDER in os.environ
                    else f"file://{folder}/store"
                )
                join_group(job, meeting, context)
                run_target(job, context)
                # From here on, other ranks may lose their connection to this one.
                events.write("leaving", sent_bytes=box.sent_bytes)
                dist.destroy_process_group()
        box.note_import()
        events.write("done", time=time.time())
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            events.write("done", time=time.time())
            return
        # Not printed here: the notebook shows only the traceback that matters (report.py).
        events.write("error", sent_bytes=box.sent_bytes, **describe_error(error))
        if report.TIMEOUT.search(str(error)):
            time.sleep(REPORT_DELAY)
        sys.exit(1)


def position():
    """Return (rank, world size, rank on its node, node) from torchrun's environment variables."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK")
    return tuple(int(os.environ[name]) for name in names)


def die_with_parent():
    """On Linux, let the kernel kill this process when its parent dies for any reason."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def redirect_output(path):
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout.reconfigure(line_buffering=True)


def join_group(job, init_method, context):
    """Join one process group of all ranks: NCCL (one GPU a rank), or gloo.

    gloo uses GLOO_SOCKET_IFNAME. Without it: the loopback, or on several machines (env://) the
    interface of the host name.
    """
    one_node = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    if job["device"] == "cuda":
        context.device = torch.device("cuda", context.local_rank)
        torch.cuda.set_device(context.device)
        if one_node and sys.platform == "linux":
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # as for gloo: enough on one node
    elif one_node or init_method != "env://":
        loopback = "lo" if sys.platform == "linux" else "lo0"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    # also with a GPU: offloaded optimizers compute on the CPU
    torch.set_num_threads(job["threads"])
    timeout = datetime.timedelta(seconds=job["collective_timeout"])
    meeting = max(timeout, datetime.timedelta(seconds=JOIN_LIMIT))
    # Later groups would otherwise use torch's default timeout of 10 or 30 minutes.
    set_default_timeout(timeout)
    dist.init_process_group(
        "nccl" if job["device"] == "cuda" else "gloo",
        init_method=init_method,
        rank=context.rank,
        world_size=context.world_size,
        timeout=meeting,
        device_id=context.device if job["device"] == "cuda" else None,
    )
    # Without the barrier, a rank that leaves early closes connections that slower ranks still open.
    dist.barrier()
    set_timeout(timeout)


def run_script(job):
    sys.argv = [job["target"], *job["arguments"]]
    runpy.run_path(job["target"], run_name="__main__")


def run_target(job, context):
    if job["kind"] == "function":
        module, _, name = job["target"].partition(":")
        function = getattr(importlib.import_module(module), name)
        call(function, context, job["parameters"])
        return
    namespace = {"__name__": "cell", "torch": torch, "dist": dist, "comm": comm}
    if job["kind"] == "cell":
        given = ("rank", "world_size", "local_rank", "node", "device", "attempt")
        given += ("record", "progress")
        namespace |= {name: getattr(context, name) for name in given} | job["parameters"]
    exec(compile_source(job["target"]), namespace)
    if job["kind"] == "source":
        call(namespace[job["name"]], context, job["parameters"])


def compile_source(source):
    """Compile a cell's source so that tracebacks show its lines, as they do for a file."""
    linecache.cache["<cell>"] = (len(source), None, source.splitlines(keepends=True), "<cell>")
    return compile(source, "<cell>", "exec")


def call(function, context, parameters):
    signature = inspect.signature(function)
    names = list(signature.parameters)[1:]
    unknown = [name for name in parameters if name not in names]
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        raise TypeError(
            f"{function.__name__}() has no parameter {unknown[0]!r}; "
            f"its parameters are {', '.join(names)}"
        )
    function(context, **parameters)


def describe_error(error):
    """Return the last line of the target's own code, and the traceback from there."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [i for i, frame in enumerate(frames) if not frame.filename.startswith(MACHINERY)]
    shown = traceback.format_list(frames[own[0] :]) if own else []
    return {
        "time": time.time(),
        "type": type(error).__name__,
        "message": str(error),
        "line": frames[own[-1]].line if own else None,
        "lineno": frames[own[-1]].lineno if own else None,
        "traceback": "".join([*shown, *traceback.format_exception_only(error)]),
    }


def shell(target, *assignments):
    """Run a target under a plain torchrun; records are printed as JSON lines."""
    parameters = {
        name: json.loads(value) for name, _, value in (text.partition("=") for text in assignments)
    }
    device = "cuda" if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else "cpu"
    job = {"kind": "function", "target": target, "parameters": parameters}
    job |= {"device": device, "threads": 1, "collective_timeout": 600}
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    context = Context(*position(), torch.device("cpu"), EventFile(sys.stdout), attempt)
    join_group(job, "env://", context)
    run_target(job, context)
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1].endswith(".json"):
        main(sys.argv[1])
    else:
        shell(*sys.argv[1:])
