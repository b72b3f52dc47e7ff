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

from labkit.cluster.kubernetes_objects import (
    INDEXED,
    JOBS,
    KNOWN,
    RESTARTING,
    at,
    gpus_of,
    literal,
    misshapen,
    mounted_at,
    mounts,
    number,
    option,
    pods_of,
    ranks_of,
    shell_text,
    size_of,
    variables,
    without_nulls,
    words,
)  # fmt: skip

DNS_LABEL = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
DNS_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", re.ASCII)
LEAST_MEMORY = 2**22  # bytes; less is a number whose unit was forgotten
KUBEFLOW = ("PyTorchJob", "TrainJob", "TrainingRuntime", "ClusterTrainingRuntime")
# Labels that a controller gives its pods, which number them.
POD_INDEX = "apps.kubernetes.io/pod-index"
NUMBERS = {POD_INDEX: ("StatefulSet",), "batch.kubernetes.io/job-completion-index": INDEXED}
NUMBERS |= {"training.kubeflow.org/replica-index": ("PyTorchJob",)}
SET_BY = {"PyTorchJob": r"RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|PET_\w+"}
SET_BY |= dict.fromkeys(INDEXED, r"JOB_COMPLETION_INDEX|PET_\w+")
SHORT_GRACE = 30  # seconds: Kubernetes' default, and torchrun's
LONGEST_SET = 52  # characters: the pods' label adds a hash of 11 to the name, and may have 63


def check(objects):
    """Return a line for each mistake in a list of Kubernetes objects (dicts); [] for none.

    Raises ValueError if objects is not a list of mappings with kind, apiVersion and a name.
    """
    for place, one in enumerate(objects, 1):
        if not isinstance(one, dict) or not isinstance(one.get("kind"), str):
            raise ValueError(f"object {place} is not a Kubernetes object: it has no kind")
        named = isinstance(one.get("metadata"), dict) and one["metadata"].get("name")
        if "apiVersion" not in one or not named:
            missing = "metadata.name" if "apiVersion" in one else "apiVersion"
            raise ValueError(f"object {place}, a {one['kind']}, has no {missing}")
    objects = [without_nulls(one) for one in objects]
    lines = {one_name(one): [] for one in objects}
    sound = []
    for one in objects:
        wrong = list(misshapen(one)) if one["kind"] in KNOWN else []
        lines[one_name(one)] += wrong
        sound += [] if wrong else [one]
    for one in sound:
        for rule in OBJECT_RULES:
            lines[one_name(one)] += rule(one, sound)
        for pods in pods_of(one):
            for rule in POD_RULES:
                lines[one_name(one)] += rule(pods)
    found = [f"{name} {path}: {text}" for name, wrong in lines.items() for path, text in wrong]
    return list(dict.fromkeys(found))


def one_name(one):
    return f"{one['kind']}/{one['metadata']['name']}"


# Rules about one object among others


def names(one, objects):
    name, kind = one["metadata"]["name"], one["kind"]
    if not isinstance(name, str) or not DNS_NAME.fullmatch(name):
        yield "metadata.name", f"must be lower-case letters, digits, '-' and '.', not {name!r}"
    elif kind == "Service" and not DNS_LABEL.fullmatch(name):
        text = f"must be at most 63 letters, digits and '-', and begin with a letter, not {name!r}"
        yield "metadata.name", text
    elif kind == "StatefulSet" and len(name) > LONGEST_SET:
        text = f"must have at most {LONGEST_SET} characters, not {len(name)}: pods carry it in a "
        text += "label"
        yield "metadata.name", text


def selectors(one, objects):
    """Labels that a selector asks for, and no pod has."""
    kind = one["kind"]
    if kind in RESTARTING:
        wanted = at(one, "spec", "selector", "matchLabels")
        (pods,) = pods_of(one)
        for key, value in wanted.items():
            if pods.labels.get(key) != value:
                text = f"selects {value!r}, but the template's label is "
                text += f"{pods.labels.get(key)!r}: make them equal"
                yield f"spec.selector.matchLabels.{key}", text
    every = [pods for other in objects for pods in pods_of(other)]
    wanted = at(one, "spec", "selector")
    if (
        kind == "Service"
        and wanted
        and every
        and not any(wanted.items() <= pods.labels.items() for pods in every)
    ):
        asked = ", ".join(f"{key}={value}" for key, value in wanted.items())
        text = f"no pod of these objects has the labels {asked}: the name resolves to nothing"
        yield "spec.selector", text


