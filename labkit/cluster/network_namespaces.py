"""Nodes on one machine: network namespaces joined by a switch, on links of a chosen speed.

        node 0                               switch                               node 1
    +----------------------+        +------------------------+        +----------------------+
    |  rank 0     rank 1   |  veth  |                        |  veth  |   rank 2     rank 3  |
    |  torchrun       eth0 |========| port0   bridge   port1 |========| eth0       torchrun  |
    |          10.77.0.100 |        |                        |        | 10.77.0.101          |
    +----------------------+        +------------------------+        +----------------------+
                       tbf -->           <-- tbf  tbf -->                   <-- tbf

Ranks of one node communicate over its own loopback. Traffic between nodes passes a node's eth0,
where the operating system counts it (counters) and tc's token bucket filter limits it to link_mbit
each way, as on a full-duplex cable.

Nothing is left behind, and no existing network is changed: namespaces without a name exist only as
long as a process in them, and the kernel removes their interfaces with them. So no clean-up can be
forgotten or killed. It works for root, and for users who may make user namespaces. Otherwise nodes
share the loopback without a speed limit. Almesberger, Linux Network Traffic Control: Implementation
Overview, 1999; namespaces(7), veth(4), tc-tbf(8).
"""

import ctypes
import json
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
SYSTEM_FOLDERS = os.pathsep.join(["/usr/sbin", "/sbin"])  # of ip and tc, not always on the PATH
MOST_NODES = 64
PORT = 29400  # of the rendezvous: a fixed port is safe in a network that has no other user
FOLDER = "LABKIT_NODES"  # environment variable: the folder where a rank notes changes of its link


class Refused(RuntimeError):
    """Raised where this system does not allow new nodes; the message is the reason."""


@dataclass(frozen=True)
class Link:
    """Each node's cable. mbit: 10^6 bits a second each way (None: no limit); mtu: bytes.

    ms: delay each way. A packet between nodes passes two cables: 2 x ms, or 4 x ms with its answer.
    """

    mbit: float | None = None
    ms: float = 0.0
    mtu: int = 9000

    def __post_init__(self):
        if self.mbit is not None and not 0.1 <= self.mbit <= 100_000:
            raise ValueError(
                f"link_mbit={self.mbit}: must be 0.1 to 100,000 Mbit/s, or None for no limit"
            )
        if not 0 <= self.ms <= 10_000:
            raise ValueError(f"link_ms={self.ms}: must be 0 to 10,000 milliseconds")
        if type(self.mtu) is not int or not 1280 <= self.mtu <= 65_000:
            raise ValueError(
                f"link_mtu={self.mtu}: must be a whole number from 1,280 to 65,000 bytes "
                "(1500 is usual, 9000 jumbo)"
            )

    def token_bucket(self):
        """Return tc's arguments.

        The bucket holds 1 ms; a larger one would pass small messages at full speed.
        """
        rate = int(self.mbit * 1e6)
        burst = max(2 * (self.mtu + 14), int(self.mbit * 125))
        return ["tbf", "rate", f"{rate}bit", "burst", str(burst), "latency", "400ms"]


class Network:
    """A switch and its nodes, as network namespaces. The calling process ends up in the switch's.

    how: "root" or "rootless". notes: lines about features that are missing. Raises Refused.
    The calling process must have one thread and must not need its old network: use a fork.
    """

    def __init__(self, count, link):
        self.notes = []
        self.link = link
        self.how = leave_network()
        self.switch = here()
        run("ip", "link", "set", "lo", "up")
        run("ip", "link", "add", "switch", "type", "bridge")
        run("ip", "link", "set", "switch", "addrgenmode", "none", "up")
        self.nodes = [self.attach(node) for node in range(count)]

    def attach(self, node):
        """Make one node and its cable; return the file descriptor that keeps its namespace."""
        call("unshare", CLONE_NEWNET)
        inside = here()
        run("ip", "link", "set", "lo", "up")
        call("setns", self.switch, CLONE_NEWNET)
        port = f"port{node}"
        # gso_max_segs 1: packets are counted as on a cable, each with its own header.
        shape = ["mtu", str(self.link.mtu), "gso_max_segs", "1", "addrgenmode", "none"]
        ends = ["netns", f"/proc/{os.getpid()}/fd/{inside}", "name", "eth0"]
        run("ip", "link", "add", port, "mtu", str(self.link.mtu), "type", "veth", "peer", *ends)
        run("ip", "link", "set", port, *shape, "master", "switch", "up")
        self.slow_down(port)
        call("setns", inside, CLONE_NEWNET)
        run("ip", "link", "set", "eth0", *shape, "up")
        run("ip", "address", "add", f"{address(node)}/24", "dev", "eth0")
        self.slow_down("eth0")
        call("setns", self.switch, CLONE_NEWNET)
        return inside

    def slow_down(self, interface):
        add = ["tc", "qdisc", "add", "dev", interface]
        above = ["root"]
        if self.link.mbit is not None:
            run(*add, "root", "handle", "1:", *self.link.token_bucket())
            above = ["parent", "1:1"]
        if self.link.ms:
            try:
                run(*add, *above, "netem", "delay", f"{self.link.ms}ms")
            except Refused:
                self.notes = [
                    "this kernel has no netem: the links have no delay instead of "
                    f"{self.link.ms:g} ms"
                ]

    def enter(self, node):
        """Move this process, which must be a fork, into the node."""
        call("setns", self.nodes[node], CLONE_NEWNET)

    def wire(self):
        """Return the bytes of each link at its port: [{node, sent_bytes, received_bytes}]."""
        ports = [counters(f"port{node}") for node in range(len(self.nodes))]
        return [
            {"node": i, "sent_bytes": sent, "received_bytes": received}
            for i, (received, sent) in enumerate(ports)
        ]


