"""Bytes against work: step times on slow links, and where one method overtakes another.

    step_ms |o   a: many bytes, little work    step_ms(mbit) = busy_ms + 8 wire_bytes / (1000 mbit)
            |  o
            |----x--------- b: few bytes,      x = 8 (bytes_a - bytes_b) / (1000 (busy_b - busy_a))
            |       o o o o      more work         below this link speed b is faster
            +----x--------- mbit

busy_ms: a step on a link that costs nothing: forward, backward, optimizer, and the compressor.
wire_bytes: what a step puts on the slowest link in one direction, say on one node's cable.
mbit: link speed in Mbit/s, 10^6 bits a second.
Assumed: every byte is exposed, none travels while backward computes; with overlap a step is faster.
Agarwal et al., On the Utility of Gradient Compression in Distributed Training Systems, MLSys 2022
(such a model).
"""

import math
from typing import NamedTuple

import numpy as np

from labkit.measure.scaling import nonnegative


class Cost(NamedTuple):
    """What a step of one method costs on any link."""

    busy_ms: float
    wire_bytes: float


def predicted(busy_ms, wire_bytes, mbit):
    """Step time in ms on a link of `mbit` Mbit/s, a number or an array of them."""
    return busy_ms + 8 * wire_bytes / (1000 * mbit)


def crossover(a, b):
    """The link speed, in Mbit/s, below which b is faster. a, b: Cost, or (busy_ms, wire_bytes).

    math.inf: b is faster at every speed, as it sends no more and computes less, or sends less and
        computes no more.
    0.0: no slower link helps b: it sends no less. Computing less, it may win above crossover(b, a).
    """
    fewer_bytes, more_ms = a[1] - b[1], b[0] - a[0]
    if fewer_bytes > 0 and more_ms > 0:
        return 8 * fewer_bytes / (1000 * more_ms)
    return math.inf if fewer_bytes >= 0 and more_ms <= 0 and (fewer_bytes or more_ms) else 0.0


def fit(link_mbit, step_ms):
    """Cost whose line is nearest to measured steps: the crossover of two fits is a measured one.

    link_mbit, step_ms: one value a measurement. Least squares over 1 / link_mbit of the *relative*
    errors, since times move by a share of themselves: else the slow links, where a step takes
    seconds, would decide alone about busy_ms. Raises ValueError for fewer than two link speeds, or
    a value that is not above 0.
    """
    mbit, measured = np.asarray(link_mbit, dtype=float), np.asarray(step_ms, dtype=float)
    positive = all((values > 0).all() and np.isfinite(values).all() for values in (mbit, measured))
    if mbit.shape != measured.shape or not positive:
        raise ValueError("a fit needs as many link speeds as step times, all of them above 0")
    if len(np.unique(mbit)) < 2:
        raise ValueError(
            "a fit needs step times at two link speeds at least: one cannot tell work from bytes"
        )
    parts = np.stack([1 / measured, 8 / (1000 * mbit) / measured], axis=1)
    return Cost(*nonnegative(parts, "step times"))
