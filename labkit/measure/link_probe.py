"""How fast each link is: one rank at a time sends to one other, which answers with a byte.

    0 -> 1   0 -> 2   0 -> 3   1 -> 0   1 -> 2   ...     n (n-1) turns, two messages in each

A collective goes at the pace of its slowest link, and its time does not say which link that is.
Sent per rank: n - 1 messages of `size` bytes, as many of one byte; twice, for the first of two may
open the connection. On many ranks pairs take their turns side by side.
The same in production: NVIDIA's nccl-tests (sendrecv_perf), run before a job.
"""

from itertools import permutations
from math import inf
from time import perf_counter

import torch
import torch.distributed as dist

from labkit import comm


def link_times(size=1 << 16, device="cpu"):
    """{"to_1_ms": 3.2, ...} of this rank, for a message of `size` bytes to each other. Collective.

    The shorter of two.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    message = torch.zeros(size, dtype=torch.uint8, device=device)
    answer = torch.zeros(1, dtype=torch.uint8, device=device)
    times = {f"to_{to}_ms": inf for to in range(n) if to != rank}
    for sender, receiver in [*permutations(range(n), 2)] * 2:
        comm.barrier()
        if rank == sender:
            start = perf_counter()
            comm.send(message, receiver)
            comm.recv(answer, receiver)
            answer.item()  # a GPU's time is over when the host can read
            ms = 1e3 * (perf_counter() - start)
            times[f"to_{receiver}_ms"] = min(ms, times[f"to_{receiver}_ms"])
        elif rank == receiver:
            comm.recv(message, sender)
            comm.send(answer, sender)
    return times
