"""Statistics of noisy times, which vary by ten per cent even on a quiet machine.

    values  . .:::.:: .   .        .   summary: the median, and the quartiles as its spread
              |--+---|                 (the mean depends on the last dot, the minimum on luck)

    a/b     paired, in one repetition  paired_ratio: the median of a_i / b_i, and its interval
    right   on the same samples        paired_accuracy: counts samples that only one has right

Two variants are timed in shuffled order inside each repetition, so that a slow second slows both.
The interval of the median reaches from the k-th smallest to the k-th largest ratio. It misses the
true median with probability 2 P(Binomial(n, 1/2) < k), for any distribution. k is the largest for
which that is at most 5 %. Fewer than FEWEST pairs have no such k: then the interval is the smallest
and the largest ratio, and is named "range". Compare a verdict ("faster", "slower") with an A/A row,
the same code against itself: noise_band. A few of many intervals miss by chance.

The sign test, from Conover, Practical Nonparametric Statistics, 3rd edition 1999, sections 3.2 and
3.4; McNemar, Note on the sampling error of the difference between correlated proportions, 1947.
"""

import random
from dataclasses import dataclass
from math import comb

import numpy as np

FEWEST = 6  # pairs: all on one side of the true median by chance in 2 / 2^6 = 3 % of cases
MISSES = 0.05  # probability with which an interval may miss


def binomial_tail(n, k):
    """Return P(Binomial(n, 1/2) <= k), summed exactly."""
    return sum(comb(n, i) for i in range(k + 1)) / 2**n


def miss(n):
    """Return (k, probability that the k-th smallest to largest of n values miss their median).

    k counts from 0. Fewer than FEWEST values: k = 0, the smallest and the largest.
    """
    k = 0
    while 2 * binomial_tail(n, k + 1) <= MISSES:
        k += 1
    return k, 2 * binomial_tail(n, k)


def median_interval(values):
    """Return (low, high) of the median: 95 % or more from FEWEST values on, else the range."""
    ordered = sorted(values)
    k, _ = miss(len(ordered))
    return ordered[k], ordered[-1 - k]


def interval_name(*pairs):
    """Return the kind of intervals of these numbers of pairs: "95 %", "range", or both."""
    names = {"95 %" if n >= FEWEST else "range" for n in pairs}
    return " or ".join(sorted(names))


