"""Tables of a translation: what each field means here; see labkit.run.frameworks.

lines    every written field, and every default that matters here
short    without fields that are off, equal to the lab's defaults, or part of the program; with
         those that the lab replaces
"""

import dataclasses
import json
import re

from labkit.run.experiment import Experiment

NAMES = frozenset(field.name for field in dataclasses.fields(Experiment))
OURS = "the lab's default for"  # a model
REPLACED = "replaced"
OFF = (None, False, 0, "none", "no", "no_shard")
TRANSLATED = ("mapped", "near")


def row_of(name, known):
    """Return the Field of a written name, or of its section; None if there is neither."""
    return known.get(name) or known.get(name.partition(".")[0])


def fields_of(field):
    """Return the names of the Experiment's fields that a Field depends on."""
    if field.kind not in (*TRANSLATED, "program"):
        return set()
    return NAMES & set(re.findall(r"[\w-]+", field.here))


def lines(written, known, model, given=None, replaced=()):
    """Return [(field, value as JSON, where it comes from, what it is here, note)].

    Written fields come first, then defaults that matter here. known: {name: Field}. model: of the
    Experiment. given: names of the Experiment's fields that a file has; other written fields are
    marked as the lab's. replaced: {written field: what the Experiment has in place of its value}.
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
        has_section = any(other.partition(".")[0] == section for other in written)
        if section == name or has_section:
            value = json.dumps(field.default)
            found.append((name, value, "default", field.says(), field.note))
    return found


def short(all_lines, known, experiment):
    """Return the lines of fields that are translated or change time, and defaults that matter.

    A default matters if it is on and gives the experiment another value than the lab's own.
    """
    found = []
    for line in all_lines:
        field = row_of(line[0], known)
        if line[2] == REPLACED or line[2].startswith(OURS):
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
