"""A real Slurm on one machine: slurmctld, munged and a slurmd for each node, in namespaces.

    with cluster(nodes=2) as slurm:                    sbatch, squeue ... are on the PATH meanwhile
        slurm.run(["sbatch", "job.sbatch"])            as on the login node
        launch("record(x=rank)", on="slurm", nodes=2)  labkit.run finds sbatch on the PATH
        slurm.kill_node(1)

    login node: slurmctld, munged        switch        node0: slurmd -> srun's tasks
    10.77.0.1                     =====  bridge  ===== 10.77.0.100  eth0
                                                 ===== 10.77.0.101  eth0, node1: slurmd -> ...

Each node has its own network, host name and mounts; all share the processor and the file system.
GPUs are stand-ins, which Slurm counts and assigns; nothing can compute on them. Partitions: "lab",
whose jobs are preempted (SIGTERM, then 20 s, then requeued) by those of "urgent".

Nothing is left behind. All processes live in a namespace of process numbers, whose first process
ends when this object is closed or its owner dies, and the kernel then kills the others. No file
outside a private folder is changed: /etc/hosts differs only inside. Needs root and Debian's
slurm-wlm and munge. slurm.conf(5), gres.conf(5), topology.conf(5), pid_namespaces(7), munged(8).
"""

import json
import os
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from labkit.cluster import network_namespaces as network
from labkit.cluster.network_namespaces import Refused

CLONE_NEWNS, CLONE_NEWUTS = 0x20000, 0x4000000
LOGIN, ADDRESS = "login", "10.77.0.1"
DAEMONS = ("slurmctld", "slurmd", "munged")
COMMANDS = ("sbatch", "srun", "salloc", "squeue", "scancel", "scontrol", "sinfo")
ISOLATE = ["unshare", "--fork", "--kill-child", "--mount-proc"]
ISOLATE += ["--mount", "--uts", "--ipc", "--pid"]
ENTER = ["--net", "--mount", "--uts", "--ipc", "--pid"]
START_LIMIT = 20.0  # seconds for all nodes to be idle
END_LIMIT = 10.0  # seconds for all processes to be gone
POLL = 0.02
MEMORY_MB = 8000  # of each node; a promise that nobody checks


def cluster(nodes=2, cpus=2, gpus=2, leaf=None, link_mbit=None):
    """Start a Slurm cluster; return it as a Cluster, which is a context manager.

    nodes: 1 to 64, called node0, node1 ... cpus, gpus: of each node, as Slurm counts them. leaf:
    nodes of a leaf switch (topology/tree); None: one switch. link_mbit: speed of each node's link,
    10^6 bits a second each way; None: no limit. Raises ValueError, and Refused with one line where
    this machine cannot run it.
    """
    leaf = nodes if leaf is None else leaf
    for what, value, least in (("nodes", nodes, 1), ("cpus", cpus, 1), ("gpus", gpus, 0)):
        if type(value) is not int or value < least:
            raise ValueError(f"{what}={value!r}: must be a whole number of at least {least}")
    if nodes > network.MOST_NODES:
        raise ValueError(f"nodes={nodes}: must be at most {network.MOST_NODES}")
    if type(leaf) is not int or leaf < 1:
        raise ValueError(f"leaf={leaf!r}: must be a whole number of at least 1, or None")
    network.Link(link_mbit)
    if reason := missing():
        raise Refused(reason)
    return Cluster(nodes, cpus, gpus, leaf, link_mbit)


