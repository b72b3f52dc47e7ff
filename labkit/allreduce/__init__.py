"""All-reduce algorithms from send and receive: naive, ring, halving-doubling, tree."""

from labkit.allreduce.allreduce import (
    ALGORITHMS,
    PipelinedRing,
    halving_doubling,
    naive,
    ring,
    ring_all_gather,
    ring_reduce_scatter,
    tree,
)

__all__ = [
    "ALGORITHMS",
    "PipelinedRing",
    "halving_doubling",
    "naive",
    "ring",
    "ring_all_gather",
    "ring_reduce_scatter",
    "tree",
]
