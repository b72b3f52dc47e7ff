"""Names that a person types, looked up with an answer that helps when one is wrong."""


def known(kind, name, table):
    """`table[name]`, or `name` where the table is no mapping; ValueError lists the known ones."""
    if name not in table:
        raise ValueError(f"unknown {kind} {name!r}: known are {', '.join(map(repr, table))}")
    return table[name] if hasattr(table, "keys") else name
