"""The conditions under which a benchmark claims that labkit is as fast as PyTorch.

Variants are timed in interleaved rounds in one process group (labkit.measure.interleaved_timing). The table shows the
median of the ratios within repetitions, with its 95 % interval. The A/A row, one implementation against itself, shows
the noise of the machine.
"""

from dataclasses import dataclass

from labkit.measure.stats import paired_ratio

REPETITIONS = 40


@dataclass(frozen=True)
class Comparison:
    """A row of the table: `ours` over `theirs`, names of columns of one run.

    at_most: limit of the median; upper: limit of the interval's upper end (None: at_most). Without at_most the row
    makes no claim.
    """

    name: str
    ours: str
    theirs: str
    at_most: float | None = None
    upper: float | None = None

    def row(self, group, ranks, values):
        """Return the row as a dict of JSON values."""
        ratio = paired_ratio(values[self.ours], values[self.theirs])
        return {
            "benchmark": group,
            "row": self.name,
            "ranks": ranks,
            "ratio": ratio.median,
            "low": ratio.low,
            "high": ratio.high,
            "pairs": ratio.n,
            "interval": ratio.interval(3),
            "target": self.target(),
            "verdict": self.verdict(ratio),
        }

    def target(self):
        if self.at_most is None:
            return ""
        upper = "" if self.upper is None else f", interval to {self.upper:.3f}"
        return f"at most {self.at_most:.3f}{upper}"

    def verdict(self, ratio):
        """Return holds: the full claim; missed: the interval's lower end exceeds it; undecided: neither."""
        if self.at_most is None:
            return ""
        if ratio.n < REPETITIONS:
            return "too few pairs"
        upper = self.at_most if self.upper is None else self.upper
        if ratio.median <= self.at_most and ratio.high <= upper:
            return "holds"
        return "missed" if ratio.low > self.at_most else "undecided"


def exact_row(group, name, ranks, measured, predicted, unit="bytes"):
    """Return a row for a count, which holds if both numbers are equal."""
    return {
        "benchmark": group,
        "row": f"{name}: {measured:,} of {predicted:,} {unit}",
        "ranks": ranks,
        "ratio": measured / predicted,
        "low": None,
        "high": None,
        "pairs": None,
        "interval": "exact",
        "target": "exactly 1",
        "verdict": "holds" if measured == predicted else "missed",
    }
