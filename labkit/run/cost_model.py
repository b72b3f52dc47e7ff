"""Predict the step of a combination from measured cells: its compute and its wait for messages.

    step     |------------- compute -------------|------- wait -------|
    compute  of the base, plus what each change adds to it; it is the same over every link
    wait     bytes x seconds per byte of the link + messages x latency

A row of the table divides its step into exposed communication (wait) and the rest (compute). The
asked world needs one measured cell, its base: that gives the link's seconds per byte. A change that
was measured in the asked world brings its own wait; any other brings bytes and messages.
"""

from math import isnan, nan

import pandas as pd

from labkit.memory.memory_tracker import KINDS
from labkit.run.experiment import Experiment
from labkit.run.summary import FIELDS, WORLD, base_in
from labkit.run.sweep import Cell

PEAKS = [f"peak_{kind}_bytes" for kind in KINDS]
AXES = {"tensor", "context", "pipeline", "expert"}
SHARDED = PEAKS[:3]  # by ZeRO and FSDP: parameters, gradients, optimizer states


def predict(table, model, world, changes, without=None):
    """Predict a cell: {"step_ms": of it "compute_ms" and "wait_ms", "ratio", "sent_bytes", ...}.

    table: of summary(). changes: ((field, value), ...) to the base of the model in that world.
    without: the cell that must not be used, because its prediction is to be checked.
    ratio: step time / that of the base. peak_KIND_bytes: memory by kind; peak_bytes is their sum.
    Raises ValueError as Experiment does for a combination that cannot run, for a change that was
    not measured, and for a world without a base.
    """
    base = base_in(table, model, world)
    check(base, changes)
    rows = table[table["model"] == model].to_dict("records")
    quiet = quiet_base(rows, base)
    parts = parts_of([row for row in rows if row["cell"] != without], base, changes)
    bases = {row["cell"]: row for row in rows if row["cell"] == row["base"]}
    pairs = [(row, bases[row["base"]]) for row in parts]
    found = {"compute_ms": compute(quiet) + sum(compute(row) - compute(own) for row, own in pairs)}
    found["wait_ms"] = wait(base, quiet, pairs)
    found["step_ms"] = found["compute_ms"] + found["wait_ms"]
    found["ratio"] = found["step_ms"] / base["step_ms"]
    found["sent_bytes"] = scaled("sent_bytes", base, pairs)
    held = {name: scaled(name, base, pairs) for name in PEAKS if name in base}
    found |= held | {"peak_bytes": sum(held.values())}
    return found


def check(base, changes):
    """Raise ValueError as Experiment and Cell do, if the changed base cannot run."""
    fields = {name: plain(base[name]) for name in FIELDS} | dict(changes)
    Cell(Experiment.from_dict(fields), **world_fields(base))


def world_fields(row):
    """Return the fields of a row's world, as Cell takes them."""
    fields = {name: plain(row[name]) for name in WORLD}
    if fields["link_mbit"] == float("inf"):  # not slowed
        fields["link_mbit"] = None
    return fields


def plain(value):
    """Return a NumPy scalar as a Python number, the type that Experiment accepts."""
    return value.item() if hasattr(value, "item") else value


def compute(row):
    """Return the milliseconds of a step that are not exposed communication."""
    return row["step_ms"] - row["exposed_comm_ms"]


def quiet_base(rows, base):
    """Return the base with as many ranks over the fastest link, where compute is measured best."""
    same = [row for row in rows if row["cell"] == row["base"] and row["ranks"] == base["ranks"]]
    return min(same, key=lambda row: (row["nodes"], -row["link_mbit"], row["link_ms"]))


def parts_of(rows, base, changes):
    """Return measured rows whose changes together are `changes`.

    Rows of the asked world come first, then those with most of the changes; of these, first those
    with as many ranks, over the fastest link. One rank sends nothing, so it comes last. Axes of a
    mesh leave other ranks for dp in a world of another size, which says nothing about this one.
    """

    def order(row):
        speed = row["nodes"], -row["link_mbit"]
        others = row["ranks"] != base["ranks"], row["ranks"] == 1
        return row["world"] != base["world"], -len(row["changes"]), *others, *speed

    def fits(row):
        axes = dict(row["changes"]).keys() & AXES
        return row["changes"] and (not axes or row["ranks"] == base["ranks"])

    left = dict(changes)
    parts = []
    for row in sorted(filter(fits, rows), key=order):
        if dict(row["changes"]).items() <= left.items():
            parts.append(row)
            left = {name: value for name, value in left.items() if name not in dict(row["changes"])}
    if left:
        words = ", ".join(f"{name}={value}" for name, value in left.items())
        raise ValueError(f"{words} was not measured for {base['model']}: measure this cell")
    return parts


def wait(base, quiet, pairs):
    """Return the milliseconds that the step waits for messages."""
    own = max(base["step_ms"] - compute(quiet), 0)
    delay = 2 * (base["ranks"] - 1) * base["link_ms"]  # of one message around the ring
    per_byte = max(own - base["messages"] * delay, 0) / (base["sent_bytes"] or 1)
    factor = 1.0
    least = 0.0
    for row, first in pairs:
        if row["world"] == base["world"]:
            factor *= over(row["step_ms"] - compute(row), own) if sends(row) != sends(first) else 1
            continue
        sizes = link_bytes(row, first)
        counts = row["messages"], first["messages"]
        factor *= over(*(s * per_byte + c * delay for s, c in zip(sizes, counts, strict=True)))
        if row["world"] == quiet["world"]:  # no link is faster than none
            least = max(least, row["exposed_comm_ms"])
    return max(own * factor, least)


def link_bytes(row, base):
    """Return the bytes that the row and its base send over their link; of a rank if not counted."""
    counted = [one.get("node_sent_bytes", nan) for one in (row, base)]
    return [row["sent_bytes"], base["sent_bytes"]] if isnan(sum(counted)) else counted


def sends(row):
    return row["sent_bytes"], row["messages"]


def scaled(name, base, pairs):
    """Return base[name] times the factor of each part; if the base has none, the parts' sum."""
    if not base[name]:
        return sum(row[name] - first[name] for row, first in pairs)
    value = base[name]
    for row, first in pairs:
        factor = over(row[name], first[name])
        if name in SHARDED and "strategy" in dict(row["changes"]) and row["ranks"] > 1:
            factor = on_ranks(factor, row["ranks"], base["ranks"])
        value *= factor
    return value


def on_ranks(factor, measured, asked):
    """Return a factor of memory measured on some ranks for another number of ranks.

    A part of the bytes is complete on each rank; the other part is sharded over all ranks.
    """
    sharded = (1 - factor) / (1 - 1 / measured)
    return 1 - sharded * (1 - 1 / asked)


def over(measured, base):
    return measured / base if base else 1.0


def scores(table):
    """Compare the model with each measured cell that other cells predict; return a DataFrame.

    The cell itself is left out of the table. error: predicted / measured - 1, of the step's ratio.
    """
    found = []
    for row in table[table["cell"] != table["base"]].to_dict("records"):
        if dict(row["changes"]).keys() <= {"seed"}:  # the base once more
            continue
        asked = (table, row["model"], row["world"], row["changes"])
        try:
            said = predict(*asked, without=row["cell"])
        except ValueError:
            continue
        found.append(row | {f"predicted_{name}": value for name, value in said.items()})
    if not found:
        return pd.DataFrame()
    found = pd.DataFrame(found)
    return found.assign(error=found["predicted_ratio"] / found["ratio"] - 1)
