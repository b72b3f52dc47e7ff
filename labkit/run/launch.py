"""The one door from a notebook to ranks.

    run = launch("labkit.run.experiment:train", nproc=2, steps=20)     a function, or its name
    run = launch("x = torch.ones(1); dist.all_reduce(x); record(x=x)") the source of a cell
    run = launch("train.py", nproc=4, steps=20)                        a script, as from torchrun

    run.records    one row per record(...) call     run.logs      one file per rank
    run.command    the same from a shell            run.seconds   wall-clock, to the last rank's end

The ranks are real processes, started by torchrun's launcher in a warm agent (agent.py).
Interrupting the cell, the wall-clock limit or the end of the notebook ends them all; a failure is
told by the rank that caused it (report.py).
"""

import json
import os
import shlex
import sys
import tempfile
import threading
import time
from pathlib import Path

from labkit.run import nodes as network
from labkit.run.client import agent
from labkit.run.console import Bar, Console, Tail
from labkit.run.job import choose_device, describe_nodes, describe_target
from labkit.run.report import explain, read_ends, read_exits

POLL = 0.02  # seconds between looks at the ranks
GOODBYE = 3.0  # seconds for torchruns to end after their ranks: never over a link that is cut
OTHERS_REPORT = 1.0  # seconds that the other ranks get to report, once one has failed
LAST_WORDS = ("leaving", "error")

one_at_a_time = threading.Lock()


class LaunchError(RuntimeError):
    """A failed launch: the message names rank, line and collective; .run holds logs and records."""

    def __init__(self, message, run, cause=None):
        super().__init__(message)
        self.run, self.cause = run, cause

    def _render_traceback_(self):
        # IPython: the ranks' traceback matters, the notebook's own does not
        return ["LaunchError: " + str(self)]


class Run:
    """What came of a launch. The folder with logs lives as long as this object.

    nproc (of each node), nodes, world_size, seconds, parameters; device "cpu" or "cuda"; logs: one
    Path per rank; command: the same run from a shell, on every node.
    """

    def __init__(self, job, nproc):
        self.job, self.nproc, self.nodes, self.seconds = job, nproc, job["nodes"], 0.0
        self.world_size = nproc * self.nodes
        self.parameters, self.device = job["parameters"], job["device"]
        self.holder = tempfile.TemporaryDirectory(prefix="labkit-")
        self.folder = Path(self.holder.name)
        self.logs = [self.folder / f"rank-{rank}.log" for rank in range(self.world_size)]
        self.events = [[] for _ in range(self.world_size)]
        self.job_path = self.folder / "job.json"
        self.job_path.write_text(json.dumps(job))

    @property
    def records(self):
        """pandas.DataFrame, one row per record(...) call, in the order of each rank."""
        import pandas

        rows = [event for events in self.events for event in events if event["kind"] == "record"]
        frame = pandas.DataFrame(rows)
        return frame.drop(columns="kind", errors="ignore")

    @property
    def network(self):
        """how: "root", "rootless" or "loopback"; notes: what is missing. {} for one node."""
        file = self.folder / "nodes.json"
        return json.loads(file.read_text()) if file.exists() else {}

    @property
    def wire(self):
        """pandas.DataFrame, a row a node: bytes that its interface counted, beside labkit.comm's.

        sent_bytes, received_bytes: on its link, headers and rendezvous included; none where nodes
        share the loopback. counted_bytes: sent by its ranks, to whichever rank, those of their own
        node included; payload only.
        """
        import pandas

        columns = ["node", "sent_bytes", "received_bytes"]
        frame = pandas.DataFrame(self.network.get("wire", []), columns=columns)
        return frame.assign(counted_bytes=[self.sent_by(node) for node in frame["node"]])

    def sent_by(self, node):
        """Bytes that the node's ranks sent through labkit.comm, as each said at its end."""
        ranks = self.events[node * self.nproc : (node + 1) * self.nproc]
        ends = [event for events in ranks for event in events if event["kind"] in LAST_WORDS]
        return sum(event["sent_bytes"] for event in ends)

    @property
    def command(self):
        return shlex.join(["torchrun", *self.torchrun_arguments(by_name=True)])

    def torchrun_arguments(self, by_name=False):
        """torchrun's arguments; by_name: what it runs by its name, if any, not by its job file."""
        start = ["--standalone", "--nproc-per-node", str(self.nproc)]
        if self.nodes > 1:
            start = ["--nnodes", str(self.nodes), *start[1:], "--rdzv-backend", "c10d"]
            # Without a name, each node is told by its environment where the others are (agent.py).
            start += ["--rdzv-endpoint", f"{network.address(0)}:{network.PORT}"] if by_name else []
        if by_name and self.job["kind"] == "script":
            return [*start, self.job["target"], *self.job["arguments"]]
        if by_name and self.job["kind"] == "function":
            values = [f"{name}={json.dumps(value)}" for name, value in self.parameters.items()]
            return [*start, "-m", "labkit.run.worker", self.job["target"], *values]
        return [*start, "-m", "labkit.run.worker", str(self.job_path)]

    def __repr__(self):
        rows = sum(event["kind"] == "record" for events in self.events for event in events)
        nodes = f"{self.nodes} nodes of " if self.nodes > 1 else ""
        return f"Run({nodes}{self.nproc} ranks on {self.device}, {rows} records)"


