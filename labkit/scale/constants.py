"""The fitted constants of the time and memory models, the same for all rows.

    constants.csv   name, value, unit, low, high, guess, column, meaning

low and high are the spread: the smallest and largest value when the fit is repeated without one
source, one model size or one number of GPUs at a time. guess: the start of every search, and the
value if no row determines the constant. column: the published figure that it is fitted to. No
constant belongs to one row or one model. host, waits, contention, straggle, metadata and once apply
to stacks that launch each layer from Python (nanotron); those in _fused to stacks with fused
kernels, on Hopper and later. The column "given" is set by hand, "fits" from the jobs that crashed.
Written by `python -m labkit.scale.fit --write`.
"""

import csv
from dataclasses import asdict, dataclass
from pathlib import Path

TABLE = Path(__file__).with_name("constants.csv")


@dataclass(frozen=True)
class Constant:
    """A fitted number with its unit, spread, first guess, fitted column and meaning."""

    name: str
    value: float
    unit: str
    low: float
    high: float
    guess: float
    column: str
    meaning: str


def read():
    """Return the stored constants: a list of Constant."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    numbers = ("value", "low", "high", "guess")
    return [Constant(**row | {name: float(row[name]) for name in numbers}) for row in rows]


def write(constants):
    """Write constants to the table, with four digits."""
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        rows = [asdict(constant) for constant in constants]
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow(row | {name: f"{row[name]:.4g}" for name in ("value", "low", "high")})


def values():
    """Return {name: value}, the argument `c` of cost.py and memory_model.py."""
    return {constant.name: constant.value for constant in read()}
