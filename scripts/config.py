"""`lab config FILE --to KIND`: write an experiment as a file for a cluster or another framework, or check such files.
Nothing is submitted.

    ./scripts/lab config gpt.yaml --to slurm --nodes 2 --gpus 8 --time 12:00:00 > gpt.sbatch
    ./scripts/lab config gpt.yaml --to statefulset --nodes 2 --gpus 8 | kubectl apply -f -
    ./scripts/lab config ds_config.json --to experiment --gpus 8
    ./scripts/lab config default_config.yaml --to megatron
    ./scripts/lab config gpt.yaml --to torchtitan --gpus 8
    ./scripts/lab config manifests.yaml --check

FILE has fields of an Experiment, as for `labkit.train --config`; or it is DeepSpeed's JSON, Accelerate's YAML,
Megatron-LM's arguments or shell script, torchtitan's Python or, up to 0.2, TOML; with --check it has Kubernetes
objects. What the fields mean is printed on stderr.
"""

import argparse
import inspect
import json
import sys
from pathlib import Path

import yaml
from terminal import UserError, main, say, table

from labkit.cluster import kubernetes
from labkit.once_only import documents
from labkit.run import framework_files, framework_lines, frameworks
from labkit.run.experiment import Experiment
from labkit.run.framework_values import NO_RECOMPUTE, Refused, reasons_of
from labkit.run.options import check_fields, fitting, natural
from labkit.run.options import positive as whole

EXAMPLES = __doc__.partition("\n\n")[2].partition("\n\nFILE")[0]
CLUSTER = ("slurm", "statefulset", "trainjob", "pytorchjob")
TARGETS = (*CLUSTER, "experiment", *frameworks.FRAMEWORKS)
PODS = ("image", "cpus", "memory", "shm", "storage", "storage_class")
ALL = ("nodes", "gpus", "name", "save_seconds", "checkpoint_every")
FITS = {"slurm": (*ALL, "time", "partition", "account", "checkpoints", "interface")}
FITS |= dict.fromkeys(CLUSTER[1:], (*ALL, *PODS))
FITS |= dict.fromkeys(TARGETS[len(CLUSTER) :], ("nodes", "gpus"))
OF_PROGRAM = ("model", "size", "data", "batch_size", "optimizer", "lr", "weight_decay", "clip", "schedule")
OF_PROGRAM += ("warmup_steps", "steps", "seed")
OWN_MODEL = "an experiment has the lab's own GPT, and its size, depth and width"
EACH_MACHINE = (
    "on each machine: accelerate launch --config_file FILE --machine_rank N --main_process_ip HOST "
    "--main_process_port PORT train.py"
)
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
    add("--all", action="store_true", help="print every row of the tables, also of fields that change nothing")
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
    if asked.check and (given or asked.all):
        raise UserError(f"config: {flag(next(iter(given), 'all'))} needs --to KIND: --check changes nothing")
    try:
        return check(asked.file) if asked.check else write(asked.file, asked.to, given, asked.all)
    except ValueError as error:
        lines = [f"config: {' '.join(reason.split())}" for reason in reasons_of(error)]
        raise UserError("\nlab: ".join(lines)) from None


