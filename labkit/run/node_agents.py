"""One torchrun agent per node, each in its node's namespace, as a cluster's scheduler starts them.

    job process, in the switch's namespace         node 0's torchrun, the rendezvous  -> ranks 0, 1
    builds the network, forks, waits, counts  -->  node 1's torchrun, over the link   -> ranks 2, 3

The run folder gets nodes.json, with how the nodes were made and the bytes of each interface, and
nodes.jsonl, with links that ranks have cut and torchruns that were killed.
"""

import json
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass

from labkit.cluster import network_namespaces
from labkit.run import worker

OTHERS_END = 3.0  # seconds that the other nodes get to end by themselves after one has failed
POLL = 0.02


@dataclass(frozen=True)
class Place:
    """Position of a torchrun agent: node (of count) and address.

    meeting: the rendezvous endpoint.
    """

    node: int
    count: int
    address: str
    meeting: str
    store_type: str = "tcp"


def run_nodes(job, folder, run_torchrun):
    """Call run_torchrun(place) -> exit status in one process per node; return 0 if all return 0."""
    count = job["nodes"]
    link = network_namespaces.Link(**job["link"])
    network = None
    if reason := network_namespaces.refusal(link):
        report = {
            "how": "loopback",
            "notes": [f"{reason}: the nodes share the loopback without a speed limit"],
        }
    else:
        network = network_namespaces.Network(count, link)
        report = {"how": network.how, "notes": network.notes}
    worker.die_with_parent()  # again, because a user namespace changes rights, which resets it
    write(folder / "nodes.json", report)
    started = [start_node(network, node, count, folder, run_torchrun) for node in range(count)]
    # a stopped job must report its bytes, too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        return wait_for(started, folder)
    finally:
        if network is not None:
            write(folder / "nodes.json", report | {"wire": network.wire()})


def write(path, value):
    """Replace a file atomically, because launch reads it during the run."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(value))
    new.replace(path)


def start_node(network, node, count, folder, run_torchrun):
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        worker.die_with_parent()
        if network is None:
            place = Place(node, count, "127.0.0.1", str(folder / "rendezvous"), "file")
        else:
            network.enter(node)
            place = Place(
                node,
                count,
                network_namespaces.address(node),
                f"{network_namespaces.address(0)}:{network_namespaces.PORT}",
            )
            os.environ |= {
                "GLOO_SOCKET_IFNAME": "eth0",
                "TP_SOCKET_IFNAME": "eth0",
                network_namespaces.FOLDER: str(folder),
            }
        status = run_torchrun(place)
    except Exception:
        traceback.print_exc()  # into job.log
    finally:
        os._exit(status)


def wait_for(pids, folder):
    """Return 0 if all pids (by node) end with 0; else 1, after the others had time to end."""
    running = set(pids)
    failed_at = None
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            running.discard(pid)
            if os.WIFSIGNALED(status):
                name = signal.Signals(os.WTERMSIG(status)).name
                network_namespaces.note(
                    folder,
                    pids.index(pid),
                    torchrun=f"died of {name} (signal {os.WTERMSIG(status)})",
                )
            if status and failed_at is None:
                failed_at = time.monotonic()
        elif failed_at is not None and time.monotonic() - failed_at > OTHERS_END:
            for pid in running:
                os.kill(pid, signal.SIGKILL)  # the kernel then kills its ranks
            return 1
        else:
            time.sleep(POLL)
    return int(failed_at is not None)
