"""Kubernetes objects: by the schemas of Kubernetes, by Kubeflow's own models, and by rules that those lack."""

import copy
import json

import kubernetes_validate
import pytest
import yaml
from kubeflow.training.api_client import ApiClient
from kubeflow.training.models import KubeflowOrgV1PyTorchJob
from kubeflow_trainer_api import models as trainer

from labkit.cluster import kubernetes, kubernetes_objects, kubernetes_rules
from labkit.cluster.kubernetes import check, pytorchjob, statefulset, trainjob
from labkit.run.experiment import Experiment
from labkit.run.options import read

GPT = Experiment(model="gpt", strategy="fsdp", batch_size=64, steps=20)
VERSIONS = [f"1.{minor}" for minor in range(30, 38)]
TARGETS = {"statefulset": statefulset, "trainjob": trainjob, "pytorchjob": pytorchjob}
POD, BOX = "spec.template.spec", "spec.template.spec.containers[0]"
WORKER = "spec.pytorchReplicaSpecs.Worker.template.spec"


def made(target="statefulset", nodes=2, gpus=4, **options):
    """The objects, as they are after a way through a file."""
    objects = TARGETS[target](GPT, nodes=nodes, gpus=gpus, name="gpt", **options)
    return json.loads(json.dumps(objects))


def by_kind(objects):
    return {one["kind"]: one for one in objects}


