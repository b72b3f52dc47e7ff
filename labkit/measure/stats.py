"""Times move by ten per cent on a quiet machine; these are the few numbers worth saying about them.

    values  . .:::.:: .   .        .   summary: the median, and the quartiles as its spread
              |--+---|                 (a mean would follow the last dot, a minimum the luckiest)

    a/b     paired, in one repetition  ratio: the median of a_i / b_i, and its 95 % interval

Two variants are timed side by side, in shuffled order inside each repetition, so that a slow second
slows both; the interval comes from drawing the repetitions again, with replacement, 2000 times. A
claim "at most x" is made only when the interval's upper end allows it, and beside an A/A row: the
same code against itself, which must give 1.

Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13 (percentile intervals).
"""

import random
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Summary:
    """Median, lower and upper quartile of n values, in the values' unit."""

    median: float
    low: float
    high: float
    n: int

    def __str__(self):
        return f"{self.median:.3g} ({self.low:.3g} to {self.high:.3g}, n={self.n})"


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median of n paired ratios, and the 95 % bootstrap interval of that median."""

    median: float
    low: float
    high: float
    n: int

    def at_most(self, limit):
        """Whether "at most `limit`" may be claimed: the whole interval lies below it."""
        return self.high <= limit

    def __str__(self):
        return f"{self.median:.3f} (95 %: {self.low:.3f} to {self.high:.3f}, n={self.n})"


def summary(values, warmup=0):
    """Summary of values[warmup:]. Raises ValueError where none is left or one is not finite."""
    kept = np.asarray(list(values), dtype=float)[warmup:]
    if not kept.size:
        raise ValueError(f"no values left after {warmup} of warm-up")
    if not np.isfinite(kept).all():
        raise ValueError("values must be finite")
    low, median, high = np.percentile(kept, [25, 50, 75])
    return Summary(float(median), float(low), float(high), kept.size)


def paired_ratio(a, b, resamples=2000, seed=0):
    """Ratio of a to b, whose i-th values are of one repetition. The seed fixes the interval."""
    a, b = np.asarray(list(a), dtype=float), np.asarray(list(b), dtype=float)
    if a.shape != b.shape or a.ndim != 1 or not a.size:
        raise ValueError(f"pairs needed: got {a.size} and {b.size} values")
    if not (np.isfinite(a).all() and np.isfinite(b).all() and (b > 0).all()):
        raise ValueError("values must be finite, and the second ones positive")
    ratios = a / b
    drawn = np.random.default_rng(seed).integers(ratios.size, size=(resamples, ratios.size))
    low, high = np.percentile(np.median(ratios[drawn], axis=1), [2.5, 97.5])
    return Ratio(float(np.median(ratios)), float(low), float(high), ratios.size)


def shuffled_rounds(names, rounds, seed=0):
    """Yield (round, name): every name once a round, in a new order, the same on all ranks."""
    names, order = list(names), random.Random(seed)
    for number in range(rounds):
        yield from ((number, name) for name in order.sample(names, len(names)))
