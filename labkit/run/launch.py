"""Start ranks from a notebook, and collect their records and logs.

    run = launch("labkit.run.experiment:train", nproc=2, steps=20)     a function, or its name
    run = launch("x = torch.ones(1); dist.all_reduce(x); record(x=x)") the source of a cell
    run = launch("train.py", nproc=4, steps=20)                        a script, as from torchrun
    run = launch(train, on="slurm", nodes=2, nproc=8)                  on nodes of a cluster

    run.records    one row per record(...) call     run.logs      one file per rank
    run.command    the same from a shell            run.seconds   wall-clock, to the last rank's end

The ranks are real processes, started by torchrun's launcher in warm_agent.py. They end
when the cell is interrupted, the wall-clock limit is reached, or the notebook ends. An error names
the rank that caused the failure (report.py). With restarts=k, a new attempt follows a failure:

    attempt 0   ranks 0, 1   step 1 ... 41   rank 1 died of SIGKILL    a folder, a rendezvous
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
from importlib import import_module
from pathlib import Path

from labkit.cluster import network_namespaces as network
from labkit.run.client import AgentError
from labkit.run.console import Bar
from labkit.run.job import choose_device, describe_nodes, describe_target
from labkit.run.launch_monitor import watch
from labkit.run.report import explain, launcher_died, read_ends

FINAL_EVENTS = ("leaving", "error")
# in a shell command: a file in a new folder that only this user can open
PRIVATE = "$(mktemp -d)/meeting"

one_at_a_time = threading.Lock()
unused = deque()  # folders of Runs that have been garbage-collected


class LaunchError(RuntimeError):
    """A failed launch.

    The message names the rank, line and collective; .run holds logs and records.
    """

    def __init__(self, message, run, cause=None):
        super().__init__(message)
        self.run = run
        self.cause = cause

    def _render_traceback_(self):
        # IPython shows this instead of the notebook's own traceback, which does not help
        return ["LaunchError: " + str(self)]


class Run:
    """Result of a launch. Its folder is deleted by the first launch after this object is gone.

    nproc (of each node), nodes, world_size, seconds, parameters; device "cpu" or "cuda"; logs: one
    Path per rank; command: the shell command of the same run, for every node. With restarts, this
    is the last attempt; earlier: the Runs before it; failures: one line per failed attempt.
    """

    def __init__(self, job, nproc, earlier=()):
        self.earlier = earlier
        self.failure = None
        self.job = job
        self.nproc = nproc
        self.nodes = job["nodes"]
        self.seconds = 0.0
        self.world_size = nproc * self.nodes
        self.parameters = job["parameters"]
        self.device = job["device"]
        self.holder = tempfile.TemporaryDirectory(
            prefix="labkit-",
            dir=job.get("on", {}).get("folder"),
            ignore_cleanup_errors=True,
        )
        # Python swallows an interrupt in a finalizer, so the next launch removes the files instead.
        weakref.finalize(self, unused.append, self.holder).atexit = False
        self.folder = Path(self.holder.name)
        self.logs = [self.folder / f"rank-{rank}.log" for rank in range(self.world_size)]
        self.events = [[] for _ in range(self.world_size)]
        self.job_path = self.folder / "job.json"
        self.job_path.write_text(json.dumps(job))

    @property
    def records(self):
        """Return a pandas.DataFrame with one row per record(...) call, in the order of each rank.

        With restarts: the rows of all attempts, and a column `attempt`.
        """
        import pandas

        frame = pandas.DataFrame([row for run in [*self.earlier, self] for row in run.rows()])
        return frame.drop(columns="kind", errors="ignore")

    def rows(self):
        which = {"attempt": self.job["attempt"]} if self.job["restarts"] else {}
        records = [event for events in self.events for event in events if event["kind"] == "record"]
        return [event | which for event in records]

    @property
    def failures(self):
        runs = [*self.earlier, self]
        return [run.failure for run in runs if run.failure]

    @property
    def network(self):
        """Return {"how": "root", "rootless" or "loopback", "notes": [what is missing], ...}.

        wire, after a run with namespaces: the bytes of each link. {} for one node.
        """
        file = self.folder / "nodes.json"
        return json.loads(file.read_text()) if file.exists() else {}

    @property
    def wire(self):
        """Return a pandas.DataFrame with a row per node: bytes by its interface and by comm.

        sent_bytes, received_bytes: on its link, including headers and rendezvous; no rows if the
        nodes share the loopback. counted_bytes: payload that its ranks sent to any rank, including
        ranks of the same node.
        """
        import pandas

        columns = ["node", "sent_bytes", "received_bytes"]
        frame = pandas.DataFrame(self.network.get("wire", []), columns=columns)
        return frame.assign(counted_bytes=[self.sent_by(node) for node in frame["node"]])

    def sent_by(self, node):
        """Return the bytes that the node's ranks sent through labkit.comm."""
        ranks = self.events[node * self.nproc : (node + 1) * self.nproc]
        ends = [event for events in ranks for event in events if event["kind"] in FINAL_EVENTS]
        return sum(event["sent_bytes"] for event in ends)

    @property
    def command(self):
        if "on" in self.job:
            return shlex.join(["sbatch", str(self.folder / "job.sbatch")])
        torchrun = shlex.join(["torchrun", *self.torchrun_arguments(PRIVATE, by_name=True)])
        torchrun = torchrun.replace(shlex.quote(PRIVATE), f'"{PRIVATE}"')
        if self.job[
            "restarts"
        ]:  # with one store for all attempts, gloo finds the ranks of the first one
            return f"TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 {torchrun}"
        return torchrun

    def torchrun_arguments(self, meeting, by_name=False):
        """Return torchrun's arguments. by_name: run a named target by name, not by its job file.

        meeting: the file where the launchers of one node meet; no other user may write to it.
        --standalone would listen on all interfaces and run what any user of the machine sends it.
        """
        start = ["--nproc-per-node", str(self.nproc), "--rdzv-backend", "c10d"]
        if by_name and self.job["restarts"]:
            start += ["--max-restarts", str(self.job["restarts"])]
        if self.nodes == 1:
            start += ["--rdzv-conf", "store_type=file", "--rdzv-endpoint", meeting]
        if self.nodes > 1:
            start = ["--nnodes", str(self.nodes), *start]
            # Without by_name, the environment of each node has the endpoint (warm_agent.py).
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
    on=None,
    device="auto",
    threads=1,
    cold=False,
    quiet=False,
    bar=None,
    **parameters,
):
    """Run the target on nproc ranks of each node, and wait for them.

    target: "package.module:function" or a function (called as function(context, **parameters); its
        source is sent to the ranks, where it sees torch, dist, comm and its own imports), the
        source of a cell, or the path of a .py script.
    nodes: more than one are network namespaces of this machine, joined by links of link_mbit (10^6
        bits a second each way; None: no limit), link_ms of delay each way and frames of link_mtu
        bytes (labkit.cluster.network_namespaces). CPU only.
    timeout, collective_timeout: seconds for the run, and for a collective to wait for its peers.
    restarts: how often a failed run is started again, each time with the full timeout. The target
        reads context.attempt (in a cell: attempt), 0 at first, and resumes if it can.
    on: None for this machine; "slurm" for nodes of the Slurm cluster whose login node this is; or
        a labkit.cluster.slurm.Slurm, for example with the folder that all nodes share (else it is
        the working directory). The timeout begins when the job leaves the queue. An interrupt and
        the timeout cancel the job. "auto" is "cpu" there.
    device: "cpu" (gloo), "cuda" (NCCL, one GPU a rank) or "auto" (cuda if there are enough GPUs).
    threads: CPU threads of each rank. cold: use a plain `torchrun`. quiet: print nothing.
    bar: an object that shows the progress, with the methods of console.Bar.
    Raises LaunchError for a failing rank (of the last attempt), AgentError if the warm agent does
    not start or dies, or Slurm does not start the job, ValueError for invalid arguments,
    SyntaxError for a cell that does not compile, and KeyboardInterrupt.
    """
    if not isinstance(nproc, int) or nproc < 1:
        raise ValueError(f"nproc={nproc!r}: must be a whole number of at least 1")
    if type(restarts) is not int or restarts < 0:
        raise ValueError(f"restarts={restarts!r}: must be a whole number of at least 0")
    job = describe_target(target, parameters)
    if on is None:
        job |= describe_nodes(nodes, link_mbit, link_ms, link_mtu)
        device = choose_device(device if nodes == 1 or device != "auto" else "cpu", nproc)
        if device == "cuda" and nodes > 1:
            raise ValueError('nodes=2 or more run on the CPU of one machine: use device="cpu"')
        job |= {"device": device}
    else:
        job |= slurm_client().describe(on, nodes, device, (link_mbit, link_ms, link_mtu))
    job |= {"threads": threads, "collective_timeout": collective_timeout}
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


