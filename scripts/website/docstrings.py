"""Docstrings are plain text: prose becomes paragraphs, what is aligned (pictures, formulas, lists) stays as it is.

Left to itself, Sphinx would read stars, bars and indents as markup.
"""

import re
from itertools import groupby

ALIGNED = re.compile(r"^\s|\S {3,}\S|^(\d+\.|[-*+|>]) ")


def as_rst(lines):
    """The lines of a docstring, as lines of reStructuredText that show it."""
    blocks = [block.split("\n") for block in re.split(r"\n\s*\n", "\n".join(lines).strip("\n")) if block.strip()]
    told = []
    for aligned, run in groupby(blocks, key=lambda block: any(map(ALIGNED.search, block))):
        if not aligned:
            told += [line for block in run for line in [*prose(block), ""]]
            continue
        told += ["::", ""]
        told += [line for block in run for line in [*(f"    {line}" for line in block), ""]]
    return told


def prose(block):
    """A paragraph without markup but for `names`. The first character cannot begin a list or a title."""
    parts = re.split(r"`([^`]+)`", "\n".join(block))
    parts[::2] = [re.sub(r"([\\*_|`:])", r"\\\1", part) for part in parts[::2]]
    parts[1::2] = [rf"\ ``{part}``\ " for part in parts[1::2]]
    text = "".join(parts)
    return (text if text.startswith("\\") else f"\\{text}").split("\n")
