"""Bytes against work: step times on slow links, and the link speed where two methods are equal.

    step_ms |o   a: many bytes, little work    step_ms(mbit) = busy_ms + 8 wire_bytes / (1000 mbit)
            |  o
            |----x--------- b: few bytes,      x = 8 (bytes_a - bytes_b) / (1000 (busy_b - busy_a))
            |       o o o o      more work         below this link speed b is faster
            +----x--------- mbit

busy_ms: a step on a link without cost: forward, backward, optimizer, and the compressor.
wire_bytes: bytes of a step on the slowest link in one direction, for example on one node's cable.
mbit: link speed in Mbit/s, 10^6 bits a second.
Assumption: every byte is exposed, none is sent while backward computes; overlap makes a step
faster.
Agarwal et al., On the Utility of Gradient Compression in Distributed Training Systems, MLSys 2022
(such a model).
"""

import math
from typing import NamedTuple


class Cost(NamedTuple):
    """The cost of a step of one method, on any link."""

    busy_ms: float
    wire_bytes: float


def predicted(busy_ms, wire_bytes, mbit):
    """Return the step time in ms on a link of `mbit` Mbit/s, a number or an array."""
    return busy_ms + 8 * wire_bytes / (1000 * mbit)


def crossover(a, b):
    """Return the link speed in Mbit/s below which b is faster. a, b: Cost.

    math.inf: b is faster at every speed, because it sends no more and computes less, or sends less
        and computes no more.
    0.0: a slower link never makes b faster, because b sends no less. If b computes less, it may be
        faster above crossover(b, a).
    """
    fewer_bytes = a[1] - b[1]
    more_ms = b[0] - a[0]
    if fewer_bytes > 0 and more_ms > 0:
        return 8 * fewer_bytes / (1000 * more_ms)
    return math.inf if fewer_bytes >= 0 and more_ms <= 0 and (fewer_bytes or more_ms) else 0.0
