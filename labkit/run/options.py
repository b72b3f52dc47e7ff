"""What labkit.train is told: an Experiment, field by field, and options of the run itself.

--config gpt.yaml --steps 9 --keep 2  -->  Experiment(model="gpt", steps=9, ...), options.keep 2
"""

import argparse
import dataclasses
import difflib
import sys
from pathlib import Path

import yaml

from labkit.measure.sinks import KNOWN
from labkit.run.choices import CHOICES, TORCH
from labkit.run.experiment import Experiment

STOPPED, WRONG, FAILED = 85, 2, 1  # exit codes
HELP = {
    "model": "mlp or resnet, which classify images; gpt, which predicts the next byte; or "
    "package.module:function, which returns a labkit.models.Task",
    "size": "of the model: about 0.1, 1 and 10 million parameters",
    "data": "auto: the first that the model takes",
    "strategy": "how the ranks train together; auto: the fastest that fits",
    "batch_size": "samples of a step, of all ranks together",
    "accumulation": "micro-batches of a step; with --pipeline, what fills it",
    "optimizer": "of PyTorch",
    "lr": "learning rate for a batch of --reference-batch",
    "momentum": "of SGD",
    "weight_decay": "of the optimizer",
    "reference_batch": "samples that --lr suits",
    "lr_rule": "how the rate grows with the batch",
    "linear_until": "samples from which on linear_sqrt grows with the square root",
    "warmup_steps": "steps in which the rate rises from 0",
    "schedule": "of the rate after the warm-up; cosine: to 0 at the last step",
    "steps": "how many to train in all",
    "precision": "bf16 and fp16: autocast over fp32 weights, fp16 with a loss scale",
    "recompute": "units of the model that run again in backward",
    "comm_hook": "what carries DDP's gradients",
    "every": "steps between two averages of local_sgd and diloco",
    "pipeline": "ranks along the pipeline's axis of the mesh (gpt)",
    "context": "ranks that share each sequence (gpt)",
    "tensor": "ranks that share each matrix (gpt)",
    "expert": "ranks that share the experts (gpt)",
    "experts": "networks in each block, of which a token goes to two; 0: one (gpt)",
    "memory_mb": "MiB of a rank for --strategy auto and --auto-batch-size; 0: what is free",
    "bucket_cap_mb": "MiB of a bucket of gradients, of DDP and ZeRO",
    "compute": "emulated: units sleep for --block-ms in place of their arithmetic",
    "block_ms": "milliseconds that a unit sleeps forward, and twice that backward",
    "seed": "of weights, data order and dropout",
}
# What a GPT learns with, where nothing else is said.
GPT = {"optimizer": "adamw", "lr": 3e-3, "weight_decay": 0.1, "warmup_steps": 10}


class Parser(argparse.ArgumentParser):
    """Errors in one line, with the nearest option that there is."""

    def error(self, message):
        unknown = message.partition("unrecognized arguments: ")[2].split()
        known = [name for action in self._actions for name in action.option_strings]
        near = difflib.get_close_matches(unknown[0].partition("=")[0], known, 1) if unknown else []
        hint = f"did you mean {near[0]}?" if near else "--help lists all options"
        print(f"labkit.train: {message}; {hint}", file=sys.stderr)
        sys.exit(WRONG)


