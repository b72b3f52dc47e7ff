"""Convert docstrings to reStructuredText: prose becomes paragraphs; aligned text (pictures, lists) stays literal.

Sphinx would otherwise read stars, bars and indents as markup.
"""

import re
from itertools import groupby

ALIGNED = re.compile(r"^\s|\S {3,}\S|^(\d+\.|[-*+|>]) ")


def as_rst(lines):
    """Return a docstring's lines as lines of reStructuredText."""
    blocks = [block.split("\n") for block in re.split(r"\n\s*\n", "\n".join(lines).strip("\n")) if block.strip()]
    rst = []
    for aligned, run in groupby(blocks, key=lambda block: any(map(ALIGNED.search, block))):
        if not aligned:
            rst += [line for block in run for line in [*prose(block), ""]]
            continue
        rst += ["::", ""]
        rst += [line for block in run for line in [*(f"    {line}" for line in block), ""]]
    return rst


def prose(block):
    """Escape a paragraph's markup, except `names`; its first character cannot begin a list or title."""
    parts = re.split(r"`([^`]+)`", "\n".join(block))
    parts[::2] = [re.sub(r"([\\*_|`:])", r"\\\1", part) for part in parts[::2]]
    parts[1::2] = [rf"\ ``{part}``\ " for part in parts[1::2]]
    text = "".join(parts)
    return (text if text.startswith("\\") else f"\\{text}").split("\n")
