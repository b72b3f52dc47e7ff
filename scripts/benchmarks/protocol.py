"""How two implementations are timed on a small noisy machine, so that a ratio of their times may be believed.

    repetition 1   | barrier | b b b | barrier | a a a | barrier | b' b' b' |      a: ours    b: theirs
    repetition 2   | barrier | a a a | barrier | b' b' b' | barrier | b b b |      b': theirs again, the A/A row
    ...            the order is new in each repetition, and the same on all ranks

A slow second then slows all variants. Told is the median of the ratios within repetitions, with a bootstrap 95 %
interval; the A/A row shows what the machine makes of identical code.
"""

import time
from dataclasses import dataclass

import torch.distributed as dist

from labkit.measure.stats import paired_ratio, shuffled_rounds

REPETITIONS = 40
STEPS = 3
WARMUP = 2  # repetitions that are run and thrown away


def time_variants(context, variants, *, repetitions, steps=STEPS, group=None):
    """Runs on every rank: time each variant (name -> function of nothing) and record rank 0's milliseconds a step.

    What a variant returns, a dict of numbers or None, is recorded beside its time: the last of its steps.
    """
    for number, name in shuffled_rounds(variants, repetitions + WARMUP):
        dist.barrier()
        started = time.perf_counter()
        for _ in range(steps):
            extra = variants[name]()
        dist.barrier()
        ms = 1000 * (time.perf_counter() - started) / steps
        if context.rank == 0 and number >= WARMUP:
            context.record(variant=name, repetition=number - WARMUP, ms=ms, **(extra or {}))
        context.progress(number + 1, repetitions + WARMUP)


def columns(records, value="ms"):
    """The records as variant -> values in the order of the repetitions."""
    ordered = records.sort_values("repetition")
    return {name: rows[value].tolist() for name, rows in ordered.groupby("variant")}


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
        "target": "exactly 1",
        "verdict": "holds" if measured == predicted else "missed",
    }
