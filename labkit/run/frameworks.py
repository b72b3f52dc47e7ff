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
    framework_lines,
    horovod_fields,
    megatron_fields,
    torchtitan_fields,
)
from labkit.run.experiment import Experiment
from labkit.run.framework_lines import flattened
from labkit.run.framework_values import (
    Refused,
    check_type,
    in_words_of,
    is_off,
    reasons_of,
    refuse,
)

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

    lines: [(field, value as JSON, where it comes from, what it is here, note)], for a table; see
        labkit.run.framework_lines.
    given: names of the experiment's fields that the file has.
    """

    experiment: Experiment
    config: dict
    lines: list
    given: frozenset


@cache
def fields(framework):
    """Return {name: Field} of a framework."""
    with TABLE.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["framework"] == framework]
    for row in rows:
        row["default"] = json.loads(row["default"]) if row["default"] else None
    return {row["name"]: Field(**row) for row in rows}


def fields_for(config, framework):
    """Return fields(), with the defaults that depend on the configuration's other values."""
    there, known = module_of(framework), fields(framework)
    if not hasattr(there, "defaults_of"):
        return known
    found = there.defaults_of(flattened(config))
    return known | {name: dataclasses.replace(known[name], default=found[name]) for name in found}


def framework_of(config):
    """Return the framework that has most of a mapping's top-level keys.

    None: no framework has one that an Experiment lacks. An Experiment has no sections.
    """
    names = {field.name for field in dataclasses.fields(Experiment)}
    own = {name for name in names if not isinstance(config.get(name), dict)}
    shared = {framework: len(sections(framework) & set(config) - own) for framework in FRAMEWORKS}
    best = max(shared, key=shared.get)
    return best if shared[best] else None


def sections(framework):
    """Return the top-level keys of a framework's configuration."""
    return {section(name) for name in fields(framework)}


def section(name):
    """Return the first part of a field's name."""
    return name.partition(".")[0]


def module_of(framework):
    """Return the module of a framework; raise ValueError for a name that is none."""
    if framework not in FRAMEWORKS:
        known = ", ".join(FRAMEWORKS)
        raise ValueError(
            f"framework={framework!r}: must be one of {known}; framework_of() returns None for a "
            "configuration that has no field of one"
        )
    return FRAMEWORKS[framework]


def ranks_of(config, framework):
    """Return the number of ranks that a configuration has, or None."""
    count = getattr(module_of(framework), "ranks_of", None)
    return count and count(config)


def nodes_of(config, framework):
    """Return the number of nodes that a configuration has, or 1."""
    count = getattr(module_of(framework), "nodes_of", None)
    return count(config) if count else 1


def read(config, framework, ranks, base=None):
    """Translate a configuration into an Experiment; return a Translation.

    ranks: number of ranks of the run, which batch sizes are divided by. base: an Experiment with
    what a configuration does not have, such as the model (default: Experiment()).
    Raises Refused, a ValueError with a reason for each unknown field and for each value that an
    Experiment cannot express.
    """
    there = module_of(framework)
    if not hasattr(there, "to_experiment"):
        raise ValueError(
            f"{there.NAME} has no file of its own to read: its calls are Python; give an "
            f"experiment with strategy: {framework}"
        )
    check_count(ranks)
    known = fields_for(config, framework)
    written = flattened(config)
    wrong = wrong_fields(written, framework)
    values = {name: field.default for name, field in known.items()} | written
    meant = {*wrong, *(nearest(name, framework) for name in wrong)}
    values = {name: value for name, value in values.items() if not meant & {name, section(name)}}
    reasons = list(wrong.values())
    try:
        chosen = there.to_experiment(values, set(written), ranks)
    except ValueError as error:
        reasons += reasons_of(error)
    except KeyError:
        if not wrong:  # else it is the value of a wrong field, which is named once
            raise
    if reasons:
        raise Refused(in_words_of(config, reason) for reason in reasons)
    experiment = dataclasses.replace(base or Experiment(), **chosen)
    experiment.check_ranks(ranks)
    replaced = there.replaced(written, experiment) if hasattr(there, "replaced") else {}
    table = framework_lines.lines(written, known, experiment.model, replaced=replaced)
    return Translation(experiment, config, table, frozenset(chosen))


def wrong_fields(written, framework):
    """Return {name: what is wrong} of the written fields that are refused by themselves."""
    there = FRAMEWORKS[framework]
    left_out = there.unread(written) if hasattr(there, "unread") else ()
    found = {}
    for name, value in written.items():
        if name in left_out:
            continue
        try:
            check_written(name, value, written, framework)
        except ValueError as error:
            found[name] = str(error)
    return found


