"""Checks that the configurations of several frameworks share; see labkit.run.frameworks."""


def refuse(name, value, title, needed):
    """Raise ValueError: a framework cannot express a field of an Experiment."""
    raise ValueError(f"Experiment({name}={value!r}): {title} cannot express it; it needs {needed}")


def whole(name, value, least=1):
    """Return a whole number of at least `least`; raise ValueError for another value."""
    if type(value) is not int or value < least:
        raise ValueError(f"{name}={value!r}: must be a whole number of at least {least}")
    return value


def number(name, value):
    """Return a number as float; raise ValueError for another value."""
    if type(value) not in (int, float):
        raise ValueError(f"{name}={value!r}: must be a number")
    return float(value)


def chosen(name, value, choices):
    """Return choices[value]; raise ValueError, which names the keys, for another value."""
    if not isinstance(value, str | int) or value not in choices:
        known = ", ".join(str(key) for key in choices)
        raise ValueError(f"{name}={value!r}: this lab has {known}")
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