def service_of_a_set(one, objects):
    """The headless Service that makes the names of a StatefulSet's pods."""
    if one["kind"] != "StatefulSet" or not any(
        True for pods in pods_of(one) for _ in pods.training()
    ):
        return
    wanted = at(one, "spec", "serviceName")
    services = [
        other
        for other in objects
        if other["kind"] == "Service" and other["metadata"]["name"] == wanted
    ]
    if not services:
        text = "must name a headless Service: none of these objects is the Service "
        text += f"{wanted or ''!r}"
        yield "spec.serviceName", text
    elif at(services[0], "spec", "clusterIP") != "None":
        text = f"Service/{wanted} must have clusterIP: None, or pods have no names of their own"
        yield "spec.serviceName", text
    elif not at(services[0], "spec", "publishNotReadyAddresses") and any(
        "readinessProbe" in container for pods in pods_of(one) for _, container in pods.containers()
    ):
        text = f"Service/{wanted} must have publishNotReadyAddresses: ranks meet before pods are "
        text += "ready"
        yield "spec.serviceName", text


def start_together(one, objects):
    """Pods that start one after another, though each waits for the others."""
    for pods in pods_of(one) if one["kind"] == "StatefulSet" else ():
        probed = any("readinessProbe" in container for _, container in pods.training())
        if probed and pods.count > 1 and at(one, "spec", "podManagementPolicy") != "Parallel":
            text = "must be Parallel: pod 0 is not ready before the others have started"
            yield "spec.podManagementPolicy", text


def shared_claims(one, objects):
    """A volume of one node for pods of several."""
    claims = {
        other["metadata"]["name"]: other
        for other in objects
        if other["kind"] == "PersistentVolumeClaim"
    }
    for pods in pods_of(one):
        for place, volume in enumerate(at(pods.spec, "volumes")):
            claim = claims.get(at(volume, "persistentVolumeClaim", "claimName") or None, {})
            modes = at(claim, "spec", "accessModes")
            if (
                (pods.count or 1) > 1
                and modes
                and not {"ReadWriteMany", "ReadOnlyMany"} & set(modes)
            ):
                text = f"the claim is {modes[0]}, of one node, but {pods.count} pods mount it: "
                text += "use ReadWriteMany"
                yield f"{pods.path}.volumes[{place}].persistentVolumeClaim.claimName", text


def stored_quantity(one, objects):
    if one["kind"] == "PersistentVolumeClaim":
        value = at(one, "spec", "resources", "requests", "storage")
        if not size_of(value):
            text = f"must be a quantity such as 100Gi, not {value!r}"
            yield "spec.resources.requests.storage", text


# Rules about the pods of an object


def restart_policy(pods):
    said = at(pods.spec, "restartPolicy") or None
    path = f"{pods.path}.restartPolicy"
    if pods.kind in RESTARTING and said not in (None, "Always"):
        text = f"must be Always, not {said}: a {pods.kind} restarts pods that end; use a Job to "
        text += "run once"
        yield path, text
    elif pods.kind in JOBS and said not in ("OnFailure", "Never"):
        yield path, f"must be OnFailure or Never, not {said or 'Always, the default'}: a Job ends"
    elif pods.kind in INDEXED and said == "Always":
        yield path, "must be OnFailure or Never, not Always: a Job ends"
    elif pods.kind == "PyTorchJob":
        said = at(pods.parent[1], "restartPolicy") or "Never"
        if said not in ("Always", "OnFailure", "Never", "ExitCode"):
            text = f"must be OnFailure, ExitCode, Never or Always, not {said}"
            yield f"{pods.parent[0]}.restartPolicy", text


def indexed(pods):
    """A Job whose pods have no number, or do not run at the same time."""
    path, job = pods.parent
    completions = number(at(job, "completions"), 1)
    if (
        pods.kind not in JOBS
        or max(completions, pods.count) == 1
        or not any(True for _ in pods.training())
    ):
        return
    if at(job, "completionMode") != "Indexed":
        yield f"{path}.completionMode", "must be Indexed, or no pod of the Job knows its rank"
    elif completions != pods.count:
        text = f"must equal completions={completions}, not {pods.count}: ranks wait for each other"
        yield f"{path}.parallelism", text


