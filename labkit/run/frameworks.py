"""Configurations of other frameworks as Experiments, and back.

    found = read(json.load(file), "deepspeed", ranks=8)
    found.experiment     the same training in this lab
    found.lines          what each field means here, also of fields that the file does not have
    write(found.experiment, "deepspeed", ranks=8).config     the file again, with every default

frameworks.csv has a row for each field: its default, which holds if a file does not have it, and
one of these kinds:

    mapped    has a field of Experiment
    near      has one, and its results differ a little: the note says how
    speed     changes time or memory, not the result
    program   belongs to the program that reads the file, such as logging
    fixed     here it has one value, which is in the column `here`; others are refused
    refused   is not in this lab: refused where the file turns it on

A module X_fields has the functions of a framework, and the source of its fields and defaults. Those
of DeepSpeed: 0.19, deepspeed/runtime/config.py, constants.py and zero/config.py, and
https://www.deepspeed.ai/docs/config-json. labkit.run.framework_files has the files themselves.
"""

import csv
import dataclasses
import json
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from labkit.run import (
    accelerate_fields,
    deepspeed_fields,
    horovod_fields,
    megatron_fields,
    torchtitan_fields,
)
from labkit.run.experiment import Experiment
from labkit.run.framework_values import refuse

TABLE = Path(__file__).with_name("frameworks.csv")
FRAMEWORKS = {
    "deepspeed": deepspeed_fields,
    "accelerate": accelerate_fields,
    "torchtitan": torchtitan_fields,
    "megatron": megatron_fields,
    "horovod": horovod_fields,
}
WORDS = {
    "speed": "time or memory only",
    "program": "part of the program",
    "fixed": "the same here",
    "refused": "off",
}


@dataclass(frozen=True)
class Field:
    """A row of frameworks.csv. default and here are values; default is None where there is none."""

    framework: str
    name: str
    kind: str
    here: str
    default: object
    note: str

    def says(self):
        """Return what the field is in this lab, as a text."""
        return self.here if self.kind in ("mapped", "near") else WORDS[self.kind]


@dataclass(frozen=True)
class Translation:
    """experiment, config: the same training in both forms.

    lines: [(field, value as JSON, "written" or "default", what it is here, note)], for a table.
    """

    experiment: Experiment
    config: dict
    lines: list


@cache
def fields(framework):
    """Return {name: Field} of a framework."""
    with TABLE.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["framework"] == framework]
    for row in rows:
        row["default"] = json.loads(row["default"]) if row["default"] else None
    return {row["name"]: Field(**row) for row in rows}


def framework_of(config):
    """Return the framework that has most of a mapping's top-level keys.

    None: no framework has one that an Experiment lacks.
    """
    own = {field.name for field in dataclasses.fields(Experiment)}
    shared = {framework: len(sections(framework) & set(config) - own) for framework in FRAMEWORKS}
    best = max(shared, key=shared.get)
    return best if shared[best] else None


def sections(framework):
    """Return the top-level keys of a framework's configuration."""
    return {name.partition(".")[0] for name in fields(framework)}


def ranks_of(config, framework):
    """Return the number of ranks that a configuration has, or None."""
    count = getattr(FRAMEWORKS[framework], "ranks_of", None)
    return count and count(config)


def read(config, framework, ranks, base=None):
    """Translate a configuration into an Experiment; return a Translation.

    ranks: number of ranks of the run, which batch sizes are divided by. base: an Experiment with
    what a configuration does not have, such as the model (default: Experiment()).
    Raises ValueError, which names the field, for an unknown field and for a value that an
    Experiment cannot express.
    """
    there = FRAMEWORKS[framework]
    if not hasattr(there, "to_experiment"):
        raise ValueError(f"{there.NAME} has no file of its own to read: its calls are Python")
    check_count(ranks)
    known = fields(framework)
    written = flattened(config)
    for name, value in written.items():
        check_written(name, value, written, framework)
    values = {name: field.default for name, field in known.items()} | written
    chosen = there.to_experiment(values, set(written), ranks)
    experiment = dataclasses.replace(base or Experiment(), **chosen)
    experiment.check_ranks(ranks)
    return Translation(experiment, config, lines(written, framework))


