"""The nodes' processes: one torchrun agent a node, in its namespace, as a scheduler starts them.

    job process, in the switch's namespace         node 0's torchrun, the rendezvous  -> ranks 0, 1
    builds the network, forks, waits, counts  -->  node 1's torchrun, over the link   -> ranks 2, 3

Into the run folder go nodes.json, how the nodes were made and what each interface has counted, and
nodes.jsonl: links that ranks have cut, and torchruns that were killed.
"""

import json
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass

from labkit.run import network_namespaces, worker

OTHERS_END = 3.0  # seconds that the other nodes get to end by themselves, once one has failed
POLL = 0.02


@dataclass(frozen=True)
class Place:
    """Where a torchrun agent stands: node of count, address; meeting: the rendezvous endpoint."""

    node: int
    count: int
    address: str
    meeting: str
    store_type: str = "tcp"


def run_nodes(job, folder, run_torchrun):
    """Run run_torchrun(place) -> exit status in a process per node; 0 if all have returned 0."""
    count, link, network = job["nodes"], network_namespaces.Link(**job["link"]), None
    if reason := network_namespaces.refusal(link):
        report = {
            "how": "loopback",
            "notes": [f"{reason}: the nodes share the loopback, and nothing is slowed down"],
        }
    else:
        network = network_namespaces.Network(count, link)
        report = {"how": network.how, "notes": network.notes}
    worker.die_with_parent()  # a user namespace is a change of rights, which resets this
    write(folder / "nodes.json", report)
    started = [start_node(network, node, count, folder, run_torchrun) for node in range(count)]
    # a job that is stopped has counted bytes as well
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        return wait_for(started, folder)
    finally:
        if network is not None:
            write(folder / "nodes.json", report | {"wire": network.wire()})


def write(path, value):
    """Whole or not at all: launch reads it while we run."""
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
    """0 when all pids (by node) end with 0; else 1, once the others have had a moment to end."""
    running, failed_at = set(pids), None
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
                os.kill(pid, signal.SIGKILL)  # its ranks are bound to it
            return 1
        else:
            time.sleep(POLL)
    return int(failed_at is not None)