def rank_source(pods):
    """A rank that is no number, or the same in two pods."""
    for path, container in pods.containers(trainer=True):
        asked = re.search(r"\w+", option(container, "--node-rank") or "")
        for index, entry in enumerate(at(container, "env")):
            name = entry.get("name", "")
            if (
                name != "RANK"
                and not name.endswith("_RANK")
                and not (asked and asked.group() == name)
            ):
                continue
            where = f"{path}.env[{index}].value"
            field_path = at(entry, "valueFrom", "fieldRef", "fieldPath")
            if field_path:
                yield from wrong_field(
                    pods, f"{path}.env[{index}].valueFrom.fieldRef.fieldPath", field_path
                )
            elif number(entry.get("value")) is not None and pods.several:
                text = f"{name} is {entry['value']} in all pods: take it from {number_of(pods)}"
                yield where, text
        typed = option(container, "--node-rank")
        if number(typed) is not None and pods.several:
            text = f"--node-rank {typed} is the same in all pods: take it from "
            text += f"{number_of(pods)}"
            yield path, text
        script = shell_text(container)
        if script and "##*-}" in script[1]:
            yield from wrong_suffix(pods, f"{path}.{script[0]}", script[1])


def wrong_field(pods, where, field_path):
    label = re.fullmatch(r"metadata\.(?:labels|annotations)\['(.+)'\]", field_path)
    if not label:
        yield where, f"{field_path} is not a number: take the rank from {number_of(pods)}"
    elif label.group(1) == "training.kubeflow.org/replica-index" and pods.kind == "PyTorchJob":
        if pods.role == "Worker" and "Master" in pods.mates:
            text = "worker 0 would have the rank of master 0: use $(RANK), which the operator sets"
            yield where, text
    elif pods.kind not in NUMBERS.get(label.group(1), ()) and pods.kind != "Pod":
        text = f"pods of a {pods.kind} have no own number in {label.group(1)}: take it from "
        text += f"{number_of(pods)}"
        yield where, text


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
    for path, container in pods.containers(trainer=True):
        world, ranks = literal(container, "WORLD_SIZE"), ranks_of(container) or 1
        if world and pods.kind in KUBEFLOW:
            yield f"{path}.env", f"WORLD_SIZE={world} is typed in: leave it to the operator"
        elif world and pods.count and number(world) != pods.count * ranks:
            text = f"WORLD_SIZE={world} is typed in, but {pods.count} pods x {ranks} ranks are "
            yield f"{path}.env", f"{text}{pods.count * ranks}: leave it out, torchrun sets it"
        nodes = option(container, "--nnodes") or literal(container, "PET_NNODES", "NNODES")
        bounds = [number(bound) for bound in str(nodes).split(":")]
        if pods.count and None not in bounds and not bounds[0] <= pods.count <= bounds[-1]:
            text = f"--nnodes or PET_NNODES is {nodes}, but there are {pods.count} pods: "
            yield path, f"{text}make them equal"
        for index, entry in enumerate(at(container, "env")):
            if not isinstance(entry.get("value", ""), str):
                text = f"must be text: write {str(entry['value'])!r} with quotes"
                yield f"{path}.env[{index}].value", text


def shell_variables(pods):
    """$X and ${X} where no shell reads them; $(X) that nobody sets."""
    for path, container in pods.containers(trainer=True):
        script = shell_text(container)
        unread = [(place, text) for place, text in words(container) if script is None]
        unread += [
            (f"env[{i}].value", str(at(one, "value"))) for i, one in enumerate(at(container, "env"))
        ]
        for place, word in unread:
            where = f"{path}.{place}"
            for name in re.findall(r"(?<!\$)\$\{?([A-Za-z_]\w*)", word):
                yield where, f"only a shell replaces ${{{name}}}: Kubernetes replaces $({name})"
            for name in re.findall(r"(?<!\$)\$\((\w+)\)", word):
                known = name in variables(container) or "envFrom" in container
                if not known and not re.fullmatch(SET_BY.get(pods.kind, ""), name):
                    yield where, f"$({name}) is not in env, and stays as it is: add {name} to env"


