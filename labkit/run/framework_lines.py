"""Tables of a translation: what each field means here; see labkit.run.frameworks.

lines         every written field, and every default that matters here
of_program    fields of an Experiment that the written configuration cannot hold
short         without fields that are off, equal to the lab's defaults, or part of the program;
              with those that the lab replaces
changes       fields of a file whose value is another one in the new form, or not there

A line says where its value comes from: it is written, a default, the lab's default for the model
(OURS), in no field of the configuration (IN_PROGRAM), or not what the Experiment has (REPLACED).
"""

import dataclasses
import json
import re

from labkit.run.experiment import Experiment

NAMES = frozenset(field.name for field in dataclasses.fields(Experiment))
OURS = "the lab's default for"  # a model
IN_PROGRAM = "in the program"
LOST = "not carried over"
REPLACED = "replaced"
OFF = (None, False, 0, "none", "no", "no_shard")
OF_ONE = ("accumulation", "context", "tensor")  # fields of which 1 is off
TRANSLATED = ("mapped", "near")


def flattened(config, above=""):
    """Return {"section.field": value} of nested mappings; an empty section stays."""
    found = {}
    for key, value in config.items():
        name = f"{above}{key}"
        nested = isinstance(value, dict) and value
        found |= flattened(value, f"{name}.") if nested else {name: value}
    return found


def row_of(name, known):
    """Return the Field of a written name, or of the innermost section that has one, or None."""
    while name not in known and "." in name:
        name = name.rpartition(".")[0]
    return known.get(name)


def fields_of(field):
    """Return the names of the Experiment's fields that a Field depends on."""
    if field.kind not in (*TRANSLATED, "program"):
        return set()
    return NAMES & set(re.findall(r"[\w-]+", field.here))


def lines(written, known, model, given=None, replaced=()):
    """Return [(field, value as JSON, where it comes from, what it is here, note)].

    Written fields come first, then defaults that matter here. known: {name: Field}. model: of the
    Experiment. given: names of the Experiment's fields that a file has; other written fields are
    marked as the lab's. replaced: {field: what the lab has in place of its value}.
    """
    found = []
    for name, value in written.items():
        field = row_of(name, known)
        if field is None:  # an empty section
            continue
        is_ours = given is not None and fields_of(field) - given
        source, here = f"{OURS} {model}" if is_ours else "written", field.says()
        if name in replaced:
            source, here = REPLACED, replaced[name]
        found.append((name, json.dumps(value), source, here, field.note))
    for name, field in known.items():
        section = name.partition(".")[0]
        if name in written or field.kind not in TRANSLATED or field.default is None:
            continue
        if name in replaced:
            value = json.dumps(field.default)
            found.append((name, value, REPLACED, replaced[name], field.note))
            continue
        has_section = any(other.partition(".")[0] == section for other in written)
        if section == name or has_section:
            value = json.dumps(field.default)
            found.append((name, value, "default", field.says(), field.note))
    return found


def of_program(experiment, config, known, there, given=()):
    """Return lines of the experiment's values that a written configuration has no field for.

    config: {field: value}. there: the module of the framework. given: names of fields that a file
    has. Other values that are an Experiment's defaults have no line, nor do those that change
    nothing.
    """
    held = unused(experiment).union(*(fields_of(row_of(name, known)) for name in config))
    if "size" in held:  # with layers and widths
        held |= {"depth", "width"}
    note = f"{there.NAME} has no field for it: the program must set it"
    found = []
    for field in dataclasses.fields(experiment):
        value = getattr(experiment, field.name)
        is_left = there.WRITES.get(field.name) is any and field.name not in held
        is_off = value in (*OFF, "") or (field.name in OF_ONE and value == 1)
        is_on = field.name in given and not is_off
        if is_left and (is_on or value != field.default):
            found.append((field.name, json.dumps(value), IN_PROGRAM, field.name, note))
    return found


def unused(experiment):
    """Return the names of fields that change nothing in this experiment."""
    names = {"momentum"} if experiment.optimizer != "sgd" else set()
    names |= {"reference_batch", "linear_until"} if experiment.lr_rule == "none" else set()
    return names | ({"bucket_cap_mb"} if experiment.strategy.startswith("fsdp") else set())


def changes(read_lines, known, new):
    """Return ([(field, value, new value or LOST, note)], names of the lost fields of the program).

    read_lines: lines of a file that was read. known: {name: Field} of its framework. new: {field:
    value} of the form it becomes, {} if that is of another framework. A lost field that has its
    default is left out, and so is one whose meaning an Experiment has.
    """
    rows, of_program = [], []
    for name, value, source, _, note in read_lines:
        field = row_of(name, known)
        if name in new:
            if new[name] != json.loads(value):
                rows.append((name, value, json.dumps(new[name]), note))
        elif source == "written" and field.kind == "program":
            of_program += [] if fields_of(field) else [name]
        elif source == "written" and is_lost(field, json.loads(value), new):
            rows.append((name, value, LOST, note))
    return rows, of_program


def is_lost(field, value, new):
    """Return whether a Field that the new form does not have changes time, memory or results."""
    here = value_here(field)
    if here is not None:
        return value != here
    is_near = field.kind == "near" and (new or not fields_of(field))
    return value != field.default and (field.kind == "speed" or is_near)


def value_here(field):
    """Return the one value that a near Field has in this lab, or None."""
    try:
        return json.loads(field.here) if field.kind == "near" else None
    except ValueError:  # names of an Experiment's fields
        return None


def short(all_lines, known, experiment):
    """Return the lines of fields that are translated or change time, and defaults that matter.

    A default matters if it is on and gives the experiment another value than the lab's own.
    """
    found = []
    for line in all_lines:
        field = row_of(line[0], known)
        if line[2] in (IN_PROGRAM, REPLACED) or line[2].startswith(OURS):
            found.append(line)
        elif line[2] == "default":
            found += [line] if matters(field, experiment) else []
        elif field.kind in (*TRANSLATED, "speed"):
            found.append(line)
    return found


def matters(field, experiment):
    """Return whether a default that is not written changes the training."""
    if field.default in OFF:
        return False
    if field.here == "the loss scale":
        return experiment.precision == "fp16"
    usual = Experiment()
    names = fields_of(field)
    changed = [name for name in names if getattr(experiment, name) != getattr(usual, name)]
    return bool(changed) or not names