def missing():
    """Return why this machine cannot run a Slurm in namespaces, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a Slurm in namespaces needs Linux and root"
    absent = [name for name in (*DAEMONS, *COMMANDS, "unshare", "nsenter") if not program(name)]
    if absent:
        return f"cannot find {', '.join(absent)} (Debian, Ubuntu: apt install slurm-wlm munge)"
    return None


def program(name):
    """Return the path of a system program, never that of a wrapper of a Cluster, or None."""
    return shutil.which(name, path=f"/usr/bin:/bin:/usr/local/bin:{network.SYSTEM_FOLDERS}")


class Cluster:
    """A running cluster. Use it in a `with` block, or call close().

    folder: a private folder with configuration, logs and wrappers of Slurm's commands. bin: the
    folder of these wrappers, which is first on the PATH of this process until close().
    """

    def __init__(self, nodes, cpus, gpus, leaf, link_mbit):
        self.names = [f"node{node}" for node in range(nodes)]
        self.folder = Path(tempfile.mkdtemp(prefix="labkit-slurm-"))  # mode 0700
        self.bin = self.folder / "bin"
        self.process = None
        try:
            write_configuration(self.folder, self.names, cpus, gpus, leaf)
            self.start({"folder": str(self.folder), "nodes": nodes, "link_mbit": link_mbit})
        except BaseException:
            self.close()
            raise

    def start(self, plan):
        root = Path(__file__).resolve().parents[2]
        paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            [*ISOLATE, sys.executable, "-m", "labkit.cluster.slurm_namespaces", json.dumps(plan)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            # Ctrl-C in a terminal must reach only the owner
            start_new_session=True,
        )
        answer = self.process.stdout.readline()
        if not answer.startswith("{"):
            raise Refused(answer.strip() or "the Slurm in namespaces did not start")
        self.slurmds = json.loads(answer)["slurmds"]
        (first,) = psutil.Process(self.process.pid).children()
        self.first = first.pid
        write_wrappers(self.bin, self.folder, self.enter())
        os.environ["PATH"] = os.pathsep.join([str(self.bin), os.environ.get("PATH", os.defpath)])

    def enter(self):
        """Return the beginning of a command line that runs on the login node."""
        return [program("nsenter"), "--target", str(self.first), *ENTER]

    def run(self, command, *, cwd=None, env=None, timeout=120, check=True):
        """Run a command, a list, on the login node; return its CompletedProcess, with text.

        cwd: None for the current one. env: added to the environment. Raises CalledProcessError, if
        check, and TimeoutExpired.
        """
        environment = os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")} | (env or {})
        inside = ["sh", "-c", 'cd "$0" && exec "$@"', str(cwd or os.getcwd()), *map(str, command)]
        return subprocess.run(
            [*self.enter(), *inside],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=environment,
            timeout=timeout,
            check=check,
        )

    def run_on_node(self, node, command, **options):
        """Run a command on a node, beside its jobs; otherwise as run."""
        place = ["nsenter", "--target", str(self.slurmds[node]), "--net", "--mount", "--uts"]
        inside = ["sh", "-c", 'cd "$0" && exec "$@"', str(options.get("cwd") or os.getcwd())]
        return self.run([*place, *inside, *map(str, command)], **options)

    def kill_node(self, node):
        """Kill slurmd of a node and all processes of its jobs, as a power cut does."""
        self.ask("kill", node)

    def start_node(self, node):
        """Start slurmd of a killed node again."""
        self.slurmds[node] = self.ask("start", node)["slurmd"]

    def ask(self, what, node):
        self.process.stdin.write(json.dumps([what, range(len(self.names))[node]]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def processes(self):
        """Return the processes of all nodes' jobs: those below a slurmstepd."""
        below = names(psutil.Process(self.process.pid).children(recursive=True))
        jobs = []
        for step in [process for process, name in below.items() if name == "slurmstepd"]:
            with suppress(psutil.NoSuchProcess):
                jobs += step.children(recursive=True)
        daemons = (*DAEMONS, "slurmstepd")
        return [process for process, name in names(jobs).items() if name not in daemons]

    def close(self):
        """Kill all processes of the cluster and remove its folder. Does nothing the second time."""
        folders = os.environ.get("PATH", "").split(os.pathsep)
        if str(self.bin) in folders:
            folders.remove(str(self.bin))
            os.environ["PATH"] = os.pathsep.join(folders)
        if self.process is not None:
            self.process.stdin.close()
            try:
                self.process.wait(END_LIMIT)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()


# What the cluster is made of