def write(file, target, given, every_row=False):
    """Print the file of an experiment for a target; given: {option: value}. every_row: of the tables, on stderr."""
    for name in given:
        if name not in FITS[target]:
            fitting_targets = [other for other in TARGETS if name in FITS[other]]
            raise ValueError(f"{flag(name)} does not fit --to {target}: it is for {', '.join(fitting_targets)}")
    text = text_of(file)
    try:
        framework, config = framework_files.parse(text)
        ranks, nodes = size_of(framework, config, given)
        outer = config
        framework, config = framework_files.with_file_behind(framework, outer, Path(file).parent)
    except Refused:
        raise
    except ValueError as error:
        raise ValueError(f"{shown(file)} {error}") from None
    if target in CLUSTER and framework is not None:
        given = {"nodes": nodes, "gpus": ranks // nodes} | given
    experiment, origin = experiment_of(framework, config, ranks, shown(file), base_for(target, framework))
    there = frameworks.FRAMEWORKS.get(target)
    has = frozenset(config) if origin is None else origin.given
    written = there and frameworks.write(experiment, target, ranks, nodes, has)
    if origin is not None:
        title = f"{frameworks.FRAMEWORKS[framework].NAME}'s fields, on {ranks} rank{'s' * (ranks > 1)}"
        if config is not outer:
            print(f"{shown(file)} names a file of DeepSpeed: only its processes and machines are used", file=sys.stderr)
        explain(origin, framework, title, every_row)
        warn_of_changes(origin, framework, written.config if target == framework else {})
        if not written:
            warn_of_program(experiment, has)
    warn_of_curriculum(experiment)
    if written:
        explain(written, target, f"written for {there.NAME}", every_row)
        if nodes > 1 and target == "accelerate":
            print(EACH_MACHINE, file=sys.stderr)
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
    """Return an experiment's strategy, and the fields that differ from the defaults, which depend on the model."""
    fields = experiment.to_dict()
    default = Experiment().to_dict()
    changed = {name: value for name, value in fields.items() if value != default[name] or name == "strategy"}
    changed |= {name: fields[name] for name in fitting(changed)}
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


def base_for(*names):
    """Return an experiment for what a file leaves to the program: of a GPT if a framework has no other model.

    names: of the file's framework and of the target; other names are left out.
    """
    known = [frameworks.FRAMEWORKS[name] for name in names if name in frameworks.FRAMEWORKS]
    fields = {"model": "gpt"} if any(there.WRITES["model"] == ("gpt",) for there in known) else {}
    return default_of(fields)


def default_of(fields):
    return Experiment.from_dict(fitting(fields) | fields)


def experiment_of(framework, config, ranks, source, base):
    """Return (Experiment, its Translation or None) of an Experiment's fields or a framework's configuration.

    base: an experiment with what the framework's configuration does not have.
    """
    if framework is not None:
        found = frameworks.read(config, framework, ranks, base)
        if found.experiment.model != base.model:  # an axis or a curriculum makes it a GPT
            base = default_of({"model": found.experiment.model})
            found = frameworks.read(config, framework, ranks, base)
        return found.experiment, found
    check_fields(config, source)
    try:
        return Experiment.from_dict(fitting(config) | config, source=source), None
    except TypeError as error:  # a value of another type
        raise ValueError(error) from None


def size_of(framework, config, given):
    """Return (ranks, nodes) of the command line; without them, those of a framework's configuration."""
    nodes = given.get("nodes", 1)
    ranks = nodes * max(1, given.get("gpus", 1))
    if framework is None or {"nodes", "gpus"} & set(given):
        return ranks, nodes
    ranks = frameworks.ranks_of(config, framework) or ranks
    nodes = frameworks.nodes_of(config, framework)
    if ranks % nodes:
        raise ValueError(f"has {ranks} ranks, which must be a multiple of its {nodes} nodes")
    return ranks, nodes


def explain(found, framework, title, every_row):
    """Print what a translation's fields mean here, on stderr."""
    rows = found.lines if every_row else frameworks.short(found, framework)
    print(f"{title}:", file=sys.stderr)
    print(table(rows, ("field", "value", "from", "here", "note")), file=sys.stderr)
    left_out = len(found.lines) - len(rows)
    if left_out:
        rest = "row changes" if left_out == 1 else "rows change"
        print(f"{left_out} more {rest} nothing here; --all prints them", file=sys.stderr)
    replaced = sum(row[2] == framework_lines.REPLACED and row[3] != NO_RECOMPUTE for row in rows)
    if replaced:
        print(f"replaced: {replaced} of these; {OWN_MODEL}", file=sys.stderr)
    ours = sum(row[2].startswith(framework_lines.OURS) for row in rows)
    if ours:
        print(f"the lab's defaults: {ours} of these; replace them by what your program has", file=sys.stderr)


def warn_of_changes(origin, framework, config):
    """Print which fields of a file the new one has not, or with another value, on stderr.

    config: the new one if it is of the same framework, else {}.
    """
    known, new = frameworks.fields_for(origin.config, framework), frameworks.flattened(config)
    rows, of_program = framework_lines.changes(origin.lines, known, new)
    if rows:
        print("changed, or not carried over:", file=sys.stderr)
        print(table(rows, ("field", "value", "now", "note")), file=sys.stderr)
    if of_program:
        print(f"part of the program, so not carried over: {', '.join(of_program)}", file=sys.stderr)


def warn_of_program(experiment, given):
    """Print which values an experiment has from the lab because the file leaves them to the program, on stderr."""
    names = [name for name in OF_PROGRAM if name not in given]
    values = ", ".join(f"{name}={getattr(experiment, name)!r}" for name in names)
    if values:
        print(f"not in the file, so the lab's defaults for {experiment.model}: {values}", file=sys.stderr)


def warn_of_curriculum(experiment):
    """Print that the run ends before its curriculum does, on stderr."""
    if experiment.curriculum == "none":
        return
    from labkit.run.experiment_mesh import unfinished_curriculum  # imports torch

    if words := unfinished_curriculum(experiment):
        print(words, file=sys.stderr)


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
        return documents(text)
    except ValueError as error:
        raise ValueError(f"{shown(file)} {error}") from None


def text_of(file):
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        return text.removeprefix(framework_files.MARK)
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
