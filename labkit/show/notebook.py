"""What a notebook shows besides pictures: labkit's source, verdicts, the machine, predictions.

Sources and tables are displayed as Markdown and plain text: JupyterLab, GitHub, nbconvert and VS
Code each colour them in the reader's own theme, light or dark.
"""

import inspect
import numbers
import re
from pathlib import Path

from IPython.display import display

from labkit.measure import machine
from labkit.measure.machine import ROOT
from labkit.show import style, tables

# The start of a quantity or of a list of them, an empty cell, or why there is no quantity.
NUMBER = re.compile(r"[-–—+−±<>≤≥~≈=$(\[ ]*(\.?\d|$|no: )")


def source(*objects, folded=False):
    """Show the source of functions, classes, methods, modules, headed "labkit/ddp/ddp.py:40-72".

    folded: under each heading, the reader unfolds its source.
    """
    if not objects:
        raise ValueError("source() needs at least one function, class or module")
    for one in objects:
        display(as_source(*place_and_code(one), folded), raw=True)


def as_source(heading, code, folded=False):
    """Return {MIME type: text} of a source, for display()."""
    block = f"````python\n{code}````\n"
    if folded:
        block = f"<details><summary>source</summary>\n\n{block}\n</details>\n"
    return {"text/markdown": f"**`{heading}`**\n\n{block}", "text/plain": f"{heading}\n\n{code}"}


def place_and_code(one):
    """Return ("labkit/mesh.py:40-72", source). Outside the repository, the path is a bare name."""
    one = inspect.unwrap(one) if callable(one) else one
    one = one.fget if isinstance(one, property) else one
    lines, first = inspect.getsourcelines(one)
    path = Path(inspect.getsourcefile(one)).resolve()
    shown = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
    if not inspect.ismodule(one):
        last = first + len(lines) - 1
        shown += f":{first}" if last == first else f":{first}-{last}"
    return shown, inspect.cleandoc("\n" + "".join(lines)) + "\n"


def verdict(claims):
    """Print one line per claim; raise AssertionError that names the claims that do not hold.

    claims: {"weights equal one process": True, "bytes sent per rank": 4096}. True and False are
    checked, whole numbers are shown. Any other value raises TypeError: a float differs from run to
    run, and the output is compared. Raises ValueError without claims.
    """
    if not claims:
        raise ValueError("a verdict needs at least one claim")
    words = {claim: outcome(claim, value) for claim, value in claims.items()}
    width = max(map(len, words))
    print("\n".join(f"{claim:<{width}}  {word}" for claim, word in words.items()))
    broken = [claim for claim, word in words.items() if word == "NO"]
    if broken:
        raise AssertionError(f"does not hold: {'; '.join(broken)}")


def outcome(claim, value):
    # numpy and torch scalars: item() gives Python's own bool, int or float.
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, numbers.Integral):
        return str(value)
    raise TypeError(
        f"the verdict {claim!r} is {type(value).__name__}; "
        "only True, False and whole numbers are exact"
    )


def machine_card():
    """Show the machine on which this notebook's numbers are measured."""
    text = machine.describe()
    display(
        {"text/markdown": f"**This machine**\n\n```text\n{text}\n```", "text/plain": text}, raw=True
    )


def prediction(frame, provenance):
    """Show a tables.predicted_measured() frame as text, with the origin of its numbers."""
    table(tables.readable(frame).reset_index(), provenance)


def table(frame, caption):
    """Show a DataFrame as a Markdown table (words left, numbers right), caption below.

    Cells and caption are shown as text: they may come from an untrusted file.
    """
    cells = [
        [style.name(name) for name in frame.columns],
        *([str(value) for value in row] for row in frame.to_numpy()),
    ]
    rules = [":--", *(rule(column) for _, column in list(frame.items())[1:])]
    escaped = [[as_text(cell) for cell in row] for row in cells]
    lines = ["| " + " | ".join(row) + " |" for row in (escaped[0], rules, *escaped[1:])]
    plain = frame.to_string(index=False)
    display(
        {
            "text/markdown": "\n".join([*lines, "", f"*{as_text(caption)}*"]),
            "text/plain": f"{plain}\n{caption}",
        },
        raw=True,
    )


def rule(column):
    """Return the Markdown rule of a column: left if most of its cells are words, else right."""
    words = [isinstance(value, str) and not NUMBER.match(value) for value in column]
    return ":--" if 2 * sum(words) > len(words) else "--:"


def as_text(words):
    """Return Markdown that shows the words as they are, on one line."""
    line = " ".join(str(words).split())
    return re.sub(r"[\\`*_\[\]<>&|~$]", r"\\\g<0>", line)
