"""How much faster n ranks make it, and what eats the rest: efficiency, and a step predicted for n.

    weak      the same batch for each rank     efficiency = step(1) / step(n)        ideal: 1
    strong    the same batch for all           efficiency = step(1) / (n step(n))    ideal: 1

    step(n) = asleep + at work + exposed messages
              |        |         a ring: 2 (n-1) messages of alpha ms, one after the other, and
              |        |         2 (n-1)/n S bytes of beta ms; what backward hides is taken off
              |        needs a core: n ranks on c cores take turns, max(1, n/c) times as long,
              |        and messages are copied and added by cores, too
              compute that is emulated: each rank has its own, whatever the machine

alpha and beta are fitted on a small world; from there to a larger one, only n changes.
Thakur, Rabenseifner, Gropp, Optimization of Collective Communication Operations in MPICH, 2005,
section 3.1 (alpha, beta); Gustafson, Reevaluating Amdahl's Law, CACM 1988 (strong and weak).
"""

from math import inf
from typing import NamedTuple

import numpy as np

from labkit.measure.stats import Ratio, paired_ratio
from labkit.ring_cost import hops, share


def efficiency(one, many, kind):
    """Ratio (median, interval) of the rounds that a rank alone and n ranks took in turns.

    one, many: rows of compare() or sweep() with round, step_ms, batch_size, and ranks. kind: "weak"
    or "strong". Raises ValueError where the batches are not what that kind compares.
    """
    (n,), (alone,) = many["ranks"].unique(), one["batch_size"].unique()
    wanted = {"weak": alone * n, "strong": alone}[kind]
    if set(many["batch_size"]) != {wanted}:
        found = ", ".join(map(str, many["batch_size"].unique()))
        words = f"{kind} scaling from a batch of {alone} to {n} ranks: all ranks together take"
        raise ValueError(f"{words} {wanted}, not {found}")
    rounds = [rows.groupby("round")["step_ms"].mean() for rows in (one, many)]
    ratio = paired_ratio(*rounds)
    ideal = n if kind == "strong" else 1
    return Ratio(ratio.median / ideal, ratio.low / ideal, ratio.high / ideal, ratio.n)


class Costs(NamedTuple):
    """What messages cost ranks that have a core each: alpha_ms of a message, beta_ms of a byte."""

    alpha_ms: float
    beta_ms: float


def ring(n):
    """(messages that follow one another, times the tensor that a rank sends) of an all-reduce."""
    return hops("all_reduce", n), share("all_reduce", n)


def turns(n, cores):
    """How many times as long it takes what needs a core, when n ranks share so many."""
    return max(1.0, n / cores)


def fit(n, measured, cores=inf):
    """Costs from all-reduces of n ranks: [(bytes, ms)], of two sizes at least."""
    messages, share = np.multiply(turns(n, cores), ring(n))
    parts = [(messages / ms, share * size / ms) for size, ms in measured]
    return Costs(*nonnegative(parts, "all-reduces"))


def nonnegative(parts, what):
    """The two costs, not below 0, with which each row of parts [rows, 2] is nearest to 1.

    parts: how much of each cost there is, over what was measured: least squares of the relative
    errors, which are alike for short and long ones. Where noise would make one of the two cost less
    than nothing, it costs nothing. Raises ValueError, one line about `what`, where a part is not a
    number or all are of one size.
    """
    parts = np.array(parts, dtype=float)
    if not np.isfinite(parts).all():
        raise ValueError(f"{what}: sizes and times must be finite, and times above 0")
    if np.linalg.matrix_rank(parts) < 2:
        raise ValueError(f"{what} of two sizes are needed: one cannot tell their two costs apart")
    found, *_ = np.linalg.lstsq(parts, np.ones(len(parts)), rcond=None)
    if found.min() < 0:
        parts[:, found.argmin()] = 0.0
        found, *_ = np.linalg.lstsq(parts, np.ones(len(parts)), rcond=None)
    return found.tolist()


def all_reduce_ms(costs, n, size, cores=inf, mbit=inf):
    """One all-reduce of `size` bytes. mbit: of a link that each rank has; the slower one counts."""
    messages, share = ring(n)
    shared = turns(n, cores)
    byte_ms = max(shared * costs.beta_ms, 8 / (1000 * mbit))
    return messages * shared * costs.alpha_ms + share * size * byte_ms


def exposed_ms(message_ms, ready_ms, backward_ms):
    """What sticks out of backward: a message leaves when it is ready and the one before arrived."""
    arrived = 0.0
    for ms, ready in zip(message_ms, ready_ms, strict=True):
        arrived = max(arrived, ready) + ms
    return max(0.0, arrived - backward_ms)


def full_at(sizes, blocks, backward_ms):
    """When each bucket is full, ms into backward: as it has passed the block of its last bytes."""
    filled = np.cumsum(sizes) / sum(sizes)
    return backward_ms * np.ceil(np.round(blocks * filled, 9)) / blocks


class Step(NamedTuple):
    """A step of one rank, in ms: its blocks asleep, a third of it forward; work for the samples
    outside the blocks; the optimizer's. sizes: bytes of its buckets, as they leave."""

    asleep_ms: float
    samples_ms: float
    optimizer_ms: float
    blocks: int
    sizes: tuple

    def shared(self, n):
        """The step of one of n ranks that share its batch. The optimizer's work stays."""
        return self._replace(asleep_ms=self.asleep_ms / n, samples_ms=self.samples_ms / n)


def step_ms(costs, step, n, cores=inf, mbit=inf):
    """The step of n ranks that each do `step`, and average the gradients in buckets meanwhile."""
    backward_ms = 2 / 3 * step.asleep_ms
    message_ms = [all_reduce_ms(costs, n, size, cores, mbit) for size in step.sizes]
    exposed = exposed_ms(message_ms, full_at(step.sizes, step.blocks, backward_ms), backward_ms)
    work_ms = step.samples_ms + step.optimizer_ms
    return step.asleep_ms + turns(n, cores) * work_ms + exposed
