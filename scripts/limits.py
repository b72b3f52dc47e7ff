"""The allowed values of a notebook's parameter, by its name and default: checked before a kernel starts."""

import math
import sys

LEAST = {int: 1, float: 0}  # an int is a count; a float, such as a pause, may be 0
BOUNDS = {
    "warmup_epochs": (0, math.inf),
    "timed_steps": (2, math.inf),  # the first is a warm-up
    "nodes": (2, math.inf),  # one node has no link
    "picture_ranks": (2, 8),
    "until": (2, math.inf),  # number of a notebook that explains a strategy
}


def demand(name, value, default):
    """Return a phrase for a value that is not allowed ("at least 1"), else None."""
    if isinstance(default, list):
        return demand_of_list(name, value, default)
    if isinstance(default, str):
        known = choices(name)
        if default in known and value not in known:
            return f"one of {', '.join(known)}"
    if type(default) in LEAST:
        least, most = BOUNDS.get(name, (LEAST[type(default)], math.inf))
        most = min(most, sys.float_info.max)  # 1e999 is a valid literal, too
        if value < least:
            return f"at least {least}"
        if value > most:
            return f"at most {most:g}"
    return None


def demand_of_list(name, value, default):
    kind = type(default[0])
    if not value or any(type(item) is not kind for item in value):
        return f"a list of {kind.__name__} like {default!r}"
    found = (demand(name, item, default[0]) for item in value)
    return next((f"a list of values {words}" for words in found if words), None)


def choices(name):
    """Return the choices for a parameter of this name; () if it has none."""
    if name == "device":
        return ("auto", "cpu", "cuda")
    from labkit.run.choices import CHOICES

    return CHOICES.get("comm_hook" if name == "compared" else name, ())
