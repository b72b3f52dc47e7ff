"""What labkit.train is told: an Experiment, field by field, and options of the run itself.

--config gpt.yaml --steps 9 --keep 2  -->  Experiment(model="gpt", steps=9, ...), options.keep 2
"""

import argparse
import dataclasses
from pathlib import Path

import yaml

from labkit.measure.sinks import KNOWN
from labkit.run.experiment import Experiment


def read(arguments):
    """(Experiment, options) of the command line."""
    parser = argparse.ArgumentParser(prog="labkit.train", description=__doc__.partition("\n")[0])
    parser.add_argument("--config", metavar="FILE", help="YAML with the fields of an Experiment")
    for field in dataclasses.fields(Experiment):
        words = f"{field.default}" if field.default != "" else None
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=field.type, help=words)
    parser.add_argument("--checkpoint-dir", metavar="URL", help="where checkpoints are (nowhere)")
    parser.add_argument("--checkpoint-every", type=positive, default=100, metavar="STEPS")
    parser.add_argument("--resume", choices=("auto", "never", "must"), default="auto")
    parser.add_argument("--keep", type=positive, default=3, help="how many checkpoints stay (3)")
    parser.add_argument("--clip", type=float, help="largest norm of the gradients (any)")
    parser.add_argument("--evaluate-every", type=positive, metavar="STEPS")
    parser.add_argument("--log", metavar="FILE", help="JSON lines, one a step")
    parser.add_argument("--metrics", nargs="+", default=[], metavar="WHERE", help=KNOWN)
    parser.add_argument("--stop-file", metavar="FILE", help="stop when this file is there")
    parser.add_argument("--stop-after", type=float, metavar="SECONDS")
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS",
        help="ends a rank that the others wait for: longer than any step (600)",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    names = [field.name for field in dataclasses.fields(Experiment)]
    fields = yaml.safe_load(Path(options.config).read_text()) if options.config else {}
    fields |= {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    return Experiment.from_dict(fields, source=options.config or "the command line"), options


def positive(text):
    if int(text) < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return int(text)
