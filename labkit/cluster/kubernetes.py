"""Kubernetes objects: an Experiment on pods, as a StatefulSet or as a job of Kubeflow.

    experiment = Experiment(model="gpt", strategy="fsdp", batch_size=256)
    objects = statefulset(experiment, nodes=2, gpus=8, image="registry.example/lab:1.0")
    check(objects)                                   [], or a line for each mistake
    ./scripts/lab config gpt.yaml --to statefulset --nodes 2 --gpus 8 | kubectl apply -f -

    statefulset   Service (headless), StatefulSet                   no operator needed
    trainjob      TrainingRuntime, TrainJob                         Kubeflow Trainer, version 2
    pytorchjob    PyTorchJob                                        Kubeflow Training Operator, v1
    and each a PersistentVolumeClaim, on which all pods save

    pod 0: torchrun -> ranks 0 ... 7       meets at pod 0's name, which the Service resolves
    pod 1: torchrun -> ranks 8 ... 15

torchrun reads each of its options from a variable, --node-rank from PET_NODE_RANK: so no shell has
to expand anything, and torchrun is the process that Kubernetes sends SIGTERM. Then all ranks save
and end, and the next pod resumes. Pods meet the restricted profile of Kubernetes' Pod Security
Standards: no root, no capabilities, a root file system that nobody can write.
"""

import re
from math import ceil

from labkit.cluster.kubernetes_rules import DNS_LABEL, check
from labkit.cluster.slurm import node_range

__all__ = ["check", "pytorchjob", "statefulset", "trainjob"]

PORT = 29500  # each pod has a network of its own
USER = 10001  # of scripts/Dockerfile
FOLDER = "/checkpoints"
STORAGE = "100Gi"
STEP = 60  # seconds for the step that SIGTERM interrupts, and for the ranks to agree
LEFT = 10  # seconds between torchrun's SIGKILL to the ranks, and Kubernetes' to torchrun
CHANGES = 1000  # of the number of pods, before torchrun ends and its container starts again
LONGEST_NAME = 52  # a StatefulSet's pods carry its name and a hash in a label of at most 63
POD_INDEX = "metadata.labels['apps.kubernetes.io/pod-index']"  # Kubernetes 1.28 and newer
STEP_LABEL = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}


def statefulset(
    experiment, *, nodes=1, gpus=1, name=None, storage=STORAGE, storage_class=None, **pods
):
    """Return [Service, StatefulSet, PersistentVolumeClaim], dicts. Raises ValueError.

    experiment: a labkit.run.experiment.Experiment. nodes: number of pods, or (fewest, most). gpus:
    of each pod, one for each rank. name: of all objects; None: from the experiment. storage,
    storage_class: of the claim; the class must allow ReadWriteMany for more than one pod. pods: the
    options of pod_spec.

    With (fewest, most), `kubectl scale statefulset NAME --replicas N` adds and removes pods while
    they train: all ranks save, meet again, and resume. Pod 0 hosts the meeting point; when it ends,
    the others start again.

    A StatefulSet never completes. After the last step its pods start again, print the result and
    end, until `kubectl scale statefulset NAME --replicas 0` frees the GPUs.
    """
    fewest, most = node_range(nodes)
    name = checked(experiment, most, gpus, name)
    for count in range(fewest, most):
        experiment.check_ranks(count * gpus)
    labels = {"app.kubernetes.io/name": name}
    environment = [variable("PET_NPROC_PER_NODE", gpus), *meeting_point(name, fewest, most)]
    spec = pod_spec(experiment, most, gpus, name, environment=environment, **pods)
    service = {
        # Ranks look up pod 0 before it is ready.
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": labels,
        "ports": [{"name": "rendezvous", "port": PORT}],
    }
    sets = {
        "serviceName": name,
        "replicas": most,
        # All pods start at once: pod 0 waits for the others.
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": {"restartPolicy": "Always", **spec}},
    }
    return [
        an_object("v1", "Service", name, service, labels),
        an_object("apps/v1", "StatefulSet", name, sets, labels),
        claim(name, most, storage, storage_class),
    ]