def write_configuration(folder, names, cpus, gpus, leaf):
    """Write slurm.conf and its companions, the key of munge, and the files of the host names."""
    for name in ("bin", "state", "log", "run", "gpus", *(f"spool.{name}" for name in names)):
        (folder / name).mkdir()
    addresses = {name: network.address(node) for node, name in enumerate(names)}
    hosts = {"localhost": "127.0.0.1", LOGIN: ADDRESS} | addresses
    write(folder / "hosts", [f"{address} {name}" for name, address in hosts.items()])
    # There is no name server: each lookup would wait for one.
    write(folder / "nsswitch.conf", ["passwd: files", "group: files", "hosts: files"])
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    for gpu in range(gpus):
        make_stand_in(folder / "gpus" / f"gpu{gpu}")
    stand_ins = f"{folder}/gpus/gpu[0-{gpus - 1}]"
    write(folder / "gres.conf", [f"Name=gpu File={stand_ins}"] if gpus else [])
    write(folder / "topology.conf", switches(len(names), leaf))
    node = f"CPUs={cpus} RealMemory={MEMORY_MB}" + (f" Gres=gpu:{gpus}" if gpus else "")
    lines = [f"{name}={value}" for name, value in settings(folder).items()]
    lines += [f"NodeName={name} NodeAddr={at} {node}" for name, at in addresses.items()]
    for partition, words in (
        ("lab", "Default=YES PriorityTier=1 GraceTime=20"),
        ("urgent", "PriorityTier=10 PreemptMode=OFF"),
    ):
        lines += [f"PartitionName={partition} Nodes=ALL MaxTime=INFINITE State=UP {words}"]
    write(folder / "slurm.conf", lines)


def make_stand_in(path):
    """Make a device that Slurm assigns: another /dev/null. A file would get no number."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.stat(os.devnull).st_rdev)
    except PermissionError:  # root without the right to make devices
        path.touch()


def settings(folder):
    """Return slurm.conf's settings of the whole cluster. Waiting times are short, for tests."""
    return {
        "ClusterName": "lab",
        "SlurmctldHost": f"{LOGIN}({ADDRESS})",
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "AuthType": "auth/munge",
        # A requeued job waits until its credentials have expired: 120 s if this is not written.
        "AuthInfo": f"socket={folder}/run/munge.sock,cred_expire=15",
        "CredType": "cred/munge",
        "StateSaveLocation": f"{folder}/state",
        "SlurmdSpoolDir": f"{folder}/spool.%n",
        "SlurmctldPidFile": f"{folder}/run/slurmctld.pid",
        "SlurmdPidFile": f"{folder}/run/slurmd.%n.pid",
        "SlurmctldLogFile": f"{folder}/log/slurmctld.log",
        "SlurmdLogFile": f"{folder}/log/slurmd.%n.log",
        "SlurmdParameters": "config_overrides",  # believe CPUs and RealMemory of the nodes' lines
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/affinity",
        "MpiDefault": "none",
        "GresTypes": "gpu",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "TopologyPlugin": "topology/tree",
        "EnforcePartLimits": "ALL",  # refuse what no node has, at once
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": "sched_interval=1,bf_interval=1,batch_sched_delay=0,"
        "sched_min_interval=0",
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
        "ReturnToService": "2",
        "KillWait": "5",
        "SlurmdTimeout": "5",
        "UnkillableStepTimeout": "10",
        "JobAcctGatherType": "jobacct_gather/none",
        "AccountingStorageType": "accounting_storage/none",
        "JobCompType": "jobcomp/none",
    }


def switches(nodes, leaf):
    """Return topology.conf's lines: leaf switches of `leaf` nodes each, below one root."""
    starts = range(0, nodes, leaf)
    lines = [
        f"SwitchName=leaf{number} Nodes=node[{start}-{min(start + leaf, nodes) - 1}]"
        for number, start in enumerate(starts)
    ]
    root = f"SwitchName=root Switches=leaf[0-{len(starts) - 1}]"
    return [*lines, root] if len(starts) > 1 else lines


def write(path, lines):
    path.write_text("".join(f"{line}\n" for line in lines))


def write_wrappers(place, folder, enter):
    """Write a script for each of Slurm's commands, which runs it on the login node."""
    configuration = shlex.quote(str(folder / "slurm.conf"))
    for name in COMMANDS:
        real = program(name)
        within = 'cd "$0" && exec "$@"'
        lines = [
            "#!/bin/sh",
            "# A job inherits the PATH: in the cluster, this is the command itself.",
            f'if [ "$SLURM_CONF" = {configuration} ]; then exec {real} "$@"; fi',
            f"export SLURM_CONF={configuration}",
            f'exec {shlex.join(enter)} sh -c {shlex.quote(within)} "$PWD" {real} "$@"',
        ]
        write(place / name, lines)
        (place / name).chmod(0o700)


# The first process of the cluster


