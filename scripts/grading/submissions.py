"""Find the submissions in a folder, and the notebook of the course that each belongs to."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from grading import exercises

LARGEST = 20 * 10**6  # bytes of a submission
CELL = "# %%"  # begins a cell in a .py file


@dataclass(frozen=True)
class Submission:
    """A file. file: its path below the folder. notebook: its stem, or None; problem: why it cannot be graded, or "".

    cells: sources of its code cells. sha256: of its bytes.
    """

    file: str
    notebook: str | None = None
    cells: tuple = ()
    sha256: str = ""
    problem: str = ""


def find(folder, out):
    """Return the Submissions in a folder and its subfolders, sorted; links are not followed.

    Hidden files and the folder `out` are left out.
    """
    closed, paths = [], []
    for place, folders, files in os.walk(folder, onerror=closed.append):
        links = [name for name in folders if Path(place, name).is_symlink()]
        paths += [Path(place, name) for name in [*files, *links]]
    problems = {Path(error.filename): f"a folder that cannot be read: {error.strerror}" for error in closed}
    named = [(path, path.relative_to(folder)) for path in sorted([*paths, *problems])]
    shown = [one for one in named if out not in one[0].absolute().parents and not is_hidden(one[1])]
    return [
        Submission(str(file), problem=problems[path]) if path in problems else read(path, str(file))
        for path, file in shown
    ]


def is_hidden(file):
    return any(part.startswith(".") for part in file.parts)


def notebook_of(name, stems):
    """Return the stem that a file's name contains ("alice_13_fsdp (1).py" contains "13_fsdp"), or None."""
    named = [stem for stem in stems if stem in name]
    return max(named, key=len, default=None)


def read(path, file):
    notebook = notebook_of(path.name, [one.stem for one in exercises.notebooks()])
    try:
        if reason := unfit(path, notebook):
            return Submission(file, notebook, problem=reason)
        content = path.read_bytes()
        if not content.strip():
            return Submission(file, notebook, problem="the file is empty")
        cells = tuple(cells_of(content.decode("utf-8-sig"), path.suffix))
    except OSError as error:
        return Submission(file, notebook, problem=f"cannot be read: {error.strerror}")
    except UnicodeDecodeError:
        return Submission(file, notebook, problem="is not UTF-8: save it with the encoding UTF-8")
    except ValueError as error:
        return Submission(file, notebook, problem=str(error))
    return Submission(file, notebook, cells, hashlib.sha256(content).hexdigest())


def unfit(path, notebook):
    """Return why a file is not to be read, or "". Raises OSError."""
    if path.is_symlink():
        return "a link, which is not followed: submit the file itself"
    if not path.is_file():
        return "neither a file nor a folder, but a pipe, a socket or a device"
    if path.suffix not in (".ipynb", ".py"):
        return "neither .ipynb nor .py"
    if notebook is None:
        return "no notebook of the course is in its name, such as 13_fsdp.ipynb"
    return f"larger than {LARGEST // 10**6} MB" if path.stat().st_size > LARGEST else ""


def cells_of(text, suffix):
    """Return the sources of the code cells. Raises ValueError. A .py file may have cells that begin with `# %%`."""
    if suffix == ".ipynb":
        return exercises.code_cells(text)
    first, *others = text.split(f"\n{CELL}")
    return [first, *(CELL + other for other in others)]


def solution(notebook):
    """Return the Submission of the course's own answers."""
    path = exercises.NOTEBOOKS / "solutions" / f"{notebook}.ipynb"
    return read(path, f"solutions/{path.name}")
