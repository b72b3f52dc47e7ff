"""Look up names that a user types, with a helpful error for a wrong one."""


def known(kind, name, table):
    """Return table[name], or name if table is not a mapping. Raises ValueError with all names."""
    if name not in table:
        raise ValueError(f"unknown {kind} {name!r}: choose from {', '.join(map(repr, table))}")
    return table[name] if hasattr(table, "keys") else name
