"""The closed forms of goodput: the failure rate of a fleet, the best interval, the useful share.

    failures of n GPUs          M = 1 / (n rate)      mean time between failures (exponential)
    goodput                     t / M e^(-(D + w) / M) / (e^((t + d) / M) - 1)
    best interval, d << M       sqrt(2 d M)

t: work between two saves. d: seconds that a save blocks work; w: seconds to write it during
work. D: detection and restart. goodput.py simulates the same runs. Young, A First Order
Approximation to the Optimum Checkpoint Interval, CACM 1974; Daly, A Higher Order Estimate of the
Optimum Checkpoint Interval for Restart Dumps, FGCS 2006.
"""

import csv
from dataclasses import dataclass
from math import exp, expm1, inf, isfinite, isinf, sqrt
from pathlib import Path

TABLE = Path(__file__).with_name("published") / "interruptions.csv"
HOUR, DAY = 3600.0, 86400.0


@dataclass(frozen=True)
class Fleet:
    """GPUs that train one model, with their failure rate and the costs of failures and saves.

    per_gpu_hour: failures of a GPU with its share of node and network; one failure stops all GPUs.
    detection, restart, save, write: seconds. Training waits during save; write follows in the
    background. Raises ValueError for 0 GPUs and for figures that are negative or not finite.
    """

    gpus: int
    per_gpu_hour: float
    save: float
    restart: float
    detection: float = 0.0
    write: float = 0.0

    def __post_init__(self):
        count("gpus", self.gpus)
        for name in ("per_gpu_hour", "save", "restart", "detection", "write"):
            number(name, getattr(self, name))

    @property
    def between(self):
        """Mean seconds between failures; inf if there are none."""
        rate = self.gpus * self.per_gpu_hour / HOUR
        return 1 / rate if rate else inf


def expected(fleet, interval):
    """Return the goodput of an endless run (Daly 2006; a background write adds to the restart)."""
    checked(fleet, interval)
    cycle, M = interval + fleet.save, fleet.between
    if isinf(M):
        return interval / cycle
    down = fleet.detection + fleet.restart + fleet.write
    return interval / M * exp(-down / M) / expm1(cycle / M) if cycle / M < 700 else 0.0


def young(save, between):
    """Return the best interval, where saves and lost work cost the same. Both in the same unit."""
    return sqrt(2 * save * between)


def daly(save, between):
    """Return the best interval to higher order, for an M that is not much longer than d."""
    x = save / (2 * between)
    return young(save, between) * (1 + sqrt(x) / 3 + x / 9) - save if x < 1 else between


def published():
    """Return published interruptions: dicts with `per_gpu_hour` and their source."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row |= {name: float(row[name]) for name in ("gpus", "days", "interruptions")}
        row["per_gpu_hour"] = row["interruptions"] / (row["gpus"] * row["days"] * 24)
    return rows


def checked(fleet, interval):
    number("interval", interval, above=True)
    if interval < fleet.write:
        raise ValueError(
            f"interval must be at least the {fleet.write:g} s that it takes to write a save, "
            f"got {interval:g}"
        )


def number(name, value, above=False):
    if not isfinite(value) or value < 0 or (above and value == 0):
        bound = "greater than" if above else "of at least"
        raise ValueError(f"{name} must be a number {bound} 0, got {value}")


def count(name, value):
    if not isfinite(value) or value < 1 or value != int(value):
        raise ValueError(f"{name} must be a whole number of at least 1, got {value}")
