"""Choose the size of gradient buckets: fewer start-ups against a shorter last bucket.

    backward   |---------------------------|
    network          [ 1 ][ 2 ][ 3 ][ 4 ][ 5 ]      a bucket is sent when its gradients are ready:
                                         ^^^^^      the last one, when the backward has ended

    exposed    n alpha + b / B  for  n = S / b  buckets of b bytes, S bytes a rank in all
               minimal where both terms are equal: b = sqrt(S alpha B), exposed 2 sqrt(S alpha / B)

alpha grows with the number of ranks in the ring, and so does the best bucket: Megatron-LM takes the
larger of 40 million elements and a million for each rank of dp; PyTorch's DDP always has 25 MiB.
The size is chosen after the layout, and does not change the predicted step: cost.py is fitted to
jobs that do not report their buckets, so its constant `data_exposed` includes usual ones.
Li et al., PyTorch Distributed, VLDB 2020, section 3.2; NVIDIA, Megatron-LM,
core/distributed/distributed_data_parallel.py (bucket_size).
"""

from dataclasses import dataclass
from math import ceil

from labkit.scale.messages import gather_seconds, summed_gradients

MIB = 2**20
USUAL = 25  # MiB: PyTorch's
SIZES = tuple(2**k for k in range(13))  # MiB


@dataclass(frozen=True)
class Bucket:
    """A bucket size with its predicted costs.

    mb: MiB of a bucket, as DDP's bucket_cap_mb. count: buckets in a backward. starts: predicted
    seconds a step of all start-ups; last: seconds to send the last bucket.
    """

    mb: int
    count: int
    starts: float
    last: float

    @property
    def exposed(self):
        return self.starts + self.last

    def __str__(self):
        return (
            f"{self.mb} MiB, {self.count} a backward: {1e3 * self.starts:.3g} ms of starts and "
            f"{1e3 * self.last:.3g} ms of the last one a step"
        )


def choose_bucket(job, c):
    """Return the Bucket with the least exposed time; None if gradients are not in buckets.

    Gradients are not in buckets with dp=1, and with FSDP, which sends one unit (layer) at a time.
    """
    if job.zero == 3 or all(ranks == 1 for _, ranks, _ in summed_gradients(job)):
        return None
    return min((bucket_of(job, mb, c) for mb in SIZES), key=lambda bucket: bucket.exposed)


def bucket_of(job, mb, c):
    """Return the Bucket of at most `mb` MiB: as few buckets as possible, of equal size.

    Gradients of experts are averaged over fewer ranks, so they have separate buckets.
    """
    count, starts, last = 0, 0.0, 0.0
    op = "reduce_scatter" if job.zero else "all_reduce"
    passes = job.grad_accum if job.zero == 2 else 1
    for parameters, ranks, stride in summed_gradients(job):
        if ranks > 1:
            total = job.stack.gradient_bytes * parameters
            n = ceil(total / (mb * MIB))
            alpha = gather_seconds(job, ranks, stride, 0, c, op)
            count += n
            starts += passes * n * alpha
            each = gather_seconds(job, ranks, stride, total / n, c, op)
            last += passes * (each - alpha)
    return Bucket(mb, count, starts, last)