def shell_keeps_the_signal(pods):
    for path, container in pods.training():
        script = shell_text(container)
        if script and not re.search(r"\b(exec|trap)\b", script[1]):
            lines = re.sub(r"\\\n", " ", script[1]).strip()
            if re.search(r"[;|&\n]", lines):
                text = "the shell gets SIGTERM and does not pass it on: write `exec torchrun ...`"
                yield f"{path}.{script[0]}", text


def rendezvous(pods):
    """A meeting point where the pods cannot meet."""
    for path, container in pods.training():
        host = option(container, "--rdzv-endpoint", "--master-addr")
        host = host or literal(container, "PET_MASTER_ADDR", "PET_RDZV_ENDPOINT", "MASTER_ADDR")
        if not host or host.startswith("$") or (pods.count or 1) == 1:
            continue
        host = re.sub(r":\d+$", "", host).strip("[]")
        first, _, rest = host.partition(".")
        service, name = at(pods.parent[1], "serviceName"), pods.object["metadata"]["name"]
        if host == "localhost" or is_address(host):
            text = f"ranks meet at {host}, which is not pod 0 for every pod: use the name of pod 0"
            yield path, text
        elif pods.kind == "StatefulSet" and first == service:
            text = f"ranks meet at {host}, which is any pod of the Service: use {name}-0.{service}"
            yield path, text
        elif pods.kind == "StatefulSet" and first == f"{name}-0" and rest.split(".")[0] != service:
            text = f"ranks meet at {host}, which no Service resolves: use {name}-0."
            yield path, f"{text}{service or 'SERVICE'}"


def is_address(host):
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def mounted_volumes(pods):
    for path, container in pods.containers():
        taken = {}
        for index, mount in enumerate(at(container, "volumeMounts")):
            where, folder = f"{path}.volumeMounts[{index}]", str(mount.get("mountPath")).rstrip("/")
            if not mounts(pods, {"volumeMounts": [mount]})[folder]:
                text = f"there is no volume {mount.get('name')!r} in {pods.path}.volumes: add it"
                yield f"{where}.name", text
            if folder in taken:
                yield f"{where}.mountPath", f"{folder} is mounted twice: remove one of the two"
            taken[folder] = mount


def written_folders(pods):
    """Checkpoints that go with their pod, and a root file system that hides /tmp."""
    for path, container in pods.training():
        found = mounts(pods, container)
        locked = at(container, "securityContext", "readOnlyRootFilesystem") is True
        if locked and mounted_at(literal(container, "TMPDIR") or "/tmp", found) is None:
            text = "the root file system is read-only, and torchrun needs /tmp: mount an emptyDir"
            yield f"{path}.volumeMounts", text
        folder = option(container, "--checkpoint-dir")
        if not folder or "://" in folder or folder.startswith("$"):
            continue
        volume = mounted_at(folder, found) if folder.startswith("/") else None
        if volume is None:
            text = f"checkpoints in {folder} go with the container: mount a claim there"
            yield f"{path}.volumeMounts", text
        elif "emptyDir" in volume:
            text = f"checkpoints in {folder} go with the pod, as its emptyDir does: use a claim"
            yield f"{path}.volumeMounts", text


def quantities(pods):
    for path, container in pods.containers(trainer=True):
        place = "resourcesPerNode" if pods.kind == "TrainJob" else "resources"
        limits, requests = (at(container, "resources", part) for part in ("limits", "requests"))
        for part, resources in (("limits", limits), ("requests", requests)):
            for name, value in resources.items():
                wrong = wrong_amount(name, value)
                if wrong:
                    yield f"{path}.{place}.{part}.{name}", wrong
        for name, value in requests.items():
            most, asked = size_of(limits.get(name)), size_of(value)
            if name.endswith("/gpu") and size_of(limits.get(name)) != asked:
                text = f"must equal the limit, {limits.get(name)}: GPUs are not shared"
                yield f"{path}.{place}.requests.{name}", text
            elif None not in (most, asked) and asked > most:
                text = f"{value} is more than the limit, {limits[name]}"
                yield f"{path}.{place}.requests.{name}", text
    for index, volume in enumerate(at(pods.spec, "volumes")):
        size = at(volume, "emptyDir", "sizeLimit")
        if size != {} and not size_of(size):
            text = f"must be a quantity such as 8Gi, not {size!r}"
            yield f"{pods.path}.volumes[{index}].emptyDir.sizeLimit", text


