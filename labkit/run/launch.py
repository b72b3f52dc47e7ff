"""The one door from a notebook to ranks.

    run = launch("labkit.run.experiment:train", nproc=2, steps=20)     a function, or its name
    run = launch("x = torch.ones(1); dist.all_reduce(x); record(x=x)") the source of a cell
    run = launch("train.py", nproc=4, steps=20)                        a script, as from torchrun

    run.records    one row per record(...) call     run.logs      one file per rank
    run.command    the same from a shell            run.seconds   wall-clock, to the last rank's end

The ranks are real processes, started by torchrun's launcher in a warm agent (agent.py).
Interrupting the cell, the wall-clock limit or the end of the notebook ends them all; a failure is
told by the rank that caused it (report.py). With restarts=k it is followed by another attempt:

    attempt 0   ranks 0, 1   step 1 ... 41   rank 1 died of SIGKILL    a folder, a meeting place
    attempt 1   ranks 0, 1   from the target's own checkpoint ...      new ones
"""

import json
import os
import shlex
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from contextlib import suppress
from pathlib import Path

from labkit.run import network_namespaces as network
from labkit.run.client import AgentError
from labkit.run.console import Bar
from labkit.run.job import choose_device, describe_nodes, describe_target
from labkit.run.launch_monitor import watch
from labkit.run.report import explain, launcher_died, read_ends

LAST_WORDS = ("leaving", "error")
PRIVATE = "$(mktemp -d)/meeting"  # for the shell: a file in a new folder of this user's alone

one_at_a_time = threading.Lock()
unused = deque()  # folders of Runs that are gone


class LaunchError(RuntimeError):
    """A failed launch: the message names rank, line and collective; .run holds logs and records."""

    def __init__(self, message, run, cause=None):
        super().__init__(message)
        self.run, self.cause = run, cause

    def _render_traceback_(self):
        # IPython: the ranks' traceback matters, the notebook's own does not
        return ["LaunchError: " + str(self)]