@dataclass(frozen=True, slots=True)
class Summary:
    """Median, lower and upper quartile of n values, in the unit of the values."""

    median: float
    low: float
    high: float
    n: int

    def __str__(self):
        return f"{self.median:.3g} ({self.low:.3g} to {self.high:.3g}, n={self.n})"


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median of n paired ratios and its interval; below FEWEST pairs, their range.

    Without values of the second variant, low and high are NaN and n is 0.
    """

    median: float
    low: float
    high: float
    n: int

    def at_most(self, limit):
        """Return whether "at most `limit`" is supported: the interval lies below it."""
        return self.n >= FEWEST and self.high <= limit

    def noise_band(self):
        """Return (1/m, m) that contains the interval of an A/A row, whichever copy is first."""
        widest = max(self.high, 1 / self.low)
        return 1 / widest, widest

    def band_in_words(self):
        """Return "0.84 to 1.19", the noise_band(), for the sentence with a verdict against it."""
        low, high = self.noise_band()
        return f"{low:.2f} to {high:.2f}"

    def verdict(self, band=(1.0, 1.0)):
        """Return "faster", "slower" or "cannot tell", for the first of two times.

        "faster" or "slower" needs at least FEWEST pairs and an interval outside band, which is a
        noise_band() or 1.
        """
        if self.n >= FEWEST and self.high < band[0]:
            return "faster"
        if self.n >= FEWEST and self.low > band[1]:
            return "slower"
        return "cannot tell"

    def verdict_in_words(self, band):
        """Return "faster", "slower", "within noise", "undecided", or "too few rounds to tell".

        Within noise: the interval lies in band. Undecided: it reaches out of it, and also into it.
        """
        low, high = band
        inside = low <= self.low and self.high <= high
        unclear = "within noise" if inside else "undecided"
        unclear = unclear if self.n >= FEWEST else "too few rounds to tell"
        return self.verdict(band).replace("cannot tell", unclear)

    def claim(self, band):
        """Return "faster", "slower", "no difference above 26 %", or "too few rounds to tell".

        26 % is the farther end of the interval, whichever of the two is first.
        """
        bound = f"no difference above {self.noise_band()[1] - 1:.0%}".replace("%", " %")
        unclear = bound if self.n >= FEWEST else "too few rounds to tell"
        return self.verdict(band).replace("cannot tell", unclear)

    def interval(self, digits=2):
        """Return "0.84 to 0.96", or "smallest 0.84, largest 0.96" for a range."""
        low = f"{self.low:.{digits}f}"
        high = f"{self.high:.{digits}f}"
        return f"{low} to {high}" if self.n >= FEWEST else f"smallest {low}, largest {high}"

    def in_words(self, digits=2):
        """Return "0.92 (0.84 to 0.96)", for a column headed by interval_name()."""
        return f"{self.median:.{digits}f} ({self.interval(digits)})"

    def __str__(self):
        name = "95 %: " if self.n >= FEWEST else ""
        return f"{self.median:.3f} ({name}{self.interval(3)}, n={self.n})"


@dataclass(frozen=True, slots=True)
class PairedAccuracy:
    """Accuracy of two models on n samples. points: first minus second, in per cent.

    first_only, second_only: samples that only one has right. p: probability of such an uneven
    split, or a more uneven one, by chance.
    """

    points: float
    first_only: int
    second_only: int
    n: int
    p: float

    def differs(self):
        """Return whether chance explains the difference in at most 5 % of cases."""
        return self.p <= MISSES


def summary(values, warmup=0):
    """Return the Summary of values[warmup:]. Raises ValueError for none, or non-finite ones."""
    kept = np.asarray(list(values), dtype=float)[warmup:]
    if not kept.size:
        raise ValueError(f"no values left after {warmup} warm-up values")
    if not np.isfinite(kept).all():
        raise ValueError("values must be finite")
    low, median, high = np.percentile(kept, [25, 50, 75])
    return Summary(float(median), float(low), float(high), kept.size)


def paired_ratio(a, b):
    """Return the Ratio of a to b; their i-th values are from the same repetition.

    Raises ValueError for unequal lengths, no values, and values that are not finite or positive.
    """
    a = np.asarray(list(a), dtype=float)
    b = np.asarray(list(b), dtype=float)
    if a.shape != b.shape or a.ndim != 1 or not a.size:
        raise ValueError(f"a and b must be pairs: got {a.size} and {b.size} values")
    if not (np.isfinite(a).all() and np.isfinite(b).all() and (a > 0).all() and (b > 0).all()):
        raise ValueError("values must be finite and positive")
    ratios = a / b
    low, high = median_interval(ratios)
    return Ratio(float(np.median(ratios)), float(low), float(high), ratios.size)


def paired_accuracy(first, second):
    """Compare two models on the same samples by the exact sign test (McNemar's).

    first, second: one value per sample: right or not, or in how many seeds' runs it was right.
    Samples with equal values do not count. Returns a PairedAccuracy. Raises ValueError for unequal
    numbers of samples, and for none.
    """
    first = np.asarray(first, dtype=float)
    second = np.asarray(second, dtype=float)
    if first.shape != second.shape or first.ndim != 1 or not first.size:
        raise ValueError(f"models need the same samples: got {first.size} and {second.size}")
    first_only = int((first > second).sum())
    second_only = int((second > first).sum())
    p = min(1.0, 2 * binomial_tail(first_only + second_only, min(first_only, second_only)))
    points = float(100 * (first - second).mean())
    return PairedAccuracy(points, first_only, second_only, first.size, p)


def shuffled_rounds(names, rounds, seed=0):
    """Yield (round, name): every name once a round, in a new order, the same on all ranks."""
    names = list(names)
    order = random.Random(seed)
    for number in range(rounds):
        yield from ((number, name) for name in order.sample(names, len(names)))
