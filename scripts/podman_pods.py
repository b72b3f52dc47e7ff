"""Run pods with podman to their end, in namespaces that take everything with them: python podman_pods.py FOLDER.

FOLDER has root.tar, the files of the image localhost/host-python, pod-N.yaml for each pod, and changes.json, a list of
[what, N, ranks]: start, stop (SIGTERM) or kill pod N, then wait until pod 0 trains with so many ranks. It gets
pod-N.log. The process and its children have a network, mounts and process ids of their own: see `inside`.
"""

import contextlib
import json
import re
import subprocess
import sys
import time
from pathlib import Path

NETWORK = "10.89.77"
MEMORY = "/run"  # a tmpfs of these namespaces: images and containers are gone with them
SETTLED = 200  # seconds until the pods train again
SOME = 3  # steps
NAMESPACES = ["unshare", "--net", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child"]
CONFIG = """
[engine]
cgroup_manager = "cgroupfs"
events_logger = "none"
runtime = "runc"
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
log_driver = "k8s-file"
[network]
network_backend = "netavark"
"""


def address(number):
    return f"{NETWORK}.{10 + number}"


def inside(folder):
    """Return the command that runs the pods of a folder, in namespaces of its own."""
    return [*NAMESPACES, sys.executable, __file__, str(folder)]


def main(folder):
    """Make the changes, and wait for the pods that are left; return 0 if all of these did."""
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", MEMORY], check=True)
    (folder / "containers.conf").write_text(CONFIG)
    podman = Podman(folder)
    podman("import", str(folder / "root.tar"), "localhost/host-python:latest")
    # A macvlan has no firewall rules, but podman's netavark always asks for iptables' version first.
    for name in ("iptables", "ip6tables"):
        (folder / name).write_text(f"#!/bin/sh\necho '{name} v1.8.9 (nf_tables)'\n")
        (folder / name).chmod(0o755)
    subprocess.run(["ip", "link", "add", "pods", "type", "bridge"], check=True)
    subprocess.run(["ip", "link", "set", "pods", "up"], check=True)
    subnet = ["--subnet", f"{NETWORK}.0/24", "--disable-dns"]
    podman("network", "create", "--driver", "macvlan", "--opt", "parent=pods", *subnet, "pods")
    left = []
    for what, number, ranks in json.loads((folder / "changes.json").read_text()):
        if what == "start":
            left.append(number)
            play = ["kube", "play", "--network", "pods", "--ip", address(number)]
            podman(*play, str(folder / f"pod-{number}.yaml"))
        else:
            left.remove(number)
            podman(*{"stop": ("stop", "--time", "60"), "kill": ("kill",)}[what], container(number))
        if ranks:
            wait_for_ranks(podman, ranks, folder)
    codes = [int(podman("wait", container(number))) for number in left]
    for pod in folder.glob("pod-*.yaml"):
        number = int(pod.stem.removeprefix("pod-"))
        pod.with_suffix(".log").write_text(podman("logs", container(number), both=True))
    podman("pod", "rm", "--all", "--force", "--time", "0")
    return max(codes)


def container(number):
    return f"gpt-{number}-trainer"


def wait_for_ranks(podman, ranks, folder):
    """Wait until the last training that pod 0 has begun is one of so many ranks, and has logged some steps."""
    deadline = time.monotonic() + SETTLED
    while [str(ranks)] != re.findall(r"dp (\d+)", podman("logs", container(0)))[-1:]:
        wait(deadline, f"{ranks} ranks", podman)
    enough = rows_in(folder) + SOME
    while rows_in(folder) < enough:
        wait(deadline, f"{SOME} steps of {ranks} ranks", podman)


def rows_in(folder):
    """The number of rows in the log of the training."""
    return sum(path.read_text().count("\n") for path in folder.glob("checkpoints/*/log.jsonl"))


def wait(deadline, what, podman):
    if time.monotonic() > deadline:
        said = podman("logs", container(0), both=True)
        raise TimeoutError(f"waited {SETTLED} s without success for {what}: {said[-4000:]}")
    time.sleep(0.3)


def remove_cgroups():
    """Remove podman's empty cgroups: they belong to no namespace. The kernel keeps those that have a process."""
    for parent in [*Path("/sys/fs/cgroup").glob("libpod_parent"), *Path("/sys/fs/cgroup").glob("*/libpod_parent")]:
        for folder in sorted((parent, *(path for path in parent.rglob("*") if path.is_dir())), reverse=True):
            with contextlib.suppress(OSError):
                folder.rmdir()


class Podman:
    def __init__(self, folder):
        places = {"root": "storage", "runroot": "run", "tmpdir": "tmp", "network-config-dir": "networks"}
        self.command = ["podman", "--storage-driver", "vfs"]
        self.command += [word for name, place in places.items() for word in (f"--{name}", f"{MEMORY}/{place}")]
        self.environment = {
            "PATH": f"{folder}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(folder),
        }
        self.environment["CONTAINERS_CONF"] = str(folder / "containers.conf")

    def __call__(self, *words, both=False):
        """Run a command of podman and return its output; RuntimeError with its message if it fails."""
        done = subprocess.run([*self.command, *words], capture_output=True, text=True, env=self.environment)
        if done.returncode:
            raise RuntimeError(f"podman {' '.join(words[:2])}: {done.stderr.strip()}")
        return done.stdout + (done.stderr if both else "")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
