"""Which checkpoint is the latest, and which ones stay, in a directory with branches of a run.

    saved     8    9    10              latest: 10
    load(8)        9'   12'             latest: 12', whose lineage is 8, 9', 12'; 9' replaced 9
    keep=2         9'   12'             8 and 10 go: the current lineage comes first

The latest is the one that was saved last, whatever its step: a manifest has a serial number, and
the lineage, the (step, serial) pairs of the checkpoints that training went on from. load() sets it;
to save a step that is not higher than the last one goes back to the steps before it. What stays is
the last `keep` of the lineage, then of the others, and the best by a metric, of the lineage and of
all; and the one just written. What cannot be read, or was found damaged, is not touched, and counts
for nothing.
"""

import math

from labkit.checkpoint import metadata


def folder_of(step):
    return f"step-{step:09d}"


def steps_in(store):
    """The step numbers of all folders, whole or not."""
    numbers = [name.removeprefix("step-") for name in store.names()]
    return sorted(int(n) for n in numbers if n.isdecimal() and store.has(folder_of(int(n))))


def manifests_in(store):
    """{step: its manifest, or None where it cannot be read}."""
    return {step: metadata.read(store, folder_of(step))[0] for step in steps_in(store)}


def age(one):
    """(serial, step) of a manifest: the larger, the later it was saved. Older formats: serial 0."""
    return one.get("serial", 0), one["step"]


def latest_first(found):
    """The steps in the order in which load() tries them. found: {step: manifest or None}.

    One that cannot be read has no serial: it comes first where its step is beyond the latest.
    """
    known = sorted((step for step, one in found.items() if one), key=lambda step: age(found[step]))
    unknown = sorted(found.keys() - set(known))
    last = known[-1] if known else -1
    before = [step for step in unknown if step <= last]
    beyond = [step for step in unknown if step > last]
    return (before + known + beyond)[::-1]


def lineage_of(one):
    """[step, serial] of what a manifest's checkpoint goes on from, and of itself."""
    return [*one.get("lineage", []), [one["step"], age(one)[0]]]


def next_place(found, step, lineage):
    """What a new checkpoint's manifest says of its place among those that are there.

    found: see latest_first(). lineage: [step, serial] of what the run has loaded and saved; of it
    stays what is still there, and is not of that step or of a later one.
    """
    there = [[other, age(one)[0]] for other, one in found.items() if one]
    serial = 1 + max((serial for _, serial in there), default=0)
    lineage = [pair for pair in lineage if pair in there and pair[0] < step]
    return {"step": step, "serial": serial, "lineage": lineage}


def staying(complete, keep, best, lineage=()):
    """Which steps stay. complete: {step: manifest}. lineage: steps of the current one."""
    order = sorted(complete, key=lambda step: (step in lineage, age(complete[step])))
    stay = set(order[-keep:])
    if best:
        for steps in (complete, lineage):
            metrics = {step: complete[step]["metrics"] for step in steps}
            stay |= best_of(metrics, *best)
    return stay


def best_of(metrics, choose, name):
    """{the step whose metric of that name is the best}, or an empty set. metrics: {step: dict}."""
    rated = {step: one[name] for step, one in metrics.items() if name in one}
    rated = {step: value for step, value in rated.items() if not math.isnan(value)}
    return {choose(rated, key=rated.get)} if rated else set()


def prune(store, found, step, keep, best, damaged):
    """Remove what does not stay, and what a kill has left half.

    found: {step: manifest or None}, with that of `step`, the one just written.
    """
    half = {other for other in found if not store.has(f"{folder_of(other)}/{metadata.NAME}")}
    complete = {other: one for other, one in found.items() if one and other not in damaged}
    lineage = [one for one, _ in lineage_of(found[step]) if one in complete]
    for other in (complete.keys() | half) - staying(complete, keep, best, lineage) - {step}:
        # The manifest first: what is half removed counts as none.
        store.remove(f"{folder_of(other)}/{metadata.NAME}")
        store.remove(folder_of(other))
    named = {metadata.NAME, *metadata.files(store, folder_of(step))}
    for name in set(store.names(folder_of(step))) - named:
        store.remove(f"{folder_of(step)}/{name}")
