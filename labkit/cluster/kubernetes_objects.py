"""Read Kubernetes objects that train on pods: which pods each makes, and what their containers say.

    (pods,) = pods_of(stateful_set)     pods.count   pods.labels   pods.containers()
    option(container, "--nnodes")       of a list of words, or in the text of `sh -c`

Any field may be missing. Fields of another type are reported by misshapen() first.
"""

import re
import shlex
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePosixPath

QUANTITY = re.compile(r"(\d+\.?\d*|\.\d+)(Ki|Mi|Gi|Ti|Pi|Ei|[numkMGTPE]|[eE][+-]?\d+|)", re.ASCII)
SCALES = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
SCALES |= {"P": 1e15, "E": 1e18, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
SCALES |= {"Pi": 2**50, "Ei": 2**60}
RESTARTING = ("StatefulSet", "Deployment", "ReplicaSet", "DaemonSet")
JOBS = ("Job", "CronJob")
INDEXED = (*JOBS, "JobSet", "TrainingRuntime", "ClusterTrainingRuntime", "TrainJob")
KNOWN = ("Pod", "Service", "PersistentVolumeClaim", "PyTorchJob", *RESTARTING, *INDEXED)
SHELLS = ("sh", "bash", "dash", "ash", "zsh")
# The types of the fields that the rules read; a text list is one of strings.
TEXT_LISTS = ("command", "args", "accessModes")
MAPPINGS = ("metadata", "spec", "template", "labels", "selector", "matchLabels", "trainer")
MAPPINGS += ("limits", "requests", "resources", "resourcesPerNode", "securityContext", "emptyDir")
MAPPINGS += ("persistentVolumeClaim", "valueFrom", "fieldRef", "pytorchReplicaSpecs", "Master")
MAPPINGS += ("Worker", "jobTemplate", "mlPolicy")
LISTS = ("containers", "env", "volumes", "volumeMounts", "volumeClaimTemplates")
LISTS += ("replicatedJobs", *TEXT_LISTS)
TEXTS = ("name", "mountPath", "fieldPath", "serviceName", "claimName", "restartPolicy")
TYPES = dict.fromkeys(MAPPINGS, dict) | dict.fromkeys(LISTS, list) | dict.fromkeys(TEXTS, str)
NAMES_OF_TYPES = {dict: "mapping", list: "list", str: "text"}


@dataclass
class Pods:
    """The pods of one object that share a template.

    path: of their spec. count: how many pods take part in the same training, or None if unknown.
    parent: (path, mapping) of what holds the template. role: Master or Worker of a PyTorchJob.
    """

    object: dict
    path: str
    spec: dict
    labels: dict
    count: int | None
    parent: tuple
    role: str | None = None
    mates: tuple = ()

    @property
    def kind(self):
        return self.object["kind"]

    @property
    def several(self):
        """Whether more than one pod is made of this template."""
        return (self.count or 1) > 1 and (not self.role or at(self.parent[1], "replicas") != 1)

    def containers(self, trainer=False):
        """Yield (path, container); trainer: also what a TrainJob says about its container."""
        for index, container in enumerate(at(self.spec, "containers")):
            yield f"{self.path}.containers[{index}]", container
        if trainer and "trainer" in self.spec:
            yield f"{self.path}.trainer", self.spec["trainer"]

    def training(self):
        """Yield those that start ranks."""
        for path, container in self.containers():
            if trains(container):
                yield path, container


def without_nulls(node):
    """Return a copy without null fields, which Kubernetes treats as absent."""
    if isinstance(node, dict):
        return {key: without_nulls(value) for key, value in node.items() if value is not None}
    return [without_nulls(value) for value in node] if isinstance(node, list) else node


def misshapen(node, path=""):
    """Yield (path, message) of each field that is no mapping, list or text where it must be."""
    for key, value in node.items():
        here = f"{path}.{key}" if path else str(key)
        kind = TYPES.get(key)
        texts = key in TEXT_LISTS
        if kind and not isinstance(value, kind):
            yield here, f"must be a {NAMES_OF_TYPES[kind]}, not {value!r:.60}"
        elif kind is list and not all(isinstance(one, str if texts else dict) for one in value):
            yield here, f"must be a list of {'text' if texts else 'mappings'}"
        elif isinstance(value, dict):
            yield from misshapen(value, here)
        elif kind is list and not texts:
            for index, one in enumerate(value):
                yield from misshapen(one, f"{here}[{index}]")


def at(node, *keys):
    """Return node[key][key]..., or {} where there is none."""
    for key in keys:
        node = node.get(key, {})
    return node


def number(value, otherwise=None):
    """Return a whole number, also one that is written as text."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return otherwise
    return int(value) if str(value).isdecimal() else otherwise


def pods_of(one):
    """Yield the Pods of an object."""
    kind, spec = one["kind"], at(one, "spec")
    if kind == "Pod":
        yield Pods(one, "spec", spec, at(one, "metadata", "labels"), 1, ("spec", spec))
    elif kind in RESTARTING:
        count = None if kind == "DaemonSet" else number(at(spec, "replicas"), 1)
        yield from_template(one, "spec", spec, count)
    elif kind == "Job":
        yield from_template(one, "spec", spec, number(at(spec, "parallelism"), 1))
    elif kind == "CronJob":
        spec = at(spec, "jobTemplate", "spec")
        yield from_template(one, "spec.jobTemplate.spec", spec, number(at(spec, "parallelism"), 1))
    elif kind == "PyTorchJob":
        replicas = at(spec, "pytorchReplicaSpecs")
        roles = {role: replicas[role] for role in ("Master", "Worker") if role in replicas}
        count = sum(number(at(roles, role, "replicas"), 1) for role in roles)
        for role in roles:
            path = f"spec.pytorchReplicaSpecs.{role}"
            pods = from_template(one, path, at(roles, role), count)
            pods.role, pods.mates = role, tuple(roles)
            yield pods
    elif kind in ("JobSet", "TrainingRuntime", "ClusterTrainingRuntime"):
        above = "spec" if kind == "JobSet" else "spec.template.spec"
        for index, job in enumerate(at(one, *above.split("."), "replicatedJobs")):
            path, inner = (
                f"{above}.replicatedJobs[{index}].template.spec",
                at(job, "template", "spec"),
            )
            nodes = at(spec, "mlPolicy", "numNodes") or at(inner, "parallelism")
            yield from_template(one, path, inner, number(nodes))
    elif kind == "TrainJob":
        trainer = at(spec, "trainer")
        container = {**trainer, "resources": at(trainer, "resourcesPerNode")}
        nodes = number(at(trainer, "numNodes"))
        yield Pods(one, "spec", {"trainer": container}, {}, nodes, ("spec", spec))


def from_template(one, path, holder, count):
    template = at(holder, "template")
    labels = at(template, "metadata", "labels")
    return Pods(one, f"{path}.template.spec", at(template, "spec"), labels, count, (path, holder))


def words(container):
    """Return [(path, word)] of command and args."""
    found = []
    for part in ("command", "args"):
        found += [(f"{part}[{i}]", text) for i, text in enumerate(at(container, part))]
    return found


def shell_text(container):
    """Return (path, text) of the text after `sh -c`, or None where no shell reads it."""
    found = words(container)
    if found and PurePosixPath(found[0][1]).name in SHELLS:
        for (_, flag), after in pairwise(found[1:]):
            if re.fullmatch(r"-[a-z]*c", flag):
                return after
    return None


def tokens(container):
    """Return the words of the command line, those of a shell's text split as a shell would."""
    script = shell_text(container)
    if script is None:
        return [text for _, text in words(container)]
    try:
        return shlex.split(script[1], comments=True)
    except ValueError:  # a quote without its partner
        return script[1].split()


def option(container, *names):
    """Return the value of an option in the command line, or None; --a_b is --a-b."""
    said = tokens(container)
    for place, word in enumerate(said):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") in names:
            return value if equals else said[place + 1] if place + 1 < len(said) else None
    return None


def variables(container):
    """Return {name: entry} of the container's environment."""
    return {entry["name"]: entry for entry in at(container, "env") if "name" in entry}


def literal(container, *names):
    """Return the text of the first of these variables that has a plain value, or None."""
    for name in names:
        value = variables(container).get(name, {}).get("value")
        if value is not None and not str(value).startswith("$"):
            return str(value)
    return None


def trains(container):
    """Return whether the container starts ranks."""
    said = tokens(container)
    starts = any(PurePosixPath(word).name == "torchrun" for word in said)
    modules = ("torch.distributed.run", "torch.distributed.launch", "labkit.train")
    return (
        starts or any(word in modules for word in said) or "PET_NODE_RANK" in variables(container)
    )


def ranks_of(container):
    """Return the number of ranks in each pod if it is written in the container, or None."""
    typed = option(container, "--nproc-per-node")
    return number(typed or literal(container, "PET_NPROC_PER_NODE"))


def gpus_of(container):
    """Return {resource: its limit or request} of the GPUs of a container."""
    resources = at(container, "resources")
    both = {**at(resources, "requests"), **at(resources, "limits")}
    return {name: value for name, value in both.items() if name.endswith("/gpu")}


def size_of(value):
    """Return a quantity in units or bytes, or None if it is none."""
    found = QUANTITY.fullmatch(str(value)) if isinstance(value, int | float | str) else None
    if found is None or isinstance(value, bool):
        return None
    figure, unit = found.groups()
    return float(figure) * SCALES[unit] if unit in SCALES else float(figure + unit)


def mounts(pods, container):
    """Return {mountPath: volume} of a container; the volume is {} where it is missing."""
    volumes = {volume.get("name"): volume for volume in at(pods.spec, "volumes")}
    for made in at(pods.object, "spec", "volumeClaimTemplates"):
        volumes[made.get("metadata", {}).get("name")] = {"persistentVolumeClaim": {}}
    return {
        str(mount.get("mountPath")).rstrip("/"): volumes.get(mount.get("name"), {})
        for mount in at(container, "volumeMounts")
    }


def mounted_at(folder, found):
    """Return the volume that holds a folder, or None if the container's own file system does."""
    path = PurePosixPath(folder)
    holders = [one for one in found if path.is_relative_to(one or "/")]
    return found[max(holders, key=len)] if holders else None
