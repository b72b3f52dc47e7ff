"""A grid of batch jobs: the product of lists of values, a notebook with those parameters that it declares.

world_size: [2, 4]        04_compare declares both: 4 jobs
model: [mlp, gpt]         02_data_parallel declares world_size alone: 2 jobs
"""

import hashlib
import itertools
import re
from dataclasses import dataclass
from pathlib import Path

import batch
from terminal import UserError

from labkit.once_only import of_yaml

FORM = "it maps parameters to lists, such as  world_size: [2, 4]"
LONGEST = 100  # characters of a folder's name


@dataclass(frozen=True)
class Job:
    path: Path
    values: dict  # parameter -> value
    name: str  # of its folder
    sha256: str  # of the notebook's cells as they were before the first job ran


def read(file):
    """Return {parameter: values} of a YAML file."""
    try:
        grid = of_yaml(Path(file).read_bytes())
    except OSError as error:
        raise UserError(f"--grid {file}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"--grid {file} {error}; {FORM}") from None
    if grid is None or grid == {}:
        raise UserError(f"--grid {file} is empty; {FORM}")
    if not isinstance(grid, dict):
        raise UserError(f"--grid {file} is a {type(grid).__name__}; {FORM}")
    for name, values in grid.items():
        if not isinstance(values, list) or not values:
            raise UserError(f"--grid {file}: {name!r} is {values!r} but must be a list of at least one value")
    return grid


def plan(paths, given, grid):
    """Return the jobs, with valid values. Each of several notebooks gets the parameters that it declares."""
    known = {path: batch.declared(path)[0] for path in paths}
    for name in (*given, *grid):
        if len(paths) > 1 and not any(name in names for names in known.values()):
            names = ", ".join(sorted(set().union(*known.values()))) or "none"
            raise UserError(f"no notebook has a parameter {name!r}; choose from {names}")
        if name in given and name in grid:
            raise UserError(f"-p {name} and the grid both set it: use one of them")
    jobs = []
    for path, names in known.items():
        mine = names if len(paths) > 1 else {**given, **grid}  # a single notebook reports unknown names itself
        fixed = {name: text for name, text in given.items() if name in mine}
        lists = {name: values for name, values in grid.items() if name in mine}
        sha256 = batch.digest(path)
        for point in itertools.product(*lists.values()):
            values = batch.check_parameters(path, fixed | dict(zip(lists, point, strict=True)))
            if not any(job.path == path and job.values == values for job in jobs):
                name = folder_name(path.stem, {name: values[name] for name in lists})
                jobs.append(Job(path, values, name, sha256))
    stems = {job.name: job.path for job in jobs}
    for job in jobs:
        if stems[job.name] != job.path:
            raise UserError(f"{job.path} and {stems[job.name]} have the same name: run them separately")
    return jobs


def folder_name(stem, values):
    """Return stem-name=value-...; invalid characters are replaced, and a digest keeps names distinct."""
    text = "-".join([stem, *(f"{name}={value}" for name, value in values.items())])
    safe = re.sub(r"[^\w.=+-]+", "_", text) if values else text
    if safe == text and len(text) <= LONGEST:
        return text
    return f"{safe[:LONGEST]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def varying(jobs):
    """Return the parameters that differ between jobs, in order."""
    seen = {}
    for job in jobs:
        for name, value in job.values.items():
            seen.setdefault(name, set()).add(repr(value))
    return [name for name, values in seen.items() if len(values) > 1]