def parser():
    parser = Parser(
        prog="labkit.train",
        description="Train a model on ranks of this machine; under torchrun, on torchrun's.",
        epilog="Exit codes: 0 done; 85 stopped and saved, the same line goes on; "
        "2 told what cannot be; 1 failed.",
        allow_abbrev=False,
    )
    run = parser.add_argument_group("ranks")
    run.add_argument("--nproc", type=positive, default=2, metavar="RANKS", help="how many (2)")
    run.add_argument(
        "--max-restarts", type=natural, default=0, metavar="TIMES",
        help="new attempts after a failure, from the latest checkpoint (0)",
    )  # fmt: skip
    what = parser.add_argument_group("what is trained")
    what.add_argument("--config", metavar="FILE", help="YAML with fields of an Experiment")
    for field in dataclasses.fields(Experiment):
        words = f"{HELP[field.name]} ({field.default})"
        option = f"--{field.name.replace('_', '-')}"
        choices = CHOICES.get(field.name) if field.name != "model" else None
        what.add_argument(option, type=field.type, choices=choices, help=words, metavar=None)
    what.add_argument(
        "--auto-batch-size", action="store_true",
        help="the largest that fits --memory-mb, predicted; a checkpoint's, where it goes on",
    )  # fmt: skip
    what.add_argument("--clip", type=float, metavar="NORM", help="largest norm of all gradients")
    saved = parser.add_argument_group("checkpoints")
    saved.add_argument("--checkpoint-dir", metavar="URL", help="a folder or s3://... (none)")
    saved.add_argument(
        "--checkpoint-every", type=positive, default=100, metavar="STEPS", help="(100)"
    )
    saved.add_argument(
        "--resume", type=resume, default="auto", metavar="auto|never|must|STEP",
        help="auto: from the latest checkpoint, if there is one (auto)",
    )  # fmt: skip
    saved.add_argument(
        "--override", nargs="+", default=[], metavar="NAME=VALUE",
        help="another value than the checkpoint's, on purpose: lr, momentum, weight_decay, clip",
    )  # fmt: skip
    saved.add_argument("--keep", type=positive, default=3, metavar="HOW_MANY", help="(3)")
    saved.add_argument(
        "--best", choices=("loss", "evaluation"),
        help="stays too where it is lowest: the batch's loss, or the held-out data's",
    )  # fmt: skip
    told = parser.add_argument_group("what is told, and when it stops")
    told.add_argument("--evaluate-every", type=positive, metavar="STEPS", help="on held-out data")
    told.add_argument("--log-file", "--log", metavar="FILE", help="JSON lines, one a step")
    told.add_argument("--metrics", nargs="+", default=[], metavar="WHERE", help=KNOWN)
    told.add_argument("--stop-file", metavar="FILE", help="stop when this file is there")
    told.add_argument("--stop-after", type=float, metavar="SECONDS", help="stop then")
    told.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS",
        help="ends a rank that the others wait for: longer than any step (600)",
    )  # fmt: skip
    return parser


def read(arguments):
    """(Experiment, options) of the command line. ValueError, TypeError, OSError: what is wrong."""
    options = parser().parse_args(arguments)
    names = [field.name for field in dataclasses.fields(Experiment)]
    fields = from_file(options.config) if options.config else {}
    fields |= {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    changed = overrides(options.override)
    options.clip = changed.pop("clip", options.clip)
    source = options.config or "the command line"
    experiment = Experiment.from_dict(fitting(fields) | fields | changed, source=source)
    if options.auto_batch_size and "batch_size" in fields:
        raise ValueError("--auto-batch-size and a batch size: name one of them")
    if options.auto_batch_size and experiment.strategy in (*TORCH, "auto"):
        raise ValueError(
            f"--auto-batch-size cannot predict the strategy {experiment.strategy}: name another"
        )
    return experiment, options


def check_ranks(experiment, options, nproc):
    """Raise ValueError where so many ranks cannot share the batch, or be the mesh."""
    if options.auto_batch_size:
        experiment.smallest_batch(nproc)
    else:
        experiment.check_ranks(nproc)


def from_file(path):
    try:
        return yaml.safe_load(Path(path).read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from None


def fitting(fields):
    """Values that go with those that were given."""
    axes = [name for name in ("pipeline", "context", "tensor", "expert") if fields.get(name, 1) > 1]
    chosen = {"model": "gpt"} if axes or fields.get("experts") else {}
    if fields.get("pipeline", 1) > 1:
        chosen["strategy"] = "ddp_naive"  # the one that goes with it
    if (chosen | fields).get("model") == "gpt" and "optimizer" not in fields:
        chosen |= GPT
    return chosen


def overrides(assignments):
    """{name: value} of ["lr=0.1", ...]."""
    changed = {}
    for text in assignments:
        name, _, value = text.partition("=")
        if name not in ("lr", "momentum", "weight_decay", "clip"):
            raise ValueError(f"--override {text}: takes lr=, momentum=, weight_decay= or clip=")
        try:
            changed[name] = float(value)
        except ValueError:
            raise ValueError(f"--override {text}: {value!r} is no number") from None
    return changed


def positive(text):
    return at_least(1, text)


def natural(text):
    return at_least(0, text)


def at_least(least, text):
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {least}")
    return int(text)


def resume(text):
    if text in ("auto", "never", "must"):
        return text
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is neither auto, never, must nor a step")
