"""Pods made from the StatefulSet's own template, in real containers: they train as warm ranks do.

Kubernetes itself is not here. podman kube play reads the pods; the test does what the StatefulSet's controller, the
headless Service and a cluster's storage do: a name and a label for each pod, a line in /etc/hosts, and a folder.
"""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import marked_samples
import podman_pods
import pytest
import train_command
import yaml
from repository import ROOT

from labkit.cluster.kubernetes import statefulset
from labkit.run import launch
from labkit.run.experiment import Experiment

SMALL = Experiment(model="mlp", strategy="fsdp", batch_size=12, steps=6, optimizer="adamw", lr=0.01)
MARKED = Experiment(
    model="marked_samples:task", strategy="fsdp", precision="fp64", lr=0.01, batch_size=marked_samples.BATCH, steps=160
)
LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
PEOPLE = "root:x:0:0::/:/bin/sh\nlearner:x:10001:10001::/tmp:/bin/sh\n"


def missing():
    """What this machine lacks, or None."""
    if os.geteuid() != 0:
        return "no root here, to make pods with podman"
    lacking = [tool for tool in ("podman", "runc", "unshare", "mount", "ip") if not shutil.which(tool)]
    if lacking:
        return f"no {', '.join(lacking)} here, to run pods"
    # ip reads commands, for a bridge and a link on it as podman makes them
    probe, commands = [*podman_pods.NAMESPACES, "ip", "-batch", "-"], "link add pods type bridge\n"
    commands += "link add one link pods type macvlan mode bridge\n"
    refused = subprocess.run(probe, capture_output=True, text=True, input=commands).stderr.strip()
    return f"no networks here, for pods: {refused}" if refused else None


MISSING = missing()


def write_root(path):
    """Write the image: no file of its own, but folders for those of this machine, and links to them."""
    with tarfile.open(path, "w") as tar:
        for name, target in LINKS.items():
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            tar.addfile(link)
        for name in ("usr", "etc", "dev", "proc", "sys", "checkpoints", "tmp", "dev/shm"):
            folder = tarfile.TarInfo(name)
            # podman gives an emptyDir the mode of the image's folder; Kubernetes lets everybody write
            folder.type, folder.mode = tarfile.DIRTYPE, 0o1777 if name in ("tmp", "dev/shm") else 0o755
            tar.addfile(folder)
        # There is no name server, and each question to it would wait for 10 s.
        for name, text in {"etc/passwd": PEOPLE, "etc/nsswitch.conf": "hosts: files\n"}.items():
            file = tarfile.TarInfo(name)
            file.size, file.mode = len(text), 0o644
            tar.addfile(file, io.BytesIO(text.encode()))


def host_folders():
    """The folders that have Python and labkit: an image would have copies."""
    found = {Path("/usr"), Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), ROOT.resolve()}
    return sorted(folder for folder in found if not any(other in folder.parents for other in found))


