"""Measure the speed of each link: one rank at a time sends to another, which answers with a byte.

    0 -> 1   0 -> 2   0 -> 3   1 -> 0   1 -> 2   ...     n (n-1) rounds, two messages in each

A collective runs at the speed of its slowest link, and its time does not show which link that is.
Sent per rank: n - 1 messages of `size` bytes, and as many of one byte; all twice, because the first
may open the connection. With many ranks, run disjoint pairs at the same time.
In production: NVIDIA's nccl-tests (sendrecv_perf), before a job.
"""

from itertools import permutations
from math import inf
from time import perf_counter

import torch
import torch.distributed as dist

from labkit import comm


def link_times(size=1 << 16, device="cpu"):
    """Return {"to_1_ms": 3.2, ...}: ms to send `size` bytes to each other rank. Collective.

    Each time includes the answer of one byte, and is the shorter of two measurements.
    """
    rank = dist.get_rank()
    n = dist.get_world_size()
    message = torch.zeros(size, dtype=torch.uint8, device=device)
    answer = torch.zeros(1, dtype=torch.uint8, device=device)
    times = {f"to_{to}_ms": inf for to in range(n) if to != rank}
    for sender, receiver in [*permutations(range(n), 2)] * 2:
        comm.barrier()
        if rank == sender:
            start = perf_counter()
            comm.send(message, receiver)
            comm.recv(answer, receiver)
            answer.item()  # waits until the host can read it, also on a GPU
            ms = 1e3 * (perf_counter() - start)
            times[f"to_{receiver}_ms"] = min(ms, times[f"to_{receiver}_ms"])
        elif rank == receiver:
            comm.recv(message, sender)
            comm.send(answer, sender)
    return times
