"""Rules for Kubernetes objects that train on several pods: mistakes that schemas accept.

    check(objects)   ["StatefulSet/gpt spec.template.spec.restartPolicy: must be Always, ...", ...]

A schema knows the fields of one object. It does not know that ranks wait for each other, that a
mount needs a volume, or that a typed-in number of ranks disagrees with the number of pods. Each
rule is a function that yields (path, message); a pod rule gets the pods of one object, and is tried
on StatefulSets, Deployments, Jobs, JobSets, PyTorchJobs, TrainingRuntimes and TrainJobs alike.
Sources: the API reference of Kubernetes 1.30 to 1.37, of JobSet and Kubeflow, and torchrun's.
"""

import ipaddress
import re
import shlex
from dataclasses import dataclass, field
from pathlib import PurePosixPath

DNS_LABEL = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
DNS_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", re.ASCII)
QUANTITY = re.compile(r"(\d+\.?\d*|\.\d+)(Ki|Mi|Gi|Ti|Pi|Ei|[numkMGTPE]|[eE][+-]?\d+|)", re.ASCII)
SCALES = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
SCALES |= {"P": 1e15, "E": 1e18, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
SCALES |= {"Pi": 2**50, "Ei": 2**60}
LEAST_MEMORY = 2**22  # bytes; less is a number whose unit was forgotten
RESTARTING = ("StatefulSet", "Deployment", "ReplicaSet", "DaemonSet")
JOBS = ("Job", "CronJob")
INDEXED = (*JOBS, "JobSet", "TrainingRuntime", "ClusterTrainingRuntime", "TrainJob")
KUBEFLOW = ("PyTorchJob", "TrainJob", "TrainingRuntime", "ClusterTrainingRuntime")
# Labels that a controller gives its pods, which number them.
POD_INDEX = "apps.kubernetes.io/pod-index"
NUMBERS = {POD_INDEX: ("StatefulSet",), "batch.kubernetes.io/job-completion-index": INDEXED}
NUMBERS |= {"training.kubeflow.org/replica-index": ("PyTorchJob",)}
SET_BY = {"PyTorchJob": r"RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|PET_\w+"}
SET_BY |= dict.fromkeys(INDEXED, r"JOB_COMPLETION_INDEX|PET_\w+")
SHELLS = ("sh", "bash", "dash", "ash", "zsh")
SHORT_GRACE = 30  # seconds: Kubernetes' default, and torchrun's
LONGEST_SET = 52  # characters: the pods' label adds a hash of 11 to the name, and may have 63


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
    mates: tuple = field(default=())

    @property
    def kind(self):
        return self.object["kind"]

    def containers(self):
        """Yield (path, container) of each container that is a mapping."""
        for number, container in enumerate(listed(self.spec, "containers")):
            yield f"{self.path}.containers[{number}]", container

    def training(self):
        """Yield those that start ranks."""
        for path, container in self.containers():
            if trains(container):
                yield path, container


def check(objects):
    """Return a line for each mistake in a list of Kubernetes objects (dicts); [] for none.

    Raises ValueError if objects is not a list of mappings with kind, apiVersion and a name.
    """
    for number, one in enumerate(objects):
        if not isinstance(one, dict) or not isinstance(one.get("kind"), str):
            raise ValueError(f"object {number + 1} is not a Kubernetes object: it has no kind")
        if "apiVersion" not in one or not at(one, "metadata", "name"):
            missing = "metadata.name" if "apiVersion" in one else "apiVersion"
            raise ValueError(f"object {number + 1}, a {one['kind']}, has no {missing}")
    found = []
    for one in objects:
        head = f"{one['kind']}/{one['metadata']['name']}"
        found += [f"{head} {path}: {text}" for rule in OBJECT_RULES for path, text in rule(one, objects)]
        for pods in pods_of(one):
            found += [f"{head} {path}: {text}" for rule in POD_RULES for path, text in rule(pods)]
    return list(dict.fromkeys(found))


# Reading objects, which may lack anything


def at(node, *keys):
    """Return node[key][key]..., or {} where there is none."""
    for key in keys:
        node = node.get(key) if isinstance(node, dict) else None
    return {} if node is None else node


def listed(node, key):
    """Return the mappings in the list node[key]."""
    found = at(node, key)
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


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
        roles = at(spec, "pytorchReplicaSpecs")
        count = sum(number(at(roles, role, "replicas"), 1) for role in roles)
        for role in roles:
            path = f"spec.pytorchReplicaSpecs.{role}"
            pods = from_template(one, path, at(roles, role), count)
            pods.role, pods.mates = role, tuple(roles)
            yield pods
    elif kind in ("JobSet", "TrainingRuntime", "ClusterTrainingRuntime"):
        start, spec = ("spec", spec) if kind == "JobSet" else ("spec.template.spec", at(spec, "template", "spec"))
        for index, job in enumerate(listed(spec, "replicatedJobs")):
            path, inner = f"{start}.replicatedJobs[{index}].template.spec", at(job, "template", "spec")
            nodes = at(one, "spec", "mlPolicy", "numNodes") or at(inner, "parallelism")
            yield from_template(one, path, inner, number(nodes))
    elif kind == "TrainJob":
        trainer = at(spec, "trainer")
        container = {**trainer, "resources": at(trainer, "resourcesPerNode")} if trainer else {}
        yield Pods(one, "spec", {"trainer": container}, {}, number(at(trainer, "numNodes")), ("spec", spec))


def from_template(one, path, holder, count):
    template = at(holder, "template")
    labels = at(template, "metadata", "labels")
    return Pods(one, f"{path}.template.spec", at(template, "spec"), labels, count, (path, holder))


def words(container):
    """Return [(path, word)] of command and args."""
    found = []
    for part in ("command", "args"):
        texts = at(container, part)
        found += [(f"{part}[{i}]", text) for i, text in enumerate(texts if isinstance(texts, list) else [])]
    return [(path, text) for path, text in found if isinstance(text, str)]


def shell_text(container):
    """Return (path, text) of the text after `sh -c`, or None where no shell reads it."""
    found = words(container)
    if found and PurePosixPath(found[0][1]).name in SHELLS:
        for (_, flag), after in zip(found[1:], found[2:], strict=False):
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
    return {entry["name"]: entry for entry in listed(container, "env") if "name" in entry}


def literal(container, *names):
    """Return (name, value) of the first of these variables that has a plain value, or None."""
    for name in names:
        value = variables(container).get(name, {}).get("value")
        if value is not None and not str(value).startswith("$"):
            return name, str(value)
    return None


def trains(container):
    """Return whether the container starts ranks."""
    said = tokens(container)
    starts = any(PurePosixPath(word).name == "torchrun" for word in said)
    modules = ("torch.distributed.run", "torch.distributed.launch", "labkit.train")
    return starts or any(word in modules for word in said) or "PET_NODE_RANK" in variables(container)


def ranks_of(container):
    """Return the number of ranks in each pod if it is written in the container, or None."""
    typed = option(container, "--nproc-per-node")
    if typed is None:
        typed = (literal(container, "PET_NPROC_PER_NODE") or (None, None))[1]
    return number(typed)


def gpus_of(container):
    """Return {resource: its limit or request} of the GPUs of a container."""
    resources = at(container, "resources")
    both = {**(at(resources, "requests") or {}), **(at(resources, "limits") or {})}
    return {name: value for name, value in both.items() if name.endswith("/gpu")}


def whole_gpus(value):
    """Return whether a value is a number of GPUs: a whole number of at least 1."""
    return type(value) is int and value >= 1


def size_of(value):
    """Return a quantity in units or bytes, or None if it is none."""
    found = QUANTITY.fullmatch(str(value)) if isinstance(value, int | float | str) else None
    if found is None or isinstance(value, bool):
        return None
    figure, unit = found.groups()
    return float(figure + unit) if unit[:1] in "eE" and unit not in ("", "E", "Ei") else float(figure) * SCALES[unit]


def mounts(pods, container):
    """Return {mountPath: volume} of a container; the volume is {} where it is missing."""
    volumes = {volume.get("name"): volume for volume in listed(pods.spec, "volumes")}
    made = [at(one, "metadata", "name") for one in listed(at(pods.object, "spec"), "volumeClaimTemplates")]
    volumes |= {name: {"persistentVolumeClaim": {}} for name in made if isinstance(name, str)}
    return {
        str(mount.get("mountPath")).rstrip("/"): volumes.get(mount.get("name"), {})
        for mount in listed(container, "volumeMounts")
    }


def mounted_at(folder, found):
    """Return the volume that holds a folder, or None if the container's own file system does."""
    path = PurePosixPath(folder)
    holders = [one for one in found if path.is_relative_to(one or "/")]
    return found[max(holders, key=len)] if holders else None


# Rules about one object among others


def names(one, objects):
    name, kind = one["metadata"]["name"], one["kind"]
    if not isinstance(name, str) or not DNS_NAME.fullmatch(name):
        yield "metadata.name", f"must be lower-case letters, digits, '-' and '.', not {name!r}"
    elif kind == "Service" and not DNS_LABEL.fullmatch(name):
        yield "metadata.name", f"must be at most 63 letters, digits and '-', and begin with a letter, not {name!r}"
    elif kind == "StatefulSet" and len(name) > LONGEST_SET:
        yield "metadata.name", f"must have at most {LONGEST_SET} characters, not {len(name)}: pods carry it in a label"


def selectors(one, objects):
    """Labels that a selector asks for, and no pod has."""
    kind = one["kind"]
    if kind in RESTARTING:
        wanted = at(one, "spec", "selector", "matchLabels")
        (pods,) = pods_of(one)
        for key, value in wanted.items():
            if pods.labels.get(key) != value:
                yield (
                    f"spec.selector.matchLabels.{key}",
                    f"selects {value!r}, but the template's label is {pods.labels.get(key)!r}: make them equal",
                )
    every = [pods for other in objects for pods in pods_of(other)]
    wanted = at(one, "spec", "selector")
    if kind == "Service" and wanted and every and not any(wanted.items() <= pods.labels.items() for pods in every):
        asked = ", ".join(f"{key}={value}" for key, value in wanted.items())
        yield "spec.selector", f"no pod of these objects has the labels {asked}: the name resolves to nothing"


def service_of_a_set(one, objects):
    """The headless Service that makes the names of a StatefulSet's pods."""
    if one["kind"] != "StatefulSet" or not any(True for pods in pods_of(one) for _ in pods.training()):
        return
    wanted = at(one, "spec", "serviceName")
    services = [other for other in objects if other["kind"] == "Service" and other["metadata"]["name"] == wanted]
    if not services:
        yield "spec.serviceName", f"must name a headless Service: none of these objects is the Service {wanted or ''!r}"
    elif at(services[0], "spec", "clusterIP") != "None":
        yield "spec.serviceName", f"Service/{wanted} must have clusterIP: None, or pods have no names of their own"
    elif not at(services[0], "spec", "publishNotReadyAddresses") and any(
        "readinessProbe" in container for pods in pods_of(one) for _, container in pods.containers()
    ):
        yield "spec.serviceName", f"Service/{wanted} must have publishNotReadyAddresses: ranks meet before pods are ready"


def start_together(one, objects):
    """Pods that start one after another, though each waits for the others."""
    for pods in pods_of(one) if one["kind"] == "StatefulSet" else ():
        probed = any("readinessProbe" in container for _, container in pods.training())
        if probed and pods.count > 1 and at(one, "spec", "podManagementPolicy") != "Parallel":
            yield "spec.podManagementPolicy", "must be Parallel: pod 0 is not ready before the others have started"


def shared_claims(one, objects):
    """A volume of one node for pods of several."""
    claims = {other["metadata"]["name"]: other for other in objects if other["kind"] == "PersistentVolumeClaim"}
    for pods in pods_of(one):
        for place, volume in enumerate(listed(pods.spec, "volumes")):
            claim = claims.get(at(volume, "persistentVolumeClaim", "claimName") or None, {})
            modes = at(claim, "spec", "accessModes")
            if (pods.count or 1) > 1 and modes and not {"ReadWriteMany", "ReadOnlyMany"} & set(modes):
                yield (
                    f"{pods.path}.volumes[{place}].persistentVolumeClaim.claimName",
                    f"the claim is {modes[0]}, of one node, but {pods.count} pods mount it: use ReadWriteMany",
                )


def stored_quantity(one, objects):
    if one["kind"] == "PersistentVolumeClaim":
        value = at(one, "spec", "resources", "requests", "storage")
        if not size_of(value):
            yield "spec.resources.requests.storage", f"must be a quantity such as 100Gi, not {value!r}"


# Rules about the pods of an object


def restart_policy(pods):
    said = at(pods.spec, "restartPolicy") or None
    path = f"{pods.path}.restartPolicy"
    if pods.kind in RESTARTING and said not in (None, "Always"):
        yield path, f"must be Always, not {said}: a {pods.kind} restarts pods that end; use a Job to run once"
    elif pods.kind in JOBS and said not in ("OnFailure", "Never"):
        yield path, f"must be OnFailure or Never, not {said or 'Always, the default'}: a Job ends"
    elif pods.kind in INDEXED and said == "Always":
        yield path, "must be OnFailure or Never, not Always: a Job ends"
    elif pods.kind == "PyTorchJob":
        said = at(pods.parent[1], "restartPolicy") or "Never"
        if said not in ("Always", "OnFailure", "Never", "ExitCode"):
            yield f"{pods.parent[0]}.restartPolicy", f"must be OnFailure, ExitCode, Never or Always, not {said}"


def indexed(pods):
    """A Job whose pods have no number, or do not run at the same time."""
    path, job = pods.parent
    completions = number(at(job, "completions"), 1)
    if pods.kind not in JOBS or max(completions, pods.count) == 1 or not any(True for _ in pods.training()):
        return
    if at(job, "completionMode") != "Indexed":
        yield f"{path}.completionMode", "must be Indexed, or no pod of the Job knows its rank"
    elif completions != pods.count:
        yield f"{path}.parallelism", f"must equal completions={completions}, not {pods.count}: ranks wait for each other"


def rank_source(pods):
    """A rank that is no number, or the same in two pods."""
    for path, container in all_containers(pods):
        asked = re.search(r"\w+", option(container, "--node-rank") or "")
        for index, entry in enumerate(listed(container, "env")):
            name = entry.get("name", "")
            if name != "RANK" and not name.endswith("_RANK") and not (asked and asked.group() == name):
                continue
            where = f"{path}.env[{index}].value"
            field_path = at(entry, "valueFrom", "fieldRef", "fieldPath")
            if field_path:
                yield from wrong_field(pods, f"{path}.env[{index}].valueFrom.fieldRef.fieldPath", field_path)
            elif (pods.count or 1) > 1 and str(at(entry, "value")).isdecimal():
                if pods.role is None or at(pods.parent[1], "replicas") not in ({}, 1):
                    yield where, f"{name} is {entry['value']} in all pods: take it from {number_of(pods)}"
        typed = option(container, "--node-rank")
        if typed and typed.isdecimal() and (pods.count or 1) > 1 and pods.role is None:
            yield path, f"--node-rank {typed} is the same in all {pods.count} pods: take it from {number_of(pods)}"
        script = shell_text(container)
        if script and "##*-}" in script[1]:
            yield from wrong_suffix(pods, f"{path}.{script[0]}", script[1])


def wrong_field(pods, where, field_path):
    label = re.fullmatch(r"metadata\.(?:labels|annotations)\['(.+)'\]", field_path)
    if not label:
        yield where, f"{field_path} is not a number: take the rank from {number_of(pods)}"
    elif label.group(1) == "training.kubeflow.org/replica-index" and pods.kind == "PyTorchJob":
        if pods.role == "Worker" and "Master" in pods.mates:
            yield where, "worker 0 would have the rank of master 0: use $(RANK), which the operator sets"
    elif pods.kind not in NUMBERS.get(label.group(1), ()) and pods.kind != "Pod":
        yield where, f"pods of a {pods.kind} have no own number in {label.group(1)}: take it from {number_of(pods)}"


def wrong_suffix(pods, where, script):
    """The end of a pod's name, where it is no number, or not the pod's alone."""
    if pods.kind in ("Deployment", "ReplicaSet", "DaemonSet"):
        yield where, f"a pod's name ends with random letters in a {pods.kind}: use a StatefulSet"
    elif pods.role == "Worker" and "Master" in pods.mates and not re.search(r"\+\s*1", script):
        yield where, "worker 0 would have the rank of master 0: use $RANK, which the operator sets"


def number_of(pods):
    """Return where a pod of this kind finds its number."""
    if pods.kind == "StatefulSet":
        return f"metadata.labels['{POD_INDEX}']"
    if pods.kind == "PyTorchJob":
        return "$(RANK), which the operator sets"
    if pods.kind in INDEXED:
        return "JOB_COMPLETION_INDEX, which an Indexed Job sets"
    return "the pod's number, which only a StatefulSet or an Indexed Job gives"


def typed_numbers(pods):
    """A number of ranks or nodes that disagrees with the objects."""
    for path, container in all_containers(pods):
        world = literal(container, "WORLD_SIZE")
        ranks = ranks_of(container) or 1
        if world and pods.kind in KUBEFLOW:
            yield f"{path}.env", f"WORLD_SIZE={world[1]} is typed in: leave it out, the operator sets it"
        elif world and pods.count and number(world[1]) != pods.count * ranks:
            yield (
                f"{path}.env",
                f"WORLD_SIZE={world[1]} is typed in, but {pods.count} pods x {ranks} ranks are "
                f"{pods.count * ranks}: leave it out, torchrun sets it",
            )
        typed = option(container, "--nnodes")
        name, nodes = ("--nnodes", typed) if typed else literal(container, "PET_NNODES", "NNODES") or (None, None)
        bounds = [number(bound) for bound in str(nodes).split(":")]
        if nodes and pods.count and None not in bounds and not bounds[0] <= pods.count <= bounds[-1]:
            yield path, f"{name} is {nodes}, but there are {pods.count} pods: make them equal"
        for index, entry in enumerate(listed(container, "env")):
            if "value" in entry and not isinstance(entry["value"], str | None):
                yield f"{path}.env[{index}].value", f"must be text: write {str(entry['value'])!r} with quotes"


def shell_variables(pods):
    """$X and ${X} where no shell reads them; $(X) that nobody sets."""
    for path, container in all_containers(pods):
        script = shell_text(container)
        known = variables(container)
        unread = [(place, text) for place, text in words(container) if script is None]
        unread += [(f"env[{i}].value", str(at(one, "value"))) for i, one in enumerate(listed(container, "env"))]
        for place, text in unread:
            for name in re.findall(r"(?<!\$)\$\{?([A-Za-z_]\w*)", text):
                yield f"{path}.{place}", f"only a shell replaces ${{{name}}}: write $({name}), which Kubernetes replaces"
            for name in re.findall(r"(?<!\$)\$\((\w+)\)", text) if "envFrom" not in container else ():
                if name not in known and not re.fullmatch(SET_BY.get(pods.kind, ""), name):
                    yield f"{path}.{place}", f"$({name}) is not in env, and stays as it is: add {name} to env"


def shell_keeps_the_signal(pods):
    for path, container in pods.training():
        script = shell_text(container)
        if script and not re.search(r"\b(exec|trap)\b", script[1]):
            lines = re.sub(r"\\\n", " ", script[1]).strip()
            if re.search(r"[;|&\n]", lines):
                yield f"{path}.{script[0]}", "the shell gets SIGTERM and does not pass it on: write `exec torchrun ...`"


def rendezvous(pods):
    """A meeting point where the pods cannot meet."""
    for path, container in pods.training():
        host = option(container, "--rdzv-endpoint", "--master-addr")
        if host is None:
            host = (literal(container, "PET_MASTER_ADDR", "PET_RDZV_ENDPOINT", "MASTER_ADDR") or (None, None))[1]
        if host is None or host.startswith("$") or (pods.count or 1) == 1:
            continue
        host = re.sub(r":\d+$", "", host).strip("[]")
        first, _, rest = host.partition(".")
        service, name = at(pods.parent[1], "serviceName"), pods.object["metadata"]["name"]
        if host == "localhost" or is_address(host):
            yield path, f"ranks meet at {host}, which is not pod 0 for every pod: use the name of pod 0"
        elif pods.kind == "StatefulSet" and first == service:
            yield path, f"ranks meet at {host}, which is any pod of the Service: use {name}-0.{service}"
        elif pods.kind == "StatefulSet" and first == f"{name}-0" and rest.partition(".")[0] != service:
            yield path, f"ranks meet at {host}, which no Service resolves: use {name}-0.{service or 'SERVICE'}"


def is_address(host):
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def mounted_volumes(pods):
    for path, container in pods.containers():
        taken = {}
        for index, mount in enumerate(listed(container, "volumeMounts")):
            where, folder = f"{path}.volumeMounts[{index}]", str(mount.get("mountPath")).rstrip("/")
            if not mounts(pods, {"volumeMounts": [mount]})[folder]:
                yield f"{where}.name", f"there is no volume {mount.get('name')!r} in {pods.path}.volumes: add it"
            if folder in taken:
                yield f"{where}.mountPath", f"{folder} is mounted twice: remove one of the two"
            taken[folder] = mount


def written_folders(pods):
    """Checkpoints that go with their pod, and a root file system that hides /tmp."""
    for path, container in pods.training():
        found = mounts(pods, container)
        locked = at(container, "securityContext", "readOnlyRootFilesystem") is True
        if locked and mounted_at((literal(container, "TMPDIR") or ("", "/tmp"))[1], found) is None:
            yield f"{path}.volumeMounts", "the root file system is read-only, and torchrun needs /tmp: mount an emptyDir"
        folder = option(container, "--checkpoint-dir")
        if not folder or "://" in folder or folder.startswith("$"):
            continue
        volume = mounted_at(folder, found) if folder.startswith("/") else None
        if volume is None:
            yield f"{path}.volumeMounts", f"checkpoints in {folder} go with the container: mount a claim there"
        elif "emptyDir" in volume:
            yield f"{path}.volumeMounts", f"checkpoints in {folder} are in an emptyDir, which goes with its pod: use a claim"


def quantities(pods):
    for path, container in all_containers(pods):
        place = "resourcesPerNode" if pods.kind == "TrainJob" else "resources"
        limits, requests = (at(container, "resources", part) or {} for part in ("limits", "requests"))
        for part, resources in (("limits", limits), ("requests", requests)):
            for name, value in resources.items():
                wrong = wrong_amount(name, value)
                if wrong:
                    yield f"{path}.{place}.{part}.{name}", wrong
        for name, value in requests.items():
            most, asked = size_of(limits.get(name)), size_of(value)
            if name.endswith("/gpu") and size_of(limits.get(name)) != asked:
                yield f"{path}.{place}.requests.{name}", f"must equal the limit, {limits.get(name)}: GPUs are not shared"
            elif None not in (most, asked) and asked > most:
                yield f"{path}.{place}.requests.{name}", f"{value} is more than the limit, {limits[name]}"
    for index, volume in enumerate(listed(pods.spec, "volumes")):
        size = at(volume, "emptyDir", "sizeLimit")
        if size != {} and not size_of(size):
            yield f"{pods.path}.volumes[{index}].emptyDir.sizeLimit", f"must be a quantity such as 8Gi, not {size!r}"


def wrong_amount(name, value):
    """Return what is wrong with an amount of a resource, or None."""
    size = size_of(value)
    if name.endswith("/gpu"):
        return None if number(value, 0) >= 1 else f"must be a whole number of at least 1, not {value}; leave it out for CPUs"
    if size is None:
        return f"must be a quantity such as 64Gi, 500m or 4, not {value!r}"
    if name == "memory" and size < LEAST_MEMORY:
        return f"{value} is {size:g} bytes: write the unit, such as {value}Gi" if str(value).isdecimal() else f"{value} is {size:g} bytes: write Mi or Gi"
    return None


def ranks_and_gpus(pods):
    for path, container in all_containers(pods):
        ranks = ranks_of(container) or number(at(container, "numProcPerNode"))
        for name, value in gpus_of(container).items():
            if ranks and number(value) and ranks != number(value):
                yield path, f"{ranks} ranks in each pod, but {value} of {name}: one rank for each GPU"


def shared_memory(pods):
    if at(pods.spec, "hostIPC") is True:
        return
    for path, container in pods.training():
        several = [ranks_of(container) or 1, *(number(value, 1) for value in gpus_of(container).values())]
        volume = mounts(pods, container).get("/dev/shm")
        if volume is None and max(several) > 1:
            yield f"{path}.volumeMounts", "/dev/shm has 64 MiB, too little for NCCL: mount an emptyDir with medium Memory"
        elif volume and at(volume, "emptyDir", "medium") != "Memory":
            yield f"{path}.volumeMounts", "/dev/shm is on a disk: give its emptyDir medium: Memory"
        elif volume:
            size, most = size_of(at(volume, "emptyDir", "sizeLimit")), size_of(at(container, "resources", "limits", "memory"))
            if size and most and size > most:
                yield f"{path}.volumeMounts", "/dev/shm is larger than the memory limit, in which it counts: raise the limit"


def user(pods):
    """A user that the kubelet refuses, or that cannot write the checkpoints."""
    group = at(pods.spec, "securityContext")
    for path, container in pods.containers():
        own = at(container, "securityContext")
        merged = {**(group or {}), **(own or {})}
        uid = merged.get("runAsUser")
        if merged.get("runAsNonRoot") is True and uid == 0:
            yield f"{path}.securityContext.runAsUser", "is 0, root, but runAsNonRoot is true: the pod would never start"
        if own.get("privileged") is True and own.get("allowPrivilegeEscalation") is False:
            yield f"{path}.securityContext.privileged", "cannot be true with allowPrivilegeEscalation: false"
        claims = any("persistentVolumeClaim" in volume for volume in mounts(pods, container).values())
        if uid and claims and "fsGroup" not in group:
            yield f"{pods.path}.securityContext.fsGroup", f"is missing: user {uid} cannot write to the claim"


def grace(pods):
    """Less time than a save takes between SIGTERM and SIGKILL."""
    for path, container in pods.training():
        if option(container, "--checkpoint-dir") is None:
            continue
        given = number(at(pods.spec, "terminationGracePeriodSeconds"), SHORT_GRACE)
        where = f"{pods.path}.terminationGracePeriodSeconds"
        limit = option(container, "--shutdown-timeout")
        if limit is None:
            limit = (literal(container, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "PET_SHUTDOWN_TIMEOUT") or (None, None))[1]
        if given <= SHORT_GRACE:
            yield where, f"{given} s must be enough for a step and a save: give twice the measured time of a save, and 60 s"
        elif limit is None:
            yield f"{path}.env", f"torchrun kills its ranks after {SHORT_GRACE} s: set TORCH_ELASTIC_SHUTDOWN_TIMEOUT below {given}"
        elif number(limit, 0) >= given:
            yield f"{path}.env", f"torchrun waits {limit} s for its ranks, but Kubernetes kills it after {given} s: wait less"


def all_containers(pods):
    """Yield (path, container), also that of a TrainJob's trainer."""
    yield from pods.containers()
    if pods.spec.get("trainer"):
        yield "spec.trainer", pods.spec["trainer"]


OBJECT_RULES = (names, selectors, service_of_a_set, start_together, shared_claims, stored_quantity)
POD_RULES = (
    *(restart_policy, indexed, rank_source, typed_numbers, shell_variables, shell_keeps_the_signal),
    *(rendezvous, mounted_volumes, written_folders, quantities, ranks_and_gpus, shared_memory),
    *(user, grace),
)
