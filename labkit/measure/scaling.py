"""Scaling: the efficiency of n ranks, and a model of the step time that explains it.

    weak      the same batch for each rank     efficiency = step(1) / step(n)        ideal: 1
    strong    the same batch for all           efficiency = step(1) / (n step(n))    ideal: 1

    step(n) = asleep + at work + exposed messages
              |        |         a ring: 2 (n-1) messages of alpha ms in sequence, and
              |        |         2 (n-1)/n S bytes of beta ms, minus the part hidden by backward
              |        needs a core: n ranks on c cores take max(1, n/c) times as long, also to
              |        copy and add messages
              emulated compute: a sleep, independent of the machine

alpha and beta are fitted on a small world; for a larger one, only n changes.
Thakur, Rabenseifner, Gropp, Optimization of Collective Communication Operations in MPICH, 2005,
section 3.1 (alpha, beta); Gustafson, Reevaluating Amdahl's Law, CACM 1988 (strong and weak).
"""

from math import ceil, inf, log2
from typing import NamedTuple

import numpy as np

from labkit.measure.stats import Ratio, paired_ratio
from labkit.ring_cost import hops, share


def efficiency(one, many, kind):
    """Return the Ratio (median, interval) of interleaved rounds of one rank and of n ranks.

    one, many: rows of compare() or sweep() with round, step_ms, batch_size, and ranks. kind: "weak"
    or "strong". Raises ValueError for batch sizes that do not fit the kind.
    """
    (n,) = many["ranks"].unique()
    (alone,) = one["batch_size"].unique()
    wanted = {"weak": alone * n, "strong": alone}[kind]
    if set(many["batch_size"]) != {wanted}:
        sizes = ", ".join(map(str, many["batch_size"].unique()))
        raise ValueError(
            f"batch_size of {n} ranks must be {wanted} for {kind} scaling from {alone}, not {sizes}"
        )
    rounds = [rows.groupby("round")["step_ms"].mean() for rows in (one, many)]
    ratio = paired_ratio(*rounds)
    ideal = n if kind == "strong" else 1
    return Ratio(ratio.median / ideal, ratio.low / ideal, ratio.high / ideal, ratio.n)


class Costs(NamedTuple):
    """Costs of messages between ranks with a core each: alpha_ms a message, beta_ms a byte."""

    alpha_ms: float
    beta_ms: float


def ring(n):
    """Return (messages in sequence, bytes sent per rank / size of the tensor) of an all-reduce."""
    return hops("all_reduce", n), share("all_reduce", n)


def tree(n):
    """Return the same of NCCL's double binary tree, each half of which sums half of the tensor."""
    return 2 * ceil(log2(n)), 2.0 if n > 1 else 0.0


def turns(n, cores):
    """Return the factor by which work takes longer when n ranks share `cores` cores."""
    return max(1.0, n / cores)


def fit(n, measured, cores=inf):
    """Fit Costs to all-reduces of n ranks. measured: [(bytes, ms)], of at least two sizes."""
    messages, share = np.multiply(turns(n, cores), ring(n))
    parts = [(messages / ms, share * size / ms) for size, ms in measured]
    return Costs(*nonnegative(parts, "all-reduces"))


def nonnegative(parts, what):
    """Fit two non-negative costs, so that each row of parts [rows, 2] is nearest to 1.

    parts: the amount of each cost, divided by the measured time: least squares of the relative
    errors. If noise would make a cost negative, it is set to 0. Raises ValueError, with `what` in
    the message, if a part is not finite or all sizes are equal.
    """
    parts = np.array(parts, dtype=float)
    if not np.isfinite(parts).all():
        raise ValueError(f"{what}: sizes and times must be finite, and times above 0")
    if np.linalg.matrix_rank(parts) < 2:
        raise ValueError(f"{what} of at least two sizes are needed to separate their two costs")
    costs, *_ = np.linalg.lstsq(parts, np.ones(len(parts)), rcond=None)
    if costs.min() < 0:
        parts[:, costs.argmin()] = 0.0
        costs, *_ = np.linalg.lstsq(parts, np.ones(len(parts)), rcond=None)
    return costs.tolist()


def all_reduce_ms(costs, n, size, cores=inf, mbit=inf, algorithm=ring):
    """Return ms of one all-reduce of `size` bytes. mbit: speed of each rank's link, in Mbit/s.

    A byte takes beta_ms or its time on the link, whichever is longer. algorithm: ring or tree.
    """
    messages, share = algorithm(n)
    shared = turns(n, cores)
    byte_ms = max(shared * costs.beta_ms, 8 / (1000 * mbit))
    return messages * shared * costs.alpha_ms + share * size * byte_ms


def exposed_ms(message_ms, ready_ms, backward_ms):
    """Return the exposed ms: a message is sent when it is ready and the previous one has arrived.

    message_ms, ready_ms: of each message. ready_ms and backward_ms count from backward's beginning.
    """
    arrived = 0.0
    for ms, ready in zip(message_ms, ready_ms, strict=True):
        arrived = max(arrived, ready) + ms
    return max(0.0, arrived - backward_ms)


def full_at(sizes, blocks, backward_ms):
    """Return when each bucket is full, in ms of backward: after the block of its last bytes."""
    filled = np.cumsum(sizes) / sum(sizes)
    return backward_ms * np.ceil(np.round(blocks * filled, 9)) / blocks


class Step(NamedTuple):
    """A step of one rank, in ms, as the sum of its parts.

    asleep_ms: the sleep of its blocks, a third of it forward. samples_ms: the work for the samples
    outside the blocks. sizes: bytes of its buckets, in the order in which they are sent.
    """

    asleep_ms: float
    samples_ms: float
    optimizer_ms: float
    blocks: int
    sizes: tuple

    def shared(self, n):
        """Return the step of one of n ranks that share the batch; the optimizer's work stays."""
        return self._replace(asleep_ms=self.asleep_ms / n, samples_ms=self.samples_ms / n)


def step_ms(costs, step, n, cores=inf, mbit=inf, algorithm=ring):
    """Return ms of a step of n ranks that average their gradients in buckets during backward."""
    backward_ms = 2 / 3 * step.asleep_ms
    message_ms = [all_reduce_ms(costs, n, size, cores, mbit, algorithm) for size in step.sizes]
    exposed = exposed_ms(message_ms, full_at(step.sizes, step.blocks, backward_ms), backward_ms)
    work_ms = step.samples_ms + step.optimizer_ms
    return step.asleep_ms + turns(n, cores) * work_ms + exposed
