"""Goodput: the share of a run's time that is useful work, after failures, saves and stragglers.

    starts  |restart|= interval =|save|= interval =|save|= inter X         X: a machine fails
                                                         |lost |detection|restart|= interval =|save|
                                                   ^ resumes from here

    a step of n ranks           max of n draws        below x with probability F(x)^n
    failures of n GPUs          M = 1 / (n rate)      mean time between failures (exponential)
    goodput                     t / M e^(-(D + w) / M) / (e^((t + d) / M) - 1)
    best interval, d << M       sqrt(2 d M)

t: work between two saves. d: seconds that a save blocks work; w: seconds to write it during
work. D: detection and restart. Identical ranks are one kind with one random draw a step, so
simulating 100,000 GPUs takes no longer than simulating two. A run needs one draw per failure.
Young, A First Order Approximation to the Optimum Checkpoint Interval, CACM 1974; Daly, A Higher
Order Estimate of the Optimum Checkpoint Interval for Restart Dumps, FGCS 2006;
David and Nagaraja, Order Statistics, 2003, section 2.1.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import torch

from labkit.scale.failures import (
    DAY,
    HOUR,
    TABLE,
    Fleet,
    checked,
    count,
    daly,
    expected,
    number,
    published,
    young,
)

__all__ = ["DAY", "HOUR", "TABLE", "Fleet", "daly", "expected", "published", "young"]
MOST = 10**7  # failures in a run; more are a sign of a rate in a wrong unit


def slowest(ranks, tail, draws):
    """Return the longest delay of `ranks` ranks, from one uniform draw in [0, 1) for all of them.

    tail: function share -> the delay that this share of delays exceeds. u = (1 - share)^ranks.
    """
    return tail(-torch.expm1(torch.log(draws) / ranks))


def spent(gaps, detection, restart, interval, save, write=0.0):
    """Split the time between failures into useful work, saves, lost work, detection and restart.

    Every gap begins from a complete save. gaps, detection: fp64 [failures]; all in seconds.
    """
    up = (gaps - detection - restart).clamp(min=0.0)
    whole = ((up - write) / (interval + save)).floor().clamp(min=0.0)
    return {
        "useful": whole * interval,
        "saves": whole * save,
        "lost": up - whole * (interval + save),
        "detection": torch.minimum(gaps, detection),
        "restart": (gaps - detection).clamp(0.0, restart),
    }


def exponential(mean):
    """Return an exponential tail for slowest(); the longest of n delays grows as log n."""
    number("mean", mean)
    return lambda share: -mean * torch.log(share)


def normal(deviation):
    """Return a normal tail for slowest(), with mean 0; the longest of n grows as sqrt(2 log n)."""
    number("deviation", deviation)
    return lambda share: -deviation * torch.special.ndtri(share)


def no_jitter(share):
    return torch.zeros_like(share)


@dataclass(frozen=True)
class Kind:
    """Identical ranks: `seconds` a step, plus a random delay of each rank, given by a tail.

    A straggler is a kind with one rank. Raises ValueError for invalid ranks or seconds.
    """

    ranks: int
    seconds: float
    jitter: Callable = no_jitter

    def __post_init__(self):
        count("ranks", self.ranks)
        number("seconds", self.seconds)


def step_seconds(kinds, steps, seed=0):
    """Return the seconds of each of `steps` synchronous steps: all wait for the slowest rank.

    kinds: a list of Kind that covers all ranks. Their seconds may come from simulate(), which is
    deterministic. The result is fp64 [steps].
    """
    count("steps", steps)
    count("kinds", len(kinds))
    generator = torch.Generator().manual_seed(seed)
    longest = torch.full((steps,), -inf, dtype=torch.float64)
    for kind in kinds:
        draws = torch.rand(steps, dtype=torch.float64, generator=generator)
        longest = torch.maximum(longest, kind.seconds + slowest(kind.ranks, kind.jitter, draws))
    return longest


class Survived(NamedTuple):
    """The result of survive(). seconds: {category: seconds}, also `useful`. failures: count."""

    seconds: dict
    failures: int

    @property
    def goodput(self):
        return self.seconds["useful"] / sum(self.seconds.values())


def survive(fleet, interval, seconds, seed=0):
    """Simulate a run of `seconds` that saves after every `interval` of work; return a Survived.

    The same seed gives the same failures for every interval. A failure during a start makes the run
    start again. Work that is not saved when the run ends counts as useful.
    Raises ValueError for an interval shorter than a write, or too many failures.
    """
    number("seconds", seconds, above=True)
    checked(fleet, interval)
    mean = seconds / fleet.between
    if mean > MOST:
        raise ValueError(f"{mean:.2g} failures in {seconds / DAY:.3g} days: is the rate per hour?")
    generator = torch.Generator().manual_seed(seed)
    failures = int(torch.poisson(torch.tensor(mean, dtype=torch.float64), generator=generator))
    moments = torch.rand(failures, dtype=torch.float64, generator=generator).sort().values
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
    gaps = torch.cat([ends[:1], moments, ends[1:]]).diff() * seconds
    detection = torch.full_like(gaps, fleet.detection)
    detection[0] = 0.0  # the first start follows no failure
    costs = fleet.restart, interval, fleet.save
    found = spent(gaps[:-1], detection[:-1], *costs, fleet.write)
    last = spent(gaps[-1:], detection[-1:], *costs)
    worked = last["lost"].clamp(max=interval)
    last["useful"] += worked
    last["saves"] += last["lost"] - worked
    last["lost"] = torch.zeros(1)
    return Survived({kind: float(found[kind].sum() + last[kind].sum()) for kind in found}, failures)
