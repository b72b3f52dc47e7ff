"""Files of other frameworks: from their text to a mapping, and back; see labkit.run.frameworks.

{...}                                DeepSpeed's JSON
distributed_type: FSDP               Accelerate's YAML
--micro-batch-size 2 ...             Megatron-LM's arguments, also a shell script that has them
return Trainer.Config(...)           torchtitan's Python, which is parsed and never run
[training]                           torchtitan's TOML, up to 0.2
"""

import json
import re
from pathlib import Path

from labkit.once_only import NotYaml, documents, without_doubles
from labkit.run import accelerate_fields, megatron_shell, torchtitan_files
from labkit.run.framework_lines import NAMES
from labkit.run.framework_values import Refused
from labkit.run.frameworks import (
    FRAMEWORKS,
    flattened,
    framework_of,
    module_of,
    sections,
    wrong_fields,
)

MARK = "\ufeff"  # a byte-order mark, which some editors write before the text
OPTION = re.compile(r"(^|\s)--[a-z][a-z0-9-]+", re.MULTILINE)
BEFORE = r"\s*(?://[^\n]*\n|/\*.*?\*/|\w+\s*=(?=\s*\{))"  # what people have before the {
OBJECT = re.compile(rf"(?:{BEFORE})*\s*\{{", re.DOTALL)
HINTS = {  # a form that JSON does not have, and what to write
    r"//|/\*": "JSON has no comments",
    r"\A\s*\w+\s*=": "leave out what stands before the {",
    r",\s*[}\]]": "JSON has no comma before } or ]",
    r"'": 'JSON has text in double quotes: "fp16"',
    r"\b(True|False|None)\b": "JSON writes true, false and null",
}
COMMAND = r"^\s*(?:\w+=\S+\s+)*(?:srun\s+(?:-\S+\s+)*)?"  # what may stand before its name
HOROVOD = rf"{COMMAND}horovodrun\b|\bHOROVOD_\w+=|^\s*(?:import|from) horovod|\bhvd\.\w"
ANYTHING = r"[\s\S]*"
LAUNCHERS = {  # lines that start a program, and what to give instead
    HOROVOD: "belongs to Horovod: its settings are calls in the training script, which the lab "
    "writes and does not read; give an experiment with strategy: horovod",
    rf"{COMMAND}accelerate launch\s": "starts Accelerate: give the file of its --config_file",
    r"\s--deepspeed(_config)?[ =]\S+\.json": "starts DeepSpeed: give its JSON file",
    r"\s-m torchtitan\.train\s": "starts torchtitan: give the Python file of its --module",
    rf"\A(?!{ANYTHING}--micro-batch-size){ANYTHING}^#SBATCH\s": "is a Slurm script: give the "
    "experiment or the framework's file that it starts",
}
MANIFEST = {
    r'(?:^|[{,])\s*"?apiVersion"?\s*:': "is a Kubernetes manifest: give the experiment that its "
    "pods train; --check looks for mistakes in it",
}
TABLE = re.compile(r"^\[[\w.]+\]\s*(#.*)?$", re.MULTILINE)


def parse(text):
    """Return (framework or None, mapping) of a file's text. None: fields of an Experiment.

    Raises ValueError for text that is none of these forms, or has a framework's fields in a form
    that the framework does not read.
    """
    if not text.strip():
        raise ValueError("is empty")
    check_text(text, MANIFEST)
    if OBJECT.match(text):
        config = from_json(text)
        return framework_of(config), config
    if "Trainer.Config" in text:
        return "torchtitan", torchtitan_files.parse(text)
    if TABLE.search(text):
        return "torchtitan", torchtitan_files.from_toml(text)
    check_text(text, LAUNCHERS)
    config = from_yaml(text)
    if not isinstance(config, dict) and OPTION.search(text):
        return "megatron", megatron_shell.parse(text)
    if not isinstance(config, dict):
        raise ValueError("must have the fields of one experiment, such as model: gpt")
    framework = framework_of(config)
    check_own(config, framework)
    if framework not in (None, "accelerate", "horovod"):  # Horovod has no file at all
        title, form = FRAMEWORKS[framework].NAME, FRAMEWORKS[framework].FORM
        raise ValueError(f"is YAML with {title}'s fields: {title} reads {form}")
    return framework, config


def check_text(text, forms):
    """Raise ValueError if a text has one of the forms. forms: {pattern: what to give instead}."""
    for pattern, words in forms.items():
        if re.search(pattern, text, re.MULTILINE):
            raise ValueError(words)


def check_own(config, framework):
    """Raise ValueError if most fields are neither the framework's nor an Experiment's."""
    known = NAMES | (sections(framework) if framework else set())
    foreign = [str(name) for name in config if name not in known]
    if len(foreign) > 1 and 2 * len(foreign) > len(config):
        raise ValueError(
            f"has fields of another program: {', '.join(foreign[:5])}; convert the file for "
            "DeepSpeed or Accelerate that belongs to it"
        )


def with_file_behind(framework, config, folder):
    """Return (framework, config) of the DeepSpeed file that Accelerate's configuration names.

    Without such a file, the arguments are returned. folder: Path that the file's path starts at.
    Raises ValueError, also for a mistake in the rest of Accelerate's configuration.
    """
    name = accelerate_fields.file_behind(config) if framework == "accelerate" else None
    if name is None:
        return framework, config
    wrong = wrong_fields(flattened(config), framework)
    if wrong:
        raise Refused(wrong.values())
    file = Path(folder, name)
    try:
        return "deepspeed", from_json(file.read_text(encoding="utf-8").removeprefix(MARK))
    except OSError as error:
        raise ValueError(
            f"names {file} as deepspeed_config_file, which cannot be read: {error.strerror}"
        ) from None
    except ValueError as error:
        raise ValueError(f"names {file} as deepspeed_config_file, which {error}") from None


def from_json(text):
    """Return the object of a JSON text; raise ValueError, also if a key is there twice."""
    try:
        return json.loads(text, object_pairs_hook=without_doubles)
    except json.JSONDecodeError as error:
        hints = [hint for form, hint in HINTS.items() if re.search(form, text)]
        raise ValueError("; ".join([f"is not JSON: {error}", *hints])) from None


def from_yaml(text):
    """Return the one document of a YAML text; the text itself if it is not YAML but arguments."""
    try:
        found = documents(text)
    except NotYaml:
        if OPTION.search(text):
            return text
        raise
    return found[0] if len(found) == 1 else found


def as_text(config, framework):
    """Return the file of a framework's configuration, as `write` returns it."""
    return module_of(framework).text(config)
