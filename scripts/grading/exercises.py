"""The exercises of the course: every check(solution, checker, ...) in notebooks/NN_*.ipynb, with its sources.

    [exercise.name for exercise in in_notebook(NOTEBOOKS / "13_fsdp.ipynb")]     ["set_up", "least_tokens"]

Standard library only: a sandbox reads submissions with the same functions.
"""

import ast
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
PYTHON_CELLS = ("%%time", "%%capture")  # magics that run their cell as Python
IPYTHON = re.compile(r"[%!?]|[\w.]+\?{1,2}$|\w+ *= *[%!]")  # %pwd, !ls, ?merge, merge?, here = %pwd
SIZES = range(2, 9)  # values of world_size that are tried
# numbers of ranks that a checker does not take: one divides 4 experts, others compare with the plan of 2 ranks
NOT_ON = {"balance_loss": {3}, "zero3": {3, 4}, "offloaded": {3, 4}}


@dataclass(frozen=True)
class Exercise:
    """An exercise: name of the reader's function, name and source of its checker, and the options of check()."""

    notebook: str
    name: str
    checker: str
    source: str = field(repr=False)
    options: dict = field(repr=False)  # {keyword: source of its value}

    @property
    def ranks(self):
        """Return the numbers of ranks to grade on: 2, 3 and 4, or the first three that check()'s nproc allows.

        One number if nproc does not depend on world_size.
        """
        nproc, nodes = (self.options.get(name, default) for name, default in (("nproc", "2"), ("nodes", "1")))
        numbers = {int(value(nproc, size)) * int(value(nodes, size)) for size in SIZES}
        return [number for number in sorted(numbers)[:3] if number not in NOT_ON.get(self.name, ())]


def value(expression, world_size):
    """Evaluate the source of an option: `2`, `world_size` or `max(4, world_size)`."""
    return eval(expression, {"__builtins__": {}, "max": max, "world_size": world_size})


def code_cells(text):
    """Return the sources of a notebook's code cells. Raises ValueError if the text is not a notebook."""
    try:
        cells = json.loads(text)["cells"]
        return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except RecursionError:
        raise ValueError("not a notebook: nested too deeply") from None
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"not a notebook: {type(error).__name__}: {error}") from None


def read(path):
    return code_cells(path.read_text(encoding="utf-8"))


def plain(cell):
    """Return a cell with IPython's lines blanked, or "" for a cell that is no Python; line numbers stay."""
    if cell.startswith("%%") and cell.split()[0] not in PYTHON_CELLS:
        return ""
    return "\n".join("" if IPYTHON.match(line) else line for line in cell.split("\n"))


def parsed(cell):
    """Return the statements of a cell of the course."""
    return ast.parse(plain(cell)).body


def functions(cells):
    """Return {name: source} of the functions at the top level of a course notebook's cells."""
    found = {}
    for cell in cells:
        for node in parsed(cell):
            if isinstance(node, ast.FunctionDef):
                found[node.name] = ast.get_source_segment(cell, node)
    return found


def checks(cells):
    """Yield (solution, checker, {keyword: source}) of each call check(solution, checker, ...)."""
    for cell in cells:
        for statement in parsed(cell) if "check(" in cell else []:
            for node in ast.walk(statement):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "check" and len(node.args) == 2:
                    options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                    yield (*map(ast.unparse, node.args), options)


def in_notebook(path):
    """Return the Exercises of a notebook, in order."""
    cells = read(path)
    known = functions(cells)
    called = [(one, other, options) for one, other, options in checks(cells) if one in known and other in known]
    return [Exercise(path.stem, one, other, known[other], options) for one, other, options in called]


def notebooks():
    """Return the paths of the course's notebooks, in order."""
    return sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