def pods_in(objects):
    """Each pod of the objects, as a Pod."""
    for one in objects:
        for pods in kubernetes_objects.pods_of(one):
            if "containers" in pods.spec:
                yield {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": pods.spec}


# The schemas and models of others


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("target", TARGETS)
def test_strict_schemas_accept_the_objects(target, version):
    objects = made(target)
    built_in = [one for one in objects if "kubeflow" not in one["apiVersion"]]
    pods = list(pods_in(objects))
    assert built_in and pods
    for one in [*built_in, *pods]:
        kubernetes_validate.validate(one, version, strict=True)


def test_strict_schemas_can_refuse():
    one = by_kind(made())["StatefulSet"]
    one["spec"]["template"]["spec"]["gracePeriod"] = 90
    with pytest.raises(kubernetes_validate.ValidationError, match="gracePeriod"):
        kubernetes_validate.validate(one, "1.34", strict=True)


@pytest.mark.parametrize("nodes", [1, 2])
def test_kubeflow_reads_a_trainjob_and_writes_the_same(nodes):
    objects = by_kind(made("trainjob", nodes=nodes))
    job, runtime = objects["TrainJob"], objects["TrainingRuntime"]
    assert trainer.TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job
    assert trainer.TrainerV1alpha1TrainingRuntime.from_dict(runtime).to_dict() == runtime
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    job["spec"]["trainer"]["numNode"] = 2  # a field that the model does not know is dropped
    assert trainer.TrainerV1alpha1TrainJob.from_dict(job).to_dict() != job


class Answer:
    """What ApiClient.deserialize takes for an HTTP answer."""

    def __init__(self, data):
        self.data = json.dumps(data)


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_kubeflow_reads_a_pytorchjob_and_writes_the_same(nodes):
    job = by_kind(made("pytorchjob", nodes=nodes))["PyTorchJob"]
    client = ApiClient()
    again = client.deserialize(Answer(job), KubeflowOrgV1PyTorchJob)
    assert client.sanitize_for_serialization(again) == job
    replicas = {role: spec["replicas"] for role, spec in job["spec"]["pytorchReplicaSpecs"].items()}
    assert replicas == ({"Master": 1, "Worker": nodes - 1} if nodes > 1 else {"Master": 1})


# What the objects say


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("nodes", [1, 2, 8])
def test_the_rules_find_nothing_in_our_own(target, nodes):
    assert check(made(target, nodes=nodes)) == []


def test_a_range_of_pods_meets_at_pod_0_and_counts_nobody():
    objects = made(nodes=(1, 2))
    assert check(objects) == []
    for pod in pods_in(objects):
        kubernetes_validate.validate(pod, VERSIONS[-1], strict=True)
    said = {one["name"]: one.get("value") for one in box(objects)["env"]}
    assert spec(objects)["replicas"] == 2 and said["PET_NNODES"] == "1:2" and "PET_NODE_RANK" not in said
    assert said["PET_RDZV_ENDPOINT"] == "gpt-0.gpt:29500" and int(said["PET_MAX_RESTARTS"]) > 100
    assert said["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"  # gloo hangs after a restart without it
    with pytest.raises(ValueError, match="batch_size=64 must be a multiple of 12"):
        made(nodes=(2, 4))  # 3 pods of 4 ranks
    spec(objects)["replicas"] = 3
    assert len(check(objects)) == 1


@pytest.mark.parametrize("target", TARGETS)
def test_the_command_is_the_experiment(target):
    for pod in pods_in(made(target)):
        (container,) = pod["spec"]["containers"]
        said = container["args"]
        arguments = said[said.index("labkit.train") + 1 :]
        experiment, options = read(arguments)
        assert experiment == GPT and options.checkpoint_dir == "/checkpoints/gpt"
        assert container["command"] == ["torchrun"]


@pytest.mark.parametrize("target", TARGETS)
def test_pods_meet_the_restricted_profile(target):
    """https://kubernetes.io/docs/concepts/security/pod-security-standards, row by row."""
    for pod in pods_in(made(target)):
        spec = pod["spec"]
        (container,) = spec["containers"]
        assert spec["securityContext"]["runAsNonRoot"] is True and spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        assert {next(iter(set(volume) - {"name"})) for volume in spec["volumes"]} <= {
            "emptyDir",
            "persistentVolumeClaim",
        }
        assert spec["automountServiceAccountToken"] is False
        assert container["resources"]["requests"] == container["resources"]["limits"]


@pytest.mark.parametrize(("save", "grace"), [(30, 120), (0.2, 61), (100, 260)])
def test_the_grace_is_longer_than_a_save_and_torchrun_knows(save, grace):
    for target in TARGETS:
        for pod in pods_in(made(target, save_seconds=save)):
            assert pod["spec"]["terminationGracePeriodSeconds"] == grace
            (limit,) = [
                one["value"]
                for one in pod["spec"]["containers"][0]["env"]
                if one["name"] == "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
            ]
            assert 2 * save < int(limit) < grace


def test_the_claim_is_of_as_many_nodes_as_there_are():
    modes = [by_kind(made(nodes=n))["PersistentVolumeClaim"]["spec"]["accessModes"] for n in (1, 2)]
    assert modes == [["ReadWriteOnce"], ["ReadWriteMany"]]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"nodes": 0}, "nodes=0: must be a whole number of at least 1"),
        ({"nodes": "2"}, "nodes='2': must be a whole number"),
        ({"gpus": 0}, "gpus=0: must be a whole number of at least 1, for each pod"),
        ({"gpus": 2.5}, "gpus=2.5"),
        ({"nodes": 3, "gpus": 1}, "batch_size=64 must be a multiple of 3"),
        ({"name": "my\njob"}, r"name='my\\njob': must be 1 to 52 lower-case letters"),
        ({"name": "GPT"}, "name='GPT'"),
        ({"name": "a" * 53}, "must be 1 to 52"),
        ({"image": "lab image"}, "image='lab image': must be a name such as"),
        ({"save_seconds": 0}, "save_seconds=0: must be more than 0"),
    ],
)
@pytest.mark.parametrize("target", TARGETS)
def test_arguments_that_cannot_be_are_refused(target, arguments, line):
    with pytest.raises(ValueError, match=line):
        TARGETS[target](GPT, **arguments)


# Planted mistakes: each is found by its path, and nothing else is reported