def wrong_amount(name, value):
    """Return what is wrong with an amount of a resource, or None."""
    size = size_of(value)
    if name.endswith("/gpu"):
        if number(value, 0) >= 1:
            return None
        return f"must be a whole number of at least 1, not {value}; leave it out for CPUs"
    if size is None:
        return f"must be a quantity such as 64Gi, 500m or 4, not {value!r}"
    if name == "memory" and size < LEAST_MEMORY:
        return f"{value} is {size:g} bytes: write Mi or Gi behind the number"
    return None


def ranks_and_gpus(pods):
    for path, container in pods.containers(trainer=True):
        ranks = ranks_of(container) or number(at(container, "numProcPerNode"))
        for name, value in gpus_of(container).items():
            if ranks and number(value) and ranks != number(value):
                text = f"{ranks} ranks in each pod, but {value} of {name}: one rank for each GPU"
                yield path, text


def shared_memory(pods):
    if at(pods.spec, "hostIPC") is True:
        return
    for path, container in pods.training():
        gpus = sum(number(value, 1) for value in gpus_of(container).values())
        volume = mounts(pods, container).get("/dev/shm")
        if volume is None and max(ranks_of(container) or 1, gpus) > 1:
            text = "/dev/shm has 64 MiB, too little for NCCL: mount an emptyDir with medium Memory"
            yield f"{path}.volumeMounts", text
        elif volume and at(volume, "emptyDir", "medium") != "Memory":
            yield f"{path}.volumeMounts", "/dev/shm is on a disk: give its emptyDir medium: Memory"
        elif volume:
            size = size_of(at(volume, "emptyDir", "sizeLimit"))
            most = size_of(at(container, "resources", "limits", "memory"))
            if size and most and size > most:
                text = "/dev/shm is larger than the memory limit, in which it counts: raise that"
                yield f"{path}.volumeMounts", text


def user(pods):
    """A user that the kubelet refuses, or that cannot write the checkpoints."""
    group = at(pods.spec, "securityContext")
    for path, container in pods.containers():
        own = at(container, "securityContext")
        merged = {**group, **own}
        uid = merged.get("runAsUser")
        if merged.get("runAsNonRoot") is True and uid == 0:
            text = "is 0, root, but runAsNonRoot is true: the pod would never start"
            yield f"{path}.securityContext.runAsUser", text
        if own.get("privileged") is True and own.get("allowPrivilegeEscalation") is False:
            text = "cannot be true with allowPrivilegeEscalation: false"
            yield f"{path}.securityContext.privileged", text
        claims = any(
            "persistentVolumeClaim" in volume for volume in mounts(pods, container).values()
        )
        if uid and claims and "fsGroup" not in group:
            text = f"is missing: user {uid} cannot write to the claim"
            yield f"{pods.path}.securityContext.fsGroup", text


def grace(pods):
    """Less time than a save takes between SIGTERM and SIGKILL."""
    for path, container in pods.training():
        if option(container, "--checkpoint-dir") is None:
            continue
        given = number(at(pods.spec, "terminationGracePeriodSeconds"), SHORT_GRACE)
        where = f"{pods.path}.terminationGracePeriodSeconds"
        waits = ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "PET_SHUTDOWN_TIMEOUT")
        limit = option(container, "--shutdown-timeout") or literal(container, *waits)
        if given <= SHORT_GRACE:
            text = f"{given} s must be enough for a step and a save: give a minute and twice a save"
            yield where, text
        elif limit is None:
            text = f"torchrun kills its ranks after {SHORT_GRACE} s: set {waits[0]} below {given}"
            yield f"{path}.env", text
        elif number(limit, 0) >= given:
            text = (
                f"torchrun waits {limit} s for its ranks, and is killed after {given} s: wait less"
            )
            yield f"{path}.env", text


OBJECT_RULES = (names, selectors, service_of_a_set, start_together, shared_claims, stored_quantity)
POD_RULES = (
    *(restart_policy, indexed, rank_source, typed_numbers, shell_variables, shell_keeps_the_signal),
    *(rendezvous, mounted_volumes, written_folders, quantities, ranks_and_gpus, shared_memory),
    *(user, grace),
)
