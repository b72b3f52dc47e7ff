"""Checks that the configurations of several frameworks share; see labkit.run.frameworks."""

import json
import re

NO_RECOMPUTE = "none: the lab recomputes nothing with other axes"
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)


class Refused(ValueError):
    """Everything that cannot be expressed in a configuration. reasons: one line for each."""

    def __init__(self, reasons):
        self.reasons = list(dict.fromkeys(reasons))
        super().__init__("\n".join(self.reasons))


class Renamed(dict):
    """A configuration with other names than its file's. names: {field: its name in the file}."""

    def __init__(self, config, names):
        super().__init__(config)
        self.names = names


def in_words_of(config, reason):
    """Return a reason with the names of the configuration's file."""
    for name, in_file in getattr(config, "names", {}).items():
        reason = re.sub(rf"(?<![\w.]){re.escape(name)}(?!\w)", in_file, reason)
    return reason


def reasons_of(error):
    """Return the messages of a ValueError, as a list."""
    return error.reasons if isinstance(error, Refused) else [str(error)]


class Parts:
    """Fields of an Experiment from the parts of a configuration; all errors are raised together.

    parts = Parts()
    parts.add(batch_of, values, ranks)      a function that returns {field: value}, or raises
    parts.result()                          {field: value} of all parts
    """

    def __init__(self, fields=()):
        self.fields = dict(fields)
        self.reasons = []
        self.missing = None

    def add(self, part, *arguments):
        """Call a part. It is left out if it needs a value that another part did not find."""
        try:
            self.fields |= part(*arguments)
        except ValueError as error:
            self.reasons += reasons_of(error)
        except KeyError as error:
            self.missing = error

    def result(self):
        """Return {field: value}. Raises Refused, or KeyError for a value that nobody has."""
        if self.reasons:
            raise Refused(self.reasons)
        if self.missing:
            raise self.missing
        return self.fields


def as_number(text):
    """Return how YAML writes a number that it reads as text: "3e-4" is 3.0e-4. None: it is none."""
    if not isinstance(text, str) or not NUMBER.fullmatch(text):
        return None
    mantissa, _, exponent = text.lower().partition("e")
    if not exponent:  # quotes make it a text
        return None
    mantissa = mantissa if "." in mantissa else f"{mantissa}.0"
    written = f"{mantissa}e{exponent if exponent[0] in '+-' else f'+{exponent}'}"
    return None if written == text else written


def hint_of_text(value):
    """Return what to write for a number that is a text, or nothing."""
    written = as_number(value)
    return f"; {value} is text, also without quotes in YAML: write {written}" if written else ""


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
        hint = hint_of_text(value) if kind in (int, float) else hint
        raise ValueError(f"{name}={json.dumps(value)}: must be {words}{hint}")


def is_off(name, written):
    """Return whether a section around a field has enabled=false. written: {field: value}."""
    while "." in name:
        name = name.rpartition(".")[0]
        if written.get(f"{name}.enabled") is False:
            return True
    return False


def refuse(name, value, title, needed, why=""):
    """Raise ValueError: a framework cannot express a field of an Experiment."""
    words = f"{title} cannot express it{why and f', {why}'}"
    raise ValueError(f"Experiment({name}={value!r}): {words}; it needs {needed}")


def whole(name, value, least=1):
    """Return a whole number of at least `least`; raise ValueError for another value."""
    if value is None:
        raise ValueError(f"{name} must be there: a whole number of at least {least}")
    if type(value) is not int or value < least:
        raise ValueError(f"{name}={value!r}: must be a whole number of at least {least}")
    return value


def number(name, value):
    """Return a number as float; raise ValueError if it is none, negative or not finite."""
    if type(value) not in (int, float):
        raise ValueError(f"{name}={value!r}: must be a number{hint_of_text(value)}")
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name}={value!r}: must be at least 0 and finite")
    return float(value)


def chosen(name, value, choices):
    """Return choices[value]; raise ValueError, which names the keys, for another value."""
    if not isinstance(value, str | int) or value not in choices:
        known = ", ".join(repr(key) for key in choices)
        what = f"{name} must be there" if value is None else f"{name}={value!r}"
        raise ValueError(f"{what}: this lab has {known}")
    return choices[value]


def data_ranks(ranks, sizes):
    """Return the number of data-parallel ranks. sizes: {field: ranks along another axis}.

    Raises ValueError if the axes do not divide the ranks.
    """
    inner = 1
    for name, size in sizes.items():
        inner *= whole(name, size)
    if ranks % inner:
        named = " x ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
        raise ValueError(f"{ranks} ranks must be a multiple of {inner}: {named}")
    return ranks // inner


def accumulation_of(names, total, micro, ranks):
    """Return how many micro-batches a rank has in a step.

    names: of (total, micro), the batch of all ranks and that of one rank. ranks: data-parallel
    ranks. Raises ValueError if the sizes do not multiply.
    """
    parts = whole(names[1], micro) * ranks
    if whole(names[0], total) % parts:
        raise ValueError(
            f"{names[0]}={total} must be a multiple of {parts}: "
            f"{names[1]}={micro} x {ranks} data-parallel ranks"
        )
    return total // parts
