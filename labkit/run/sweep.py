"""Measure a grid of experiments: each cell is measured once and stored; a killed sweep resumes.

    sweep({"strategy": ["ddp_bucketed", "zero1"], "batch_size": [32, 64], "nproc": [1, 2]}, folder)

    grid      lists of an Experiment's fields and of a launch's: nproc, nodes, link_mbit, link_ms
    cells     their product: here 8. Invalid cells are left out, and reported before anything runs.
              A list of grids has the cells of each (weak scaling: ranks and batch together)
    launch    cells of one world, link and model run interleaved in one process group (compare.py),
              so noise slows all of them, and ratios between them are paired. At most TOGETHER at
              once, because of memory; the first such cell is in each of their launches, as the base
    folder    a CSV file per launch, written atomically: a row per cell, round, step and rank. The
              column `code` names a JSON file with the fingerprint of the measured code

Copy the files of several people into one folder to merge their results. `results` reads them, and
refuses to compare rows of different machines or versions.
"""

import fcntl
import hashlib
import itertools
import json
import os
import time
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import pandas as pd

from labkit.measure import fingerprint, machine
from labkit.once_only import of_yaml
from labkit.open_without_links import lock_file, new_file
from labkit.run.compare import check_constant, compare
from labkit.run.console import Bar
from labkit.run.experiment import Experiment
from labkit.run.job import describe_nodes

FORMAT = 2  # of the files; other formats are refused
MEASURED = "from labkit.run.compare import compare; compare"  # the entry point of the measured code
TOGETHER = 8
WORLD = {"nproc": 2, "nodes": 1, "link_mbit": None, "link_ms": 0.0}
USUAL = Experiment().to_dict() | WORLD
TEXTS = [name for name, usual in USUAL.items() if usual == ""]  # an empty text is empty in a file
ALIKE = ("cpu", "cores", "gpus", "torch")  # columns that must be equal for rows to be comparable


@dataclass(frozen=True)
class Cell:
    """One experiment in one world. Raises ValueError if they do not fit together."""

    experiment: Experiment
    nproc: int = 2
    nodes: int = 1
    link_mbit: float | None = None
    link_ms: float = 0.0

    def __post_init__(self):
        if type(self.nproc) is not int or self.nproc < 1:
            raise ValueError(f"nproc={self.nproc!r}: must be a whole number of at least 1")
        describe_nodes(self.nodes, self.link_mbit, self.link_ms, 9000)
        self.experiment.check_ranks(self.nproc * self.nodes)
        check_constant(self.experiment)

    @property
    def world(self):
        return {name: getattr(self, name) for name in WORLD}

    @property
    def fields(self):
        return self.experiment.to_dict() | self.world

    @property
    def key(self):
        """Return a hash of the fields that differ from the defaults, stable across versions."""
        changed = {name: value for name, value in self.fields.items() if value != USUAL[name]}
        return hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:16]


