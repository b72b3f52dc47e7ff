"""What the model of cost and memory cannot know: a few fitted constants, the same for all rows.

    constants.csv   name, value, unit, low, high, guess, column, meaning

low and high are its spread: the least and the largest value it takes when the fit is repeated
without one source, one size of model or one number of GPUs after another. guess: where every
search begins, and what stays where no row tells. column: the published figure that it is fitted
to. None belongs to a row or to a model; host, contention and straggle are of a stack that launches
each layer from Python (nanotron). Written by `python -m labkit.scale.fit --write`.
"""

import csv
from dataclasses import asdict, dataclass
from pathlib import Path

TABLE = Path(__file__).with_name("constants.csv")


@dataclass(frozen=True)
class Constant:
    """A fitted number, its unit, spread, first guess, what it is fitted to, what it means."""

    name: str
    value: float
    unit: str
    low: float
    high: float
    guess: float
    column: str
    meaning: str


def read():
    """The committed constants: a list of Constant."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    numbers = ("value", "low", "high", "guess")
    return [Constant(**row | {name: float(row[name]) for name in numbers}) for row in rows]


def write(constants):
    """Commit constants to the table, four digits of each."""
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        rows = [asdict(constant) for constant in constants]
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow(row | {name: f"{row[name]:.4g}" for name in ("value", "low", "high")})


def values():
    """Name to value: what cost.py and memory.py take as `c`."""
    return {constant.name: constant.value for constant in read()}