def refusal(link):
    """Return why this system allows no nodes, or None.

    Tries in a fork, so this process stays in its network.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            Network(1, link)
        except (Refused, OSError) as reason:
            os.write(writing, str(reason).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as answer:
        reason = answer.read()
    os.waitpid(pid, 0)
    return reason or None


def leave_network():
    """Move this process into an empty network; return the rights it used, "root" or "rootless"."""
    for tool in ("ip", "tc"):
        find(tool)
    try:
        call("unshare", CLONE_NEWNET)
        return "root"
    except Refused:
        user, group = os.geteuid(), os.getegid()
        call("unshare", CLONE_NEWUSER | CLONE_NEWNET)
        # Root of the new namespace is mapped to the current user, so nothing outside becomes
        # permitted.
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        return "rootless"


def call(name, *arguments):
    """Call unshare or setns, which Python has only since 3.12."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        raise Refused(f"cannot make network namespaces ({name}: {os.strerror(ctypes.get_errno())})")


def here():
    """Return a file descriptor that keeps the current network namespace of this process."""
    return os.open("/proc/self/ns/net", os.O_RDONLY)


def find(tool):
    folders = os.pathsep.join([os.environ.get("PATH", os.defpath), SYSTEM_FOLDERS])
    path = shutil.which(tool, path=folders)
    if path is None:
        raise Refused(f"cannot find the program `{tool}` (Debian, Ubuntu: apt install iproute2)")
    return path


def run(tool, *arguments):
    done = subprocess.run([find(tool), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise Refused(f"{tool} {' '.join(arguments)}: {done.stderr.strip() or 'failed'}")


def address(node):
    """Return a node's address.

    Its last number has three digits, because torch's rendezvous sorts addresses as text.
    """
    return f"10.77.0.{100 + node}"


def counters(interface="eth0"):
    """Return (sent, received): bytes of an interface, as in /sys/class/net/*/statistics.

    On a rank: of its node, because /proc shows a process its own network. ValueError without nodes.
    """
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            fields = numbers.split()
            return int(fields[8]), int(fields[0])
    raise ValueError(
        f"no interface {interface}: counters() needs launch(..., nodes=2) with namespaces"
    )


def cut():
    """Take down the link of this rank's node.

    Connections stay open; nothing arrives until heal().
    """
    set_link("down")


def heal():
    """Bring up the link of this rank's node. Lost data arrives when TCP retries, within seconds."""
    set_link("up")


def set_link(state):
    # Without FOLDER, eth0 may be the machine's own interface.
    if FOLDER not in os.environ:
        raise ValueError(
            "this rank has no link of its own: use launch(..., "
            "nodes=2) where namespaces are allowed"
        )
    run("ip", "link", "set", "eth0", state)
    note(Path(os.environ[FOLDER]), int(os.environ["GROUP_RANK"]), link=state)


def note(folder, node, **news):
    """Append an event of a node to a log that launch reads after a failure."""
    with open(folder / "nodes.jsonl", "a") as file:
        file.write(json.dumps({"node": node, "time": time.time(), **news}) + "\n")


def broken(folder):
    """Return a sentence about the link that is down or the torchrun that was killed, or None."""
    file = folder / "nodes.jsonl"
    state = {}
    for line in file.read_text().splitlines() if file.exists() else []:
        news = json.loads(line)
        state.setdefault(news["node"], {}).update(news)
    for node, news in state.items():
        if "torchrun" in news:
            return f"torchrun of node {node} {news['torchrun']}, and its ranks died with it"
        if news["link"] == "down":
            return f"the link of node {node} is cut"
    return None