def serve(plan):
    """Start the daemons, report it, and obey the owner until its pipe closes."""
    folder = Path(plan["folder"])
    slurmds = {}
    try:
        net = network.Network(plan["nodes"], network.Link(plan["link_mbit"]))
        network.run("ip", "address", "add", f"{ADDRESS}/24", "dev", "switch")
        socket.sethostname(LOGIN)
        for name in ("hosts", "nsswitch.conf"):
            network.run("mount", "--bind", str(folder / name), f"/etc/{name}")
        os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
        start_controller(folder)
        for node in range(plan["nodes"]):
            slurmds[node] = start_slurmd(net, node, folder)
        wait_until_idle(plan["nodes"], folder)
        answer(slurmds=list(slurmds.values()))
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans of the whole cluster end up here
        for line in sys.stdin:
            what, node = json.loads(line)
            if what == "kill":
                kill_inside(net.nodes[node])
                answer(killed=node)
            else:
                slurmds[node] = start_slurmd(net, node, folder)
                answer(slurmd=slurmds[node])
    except (Refused, OSError) as error:
        print(f"no Slurm in namespaces: {error}", flush=True)
    finally:
        end_all()
        shutil.rmtree(folder, ignore_errors=True)


def end_all():
    """Kill all processes of this namespace but this one, its first."""
    if os.getpid() == 1:  # elsewhere, -1 would be every process of this user
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)


def answer(**fields):
    print(json.dumps(fields), flush=True)


def start_controller(folder):
    subprocess.run(
        [
            program("munged"),
            "--force",
            "--num-threads=2",
            f"--key-file={folder}/munge.key",
            f"--socket={folder}/run/munge.sock",
            f"--pid-file={folder}/run/munged.pid",
            f"--seed-file={folder}/run/munged.seed",
            f"--log-file={folder}/log/munged.log",
        ],
        stdin=subprocess.DEVNULL,
        stdout=open(folder / "log" / "munged.out", "w"),
        stderr=subprocess.STDOUT,
    )
    start([program("slurmctld"), "-D"], folder / "log" / "slurmctld.out")


def start(command, log):
    """Start a daemon; return its process id."""
    pid = os.fork()
    if pid:
        return pid
    become(command, log)


def start_slurmd(net, node, folder):
    """Start slurmd in a node's namespaces; return its process id when it is in them."""
    reading, writing = os.pipe()  # closed when the fork becomes slurmd, or dies
    pid = os.fork()
    if pid:
        os.close(writing)
        os.read(reading, 1)
        os.close(reading)
        return pid
    try:
        net.enter(node)
        network.call("unshare", CLONE_NEWNS | CLONE_NEWUTS)
        socket.sethostname(f"node{node}")
    except Refused as error:
        (folder / "log" / f"node{node}.out").write_text(f"{error}\n")
        os._exit(1)
    become([program("slurmd"), "-D", "-N", f"node{node}"], folder / "log" / f"node{node}.out")


def become(command, log):
    """Replace this process, a fork, by a daemon without the owner's pipes."""
    try:
        for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):  # as Python found them
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for descriptor, file in ((0, nothing), (1, output), (2, output)):
            os.dup2(file, descriptor)
        os.execv(command[0], command)
    finally:
        os._exit(1)


def wait_until_idle(count, folder):
    """Wait until all nodes are idle. Raises Refused with the last lines of the logs."""
    deadline = time.monotonic() + START_LIMIT
    ask = [program("sinfo"), "--noheader", "--states=idle", "--Node", "--partition=lab"]
    while time.monotonic() < deadline:
        found = subprocess.run([*ask, "--format=%N"], capture_output=True, text=True)
        if len(found.stdout.split()) == count:
            return
        time.sleep(POLL)
    logs = [path.read_text(errors="replace").splitlines() for path in (folder / "log").iterdir()]
    errors = [line for lines in logs for line in lines if "error" in line or "fatal" in line]
    raise Refused(f"not all {count} nodes are idle after {START_LIMIT:g} s: {errors[-3:]}")


def kill_inside(namespace):
    """Kill all processes of a network namespace, given by its file descriptor."""
    deadline = time.monotonic() + END_LIMIT
    while (found := processes_in(namespace)) and time.monotonic() < deadline:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL)


def names(processes):
    """Return {process: its name}, without those that have ended."""
    found = {}
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            found[process] = process.name()
    return found


def processes_in(namespace):
    """Return the process ids in a network namespace, given by its file descriptor."""
    inside = os.fstat(namespace).st_ino
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has ended
            if os.stat(f"/proc/{name}/ns/net").st_ino == inside:
                found.append(int(name))
    return found


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
