"""Files of other frameworks: from their text to a mapping, and back; see labkit.run.frameworks.

{...}                                DeepSpeed's JSON
distributed_type: FSDP               Accelerate's YAML
--micro-batch-size 2 ...             Megatron-LM's arguments, also behind torchrun and a script
return Trainer.Config(...)           torchtitan's Python, which is parsed and never run
"""

import json
import re

import yaml

from labkit.run import megatron_fields, torchtitan_fields
from labkit.run.frameworks import FRAMEWORKS, framework_of

OPTION = re.compile(r"(^|\s)--[a-z][a-z0-9-]+", re.MULTILINE)
TABLE = re.compile(r"^\[[\w.]+\]\s*(#.*)?$", re.MULTILINE)


def parse(text):
    """Return (framework or None, mapping) of a file's text. None: fields of an Experiment.

    Raises ValueError for text that is none of these forms, or has a framework's fields in a form
    that the framework does not read.
    """
    if text.lstrip().startswith("{"):
        config = from_json(text)
        return framework_of(config), config
    if "Trainer.Config" in text:
        return "torchtitan", torchtitan_fields.parse(text)
    if TABLE.search(text):
        raise ValueError("is TOML: torchtitan read it up to 0.2; this lab reads the Python of 0.3")
    config = from_yaml(text)
    if not isinstance(config, dict) and OPTION.search(text):
        return "megatron", megatron_fields.parse(text)
    if not isinstance(config, dict):
        raise ValueError("must have the fields of one experiment, such as model: gpt")
    framework = framework_of(config)
    if framework not in (None, "accelerate"):
        title, form = FRAMEWORKS[framework].NAME, FRAMEWORKS[framework].FORM
        raise ValueError(f"is YAML with {title}'s fields: {title} reads {form}")
    return framework, config


def from_json(text):
    """Return the object of a JSON text; raise ValueError, also if a key is there twice."""
    try:
        return json.loads(text, object_pairs_hook=without_doubles)
    except json.JSONDecodeError as error:
        comment = "//" in text or "/*" in text
        hint = ": JSON has no comments" if comment else ""
        raise ValueError(f"is not JSON: {error}{hint}") from None


def without_doubles(pairs):
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"the key {name} is there twice")
    return dict(pairs)


def from_yaml(text):
    """Return the one document of a YAML text; the text itself if it is not YAML but arguments."""
    try:
        documents = [found for found in yaml.safe_load_all(text) if found is not None]
    except yaml.YAMLError as error:
        if OPTION.search(text):
            return text
        raise ValueError(f"is not YAML: {error}") from None
    return documents[0] if len(documents) == 1 else documents


def as_text(config, framework):
    """Return the file of a framework's configuration, as `write` returns it."""
    return FRAMEWORKS[framework].text(config)