class Run:
    """What came of a launch. The folder with logs goes with the first launch after this object.

    nproc (of each node), nodes, world_size, seconds, parameters; device "cpu" or "cuda"; logs: one
    Path per rank; command: the same run from a shell, on every node. With restarts it is the last
    attempt; earlier: the Runs before it; failures: what ended each of them, in a line.
    """

    def __init__(self, job, nproc, earlier=()):
        self.earlier, self.failure = earlier, None
        self.job, self.nproc, self.nodes, self.seconds = job, nproc, job["nodes"], 0.0
        self.world_size = nproc * self.nodes
        self.parameters, self.device = job["parameters"], job["device"]
        self.holder = tempfile.TemporaryDirectory(prefix="labkit-", ignore_cleanup_errors=True)
        # Python swallows an interrupt in a finalizer: none removes files, the next launch does.
        weakref.finalize(self, unused.append, self.holder).atexit = False
        self.folder = Path(self.holder.name)
        self.logs = [self.folder / f"rank-{rank}.log" for rank in range(self.world_size)]
        self.events = [[] for _ in range(self.world_size)]
        self.job_path = self.folder / "job.json"
        self.job_path.write_text(json.dumps(job))

    @property
    def records(self):
        """pandas.DataFrame, one row per record(...) call, in the order of each rank.

        With restarts: of all attempts, and a column that says of which.
        """
        import pandas

        frame = pandas.DataFrame([row for run in [*self.earlier, self] for row in run.rows()])
        return frame.drop(columns="kind", errors="ignore")

    def rows(self):
        which = {"attempt": self.job["attempt"]} if self.job["restarts"] else {}
        told = [event for events in self.events for event in events if event["kind"] == "record"]
        return [event | which for event in told]

    @property
    def failures(self):
        runs = [*self.earlier, self]
        return [run.failure for run in runs if run.failure]

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
        torchrun = shlex.join(["torchrun", *self.torchrun_arguments(PRIVATE, by_name=True)])
        torchrun = torchrun.replace(shlex.quote(PRIVATE), f'"{PRIVATE}"')
        if self.job["restarts"]:  # in one store for all attempts gloo finds the ranks of the first
            return f"TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 {torchrun}"
        return torchrun

    def torchrun_arguments(self, meeting, by_name=False):
        """torchrun's arguments; by_name: what it runs by its name, if any, not by its job file.

        meeting: the file by which the launchers of one node meet, where no other user may write.
        --standalone would listen on all interfaces, and run what any user of the machine sends it.
        """
        start = ["--nproc-per-node", str(self.nproc), "--rdzv-backend", "c10d"]
        if by_name and self.job["restarts"]:
            start += ["--max-restarts", str(self.job["restarts"])]
        if self.nodes == 1:
            start += ["--rdzv-conf", "store_type=file", "--rdzv-endpoint", meeting]
        if self.nodes > 1:
            start = ["--nnodes", str(self.nodes), *start]
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
    restarts=0,
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
        bytes (labkit.run.network_namespaces). On the CPU.
    timeout, collective_timeout: seconds for the run, and for a collective to wait for its peers.
    restarts: so many times a run that fails is started again, each time with the whole timeout; the
        target knows by context.attempt (a cell: attempt), 0 at first, and goes on where it can.
    device: "cpu" (gloo), "cuda" (NCCL, one GPU a rank) or "auto" (cuda where GPUs are enough).
    threads: of each rank's CPU arithmetic. cold: a plain `torchrun`. quiet: print nothing.
    bar: what shows the progress, with the methods of console.Bar.
    Raises LaunchError for a failing rank (the last attempt's), ValueError for arguments that cannot
    be, SyntaxError for a cell that does not compile, KeyboardInterrupt as it comes.
    """
    if not isinstance(nproc, int) or nproc < 1:
        raise ValueError(f"nproc={nproc!r}: the number of ranks is a whole number of at least 1")
    if type(restarts) is not int or restarts < 0:
        raise ValueError(f"restarts={restarts!r}: a run is started again 0 times or more")
    job = describe_target(target, parameters) | describe_nodes(nodes, link_mbit, link_ms, link_mtu)
    device = choose_device(device if nodes == 1 or device != "auto" else "cpu", nproc)
    if device == "cuda" and nodes > 1:
        raise ValueError('nodes in namespaces share one machine and run on the CPU: device="cpu"')
    job |= {"device": device, "threads": threads, "collective_timeout": collective_timeout}
    job |= {"cwd": os.getcwd(), "sys_path": [path or os.getcwd() for path in sys.path]}
    job |= {"restarts": restarts}
    earlier = []
    while True:
        remove_unused()
        run = Run(job | {"attempt": len(earlier)}, nproc, earlier)
        try:
            attempt(run, timeout, cold, quiet, bar or Bar(quiet))
            return run
        except (LaunchError, AgentError) as error:
            run.failure, _, _ = str(error).partition("\n")
            if len(earlier) == restarts:
                raise
        earlier = [*earlier, run]
        if not quiet:
            print(f"[launch] {run.failure}: restart {len(earlier)} of {restarts}", flush=True)


def remove_unused():
    """The folders of Runs that are gone, before another is made: a full disk has room again."""
    with one_at_a_time:
        while unused:
            thread = threading.Thread(target=unused.popleft().cleanup)
            thread.start()
            thread.join()  # an interrupt ends this wait, not the removal


def attempt(run, timeout, cold, quiet, bar):
    """Start the ranks once and wait for them. Raises LaunchError; AgentError if the agent died."""
    meeting = str(run.folder / "rendezvous")
    plain = [sys.executable, "-m", "torch.distributed.run", *run.torchrun_arguments(meeting)]
    with one_at_a_time:
        start = time.monotonic()
        outcome = watch(run, plain if cold else None, timeout, quiet, bar)
        run.seconds = time.monotonic() - start
    ends = read_ends(run.folder, run.world_size, run.events, outcome.exits, outcome.stopped)
    if outcome.status == 0 and all(end.state == "finished" for end in ends):
        return
    for end in ends:
        if end.error:
            with suppress(OSError), open(run.logs[end.rank], "a") as log:  # the disk may be full
                log.write(end.error["traceback"])
    broken = outcome.flood or network.broken(run.folder) or launcher_died(outcome.status)
    cause, message = explain(ends, outcome.timed_out, broken)
    if all(end.state == "absent" for end in ends) or message.startswith("the launcher failed"):
        log = run.folder / "job.log"
        message += "\n" + (log.read_text()[-2000:] if log.exists() else "")
    raise LaunchError(message, run, cause)