def launch(
    target,
    *,
    nproc=2,
    nodes=1,
    link_mbit=None,
    link_ms=0.0,
    link_mtu=9000,
    timeout=600.0,
    collective_timeout=60.0,
    device="auto",
    threads=1,
    cold=False,
    quiet=False,
    bar=None,
    **parameters,
):
    """Run the target on nproc ranks, of each of so many nodes, and wait for them.

    target: "package.module:function" or a function (called as function(context, **parameters); a
        function's source travels, so it sees torch, dist, comm and what it imports itself), a
        cell's source, or a path to a .py script.
    nodes: more than one are network namespaces of this machine, joined by links of link_mbit (10^6
        bits a second each way; None: unslowed), link_ms of delay each way and frames of link_mtu
        bytes (labkit.run.nodes). On the CPU.
    timeout, collective_timeout: seconds for the run, and for a collective to wait for its peers.
    device: "cpu" (gloo), "cuda" (NCCL, one GPU a rank) or "auto" (cuda where GPUs are enough).
    threads: of each rank's CPU arithmetic. cold: a plain `torchrun`. quiet: print nothing.
    bar: what shows the progress, as console.Bar does.
    Raises LaunchError for a failing rank, ValueError for arguments that cannot be, SyntaxError for
    a cell that does not compile, KeyboardInterrupt as it comes.
    """
    if not isinstance(nproc, int) or nproc < 1:
        raise ValueError(f"nproc={nproc!r}: the number of ranks is a whole number of at least 1")
    job = describe_target(target, parameters) | describe_nodes(nodes, link_mbit, link_ms, link_mtu)
    device = choose_device(device if nodes == 1 or device != "auto" else "cpu", nproc)
    if device == "cuda" and nodes > 1:
        raise ValueError('nodes in namespaces share one machine and run on the CPU: device="cpu"')
    job |= {"device": device, "threads": threads, "collective_timeout": collective_timeout}
    job |= {"cwd": os.getcwd(), "sys_path": [path or os.getcwd() for path in sys.path]}
    run = Run(job, nproc)
    plain = [sys.executable, "-m", "torch.distributed.run", *run.torchrun_arguments()]
    with one_at_a_time:
        start = time.monotonic()
        status, exits, timed_out = watch(
            run, plain if cold else None, timeout, quiet, bar or Bar(quiet)
        )
        run.seconds = time.monotonic() - start
    ends = read_ends(run.folder, run.world_size, run.events, exits)
    if status == 0 and all(end.state == "finished" for end in ends):
        return run
    for end in ends:
        if end.error:
            with open(run.logs[end.rank], "a") as log:
                log.write(end.error["traceback"])
    cause, message = explain(ends, timed_out, network.broken(run.folder))
    if all(end.state == "absent" for end in ends) or message.startswith("the launcher failed"):
        log = run.folder / "job.log"
        message += "\n" + (log.read_text()[-2000:] if log.exists() else "")
    raise LaunchError(message, run, cause)


def watch(run, command, timeout, quiet, bar):
    """Show the ranks to the job's end: (exit status, exit codes before any stop, limit hit)."""
    client = agent()
    console = Console(run.logs, quiet)
    tails = [Tail(run.folder / f"rank-{rank}.jsonl") for rank in range(run.world_size)]
    start, failed_at, done_at, status, told = time.monotonic(), None, None, None, quiet
    try:
        client.start(run.job_path, run.nproc, command)
        while status is None:
            status = client.poll(POLL)
            take_events(run, tails, bar)
            console.show()
            if not told and run.network:
                told = True
                tell(run.network["notes"])
            now = time.monotonic()
            last = [events[-1]["kind"] if events else None for events in run.events]
            if failed_at is None and "error" in last:
                failed_at = now
            if done_at is None and set(last) == {"done"}:
                done_at = now
            if status is None and done_at is not None and now - done_at > GOODBYE:
                client.stop()
                return 0, read_exits(run.folder), None
            late = failed_at is not None and now - failed_at > OTHERS_REPORT
            if status is None and (late or now - start > timeout):
                exits = read_exits(run.folder)
                client.stop()
                return 1, exits, None if late else timeout
        return status, read_exits(run.folder), None
    except KeyboardInterrupt:
        client.stop()
        print(f"[launch] stopped: all {run.world_size} ranks have ended")
        raise
    finally:
        take_events(run, tails, bar)
        console.show(final=True)
        bar.close()


def tell(notes):
    for note in notes:
        print(f"[launch] {note}", flush=True)


def take_events(run, tails, bar):
    for events, tail in zip(run.events, tails, strict=True):
        for event in map(json.loads, tail.lines()):
            events.append(event)
            if event["kind"] == "progress":
                bar.update(event["step"], event["total"])