def write(experiment, framework, ranks, nodes=1, given=None):
    """Translate an Experiment into a framework's configuration; return a Translation.

    ranks: of all nodes. given: names of the fields that a file has; in the table, the others are
    marked as the lab's defaults (default: none is marked).
    Raises Refused, a ValueError with a reason for each field of the Experiment that the framework
    cannot express.
    """
    there = module_of(framework)
    check_count(ranks)
    experiment.check_ranks(ranks)
    reasons = []
    for field in dataclasses.fields(Experiment):
        try:
            check_expressible(experiment, field, there)
        except ValueError as error:
            reasons.append(str(error))
    if reasons:
        raise Refused(reasons)
    config = there.from_experiment(experiment, ranks)
    if nodes > 1 and hasattr(there, "on_nodes"):
        config = there.on_nodes(config, nodes)
    known = fields(framework)
    table = framework_lines.lines(flattened(config), known, experiment.model, given)
    table += framework_lines.of_program(experiment, flattened(config), known, there, given or ())
    names = framework_lines.NAMES if given is None else given
    return Translation(experiment, config, table, frozenset(names))


def check_expressible(experiment, field, there):
    """Raise ValueError if a framework cannot have the experiment's value of a field.

    curriculum stands for the other fields of a curriculum, which need it.
    """
    if field.name.startswith("curriculum_"):
        return
    value = getattr(experiment, field.name)
    allowed = there.WRITES.get(field.name, (field.default,))
    if allowed is any or value in allowed:
        return
    needed = " or ".join(repr(one) for one in allowed if one != "")
    why = getattr(there, "WHY", {}).get(field.name, "")
    refuse(field.name, value, there.NAME, needed or f"an experiment without {field.name}", why)


def short(found, framework):
    """Return the lines of a Translation without fields that change nothing here."""
    return framework_lines.short(found.lines, fields_for(found.config, framework), found.experiment)


def check_count(ranks):
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: must be at least 1")


def check_written(name, value, written, framework):
    """Raise ValueError if a written field is unknown, has a wrong type, or is not in this lab."""
    known = fields(framework)
    there = FRAMEWORKS[framework]
    title = there.NAME
    field = framework_lines.row_of(name, known)
    inner = field is not None and field.name != name
    parts = [other.removeprefix(f"{name}.") for other in known if other.startswith(f"{name}.")]
    if parts and value != {}:
        raise ValueError(f"{name}={json.dumps(value)}: must be a section, with {parts[0]} in it")
    if parts:
        return
    if field is None or (inner and field.kind not in ("refused", "program")):
        raise ValueError(f"{title} has no field {name}; {hint_for(name, framework)}")
    if field.kind == "program":
        return
    if "$" in str(value) and there.FORM == "arguments":
        raise ValueError(f"--{name} {value}: write the value of the shell variable")
    if value == "auto" and there.AUTO:
        if field.kind == "speed":
            return
        raise ValueError(f'{name}="auto": {there.AUTO}; write the value')
    if inner:
        if field.kind == "refused" and not is_off(name, written):
            raise ValueError(f"this lab has no {field.name} ({field.note}); remove it")
        return
    if field.kind == "fixed" and value != json.loads(field.here):
        note = f" ({field.note})" if field.note else ""
        raise ValueError(
            f"{name}={json.dumps(value)}: here it is {field.here}{note}; write {field.here}"
        )
    if field.kind == "refused" and value not in (field.default, None, False, {}):
        raise ValueError(f"{name}={json.dumps(value)}: not in this lab ({field.note}); remove it")
    if value is None and field.default is not None and field.kind in ("mapped", "near"):
        raise ValueError(
            f"{name}=null: remove it, or write a value; the default is {field.default!r}"
        )
    check_type(name, value, field.default)


def hint_for(name, framework):
    """Return what to do about an unknown field: take the framework that has it, or another name."""
    owners = [other for other in FRAMEWORKS if name in fields(other)]
    if owners:
        title = FRAMEWORKS[owners[0]].NAME
        return f"{title} has it: remove it, or write the file for {title}"
    near = nearest(name, framework)
    return f"did you mean {near}?" if near else "remove it"


def nearest(name, framework):
    """Return the nearest field of the same section, or of its last part; a known name itself."""
    if name in fields(framework):
        return name
    known = [*fields(framework), *sections(framework)]
    near = get_close_matches(name, known, 1, 0.75)
    if not near:
        last = name.rpartition(".")[2]
        near = [other for other in known if other.rpartition(".")[2] == last]
    return near[0] if near else None
