"""`lab config FILE --to KIND`: write an experiment as a file for a cluster or another framework, or check such files.
Nothing is submitted.

    ./scripts/lab config gpt.yaml --to slurm --nodes 2 --gpus 8 --time 12:00:00 > gpt.sbatch
    ./scripts/lab config gpt.yaml --to statefulset --nodes 2 --gpus 8 | kubectl apply -f -
    ./scripts/lab config ds_config.json --to experiment --gpus 8
    ./scripts/lab config default_config.yaml --to megatron
    ./scripts/lab config gpt.yaml --to torchtitan --gpus 8
    ./scripts/lab config manifests.yaml --check

FILE has fields of an Experiment, as for `labkit.train --config`; or it is DeepSpeed's JSON, Accelerate's YAML,
Megatron-LM's arguments or torchtitan's Python; with --check it has Kubernetes objects. What the fields mean is printed
on stderr.
"""

import argparse
import inspect
import json
import sys
from pathlib import Path

import yaml
from terminal import UserError, main, say, table

from labkit.cluster import kubernetes
from labkit.run import framework_files, frameworks
from labkit.run.experiment import Experiment
from labkit.run.options import fitting, natural
from labkit.run.options import positive as whole

EXAMPLES = __doc__.partition("\n\n")[2].partition("\n\nFILE")[0]
CLUSTER = ("slurm", "statefulset", "trainjob", "pytorchjob")
TARGETS = (*CLUSTER, "experiment", *frameworks.FRAMEWORKS)
PODS = ("image", "cpus", "memory", "shm", "storage", "storage_class")
ALL = ("nodes", "gpus", "name", "save_seconds", "checkpoint_every")
FITS = {"slurm": (*ALL, "time", "partition", "account", "checkpoints", "interface")}
FITS |= dict.fromkeys(CLUSTER[1:], (*ALL, *PODS))
FITS |= dict.fromkeys(TARGETS[len(CLUSTER) :], ("nodes", "gpus"))
EVERY = tuple(dict.fromkeys(name for names in FITS.values() for name in names))


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"config: {message} (see ./scripts/lab config --help)")