def box(objects, kind="StatefulSet"):
    return by_kind(objects)[kind]["spec"]["template"]["spec"]["containers"][0]


def pod(objects, kind="StatefulSet"):
    return by_kind(objects)[kind]["spec"]["template"]["spec"]


def spec(objects, kind="StatefulSet"):
    return by_kind(objects)[kind]["spec"]


def set_variable(container, name, value):
    container["env"] = [one for one in container["env"] if one["name"] != name]
    container["env"].append({"name": name, "value": value})


def without(entries, **wanted):
    entries[:] = [one for one in entries if not wanted.items() <= one.items()]


def both(container, name, value):
    for part in ("requests", "limits"):
        container["resources"][part][name] = value


def in_a_shell(text):
    def change(objects):
        box(objects).update(command=["sh", "-c"], args=[text])

    return change


def as_job(**fields):
    """The pods as those of a Job, which has these fields."""

    def change(objects):
        sets = by_kind(objects)["StatefulSet"]
        without(objects, kind="Service")
        sets.update(apiVersion="batch/v1", kind="Job")
        template = {"spec": sets["spec"]["template"]["spec"] | {"restartPolicy": "Never"}}
        without(template["spec"]["containers"][0]["env"], name="PET_NODE_RANK")
        index = {"fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/job-completion-index']"}}
        template["spec"]["containers"][0]["env"].append({"name": "PET_NODE_RANK", "valueFrom": index})
        sets["spec"] = {"completions": 2, "parallelism": 2, "completionMode": "Indexed", "template": template}
        sets["spec"].update(fields)
        for name in [name for name, value in sets["spec"].items() if value is None]:
            del sets["spec"][name]

    return change


def job_restarts_always(objects):
    as_job()(objects)
    del pod(objects, "Job")["restartPolicy"]


def no_service(objects):
    without(objects, kind="Service")


def probed(change):
    def planted(objects):
        box(objects)["readinessProbe"] = {"tcpSocket": {"port": 29500}}
        change(objects)

    return planted