def meeting_point(name, fewest, most):
    """Return torchrun's variables: how many pods of a StatefulSet train, and where they meet."""
    first = f"{name}-0.{name}"
    if fewest == most:
        return [
            variable("PET_NNODES", most),
            {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": POD_INDEX}}},
            variable("PET_MASTER_ADDR", first),
            variable("PET_MASTER_PORT", PORT),
        ]
    return [
        variable("PET_NNODES", f"{fewest}:{most}"),
        variable("PET_RDZV_BACKEND", "c10d"),
        variable("PET_RDZV_ENDPOINT", f"{first}:{PORT}"),
        variable("PET_RDZV_ID", name),
        # A pod that comes or goes restarts the ranks of the others.
        variable("PET_MAX_RESTARTS", CHANGES),
        # With one store for all attempts, gloo waits for the ranks of the first attempt.
        variable("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", 1),
    ]


def trainjob(
    experiment, *, nodes=1, gpus=1, name=None, storage=STORAGE, storage_class=None, **pods
):
    """Return [TrainingRuntime, TrainJob, PersistentVolumeClaim] as for statefulset().

    For Kubeflow Trainer 2, which sets torchrun's PET_ variables. Where a pod fails or is evicted,
    all pods start again, at most 10 times, and training resumes.
    """
    name = checked(experiment, nodes, gpus, name)
    spec = pod_spec(experiment, nodes, gpus, name, container="node", **pods)
    # One pod cannot come back alone, so its failure is the job's, and the JobSet starts all again.
    job = {"backoffLimit": 0, "template": {"spec": {"restartPolicy": "Never", **spec}}}
    replicated = {"name": "node", "template": {"metadata": {"labels": STEP_LABEL}, "spec": job}}
    runtime = {
        "mlPolicy": {"numNodes": nodes, "torch": {}},
        "template": {
            "spec": {"failurePolicy": {"maxRestarts": 10}, "replicatedJobs": [replicated]}
        },
    }
    (container,) = spec["containers"]
    trainer = {
        "image": container["image"],
        "command": container["command"],
        "args": container["args"],
        "numNodes": nodes,
        "numProcPerNode": gpus,
        "resourcesPerNode": container["resources"],
    }
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name}
    version = "trainer.kubeflow.org/v1alpha1"
    return [
        an_object(version, "TrainingRuntime", name, runtime),
        an_object(version, "TrainJob", name, {"runtimeRef": reference, "trainer": trainer}),
        claim(name, nodes, storage, storage_class),
    ]


def pytorchjob(
    experiment, *, nodes=1, gpus=1, name=None, storage=STORAGE, storage_class=None, **pods
):
    """Return [PyTorchJob, PersistentVolumeClaim] as for statefulset().

    For the Training Operator of Kubeflow 1. It sets RANK, which is the node's, and where the master
    is. If a worker is evicted, the master's ranks stop too, and the operator counts that as
    success: create the job again to resume. A TrainJob does so by itself.
    """
    name = checked(experiment, nodes, gpus, name)
    # Kubernetes, not a shell, replaces $(RANK).
    meeting = ["--nnodes", str(nodes), "--nproc-per-node", str(gpus), "--node-rank", "$(RANK)"]
    meeting += ["--master-addr", "$(MASTER_ADDR)", "--master-port", "$(MASTER_PORT)"]
    spec = pod_spec(experiment, nodes, gpus, name, meeting=meeting, container="pytorch", **pods)
    spec["containers"][0]["ports"] = [{"name": "pytorchjob-port", "containerPort": PORT}]
    # A sidecar of Istio keeps pods alive after training, and its proxy breaks the rendezvous.
    metadata = {"annotations": {"sidecar.istio.io/inject": "false"}}
    template = {"metadata": metadata, "spec": spec}
    replicas = {"Master": 1, "Worker": nodes - 1}
    specs = {
        kind: {"replicas": count, "restartPolicy": "OnFailure", "template": template}
        for kind, count in replicas.items()
        if count
    }
    job = {"runPolicy": {"cleanPodPolicy": "Running"}, "pytorchReplicaSpecs": specs}
    return [
        an_object("kubeflow.org/v1", "PyTorchJob", name, job),
        claim(name, nodes, storage, storage_class),
    ]