def parser():
    found = Parser(
        prog="./scripts/lab config",
        usage="./scripts/lab config FILE (--to KIND [options] | --check)",
        description="Write an experiment as a file for a cluster or another framework, or check Kubernetes manifests. "
        "Nothing is submitted.",
        epilog=f"examples:\n{EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    default = {
        name: parameter.default
        for name, parameter in inspect.signature(kubernetes.pod_spec).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    add = found.add_argument
    add("file", metavar="FILE", help='YAML, JSON, arguments or Python; "-": standard input')
    add("--to", choices=TARGETS, metavar="KIND", help=f"one of {', '.join(TARGETS)}")
    add(
        "--check", action="store_true", help="print a line for each mistake in Kubernetes manifests; exit code 1 if any"
    )
    add("--nodes", type=whole, metavar="N", help="nodes, or pods (default: 1)")
    add("--gpus", type=natural, metavar="N", help="GPUs of each node, one for each rank (default: 1)")
    add("--name", help="name of the job (default: model and strategy)")
    add("--save-seconds", type=whole, metavar="S", help="measured time of a save (default: of slurm 60, else 30)")
    add("--checkpoint-every", type=whole, metavar="STEPS", help="steps between checkpoints (default: 100)")
    add("--time", help="slurm: limit of one attempt, such as 90 (minutes) or 1:30:00 (default: 1:00:00)")
    add("--partition", help="slurm: where to run (default: the cluster's)")
    add("--account", help="slurm: whom Slurm charges (default: your own default account)")
    add("--checkpoints", metavar="FOLDER", help="slurm: shared by all nodes, or s3://... (default: runs/NAME)")
    add("--interface", help="slurm: network of the ranks, such as ib0 (default: of the host names)")
    add("--image", help=f"container image with torchrun and labkit (default: {default['image']})")
    add("--cpus", type=whole, metavar="N", help="CPU cores of a pod (default: 4 for each GPU)")
    add("--memory", help=f"memory of a pod (default: {default['memory']})")
    add("--shm", help=f"size of /dev/shm, which counts as memory (default: {default['shm']})")
    add("--storage", help=f"size of the volume with the checkpoints (default: {kubernetes.STORAGE})")
    add("--storage-class", metavar="CLASS", help="its storage class (default: the cluster's)")
    return found


def run(arguments):
    asked = parser().parse_args(arguments)
    given = {name: getattr(asked, name) for name in EVERY if getattr(asked, name) is not None}
    if asked.check == (asked.to is not None):
        raise UserError(f"config: give --to KIND, one of {', '.join(TARGETS)}, or --check")
    if asked.check and given:
        raise UserError(f"config: {flag(next(iter(given)))} needs --to KIND: --check changes nothing")
    try:
        return check(asked.file) if asked.check else write(asked.file, asked.to, given)
    except ValueError as error:
        raise UserError(f"config: {' '.join(str(error).split())}") from None


def write(file, target, given):
    """Print the file of an experiment for a target; given: {option: value}."""
    for name in given:
        if name not in FITS[target]:
            fitting_targets = [other for other in TARGETS if name in FITS[other]]
            raise ValueError(f"{flag(name)} does not fit --to {target}: it is for {', '.join(fitting_targets)}")
    text = text_of(file)
    try:
        framework, config = framework_files.parse(text)
    except ValueError as error:
        raise ValueError(f"{shown(file)} {error}") from None
    ranks = given.get("nodes", 1) * max(1, given.get("gpus", 1))
    if framework is not None and not given:
        ranks = frameworks.ranks_of(config, framework) or ranks
        given = {"gpus": ranks} if target in CLUSTER else {}
    experiment, origin = experiment_of(framework, config, ranks, shown(file), base_for(target))
    there = frameworks.FRAMEWORKS.get(target)
    written = there and frameworks.write(experiment, target, ranks)
    if origin is not None:
        title = frameworks.FRAMEWORKS[framework].NAME
        explain(origin, f"{title}'s fields; what the program has, such as the model, is the lab's default")
    if written:
        explain(written, f"written for {there.NAME}")
        text = framework_files.as_text(written.config, target)
    elif target == "experiment":
        text = as_yaml(experiment)
    elif target == "slurm":
        text = as_script(experiment, given)
    else:
        text = as_objects(experiment, target, given)
    sys.stdout.write(text)
    return 0


def as_yaml(experiment):
    """Return the fields of an experiment that differ from the defaults."""
    default = Experiment().to_dict()
    changed = {name: value for name, value in experiment.to_dict().items() if value != default[name]}
    return yaml.safe_dump(changed, sort_keys=False)


def as_script(experiment, given):
    """Return a Slurm script that uses this Python's folder."""
    from labkit.cluster import slurm

    return slurm.script(experiment, path=str(Path(sys.prefix, "bin")), **{"nodes": 1, "gpus": 1} | given)


def as_objects(experiment, target, given):
    """Return Kubernetes objects as YAML. Raises ValueError for what they cannot have."""
    objects = getattr(kubernetes, target)(experiment, **given)
    wrong = kubernetes.check(objects)
    if wrong:  # a quantity that none is, a volume larger than the memory
        raise ValueError(wrong[0])
    plain = json.loads(json.dumps(objects))  # without YAML's aliases for equal parts
    return yaml.safe_dump_all(plain, sort_keys=False, explicit_start=True)


def base_for(target):
    """Return an experiment for what a file leaves to the program: of a GPT if the target has no other model."""
    there = frameworks.FRAMEWORKS.get(target)
    fields = {"model": "gpt"} if there and there.WRITES["model"] == ("gpt",) else {}
    return Experiment.from_dict(fitting(fields) | fields)


def experiment_of(framework, config, ranks, source, base):
    """Return (Experiment, its Translation or None) of an Experiment's fields or a framework's configuration.

    base: an experiment with what the framework's configuration does not have.
    """
    if framework is not None:
        found = frameworks.read(config, framework, ranks, base)
        return found.experiment, found
    try:
        return Experiment.from_dict(fitting(config) | config, source=source), None
    except TypeError as error:  # a value of another type
        raise ValueError(error) from None


def explain(translation, title):
    """Print what each field means here, on stderr."""
    print(f"{title}:", file=sys.stderr)
    print(table(translation.lines, ("field", "value", "from", "here", "note")), file=sys.stderr)


def check(file):
    """Print a line for each mistake; return 1 if there are any."""
    objects = read(file)
    # `kubectl get -o yaml` wraps objects in a List
    lists = [one.get("items") if isinstance(one, dict) and one.get("kind") == "List" else [one] for one in objects]
    objects = [one for items in lists for one in items or ()]
    if not objects:
        raise ValueError(f"{shown(file)}: has no Kubernetes objects")
    try:
        wrong = kubernetes.check(objects)
    except ValueError as error:
        raise ValueError(f"{shown(file)}: {error}") from None
    for line in wrong:
        say(line)
    if not wrong:
        say(f"{len(objects)} objects, no mistakes found")
    return 1 if wrong else 0


def read(file):
    """Return the documents of a YAML or JSON file, without empty ones."""
    text = text_of(file)
    try:
        if text.lstrip().startswith("{"):  # in YAML, 1e-3 is a text
            return [framework_files.from_json(text)]
        return [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as error:
        raise ValueError(f"{shown(file)} is not YAML: {error}") from None
    except ValueError as error:
        raise ValueError(f"{shown(file)} {error}") from None


def text_of(file):
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{shown(file)} is not text: it must be YAML or JSON") from None
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}") from None


def shown(file):
    return "standard input" if file == "-" else file


def flag(name):
    return f"--{name.replace('_', '-')}"


if __name__ == "__main__":
    sys.exit(main(run, sys.argv[1:]))
