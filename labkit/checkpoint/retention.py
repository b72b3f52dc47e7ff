"""Which checkpoint is the latest and which ones are kept, in a directory with branches of a run.

    saved     8    9    10              latest: 10
    load(8)        9'   12'             latest: 12', whose lineage is 8, 9', 12'; 9' replaced 9
    keep=2         9'   12'             8 and 10 are removed: the current lineage comes first

The latest checkpoint is the one that was saved last, whatever its step. A manifest has a serial
number and a lineage: the (step, serial) pairs of the checkpoints from which training continued.
load() sets the lineage; saving a step that is not higher than the last one cuts it back. Kept are
the last `keep` of the lineage, then of the others; the best by a metric, of the lineage and of all;
and the newest. Checkpoints that cannot be read, or were found damaged, are not removed and do not
count.
"""

import math

from labkit.checkpoint import metadata


def folder_of(step):
    return f"step-{step:09d}"


def steps_in(store):
    """Return the step numbers of all folders, valid or not."""
    numbers = [name.removeprefix("step-") for name in store.names()]
    return sorted(int(n) for n in numbers if n.isdecimal() and store.has(folder_of(int(n))))


def manifests_in(store, written=None):
    """Return {step: its manifest, or None if it cannot be read}.

    written: {step: (SHA-256, manifest)} that this run wrote, which need not be parsed again.
    """
    found = {}
    for step in steps_in(store):
        known = (written or {}).get(step, ("", None))
        found[step], _ = metadata.read(store, folder_of(step), known)
    return found


def age(one):
    """Return (serial, step) of a manifest; larger means later. Older formats have serial 0."""
    return one.get("serial", 0), one["step"]


def latest_first(found):
    """Return the steps in the order in which load() tries them. found: {step: manifest or None}.

    An unreadable checkpoint has no serial: it comes first if its step is beyond the latest.
    """
    readable = [step for step, manifest in found.items() if manifest]
    known = sorted(readable, key=lambda step: age(found[step]))
    unknown = sorted(found.keys() - set(known))
    last = known[-1] if known else -1
    before = [step for step in unknown if step <= last]
    beyond = [step for step in unknown if step > last]
    return (before + known + beyond)[::-1]


def lineage_of(one):
    """Return [step, serial] of the checkpoint's ancestors and of itself."""
    return [*one.get("lineage", []), [one["step"], age(one)[0]]]


def next_place(found, step, lineage):
    """Return the step, serial and lineage for a new checkpoint's manifest.

    found: see latest_first(). lineage: [step, serial] of the checkpoints that the run has loaded
    and saved. Removed checkpoints, and those of this step or a later one, are dropped from it.
    """
    there = [[other, age(one)[0]] for other, one in found.items() if one]
    serial = 1 + max((serial for _, serial in there), default=0)
    lineage = [pair for pair in lineage if pair in there and pair[0] < step]
    return {"step": step, "serial": serial, "lineage": lineage}


def staying(complete, keep, best, lineage=()):
    """Return the steps to keep. complete: {step: manifest}. lineage: steps of the current one."""
    order = sorted(complete, key=lambda step: (step in lineage, age(complete[step])))
    stay = set(order[-keep:])
    if best:
        for steps in (complete, lineage):
            metrics = {step: complete[step]["metrics"] for step in steps}
            stay |= best_of(metrics, *best)
    return stay


def best_of(metrics, choose, name):
    """Return {the step with the best value of a metric}, or an empty set. metrics: {step: dict}."""
    rated = {step: one[name] for step, one in metrics.items() if name in one}
    rated = {step: value for step, value in rated.items() if not math.isnan(value)}
    return {choose(rated, key=rated.get)} if rated else set()


def prune(store, found, step, keep, best, damaged):
    """Remove checkpoints that are not kept, and incomplete ones of a killed run.

    found: {step: manifest or None}, including `step`, which was just written.
    """
    half = {other for other in found if not store.has(f"{folder_of(other)}/{metadata.NAME}")}
    complete = {other: one for other, one in found.items() if one and other not in damaged}
    lineage = [one for one, _ in lineage_of(found[step]) if one in complete]
    for other in (complete.keys() | half) - staying(complete, keep, best, lineage) - {step}:
        # The manifest first, so that a half-removed checkpoint is invalid.
        store.remove(f"{folder_of(other)}/{metadata.NAME}")
        store.remove(folder_of(other))
    named = {metadata.NAME, *(file["name"] for file in found[step]["files"])}
    for name in set(store.names(folder_of(step))) - named:
        store.remove(f"{folder_of(step)}/{name}")
