"""Pods made from the StatefulSet's own template, in real containers: they train to the same weights as warm ranks.

Kubernetes itself is not here. podman kube play reads the pods; the test does what the StatefulSet's controller, the
headless Service and a cluster's storage do: a name and a label for each pod, a line in /etc/hosts, and a folder.
"""

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import podman_pods
import pytest
import train_command
import yaml
from repository import ROOT

from labkit.cluster.kubernetes import statefulset
from labkit.run import launch
from labkit.run.experiment import Experiment

SMALL = Experiment(model="mlp", strategy="fsdp", batch_size=12, steps=6, optimizer="adamw", lr=0.01)
LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
PEOPLE = "root:x:0:0::/:/bin/sh\nlearner:x:10001:10001::/tmp:/bin/sh\n"


def missing():
    """What this machine lacks, or None."""
    if os.geteuid() != 0:
        return "no root here, to make pods with podman"
    lacking = [tool for tool in ("podman", "runc", "unshare", "mount", "ip") if not shutil.which(tool)]
    if lacking:
        return f"no {', '.join(lacking)} here, to run pods"
    refused = subprocess.run([*podman_pods.NAMESPACES, "true"], capture_output=True, text=True).stderr.strip()
    return f"no namespaces here, for pods: {refused}" if refused else None


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
    spec["hostAliases"] = [{"ip": podman_pods.address(number), "hostnames": [name]}]
    for other in range(sets["spec"]["replicas"]):
        spec["hostAliases"].append({"ip": podman_pods.address(other), "hostnames": [f"gpt-{other}.gpt"]})
    spec["volumes"][0] = {"name": "checkpoints", "hostPath": {"path": str(checkpoints)}}
    (container,) = spec["containers"]
    container["image"] = "localhost/host-python:latest"
    for resources in container["resources"].values():
        del resources["nvidia.com/gpu"]
    for index, folder in enumerate(host_folders()):
        spec["volumes"].append({"name": f"host{index}", "hostPath": {"path": str(folder)}})
        container["volumeMounts"].append({"name": f"host{index}", "mountPath": str(folder), "readOnly": True})
    path = f"{Path(sys.prefix) / 'bin'}:/usr/bin:/bin"
    own = {"PATH": path, "PYTHONPATH": str(ROOT)}
    container["env"] += [{"name": name, "value": value} for name, value in own.items()]
    metadata = {"name": name, "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


@pytest.mark.slow
@pytest.mark.skipif(MISSING is not None, reason=f"pods of the StatefulSet do not run: {MISSING}")
def test_two_pods_of_the_stateful_set_train_to_the_same_weights(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    os.chown(checkpoints, 10001, 10001)  # as fsGroup does
    write_root(tmp_path / "root.tar")
    options = {"memory": "2Gi", "shm": "64Mi", "cpus": 1}
    (sets,) = [
        one for one in statefulset(SMALL, nodes=2, gpus=1, name="gpt", **options) if one["kind"] == "StatefulSet"
    ]
    for number in range(2):
        (tmp_path / f"pod-{number}.yaml").write_text(yaml.safe_dump(pod_of(sets, number, checkpoints)))
    before = mounted()
    done = subprocess.run(podman_pods.inside(tmp_path), capture_output=True, text=True, timeout=200)
    logs = {path.name: path.read_text()[-3000:] for path in sorted(tmp_path.glob("pod-*.log"))}
    assert done.returncode == 0, (done.stderr, logs)
    assert mounted() == before
    rows = train_command.steady(checkpoints / "gpt" / "log.jsonl")

    log = tmp_path / "warm.jsonl"
    launch("labkit.run.training:launched", nproc=2, arguments=[*SMALL.arguments(), "--log-file", str(log)], quiet=True)
    assert len(rows) == SMALL.steps and rows == train_command.steady(log)
    assert rows[-1]["weights_sha256"]
    assert (checkpoints / "gpt" / "log.jsonl").stat().st_uid == 10001
    assert "dp 2, gloo" in logs["pod-0.log"]


def mounted():
    return [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