def pod_of(sets, number, checkpoints):
    """Pod `number` as the controller would make it, on this machine."""
    name, template = f"gpt-{number}", sets["spec"]["template"]
    labels = template["metadata"]["labels"] | {"apps.kubernetes.io/pod-index": str(number)}
    spec = json.loads(json.dumps(template["spec"]))
    spec["restartPolicy"] = "Never"  # a StatefulSet would start it again after the last step
    domain = "gpt.default.svc.cluster.local"
    spec["hostAliases"] = [{"ip": podman_pods.address(number), "hostnames": [f"{name}.{domain}", name]}]
    for other in range(sets["spec"]["replicas"]):
        names = [f"gpt-{other}.{domain}", f"gpt-{other}.gpt"]
        spec["hostAliases"].append({"ip": podman_pods.address(other), "hostnames": names})
    spec["volumes"][0] = {"name": "checkpoints", "hostPath": {"path": str(checkpoints)}}
    (container,) = spec["containers"]
    container["image"] = "localhost/host-python:latest"
    for resources in container["resources"].values():
        del resources["nvidia.com/gpu"]
    for index, folder in enumerate(host_folders()):
        spec["volumes"].append({"name": f"host{index}", "hostPath": {"path": str(folder)}})
        container["volumeMounts"].append({"name": f"host{index}", "mountPath": str(folder), "readOnly": True})
    path = f"{Path(sys.prefix) / 'bin'}:/usr/bin:/bin"
    own = {"PATH": path, "PYTHONPATH": f"{ROOT}:{ROOT}/tests/helpers"}
    own["PET_RDZV_CONF"] = "last_call_timeout=2,keep_alive_interval=1"  # seconds; used by a range of pods
    own[marked_samples.DELAY] = "0.1"
    container["env"] += [{"name": name, "value": value} for name, value in own.items()]
    metadata = {"name": name, "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def run_pods(folder, experiment, nodes, changes, **options):
    """Make the changes (podman_pods.py) to pods of the experiment; return (their checkpoints, {pod: its log})."""
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir()
    os.chown(checkpoints, 10001, 10001)  # as fsGroup does
    write_root(folder / "root.tar")
    options |= {"memory": "2Gi", "shm": "64Mi", "cpus": 1}
    objects = statefulset(experiment, nodes=nodes, gpus=1, name="gpt", **options)
    (sets,) = [one for one in objects if one["kind"] == "StatefulSet"]
    for number in range(sets["spec"]["replicas"]):
        (folder / f"pod-{number}.yaml").write_text(yaml.safe_dump(pod_of(sets, number, checkpoints)))
    (folder / "changes.json").write_text(json.dumps(changes))
    before = mounted()
    try:
        done = subprocess.run(podman_pods.inside(folder), capture_output=True, text=True, timeout=600)
    finally:
        podman_pods.remove_cgroups()
    logs = {path.stem: path.read_text() for path in sorted(folder.glob("pod-*.log"))}
    assert done.returncode == 0, (done.stderr, {name: text[-3000:] for name, text in logs.items()})
    assert mounted() == before
    return checkpoints / "gpt", logs


def warm(folder, experiment, nproc):
    """The rows of the log of an unbroken run on warm ranks."""
    log = folder / "warm.jsonl"
    arguments = [*experiment.arguments(), "--log-file", str(log)]
    launch("labkit.run.training:launched", nproc=nproc, arguments=arguments, quiet=True)
    return train_command.steady(log)


@pytest.mark.slow
@pytest.mark.skipif(MISSING is not None, reason=f"pods of the StatefulSet do not run: {MISSING}")
def test_two_pods_of_the_stateful_set_train_to_the_same_weights(tmp_path):
    saved, logs = run_pods(tmp_path, SMALL, 2, [["start", 0, None], ["start", 1, None]])
    rows = train_command.steady(saved / "log.jsonl")
    assert len(rows) == SMALL.steps and rows == warm(tmp_path, SMALL, 2)
    assert rows[-1]["weights_sha256"]
    assert (saved / "log.jsonl").stat().st_uid == 10001
    assert "dp 2, gloo" in logs["pod-0"]


@pytest.mark.slow
@pytest.mark.skipif(MISSING is not None, reason=f"pods that come and go do not run: {MISSING}")
def test_pods_come_and_go_and_each_sample_is_used_once_an_epoch(tmp_path):
    """1, 2, 3 pods, one is lost without a word, one is deleted as by kubectl scale: as one process."""
    changes = [["start", 0, 1], ["start", 1, 2], ["start", 2, 3], ["kill", 2, 2], ["stop", 1, 1]]
    saved, logs = run_pods(tmp_path, MARKED, (1, 3), changes, checkpoint_every=5)
    assert re.findall(r"dp (\d), gloo", logs["pod-0"]) == ["1", "2", "3", "2", "1"], logs["pod-0"]
    rows = train_command.steady(saved / "log.jsonl")
    marked_samples.check_each_sample_once_an_epoch(rows)
    marked_samples.check_equal(rows, warm(tmp_path, MARKED, 1))


def mounted():
    return [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
