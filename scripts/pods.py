"""Run the pods of a StatefulSet on this machine, in real containers, until their training ends.

    run(statefulset(experiment, nodes=2, name="gpt"), folder)    folder/checkpoints/gpt, folder/pod-0.log ...

Kubernetes itself is not here: podman kube play reads the pods (podman_pods.py). This file does what the StatefulSet's
controller, the headless Service and a cluster's storage do: a name and a label for each pod, a line in /etc/hosts, and
a folder. The image has no file of its own: pods read Python and labkit from the folders of this machine.
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

from labkit.cluster.kubernetes import USER

ROOT = Path(__file__).resolve().parent.parent
LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
PEOPLE = f"root:x:0:0::/:/bin/sh\nlearner:x:{USER}:{USER}::/tmp:/bin/sh\n"
LIMIT = 400  # seconds for all pods


def missing():
    """Return why this machine cannot run pods, or None."""
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


def run(objects, folder, changes=None, variables=()):
    """Run pods of a StatefulSet named gpt; folder: an empty one. Raises RuntimeError with the pods' last words.

    objects: of labkit.cluster.kubernetes.statefulset. changes: which pods start and end (podman_pods.py); None: all do.
    variables: {name: value} of the environment, in addition.
    """
    (sets,) = [one for one in objects if one["kind"] == "StatefulSet"]
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir()
    os.chown(checkpoints, USER, USER)  # as fsGroup does
    write_root(folder / "root.tar")
    numbers = range(sets["spec"]["replicas"])
    for number in numbers:
        pod = pod_of(sets, number, checkpoints, dict(variables))
        (folder / f"pod-{number}.yaml").write_text(json.dumps(pod))
    (folder / "changes.json").write_text(json.dumps(changes or [["start", number, None] for number in numbers]))
    try:
        done = subprocess.run(podman_pods.inside(folder), capture_output=True, text=True, timeout=LIMIT)
    finally:
        podman_pods.remove_cgroups()
    if done.returncode:
        logs = [path.read_text()[-1000:] for path in sorted(folder.glob("pod-*.log"))]
        raise RuntimeError("\n".join(["the pods failed", done.stderr, *logs]))


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
    """Return the folders that have Python and labkit: an image would have copies."""
    found = {Path("/usr"), Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), ROOT}
    return sorted(folder for folder in found if not any(other in folder.parents for other in found))


def pod_of(sets, number, checkpoints, variables):
    """Return pod `number` as the controller would make it, on this machine."""
    service, template = sets["metadata"]["name"], sets["spec"]["template"]
    name = f"{service}-{number}"
    labels = template["metadata"]["labels"] | {"apps.kubernetes.io/pod-index": str(number)}
    spec = json.loads(json.dumps(template["spec"]))
    spec["restartPolicy"] = "Never"  # a StatefulSet would start it again after the last step
    domain = f"{service}.default.svc.cluster.local"
    spec["hostAliases"] = [{"ip": podman_pods.address(number), "hostnames": [f"{name}.{domain}", name]}]
    for other in range(sets["spec"]["replicas"]):
        names = [f"{service}-{other}.{domain}", f"{service}-{other}.{service}"]
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
    own = {"PATH": path, "PYTHONPATH": str(ROOT)} | variables
    container["env"] += [{"name": name, "value": value} for name, value in own.items()]
    metadata = {"name": name, "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
