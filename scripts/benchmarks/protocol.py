"""What must hold before a benchmark claims that ours is as fast as theirs.

The times are of turns in one process group (labkit.measure.interleaved_timing). Told is the median of the ratios within
repetitions, with its 95 % interval; the A/A row, one implementation against itself, shows what the machine
makes of identical code.
"""

from dataclasses import dataclass

from labkit.measure.stats import paired_ratio

REPETITIONS = 40


@dataclass(frozen=True)
class Comparison:
    """A row of the table: `ours` over `theirs`, names of columns of one run.

    at_most: what the median may be; upper: what the interval's upper end may be (at_most if not told). Without at_most
    the row informs and claims nothing.
    """

    name: str
    ours: str
    theirs: str
    at_most: float | None = None
    upper: float | None = None

    def row(self, group, ranks, values):
        """The row as a dict of JSON values."""
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
        """holds: the whole claim; missed: even the interval's lower end is over; undecided: the machine cannot tell."""
        if self.at_most is None:
            return ""
        if ratio.n < REPETITIONS:
            return "too few pairs"
        upper = self.at_most if self.upper is None else self.upper
        if ratio.median <= self.at_most and ratio.high <= upper:
            return "holds"
        return "missed" if ratio.low > self.at_most else "undecided"


def exact_row(group, name, ranks, measured, predicted, unit="bytes"):
    """A row for something counted: it holds when both numbers are the same."""
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