TRAIN = "torchrun -m -- labkit.train --checkpoint-dir /checkpoints/gpt"
PLANTED = {
    "restart policy of a set": (
        lambda o: pod(o).update(restartPolicy="OnFailure"),
        [f"StatefulSet/gpt {POD}.restartPolicy"],
    ),
    "${X} that no shell reads": (
        lambda o: box(o)["args"].__setitem__(0, "--node-rank=${POD_INDEX}"),
        [f"StatefulSet/gpt {BOX}.args[0]"],
    ),
    "${X} in a variable": (
        lambda o: set_variable(box(o), "FOLDER", "/checkpoints/$RUN"),
        [f"StatefulSet/gpt {BOX}.env[7].value"],
    ),
    "$(X) that nobody sets": (
        lambda o: box(o)["args"].append("--seed=$(SEED)"),
        [f"StatefulSet/gpt {BOX}.args[15]"],
    ),
    "a rank that is a name": (
        lambda o: box(o)["env"][2]["valueFrom"]["fieldRef"].update(fieldPath="metadata.name"),
        [f"StatefulSet/gpt {BOX}.env[2].valueFrom.fieldRef.fieldPath"],
    ),
    "a rank from a Job's label": (
        lambda o: box(o)["env"][2]["valueFrom"]["fieldRef"].update(
            fieldPath="metadata.labels['batch.kubernetes.io/job-completion-index']"
        ),
        [f"StatefulSet/gpt {BOX}.env[2].valueFrom.fieldRef.fieldPath"],
    ),
    "the same rank in all pods": (
        lambda o: set_variable(box(o), "PET_NODE_RANK", "0"),
        [f"StatefulSet/gpt {BOX}.env[6].value"],
    ),
    "a number without quotes": (
        lambda o: set_variable(box(o), "OMP_NUM_THREADS", 1),
        [f"StatefulSet/gpt {BOX}.env[7].value"],
    ),
    "selector and labels": (
        lambda o: spec(o)["selector"]["matchLabels"].update({"app.kubernetes.io/name": "bert"}),
        ["StatefulSet/gpt spec.selector.matchLabels.app.kubernetes.io/name"],
    ),
    "a Service of no pod": (
        lambda o: spec(o, "Service")["selector"].update({"app.kubernetes.io/name": "bert"}),
        ["Service/gpt spec.selector"],
    ),
    "no Service": (no_service, ["StatefulSet/gpt spec.serviceName"]),
    "a Service with an address": (
        lambda o: spec(o, "Service").pop("clusterIP"),
        ["StatefulSet/gpt spec.serviceName"],
    ),
    "a Service of ready pods": (
        probed(lambda o: spec(o, "Service").pop("publishNotReadyAddresses")),
        ["StatefulSet/gpt spec.serviceName"],
    ),
    "one pod after another": (
        probed(lambda o: spec(o).pop("podManagementPolicy")),
        ["StatefulSet/gpt spec.podManagementPolicy"],
    ),
    "a Service whose name is no label": (
        lambda o: (
            by_kind(o)["Service"]["metadata"].update(name="1gpt")
            or spec(o).update(serviceName="1gpt")
            or set_variable(box(o), "PET_MASTER_ADDR", "gpt-0.1gpt")
        ),
        ["Service/1gpt metadata.name"],
    ),
    "a name with a newline": (
        lambda o: by_kind(o)["PersistentVolumeClaim"]["metadata"].update(name="my job"),
        ["PersistentVolumeClaim/my job metadata.name"],
    ),
    "a name that leaves no room": (
        lambda o: (
            by_kind(o)["StatefulSet"]["metadata"].update(name="g" * 53)
            or set_variable(box(o), "PET_MASTER_ADDR", f"{'g' * 53}-0.gpt")
        ),
        [f"StatefulSet/{'g' * 53} metadata.name"],
    ),
    "a claim of one node": (
        lambda o: spec(o, "PersistentVolumeClaim").update(accessModes=["ReadWriteOnce"]),
        [f"StatefulSet/gpt {POD}.volumes[0].persistentVolumeClaim.claimName"],
    ),
    "a size that is none": (
        lambda o: spec(o, "PersistentVolumeClaim")["resources"]["requests"].update(storage="100 GB"),
        ["PersistentVolumeClaim/gpt spec.resources.requests.storage"],
    ),
    "a mount without a volume": (
        lambda o: without(pod(o)["volumes"], name="tmp"),
        [f"StatefulSet/gpt {BOX}.volumeMounts[2].name"],
    ),
    "two mounts in one place": (
        lambda o: box(o)["volumeMounts"].append({"name": "tmp", "mountPath": "/tmp/"}),
        [f"StatefulSet/gpt {BOX}.volumeMounts[3].mountPath"],
    ),
    "no folder for /tmp": (
        lambda o: without(box(o)["volumeMounts"], name="tmp"),
        [f"StatefulSet/gpt {BOX}.volumeMounts"],
    ),
    "checkpoints in the container": (
        lambda o: without(box(o)["volumeMounts"], name="checkpoints"),
        [f"StatefulSet/gpt {BOX}.volumeMounts"],
    ),
    "checkpoints in an emptyDir": (
        lambda o: pod(o)["volumes"].__setitem__(0, {"name": "checkpoints", "emptyDir": {}}),
        [f"StatefulSet/gpt {BOX}.volumeMounts"],
    ),
    "a quantity that is none": (
        lambda o: box(o)["resources"]["limits"].update(memory="64 Gigs"),
        [f"StatefulSet/gpt {BOX}.resources.limits.memory"],
    ),
    "thousandths of bytes": (
        lambda o: both(box(o), "memory", "64m") or pod(o)["volumes"][1]["emptyDir"].pop("sizeLimit"),
        [f"StatefulSet/gpt {BOX}.resources.limits.memory", f"StatefulSet/gpt {BOX}.resources.requests.memory"],
    ),
    "a request above its limit": (
        lambda o: box(o)["resources"]["requests"].update(cpu="17"),
        [f"StatefulSet/gpt {BOX}.resources.requests.cpu"],
    ),
    "no GPUs": (
        lambda o: both(box(o), "nvidia.com/gpu", 0),
        [
            f"StatefulSet/gpt {BOX}.resources.limits.nvidia.com/gpu",
            f"StatefulSet/gpt {BOX}.resources.requests.nvidia.com/gpu",
        ],
    ),
    "GPUs without a limit": (
        lambda o: box(o)["resources"]["limits"].pop("nvidia.com/gpu"),
        [f"StatefulSet/gpt {BOX}.resources.requests.nvidia.com/gpu"],
    ),
    "more ranks than GPUs": (
        lambda o: set_variable(box(o), "PET_NPROC_PER_NODE", "8"),
        [f"StatefulSet/gpt {BOX}"],
    ),
    "no shared memory": (
        lambda o: without(box(o)["volumeMounts"], name="shm"),
        [f"StatefulSet/gpt {BOX}.volumeMounts"],
    ),
    "shared memory on a disk": (
        lambda o: pod(o)["volumes"][1]["emptyDir"].pop("medium"),
        [f"StatefulSet/gpt {BOX}.volumeMounts"],
    ),
    "shared memory above the limit": (
        lambda o: pod(o)["volumes"][1]["emptyDir"].update(sizeLimit="65Gi"),
        [f"StatefulSet/gpt {BOX}.volumeMounts"],
    ),
    "shared memory of no size": (
        lambda o: pod(o)["volumes"][1]["emptyDir"].update(sizeLimit="8 GB"),
        [f"StatefulSet/gpt {POD}.volumes[1].emptyDir.sizeLimit"],
    ),
    "root that must not be": (
        lambda o: box(o)["securityContext"].update(runAsUser=0),
        [f"StatefulSet/gpt {BOX}.securityContext.runAsUser"],
    ),
    "privileged without escalation": (
        lambda o: box(o)["securityContext"].update(privileged=True),
        [f"StatefulSet/gpt {BOX}.securityContext.privileged"],
    ),
    "no group for the claim": (
        lambda o: pod(o)["securityContext"].pop("fsGroup"),
        [f"StatefulSet/gpt {POD}.securityContext.fsGroup"],
    ),
    "no time to save": (
        lambda o: pod(o).pop("terminationGracePeriodSeconds"),
        [f"StatefulSet/gpt {POD}.terminationGracePeriodSeconds"],
    ),
    "torchrun's 30 seconds": (
        lambda o: without(box(o)["env"], name="TORCH_ELASTIC_SHUTDOWN_TIMEOUT"),
        [f"StatefulSet/gpt {BOX}.env"],
    ),
    "torchrun waits longer than Kubernetes": (
        lambda o: set_variable(box(o), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "120"),
        [f"StatefulSet/gpt {BOX}.env"],
    ),
    "a typed-in WORLD_SIZE": (
        lambda o: set_variable(box(o), "WORLD_SIZE", "4"),
        [f"StatefulSet/gpt {BOX}.env"],
    ),
    "a typed-in number of nodes": (lambda o: spec(o).update(replicas=4), [f"StatefulSet/gpt {BOX}"]),
    "a name without its Service": (
        lambda o: set_variable(box(o), "PET_MASTER_ADDR", "gpt-0"),
        [f"StatefulSet/gpt {BOX}"],
    ),
    "any pod of the Service": (
        lambda o: set_variable(box(o), "PET_MASTER_ADDR", "gpt"),
        [f"StatefulSet/gpt {BOX}"],
    ),
    "each pod for itself": (
        lambda o: set_variable(box(o), "PET_MASTER_ADDR", "localhost"),
        [f"StatefulSet/gpt {BOX}"],
    ),
    "an address of yesterday": (
        lambda o: box(o)["args"].insert(0, "--rdzv-endpoint=10.1.2.3:29500"),
        [f"StatefulSet/gpt {BOX}"],
    ),
    "a shell that keeps SIGTERM": (in_a_shell(f"cd /lab && {TRAIN}"), [f"StatefulSet/gpt {BOX}.args[0]"]),
    "a Job that is not Indexed": (as_job(completionMode=None), ["Job/gpt spec.completionMode"]),
    "a Job of one pod after another": (
        lambda o: as_job(parallelism=1)(o) or set_variable(box(o, "Job"), "PET_NNODES", "1"),
        ["Job/gpt spec.parallelism"],
    ),
    "a Job without an end": (job_restarts_always, [f"Job/gpt {POD}.restartPolicy"]),
}