def pod_spec(
    experiment,
    nodes,
    gpus,
    name,
    *,
    image="localhost/lab:latest",
    cpus=None,
    memory="64Gi",
    shm="8Gi",
    save_seconds=30,
    checkpoint_every=100,
    environment=(),
    meeting=(),
    container="trainer",
):
    """Return the spec of a pod, without restartPolicy: labkit.train under torchrun.

    image: of scripts/Dockerfile, or any that has torchrun on its PATH and labkit.
    cpus: CPU cores; None: 4 for each GPU. memory, shm: Kubernetes quantities. shm is the size of
    /dev/shm, through which NCCL and data loaders exchange messages; what is in it counts as memory.
    save_seconds: of one save, as measured on the storage of the claim. The default is what
    Kubernetes gives a pod that names no grace period. The pod gets twice save_seconds, because
    storage is slower when all jobs save at once, and a minute for the step that is interrupted.
    environment, meeting, container: variables, options of torchrun, name of the container.
    """
    if not isinstance(image, str) or not re.fullmatch(r"[\w.:/@-]+", image, re.ASCII):
        raise ValueError(f"image={image!r}: must be a name such as registry.example/lab:1.0")
    if not 0 < save_seconds <= 3600:
        raise ValueError(f"save_seconds={save_seconds!r}: must be more than 0, at most 3600")
    grace = ceil(2 * save_seconds) + STEP
    folder = f"{FOLDER}/{name}"
    training = [*experiment.arguments(), "--checkpoint-dir", folder]
    training += ["--checkpoint-every", str(checkpoint_every), "--log-file", f"{folder}/log.jsonl"]
    resources = {"cpu": str(cpus or 4 * gpus), "memory": memory, "nvidia.com/gpu": str(gpus)}
    return {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": grace,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            # The claim's files belong to this group, or nobody but root can write them.
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": container,
                "image": image,
                "command": ["torchrun"],
                "args": [*meeting, "-m", "--", "labkit.train", *training],
                "env": [
                    *environment,
                    # torchrun kills its ranks after 30 s, however long the pod may take.
                    variable("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", grace - LEFT),
                    variable("HOME", "/tmp"),
                ],
                "resources": {"requests": resources, "limits": dict(resources)},
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
                "volumeMounts": [
                    {"name": "checkpoints", "mountPath": FOLDER},
                    {"name": "shm", "mountPath": "/dev/shm"},
                    {"name": "tmp", "mountPath": "/tmp"},
                ],
            }
        ],
        "volumes": [
            {"name": "checkpoints", "persistentVolumeClaim": {"claimName": name}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": shm}},
            {"name": "tmp", "emptyDir": {}},
        ],
    }


def claim(name, nodes, storage, storage_class):
    """Return the PersistentVolumeClaim of the checkpoints."""
    spec = {
        # ReadWriteOnce is one node's: pods elsewhere would wait for the volume forever.
        "accessModes": ["ReadWriteMany" if nodes > 1 else "ReadWriteOnce"],
        "resources": {"requests": {"storage": storage}},
    }
    if storage_class:
        spec["storageClassName"] = storage_class
    return an_object("v1", "PersistentVolumeClaim", name, spec)


def an_object(version, kind, name, spec, labels=None):
    metadata = {"name": name} | ({"labels": labels} if labels else {})
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def variable(name, value):
    """Return an environment variable; Kubernetes accepts no numbers."""
    return {"name": name, "value": str(value)}


def checked(experiment, nodes, gpus, name):
    """Return the name of the objects. Raises ValueError for arguments that cannot be."""
    if type(nodes) is not int or nodes < 1:
        raise ValueError(f"nodes={nodes!r}: must be a whole number of at least 1")
    if type(gpus) is not int or gpus < 1:
        raise ValueError(f"gpus={gpus!r}: must be a whole number of at least 1, for each pod")
    experiment.check_ranks(nodes * gpus)
    name = name or re.sub(r"[^a-z0-9]+", "-", f"{experiment.model}-{experiment.strategy}".lower())
    if not isinstance(name, str) or len(name) > LONGEST_NAME or not DNS_LABEL.fullmatch(name):
        raise ValueError(
            f"name={name!r}: must be 1 to {LONGEST_NAME} lower-case letters, digits and '-', "
            "and begin with a letter"
        )
    return name