def slurm_client():
    """Return labkit.run.slurm_client.

    By name, and only when it is used: no other launch depends on it, nor do the stored numbers of
    other launches (measure/fingerprint.py).
    """
    return import_module(".slurm_client", __package__)


def remove_unused():
    """Remove the folders of garbage-collected Runs before a new one is made, to free disk space."""
    with one_at_a_time:
        while unused:
            thread = threading.Thread(target=unused.popleft().cleanup)
            thread.start()
            thread.join()  # an interrupt ends this wait, but not the removal


def attempt(run, timeout, cold, quiet, bar):
    """Start the ranks once and wait for them. Raises LaunchError; AgentError if the agent died."""
    client = None
    if "on" in run.job:
        client = slurm_client().SlurmClient(run, timeout, quiet)
    meeting = str(run.folder / "rendezvous")
    plain = [sys.executable, "-m", "torch.distributed.run", *run.torchrun_arguments(meeting)]
    with one_at_a_time:
        start = time.monotonic()
        outcome = watch(run, plain if cold else None, timeout, quiet, bar, client)
        run.seconds = time.monotonic() - start
    ends = read_ends(run.folder, run.world_size, run.events, outcome.exits, outcome.stopped)
    if outcome.status == 0 and all(end.state == "finished" for end in ends):
        return
    for end in ends:
        if end.error:
            with suppress(OSError), open(run.logs[end.rank], "a") as log:  # the disk may be full
                log.write(end.error["traceback"])
    broken = outcome.broken or network.broken(run.folder) or launcher_died(outcome.status)
    cause, message = explain(ends, outcome.timed_out, broken)
    if all(end.state == "absent" for end in ends) or message.startswith("the launcher failed"):
        log = run.folder / "job.log"
        message += "\n" + (log.read_text()[-2000:] if log.exists() else "")
    raise LaunchError(message, run, cause)