@pytest.mark.parametrize("case", PLANTED)
def test_a_planted_mistake_is_found_by_its_path(case):
    plant, paths = PLANTED[case]
    objects = made()
    plant(objects)
    assert [line.partition(": ")[0] for line in check(objects)] == paths, "\n".join(check(objects))


def worker(objects):
    return spec(objects, "PyTorchJob")["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]


def rank_from(path):
    return {"name": "POD_INDEX", "valueFrom": {"fieldRef": {"fieldPath": path}}}


def worker_counts_itself(objects):
    worker(objects)["env"].append(rank_from("metadata.labels['training.kubeflow.org/replica-index']"))
    worker(objects)["args"][5] = "$(POD_INDEX)"


def worker_cuts_its_name(objects):
    text = f"exec torchrun --nnodes 4 --nproc-per-node 4 --node-rank ${{HOSTNAME##*-}} {TRAIN[9:]}"
    worker(objects).update(command=["sh", "-c"], args=[text])


PLANTED_KUBEFLOW = {
    "worker 0 = master 0": (
        worker_counts_itself,
        [f"PyTorchJob/gpt {WORKER}.containers[0].env[2].valueFrom.fieldRef.fieldPath"],
    ),
    "worker 0 = master 0, by its name": (
        worker_cuts_its_name,
        [f"PyTorchJob/gpt {WORKER}.containers[0].args[0]"],
    ),
    "the same rank in three workers": (
        lambda o: worker(o)["env"].append({"name": "RANK", "value": "1"}),
        [f"PyTorchJob/gpt {WORKER}.containers[0].env[2].value"],
    ),
    "a WORLD_SIZE that the operator sets": (
        lambda o: set_variable(worker(o), "WORLD_SIZE", "16"),
        [f"PyTorchJob/gpt {WORKER}.containers[0].env"],
    ),
    "a restart policy that is none": (
        lambda o: spec(o, "PyTorchJob")["pytorchReplicaSpecs"]["Worker"].update(restartPolicy="Sometimes"),
        ["PyTorchJob/gpt spec.pytorchReplicaSpecs.Worker.restartPolicy"],
    ),
    "a worker too few": (
        lambda o: spec(o, "PyTorchJob")["pytorchReplicaSpecs"]["Worker"].update(replicas=2),
        [
            "PyTorchJob/gpt spec.pytorchReplicaSpecs.Master.template.spec.containers[0]",
            f"PyTorchJob/gpt {WORKER}.containers[0]",
        ],
    ),
}
PLANTED_TRAINJOB = {
    "more ranks than GPUs": (lambda o: spec(o, "TrainJob")["trainer"].update(numProcPerNode=8), ["spec.trainer"]),
    "${X} that no shell reads": (
        lambda o: spec(o, "TrainJob")["trainer"]["args"].append("${X}"),
        ["spec.trainer.args[15]"],
    ),
    "typed-in nodes": (
        lambda o: spec(o, "TrainJob")["trainer"]["args"].insert(0, "--nnodes=2"),
        ["spec.trainer"],
    ),
}


@pytest.mark.parametrize("case", PLANTED_KUBEFLOW)
def test_a_planted_mistake_in_a_pytorchjob(case):
    plant, paths = PLANTED_KUBEFLOW[case]
    objects = made("pytorchjob", nodes=4)
    plant(objects)
    assert [line.partition(": ")[0] for line in check(objects)] == paths, "\n".join(check(objects))


@pytest.mark.parametrize("case", PLANTED_TRAINJOB)
def test_a_planted_mistake_in_a_trainjob(case):
    plant, paths = PLANTED_TRAINJOB[case]
    objects = made("trainjob", nodes=4)
    plant(objects)
    assert [line.partition(": ")[0] for line in check(objects)] == [f"TrainJob/gpt {path}" for path in paths]


@pytest.mark.parametrize(
    "rule", [*kubernetes_rules.OBJECT_RULES, *kubernetes_rules.POD_RULES], ids=lambda r: r.__name__
)
def test_without_a_rule_a_planted_mistake_stays_hidden(monkeypatch, rule):
    """Each rule is needed, so each has a case that can fail."""
    for name in ("OBJECT_RULES", "POD_RULES"):
        kept = tuple(one for one in getattr(kubernetes_rules, name) if one is not rule)
        monkeypatch.setattr(kubernetes_rules, name, kept)
    hidden = []
    for case, (plant, _) in PLANTED.items():
        objects = made()
        plant(objects)
        if not check(objects):
            hidden.append(case)
    assert hidden


# Two manifests with the mistakes of published ones, in our words

A_SET = """
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: trainer}
spec:
  serviceName: trainer
  replicas: 4
  selector: {matchLabels: {app: trainer}}
  template:
    metadata: {labels: {app: trainer}}
    spec:
      restartPolicy: OnFailure
      containers:
        - name: trainer
          image: trainer:1.0
          command: [torchrun]
          args: [--nnodes=4, --nproc-per-node=8, "--node-rank=${POD_INDEX}", --master-addr=trainer-0, train.py]
          env:
            - {name: POD_INDEX, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
            - {name: WORLD_SIZE, value: "4"}
          resources: {limits: {nvidia.com/gpu: 8}}
"""
A_JOB = """
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: trainer}
spec:
  pytorchReplicaSpecs:
    Master:
      replicas: 1
      restartPolicy: OnFailure
      template: &pods
        spec:
          containers:
            - name: pytorch
              image: trainer:1.0
              command: [torchrun, --nnodes=3, --nproc-per-node=2, --node-rank=$(POD_INDEX), train.py]
              env:
                - name: POD_INDEX
                  valueFrom: {fieldRef: {fieldPath: "metadata.labels['training.kubeflow.org/replica-index']"}}
              resources: {limits: {nvidia.com/gpu: 2, memory: 64}}
    Worker: {replicas: 3, restartPolicy: OnFailure, template: *pods}
"""
PUBLISHED = {
    A_SET: [
        "spec.serviceName",
        f"{POD}.restartPolicy",
        f"{BOX}.env[0].valueFrom.fieldRef.fieldPath",
        f"{BOX}.env",
        f"{BOX}.args[2]",
        BOX,
        f"{BOX}.volumeMounts",
    ],
    A_JOB: [
        "spec.pytorchReplicaSpecs.Master.template.spec.containers[0]",
        "spec.pytorchReplicaSpecs.Master.template.spec.containers[0].resources.limits.memory",
        "spec.pytorchReplicaSpecs.Master.template.spec.containers[0].volumeMounts",
        f"{WORKER}.containers[0].env[0].valueFrom.fieldRef.fieldPath",
        f"{WORKER}.containers[0]",
        f"{WORKER}.containers[0].resources.limits.memory",
        f"{WORKER}.containers[0].volumeMounts",
    ],
}


@pytest.mark.parametrize("text", PUBLISHED, ids=["StatefulSet", "PyTorchJob"])
def test_the_mistakes_of_published_manifests_are_found(text):
    (one,) = yaml.safe_load_all(text)
    if one["kind"] == "StatefulSet":  # the schema accepts what can never start
        kubernetes_validate.validate(one, "1.34", strict=True)
    head = f"{one['kind']}/trainer "
    assert [line.partition(": ")[0] for line in check([one])] == [head + path for path in PUBLISHED[text]]


GOOD = {
    "a shell that hands over": in_a_shell(f"cd /lab && exec {TRAIN}"),
    "a shell with one command": in_a_shell(f"{TRAIN} \\\n  --steps $STEPS"),
    "a shell that reads ${X}": in_a_shell(f"exec {TRAIN} --seed ${{HOSTNAME##*-}}"),
    "a Job with an index": as_job(),
    "$(X) that is set": lambda o: box(o)["args"].append("--seed=$(PET_NODE_RANK)"),
    "$$ that stays a dollar": lambda o: box(o)["args"].append("--name=$$(SEED)"),
    "any number of nodes": lambda o: box(o)["args"].insert(0, "--nnodes=1:4"),
    "a template for claims": lambda o: spec(o).update(volumeClaimTemplates=[{"metadata": {"name": "checkpoints"}}])
    or without(pod(o)["volumes"], name="checkpoints"),
    "checkpoints behind a URL": lambda o: box(o)["args"].__setitem__(
        box(o)["args"].index("--checkpoint-dir") + 1, "s3://bucket/gpt"
    ),
    "a full name": lambda o: set_variable(box(o), "PET_MASTER_ADDR", "gpt-0.gpt.lab.svc.cluster.local"),
    "a web server beside it": lambda o: o.append(
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"},
         "spec": {"selector": {"matchLabels": {"app": "web"}},
                  "template": {"metadata": {"labels": {"app": "web"}},
                               "spec": {"containers": [{"name": "web", "image": "web"}]}}}}
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", GOOD)
def test_what_is_right_is_not_reported(case):
    objects = made()
    GOOD[case](objects)
    assert check(objects) == []


@pytest.mark.parametrize(
    ("objects", "line"),
    [
        ([3], "object 1 is not a Kubernetes object: it has no kind"),
        ([{"kind": "Pod"}], "object 1, a Pod, has no apiVersion"),
        ([{"kind": "Pod", "apiVersion": "v1"}], "object 1, a Pod, has no metadata.name"),
        ([{"kind": "Pod", "apiVersion": "v1", "metadata": "gpt"}], "object 1, a Pod, has no metadata.name"),
    ],
)
def test_what_is_no_object_is_refused(objects, line):
    with pytest.raises(ValueError, match=line):
        check(objects)


@pytest.mark.parametrize("target", TARGETS)
def test_any_part_may_be_missing_or_of_another_type(target):
    """check() reports, and never fails: each field in turn is removed, and becomes a list, a text and a number."""

    def places(node, path=()):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield (*path, key)
            if isinstance(value, dict | list):
                yield from places(value, (*path, key))

    for number, one in enumerate(made(target)):
        for *path, last in list(places(one)):
            if path[:1] in ([], ["metadata"]) and last in ("kind", "apiVersion", "metadata", "name"):
                continue
            for value in (None, [], "text", 3, {"a": 1}):
                objects = copy.deepcopy(made(target))
                node = objects[number]
                for key in path:
                    node = node[key]
                node[last] = value
                assert all(isinstance(line, str) for line in check(objects))


def test_the_claim_has_the_size_and_class_that_are_given():
    spec = by_kind(made(storage="1Ti", storage_class="nfs"))["PersistentVolumeClaim"]["spec"]
    assert spec["resources"]["requests"] == {"storage": "1Ti"} and spec["storageClassName"] == "nfs"


def test_names_of_the_api():
    assert kubernetes.__all__ == ["check", "pytorchjob", "statefulset", "trainjob"]
