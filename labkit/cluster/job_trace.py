"""Gangs with the sizes and run times of a published cluster, drawn at random.

    cluster_shapes.csv   share of jobs by number of GPUs  -> the size of a gang
                         share of GPU time by the same    -> how much longer jobs of that size run
                         share of jobs by run time        -> its seconds
    load                 GPU-seconds that arrive, over GPU-seconds that the cluster has
                         -> exponential gaps between arrivals

The source used here gives shares, not jobs, so size and run time of one job are drawn apart; only
the mean run time depends on the size. Sizes are powers of two. Run times are cut at 14 days. Users
ask for more time than they need: `limit` is the next power of two.
Hu et al., Characterization and Prediction of Deep Learning Workloads in Large-Scale GPU
Datacenters, SC 2021 (Helios); Jeon et al., ATC 2019 (Philly); Hu et al., Characterization of Large
Language Model Development in the Datacenter, NSDI 2024 (Seren, Kalos; its figures are the source
of all four).
"""

import csv
import random
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from math import exp, inf, isfinite, log
from pathlib import Path

SHAPES = Path(__file__).with_name("cluster_shapes.csv")
LONGEST = 14 * 86400.0  # seconds
SHORTEST = 0.5  # seconds: where the shares of run times begin


@dataclass(frozen=True)
class Gang:
    """A job that needs all of its GPUs at once.

    arrival: seconds. seconds: its run time on the best placement. limit: the run time that its user
    asks for, on the best placement; None: exactly `seconds`. priority: higher ones go first.
    Raises ValueError, one line that names the gang.
    """

    number: int
    arrival: float
    gpus: int
    seconds: float
    limit: float | None = None
    priority: int = 0

    def __post_init__(self):
        if type(self.gpus) is not int or self.gpus < 1:
            raise ValueError(
                f"gang {self.number}: gpus must be a whole number of at least 1, got {self.gpus!r}"
            )
        for name, least in (("arrival", 0), ("seconds", 0), ("limit", self.seconds)):
            value = getattr(self, name)
            if value is not None and not (isfinite(value) and value >= least):
                raise ValueError(
                    f"gang {self.number}: {name} must be a number of at least {least:g}, "
                    f"got {value!r}"
                )
        if self.limit is None:
            object.__setattr__(self, "limit", float(self.seconds))


@cache
def shapes():
    """Return the published shares: {(cluster, what): ((x, percent of at most x), ...)}."""
    found = defaultdict(list)
    with SHAPES.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found[row["cluster"], row["what"]].append((float(row["x"]), float(row["percent"])))
    return {key: tuple(points) for key, points in found.items()}


def clusters():
    """Return the names of the published clusters."""
    return list(dict.fromkeys(cluster for cluster, _ in shapes()))


def sizes(cluster, most):
    """Return {GPUs of a gang: (share of jobs, relative mean run time)}, sizes up to `most`."""
    jobs = steps(shapes()[cluster, "gpus_at_most: jobs"])
    times = steps(shapes()[cluster, "gpus_at_most: gpu time"])
    kept = {int(gpus): jobs[gpus] for gpus in jobs if gpus <= most and jobs[gpus] > 0}
    mean = {gpus: times[gpus] / (share * gpus) for gpus, share in kept.items()}
    overall = sum(share * mean[gpus] for gpus, share in kept.items()) / sum(kept.values())
    return {gpus: (share, mean[gpus] / overall) for gpus, share in kept.items()}


def steps(points):
    """Return {x: percent between the x before and this one}."""
    found, before = {}, 0.0
    for x, percent in points:
        found[x] = max(0.0, round(percent - before, 6))
        before = percent
    return found


def run_seconds(points, percent):
    """Return the run time below which that share of jobs is, between the points on a log scale."""
    x0, before = SHORTEST, 0.0
    for x, after in points:
        if percent <= after:
            share = (percent - before) / (after - before) if after > before else 1.0
            return exp(log(x0) + (log(x) - log(x0)) * share)
        x0, before = x, after
    return points[-1][0]


def trace(cluster="Helios", jobs=1000, gpus=512, load=1.0, seed=0):
    """Draw the gangs of a cluster: a list of Gang, in the order of arrival.

    gpus: of the cluster; gangs have at most half of them. load: 1.0 brings as much work as the
    cluster can do at best. Raises ValueError.
    """
    if cluster not in clusters():
        raise ValueError(f"cluster must be one of {', '.join(clusters())}, got {cluster!r}")
    for name, value, most in (("jobs", jobs, 10**6), ("gpus", gpus, 10**6), ("load", load, inf)):
        if not (isfinite(value) and 0 < value <= most):
            raise ValueError(f"{name} must be positive, got {value!r}")
    rng = random.Random(f"{cluster} {seed}")
    kinds = sizes(cluster, max(1, gpus // 2))
    weights = [share for share, _ in kinds.values()]
    points = shapes()[cluster, "run_seconds_at_most"]
    drawn = []
    for size in rng.choices(list(kinds), weights, k=jobs):
        seconds = run_seconds(points, 100 * rng.random()) * kinds[size][1]
        drawn.append((size, min(LONGEST, seconds)))
    work = sum(size * seconds for size, seconds in drawn)
    gap = work / gpus / load / jobs
    now, gangs = 0.0, []
    for number, (size, seconds) in enumerate(drawn):
        now += rng.expovariate(1 / gap)
        gangs.append(Gang(number, now, size, seconds, power_of_two(seconds)))
    return gangs


def power_of_two(seconds):
    """Return the smallest power of two that is at least `seconds`, and at least 1."""
    found = 1.0
    while found < seconds:
        found *= 2
    return found