def write(experiment, framework, ranks):
    """Translate an Experiment into a framework's configuration; return a Translation.

    Raises ValueError, which names the field of Experiment and the framework, for a value that the
    framework cannot express.
    """
    check_count(ranks)
    experiment.check_ranks(ranks)
    there = FRAMEWORKS[framework]
    default = Experiment()
    for field in dataclasses.fields(Experiment):
        value = getattr(experiment, field.name)
        allowed = there.WRITES.get(field.name, (getattr(default, field.name),))
        if allowed is not any and value not in allowed:
            refuse(field.name, value, there.NAME, " or ".join(map(repr, allowed)))
    config = there.from_experiment(experiment, ranks)
    return Translation(experiment, config, lines(flattened(config), framework))


def check_count(ranks):
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: must be at least 1")


def flattened(config, above=""):
    """Return {"section.field": value} of nested mappings; an empty section stays."""
    found = {}
    for key, value in config.items():
        name = f"{above}{key}"
        nested = isinstance(value, dict) and value
        found |= flattened(value, f"{name}.") if nested else {name: value}
    return found


def check_written(name, value, written, framework):
    """Raise ValueError if a written field is unknown, has a wrong type, or is not in this lab."""
    known = fields(framework)
    there = FRAMEWORKS[framework]
    title = there.NAME
    field = known.get(name) or known.get(name.partition(".")[0])
    inner = field is not None and field.name != name
    parts = [other.removeprefix(f"{name}.") for other in known if other.startswith(f"{name}.")]
    if parts and value != {}:
        raise ValueError(f"{name}={json.dumps(value)}: must be a section, with {parts[0]} in it")
    if parts:
        return
    if field is None or (inner and field.kind not in ("refused", "program")):
        raise ValueError(f"{title} has no field {name}; {hint_for(name, framework)}")
    if value == "auto" and there.AUTO:
        raise ValueError(f'{name}="auto": {there.AUTO}; write the value')
    if inner:
        is_off = written.get(f"{field.name}.enabled", True) is False
        if field.kind == "refused" and not is_off:
            raise ValueError(f"{name}: this lab has no {field.name} ({field.note}); remove it")
        return
    if field.kind == "fixed" and value != json.loads(field.here):
        raise ValueError(f"{name}={json.dumps(value)}: here it is {field.here} ({field.note})")
    if field.kind == "refused" and value not in (field.default, None, False, {}):
        raise ValueError(f"{name}={json.dumps(value)}: not in this lab ({field.note})")
    if value is None and field.default is not None and field.kind in ("mapped", "near"):
        raise ValueError(
            f"{name}=null: remove it, or write a value; the default is {field.default!r}"
        )
    check_type(name, value, field.default)


def check_type(name, value, default):
    """Raise ValueError if a value is not of the type of the field's default."""
    if default is None or value is None:
        return
    kinds = {bool: (bool, "true or false"), int: (int, "a whole number")}
    kinds |= {float: (float, "a number"), str: (str, "a text"), list: (list, "a list")}
    kind, words = kinds.get(type(default), (object, ""))
    whole = isinstance(value, float) and value.is_integer()
    converts = type(value) is int if kind is float else kind is int and whole
    if type(value) is not kind and not converts and kind is not object:
        hint = "; YAML reads an unquoted no as false" if kind is str and value is False else ""
        raise ValueError(f"{name}={json.dumps(value)}: must be {words}{hint}")


def hint_for(name, framework):
    """Return what to do about an unknown field: take the framework that has it, or another name."""
    owners = [other for other in FRAMEWORKS if name in fields(other)]
    if owners:
        return f"{FRAMEWORKS[owners[0]].NAME} has it: read the file as {owners[0]}"
    return nearest(name, [*fields(framework), *sections(framework)])


def nearest(name, known):
    """Return "did you mean ...?" of the nearest field of the same section, or of its last part."""
    near = get_close_matches(name, known, 1, 0.75)
    if not near:
        last = name.rpartition(".")[2]
        near = [other for other in known if other.rpartition(".")[2] == last]
    return f"did you mean {near[0]}?" if near else "remove it"


def lines(written, framework):
    """Return the lines of a Translation: written fields first, then defaults that matter here."""
    known = fields(framework)
    found = []
    for name, value in written.items():
        field = known.get(name) or known.get(name.partition(".")[0])
        if field is None:  # an empty section
            continue
        found.append((name, json.dumps(value), "written", field.says(), field.note))
    for name, field in known.items():
        section = name.partition(".")[0]
        if name in written or field.kind not in ("mapped", "near") or field.default is None:
            continue
        has_section = any(other.partition(".")[0] == section for other in written)
        if section == name or has_section:
            value = json.dumps(field.default)
            found.append((name, value, "default", field.says(), field.note))
    return found