def read_grid(path):
    """Read a grid from a YAML file: a mapping of names to lists, or a list of such mappings."""
    try:
        grid = of_yaml(Path(path).read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not all(isinstance(mapping, dict) for mapping in as_list(grid)):
        raise ValueError(f"{path}: a grid must be a mapping of names to lists, or a list of them")
    return grid


def as_list(value):
    return value if isinstance(value, list) else [value]


def cells(grid):
    """Return ([valid Cell], [(fields, error)]) of a grid or of a list of grids, each cell once.

    A grid maps a name to a list of values, or to one value. Raises ValueError for an unknown name,
    an empty grid, and if no cell is valid.
    """
    possible = {}
    refused = []
    for one in as_list(grid) or [{}]:
        possible_here, refused_here = product(one)
        possible |= {cell.key: cell for cell in possible_here}
        refused += refused_here
    if not possible:
        raise ValueError(f"no cell of the grid is valid; the first error: {refused[0][1]}")
    return list(possible.values()), refused


def product(grid):
    """Return ([valid Cell], [(fields, error)]) of one grid."""
    names = [field.name for field in fields(Experiment)] + list(WORLD)
    if unknown := [name for name in grid if name not in names]:
        raise ValueError(
            f"unknown name in the grid: {unknown[0]!r}; valid names are {', '.join(names)}"
        )
    lists = [as_list(values) for values in grid.values()]
    if not grid or not all(lists):
        raise ValueError("the grid is empty: give at least one name with at least one value")
    possible = []
    refused = []
    for values in itertools.product(*lists):
        given = dict(zip(grid, values, strict=True))
        try:
            world = {name: given.get(name, default) for name, default in WORLD.items()}
            experiment = Experiment.from_dict({k: v for k, v in given.items() if k not in WORLD})
            possible.append(Cell(experiment, **world))
        except (ValueError, TypeError) as error:
            refused.append((given, str(error)))
    return possible, refused


def sweep(grid, folder, rounds=10, steps_per_round=3, device="auto", quiet=False, bar=None):
    """Measure the cells of the grid that are not in folder; return results(folder).

    bar: an object that shows the progress, with the methods of console.Bar.
    Raises ValueError as `cells` and `results` do, and if another sweep writes to the folder;
    LaunchError if a cell fails: earlier measurements are kept and reused.
    """
    folder = Path(folder)
    possible, refused = cells(grid)
    with alone(folder):
        measured = set(read(folder).get("cell", ()))
        planned = launches(possible, measured)
        if not quiet:
            tell(possible, measured, refused, planned)
        code = fingerprint.Code().fingerprint([MEASURED]) if planned else {}
        bar = bar or Bar(quiet)
        turns = rounds * sum(map(len, planned))
        done = 0
        for group in planned:
            part = Part(bar, done, turns)
            options = {"rounds": rounds, "steps_per_round": steps_per_round, "device": device}
            experiments = {cell.key: cell.experiment for cell in group}
            run = compare(experiments, **group[0].world, **options, quiet=True, bar=part)
            write(folder, group, run, code)
            done += rounds * len(group)
        bar.close()
    return results(folder, mixed=True)


def launches(possible, measured):
    """Return lists of cells to run together: a world's and model's first, and missing ones."""
    worlds = {}
    for cell in possible:
        worlds.setdefault((*cell.world.values(), cell.experiment.model), []).append(cell)
    planned = []
    for first, *others in worlds.values():
        missing = [cell for cell in others if cell.key not in measured]
        size = TOGETHER - 1
        parts = [missing[start : start + size] for start in range(0, len(missing), size)]
        planned += [[first, *part] for part in parts]
        if not missing and first.key not in measured:
            planned.append([first])
    return planned


def tell(possible, measured, refused, planned):
    done = sum(cell.key in measured for cell in possible)
    print(f"cells: {len(possible)}, measured before: {done}, launches to go: {len(planned)}")
    for why in dict.fromkeys(why for _, why in refused):
        print(f"  invalid cells: {sum(why == other for _, other in refused)}, {why}")


class Part:
    """A launch's part of the sweep's progress bar."""

    def __init__(self, bar, before, total):
        self.bar = bar
        self.before = before
        self.total = total
        self.record = bar.record

    def update(self, step, total):
        self.bar.update(self.before + step, self.total)

    def close(self):
        pass


@contextmanager
def alone(folder):
    """Lock the folder, so that only one sweep at a time writes to it."""
    folder.mkdir(parents=True, exist_ok=True)
    with lock_file(folder / "lock") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another sweep writes to {folder}: use another folder") from None
        yield


def write(folder, group, run, code):
    """Write a launch's rows with their cells' fields and the machine, atomically.

    code: the fingerprint of the code that measured them, stored in a file of its own.
    """
    name = fingerprint.digest(code)
    put(folder / f"{name}.json", lambda file: file.write(json.dumps(code, indent=1).encode()))
    rows = as_rows({cell.key: cell for cell in group}, run).assign(format=FORMAT, code=name)
    save = partial(rows.to_csv, index=False, float_format="%.9g")
    put(folder / f"{rows['launch'].iloc[0]}.csv", save)


def as_rows(cells, run):
    """Return the rows of one compare() as in results(). cells: {label: Cell} of its experiments."""
    card = machine.card()
    about = {name: card[name] for name in ("cpu", "cores", "torch", "python")}
    about["gpus"] = ", ".join(gpu["name"] for gpu in card["gpus"]) or "none"
    measured_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    about["network"] = run.network.get("how", "none")
    about |= {"device": run.device, "commit": machine.commit(), "measured_at": measured_at}
    launch = hashlib.sha256(f"{measured_at} {list(cells)} {os.getpid()}".encode()).hexdigest()[:16]
    fields = [{"label": label, "cell": cell.key} | cell.fields for label, cell in cells.items()]
    same = [name for name in run.records if name in USUAL]
    rows = pd.DataFrame(fields).merge(run.records.drop(columns=same), on="label")
    return rows.drop(columns="label").assign(launch=launch, **about)


def put(path, save):
    """Let save(file), which writes bytes, make a file atomically."""
    part = path.with_name(f"{path.name}.part")
    try:
        with new_file(part) as file:
            save(file)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def code_of(path):
    """Return the fingerprint of the code that measured a launch's file, or None."""
    rows = pd.read_csv(path, nrows=1, dtype=str)
    about = path.with_name(f"{rows['code'].iloc[0]}.json") if "code" in rows else None
    return json.loads(about.read_text()) if about and about.exists() else None


def read(folder):
    """Return all rows of the folder's files.

    Raises ValueError for a file that is not a launch's.
    """
    frames = []
    for path in sorted(Path(folder).glob("*.csv")):
        try:
            frame = pd.read_csv(path, keep_default_na=False, na_values=[""])
        except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: not a file of a sweep ({error}): remove it") from None
        if "format" not in frame or not frame["format"].eq(FORMAT).all():
            raise ValueError(f"{path}: not of this version's sweep (format {FORMAT}): move it away")
        new = {name: usual for name, usual in USUAL.items() if name not in frame}
        frame = frame.assign(**new)
        for name in TEXTS:
            frame[name] = frame[name].astype(object).fillna("")
        frames.append(frame)
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def results(folder, mixed=False):
    """Return the rows of all sweeps in folder. mixed: allow different machines or versions.

    Raises ValueError for an empty folder and, unless mixed, for rows that are not comparable.
    """
    rows = read(folder)
    if rows.empty:
        raise ValueError(f"{folder} has no results: run a sweep with this folder first")
    for name in ALIKE:
        if not mixed and rows[name].nunique() > 1:
            differ = " and ".join(map(str, rows[name].unique()[:3]))
            raise ValueError(
                f"{folder}: measured with different {name}: {differ}; allow it with mixed=True"
            )
    return rows
