"""Times move by ten per cent on a quiet machine; these are the few numbers worth saying about them.

    values  . .:::.:: .   .        .   summary: the median, and the quartiles as its spread
              |--+---|                 (a mean would follow the last dot, a minimum the luckiest)

    a/b     paired, in one repetition  paired_ratio: the median of a_i / b_i, and its interval
    right   of the same samples        paired_accuracy: only those that one of two has right count

Two variants are timed side by side, in shuffled order inside each repetition, so that a slow second
slows both. The interval of the median reaches from the k-th smallest to the k-th largest ratio. It
misses the true median with probability 2 P(Binomial(n, 1/2) < k), whatever the distribution. k is
the largest for which that is at most 5 %. Fewer than FEWEST pairs have no such k: then the interval
is the smallest and the largest ratio, and is called so. A verdict ("faster", "slower") is made
beside an A/A row, the same code against itself: noise_band. Some of many intervals miss: by_chance.

The sign test, from Conover, Practical Nonparametric Statistics, 3rd edition 1999, sections 3.2 and
3.4; McNemar, Note on the sampling error of the difference between correlated proportions, 1947.
"""

import random
from dataclasses import dataclass
from math import comb

import numpy as np

FEWEST = 6  # pairs: all on one side of the truth by chance in 2 / 2^6 = 3 % of all cases
MISSES = 0.05  # how often an interval may miss


def binomial_tail(n, k):
    """P(Binomial(n, 1/2) <= k), exactly summed."""
    return sum(comb(n, i) for i in range(k + 1)) / 2**n


def miss(n):
    """(k, probability): the k-th smallest and largest of n values miss their median so often.

    k counts from 0. Fewer than FEWEST values: k = 0, the smallest and the largest.
    """
    k = 0
    while 2 * binomial_tail(n, k + 1) <= MISSES:
        k += 1
    return k, 2 * binomial_tail(n, k)


def median_interval(values):
    """(low, high) of the values' median: 95 % or more from FEWEST values on, else all of them."""
    ordered = sorted(values)
    k, _ = miss(len(ordered))
    return ordered[k], ordered[-1 - k]


def interval_name(*pairs):
    """What the intervals of so many pairs each are: "95 %", "range", or "95 % or range"."""
    names = {"95 %" if n >= FEWEST else "range" for n in pairs}
    return " or ".join(sorted(names))


def by_chance(pairs):
    """How many of these intervals miss by chance, on average. pairs: how many each is made of."""
    return sum(miss(int(n))[1] for n in pairs)


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
    """Median of n paired ratios and its interval; below FEWEST pairs the smallest and the largest.

    Without the second, low and high are NaN and n is 0.
    """

    median: float
    low: float
    high: float
    n: int

    def at_most(self, limit):
        """Whether "at most `limit`" may be claimed: the whole interval lies below it."""
        return self.n >= FEWEST and self.high <= limit

    def noise_band(self):
        """(1/m, m) that holds the interval: of an A/A row, the same whichever copy is the first."""
        widest = max(self.high, 1 / self.low)
        return 1 / widest, widest

    def verdict(self, band=(1.0, 1.0)):
        """ "faster", "slower" or "cannot tell": the first beside the second, where these are times.

        It is faster or slower only where the whole interval lies outside band, a noise_band() or
        1, and never from fewer than FEWEST pairs.
        """
        if self.n >= FEWEST and self.high < band[0]:
            return "faster"
        if self.n >= FEWEST and self.low > band[1]:
            return "slower"
        return "cannot tell"

    def interval(self, digits=2):
        """ "0.84 to 0.96", or "smallest 0.84, largest 0.96" where that is not a 95 % interval."""
        low, high = f"{self.low:.{digits}f}", f"{self.high:.{digits}f}"
        return f"{low} to {high}" if self.n >= FEWEST else f"smallest {low}, largest {high}"

    def in_words(self, digits=2):
        """ "0.92 (0.84 to 0.96)", under a heading that says interval_name()."""
        return f"{self.median:.{digits}f} ({self.interval(digits)})"

    def __str__(self):
        name = "95 %: " if self.n >= FEWEST else ""
        return f"{self.median:.3f} ({name}{self.interval(3)}, n={self.n})"


@dataclass(frozen=True, slots=True)
class PairedAccuracy:
    """Of n samples: points = first minus second, in per cent of n; how many only one has right.

    p: how often chance alone would split first_only + second_only as unevenly, or more.
    """

    points: float
    first_only: int
    second_only: int
    n: int
    p: float

    def differs(self):
        """Whether chance would do this in at most 5 % of all cases."""
        return self.p <= MISSES


def summary(values, warmup=0):
    """Summary of values[warmup:]. Raises ValueError where none is left or one is not finite."""
    kept = np.asarray(list(values), dtype=float)[warmup:]
    if not kept.size:
        raise ValueError(f"no values left after {warmup} of warm-up")
    if not np.isfinite(kept).all():
        raise ValueError("values must be finite")
    low, median, high = np.percentile(kept, [25, 50, 75])
    return Summary(float(median), float(low), float(high), kept.size)


def paired_ratio(a, b):
    """Ratio of a to b, whose i-th values are of one repetition.

    Raises ValueError for unequal numbers, none, and values that are not finite or not positive.
    """
    a, b = np.asarray(list(a), dtype=float), np.asarray(list(b), dtype=float)
    if a.shape != b.shape or a.ndim != 1 or not a.size:
        raise ValueError(f"pairs needed: got {a.size} and {b.size} values")
    if not (np.isfinite(a).all() and np.isfinite(b).all() and (a > 0).all() and (b > 0).all()):
        raise ValueError("values must be finite and positive")
    ratios = a / b
    low, high = median_interval(ratios)
    return Ratio(float(np.median(ratios)), float(low), float(high), ratios.size)


def paired_accuracy(first, second):
    """PairedAccuracy of two models over the same samples, by the exact sign test (McNemar's).

    first, second: one value a sample: right or not, or in how many seeds' runs it was right.
    Samples that both have right as often say nothing of the difference. Raises ValueError for
    unequal numbers of samples, and for none.
    """
    first, second = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    if first.shape != second.shape or first.ndim != 1 or not first.size:
        raise ValueError(f"the same samples are needed: got {first.size} and {second.size}")
    one, other = int((first > second).sum()), int((second > first).sum())
    p = min(1.0, 2 * binomial_tail(one + other, min(one, other)))
    return PairedAccuracy(float(100 * (first - second).mean()), one, other, first.size, p)


def shuffled_rounds(names, rounds, seed=0):
    """Yield (round, name): every name once a round, in a new order, the same on all ranks."""
    names, order = list(names), random.Random(seed)
    for number in range(rounds):
        yield from ((number, name) for name in order.sample(names, len(names)))
