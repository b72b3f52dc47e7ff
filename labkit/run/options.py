"""The command line of labkit.train: the fields of an Experiment, and options of the run itself.

--config gpt.yaml --steps 9 --keep 2  -->  Experiment(model="gpt", steps=9, ...), options.keep 2
"""

import argparse
import dataclasses
import difflib
import sys
from pathlib import Path

from labkit.measure.sinks import KNOWN
from labkit.once_only import of_yaml
from labkit.run.choices import CHOICES, TORCH
from labkit.run.experiment import GPT, Experiment
from labkit.run.framework_values import as_number

STOPPED, WRONG, FAILED = 85, 2, 1  # exit codes
HELP = {
    "model": "mlp or resnet, which classify images; gpt, which predicts the next byte; or "
    "package.module:function, which returns a labkit.models.Task",
    "size": "of the model: about 0.1, 1 and 10 million parameters",
    "depth": "of the model: layers or hidden layers, of resnet 6n + 2; 0: that of --size",
    "width": "of the model: of a token, a hidden layer or the first stage; 0: that of --size",
    "data": "auto: the first data set that fits the model",
    "strategy": "how the ranks train together; auto: the fastest that fits",
    "batch_size": "samples per step, over all ranks",
    "accumulation": "micro-batches per step, also those of --pipeline",
    "optimizer": "of PyTorch",
    "lr": "learning rate for a batch of --reference-batch",
    "momentum": "of SGD",
    "weight_decay": "of the optimizer",
    "clip": "maximum norm of the gradients; 0: no clipping",
    "reference_batch": "batch size for which --lr is meant",
    "lr_rule": "how the rate grows with the batch",
    "linear_until": "batch size from which linear_sqrt grows with the square root",
    "warmup_steps": "steps in which the rate rises from 0",
    "schedule": "of the rate after the warm-up; cosine: to 0 at the last step",
    "curriculum": "schedule of the length of sequences, which grows to that of the model (gpt)",
    "curriculum_from": "tokens of a sequence in the first steps of --curriculum",
    "curriculum_steps": "steps until --curriculum has complete sequences",
    "steps": "total number of steps",
    "precision": "bf16 and fp16: autocast with fp32 weights; fp16 also with a loss scale",
    "recompute": "units of the model that run again in backward",
    "comm_hook": "how DDP sends its gradients",
    "every": "steps between two averages of local_sgd and diloco",
    "pipeline": "ranks along the pipeline axis of the mesh (gpt)",
    "context": "ranks that share each sequence (gpt)",
    "tensor": "ranks that share each matrix (gpt)",
    "expert": "ranks that share the experts (gpt)",
    "experts": "expert networks in each block, two for each token; 0: one plain network (gpt)",
    "sequence_parallel": "on: with --tensor, ranks share the tokens between its layers (gpt)",
    "attention": "flash: labkit's, tile by tile, instead of PyTorch's (gpt)",
    "memory_mb": "MiB of a rank for --strategy auto and --auto-batch-size; 0: the free memory",
    "bucket_cap_mb": "MiB of a bucket of gradients, for DDP and ZeRO",
    "nvme_path": "folder for the files of fsdp_nvme; empty: the system's temporary one",
    "compute": "emulated: units sleep for --block-ms instead of computing",
    "block_ms": "milliseconds that a unit sleeps forward; backward takes twice that",
    "seed": "of weights, data order and dropout",
}


class Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line, with the nearest valid option."""

    def error(self, message):
        unknown = message.partition("unrecognized arguments: ")[2].split()
        known = [name for action in self._actions for name in action.option_strings]
        near = difflib.get_close_matches(unknown[0].partition("=")[0], known, 1) if unknown else []
        hint = f"did you mean {near[0]}?" if near else "--help lists all options"
        print(f"labkit.train: {message}; {hint}", file=sys.stderr)
        sys.exit(WRONG)


def parser():
    """Return the parser of the command line, with four groups of options."""
    parser = Parser(
        prog="labkit.train",
        description="Train a model on ranks of this machine; under torchrun, on torchrun's ranks.",
        epilog="Exit codes: 0 done; 85 stopped and saved, the same command resumes; "
        "2 invalid arguments; 1 failed. Under torchrun: the file LABKIT_OUTCOME, done or stopped.",
        allow_abbrev=False,
    )
    add_ranks(parser.add_argument_group("ranks"))
    add_training(parser.add_argument_group("training"))
    add_checkpoints(parser.add_argument_group("checkpoints"))
    add_logs_and_limits(parser.add_argument_group("logs and limits"))
    return parser


def add_ranks(group):
    group.add_argument(
        "--nproc", type=positive, default=2, metavar="RANKS", help="number of ranks (2)"
    )
    group.add_argument(
        "--max-restarts", type=natural, default=0, metavar="TIMES",
        help="attempts after a failure, from the latest checkpoint (0)",
    )  # fmt: skip


def add_training(group):
    """Add an option for each field of an Experiment, and those of the training itself."""
    group.add_argument("--config", metavar="FILE", help="YAML with fields of an Experiment")
    for field in dataclasses.fields(Experiment):
        words = f"{HELP[field.name]} ({default_of(field)})"
        option = f"--{field.name.replace('_', '-')}"
        choices = CHOICES.get(field.name) if field.name != "model" else None
        group.add_argument(option, type=field.type, choices=choices, help=words, metavar=None)
    group.add_argument(
        "--auto-batch-size", action="store_true",
        help="the largest predicted to fit --memory-mb; on resume, the checkpoint's",
    )  # fmt: skip


def default_of(field):
    """Return the default of a field of an Experiment in words, also that of a GPT."""
    if field.name not in GPT:
        return field.default
    model = "gpt" if field.name == "optimizer" else f"gpt with {GPT['optimizer']}"
    return f"{field.default}; {model}: {GPT[field.name]}"


def add_checkpoints(group):
    group.add_argument("--checkpoint-dir", metavar="URL", help="a folder or s3://... (none)")
    group.add_argument(
        "--checkpoint-every",
        type=positive,
        default=100,
        metavar="STEPS",
        help="steps between checkpoints (100)",
    )
    group.add_argument(
        "--resume", type=resume, default="auto", metavar="auto|never|must|STEP",
        help="auto: from the latest checkpoint, if any; must: fail without one (auto)",
    )  # fmt: skip
    group.add_argument(
        "--override", nargs="+", default=[], metavar="NAME=VALUE",
        help="replace a value of the checkpoint: lr, momentum, weight_decay, clip",
    )  # fmt: skip
    group.add_argument(
        "--keep",
        type=positive,
        default=3,
        metavar="HOW_MANY",
        help="latest checkpoints to keep (3)",
    )
    group.add_argument(
        "--best", choices=("loss", "evaluation"),
        help="also keep the checkpoint with the lowest loss: the batch's, or the held-out data's",
    )  # fmt: skip


def add_logs_and_limits(group):
    group.add_argument("--evaluate-every", type=positive, metavar="STEPS", help="on held-out data")
    group.add_argument("--log-file", "--log", metavar="FILE", help="JSON lines, one per step")
    group.add_argument("--metrics", nargs="+", default=[], metavar="WHERE", help=KNOWN)
    group.add_argument("--stop-file", metavar="FILE", help="stop when this file exists")
    group.add_argument("--stop-after", type=float, metavar="SECONDS", help="stop after this time")
    group.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS",
        help="kill a rank that others wait for this long; must exceed a step (600)",
    )  # fmt: skip


def read(arguments):
    """Return (Experiment, options) of the command line. Raises ValueError, TypeError, OSError."""
    options = parser().parse_args(arguments)
    names = [field.name for field in dataclasses.fields(Experiment)]
    fields = from_file(options.config) if options.config else {}
    fields |= {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    changed = overrides(options.override)
    source = options.config or "the command line"
    experiment = Experiment.from_dict(fitting(fields) | fields | changed, source=source)
    if options.auto_batch_size and "batch_size" in fields:
        raise ValueError("--auto-batch-size cannot be combined with a batch size: use one of them")
    if options.auto_batch_size and experiment.strategy in (*TORCH, "auto"):
        raise ValueError(
            f"--auto-batch-size does not support strategy {experiment.strategy}: "
            "use another strategy"
        )
    return experiment, options


def check_ranks(experiment, options, nproc):
    """Raise ValueError if nproc ranks cannot split the batch evenly or form the mesh."""
    if options.auto_batch_size:
        experiment.smallest_batch(nproc)
    else:
        experiment.check_ranks(nproc)


def from_file(path):
    """Return the fields of a YAML file, {} of an empty one. Raises ValueError, OSError."""
    try:
        fields = of_yaml(Path(path).read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    fields = {} if fields is None else fields
    check_fields(fields, path)
    return fields


def check_fields(fields, source):
    """Raise ValueError if fields are no mapping, or have a number that YAML reads as text."""
    if not isinstance(fields, dict):
        raise ValueError(f"{source}: must have fields of an experiment, such as model: gpt")
    types = {field.name: field.type for field in dataclasses.fields(Experiment)}
    texts = {name: number_of(value, types.get(name)) for name, value in fields.items()}
    wrong = [
        f"{name}: {fields[name]} is text in YAML: write {number}"
        for name, number in texts.items()
        if number
    ]
    if wrong:
        raise ValueError(f"{source}: {'; '.join(wrong)}")


def number_of(value, kind):
    """Return what to write for a number that YAML reads as text. None: it is no such text.

    kind: type of the field.
    """
    number = as_number(value) if kind in (int, float) else None
    is_whole = number is not None and kind is int and float(number).is_integer()
    return f"{float(number):.0f}" if is_whole else number


def fitting(fields):
    """Return defaults that suit the given fields: of a mesh, and of a GPT that AdamW trains."""
    axes = [name for name in ("pipeline", "context", "tensor", "expert") if fields.get(name, 1) > 1]
    shortens = fields.get("curriculum", "none") != "none"
    chosen = {"model": "gpt"} if axes or fields.get("experts") or shortens else {}
    if fields.get("pipeline", 1) > 1:
        chosen["strategy"] = "ddp_naive"  # the only one that a pipeline supports
    adam = fields.get("optimizer", GPT["optimizer"]) == GPT["optimizer"]
    if adam and (chosen | fields).get("model") == "gpt":
        chosen |= GPT
    return chosen


def overrides(assignments):
    """Return {name: value} of ["lr=0.1", ...]."""
    changed = {}
    for text in assignments:
        name, _, value = text.partition("=")
        if name not in ("lr", "momentum", "weight_decay", "clip"):
            raise ValueError(f"--override {text}: must be lr=, momentum=, weight_decay= or clip=")
        try:
            changed[name] = float(value)
        except ValueError:
            raise ValueError(f"--override {text}: {value!r} is not a number") from None
    return changed


def positive(text):
    return at_least(1, text)


def natural(text):
    return at_least(0, text)


def at_least(least, text):
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least {least}")
    return int(text)


def resume(text):
    if text in ("auto", "never", "must"):
        return text
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} must be auto, never, must or a step")
