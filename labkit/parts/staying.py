"""Which checkpoints stay: the last by step number, the best by a metric, and the one just written.

    keep=2, best=(min, "loss")    step-10  step-20  step-30  step-40  step-50
                                   4.1      3.0      3.2     half     3.4
                                  goes     best     stays    goes     stays

What cannot be read, or was found damaged, is left where it is, and takes nobody's place.
"""

import math

from labkit.parts import manifest


def folder_of(step):
    return f"step-{step:09d}"


def steps_in(store):
    """The step numbers of all folders, whole or not."""
    numbers = [name.removeprefix("step-") for name in store.names()]
    return sorted(int(n) for n in numbers if n.isdecimal() and store.has(folder_of(int(n))))


def staying(complete, keep, best):
    """Which steps stay. complete: {step: metrics}."""
    stay = set(sorted(complete)[-keep:])
    if best:
        choose, metric = best
        rated = {step: metrics[metric] for step, metrics in complete.items() if metric in metrics}
        rated = {step: value for step, value in rated.items() if not math.isnan(value)}
        stay |= {choose(rated, key=rated.get)} if rated else set()
    return stay


def prune(store, step, keep, best, damaged):
    """Remove what does not stay, and what a kill has left half. step: the one just written."""
    found = {other: manifest.read(store, folder_of(other))[0] for other in steps_in(store)}
    half = {other for other in found if not store.has(f"{folder_of(other)}/{manifest.NAME}")}
    complete = {
        other: one["metrics"] for other, one in found.items() if one and other not in damaged
    }
    for other in (complete.keys() | half) - staying(complete, keep, best) - {step}:
        # The manifest first: what is half removed counts as none.
        store.remove(f"{folder_of(other)}/{manifest.NAME}")
        store.remove(folder_of(other))
    named = {manifest.NAME, *manifest.files(store, folder_of(step))}
    for name in set(store.names(folder_of(step))) - named:
        store.remove(f"{folder_of(step)}/{name}")
