"""All-reduce: every rank ends with the sum of all ranks' tensors, built from send and receive.

    ring, 4 ranks, each tensor cut into the chunks a b c d     ' partly summed, A B C D summed

    rank 0   a  b  c  d      n-1 steps: pass a chunk on,      A  b' c' d      n-1 steps: pass the
    rank 1   a  b  c  d      add what arrives to your own     a  B  c' d'     sums around once more
    rank 2   a  b  c  d      -> rank r has the sum of         ...             -> all have all sums
    rank 3   a  b  c  d      chunk r

Sent per rank, of P bytes on n ranks:  ring and halving-doubling  2 (n-1)/n P, the least possible
                                       tree  up to 3 P    naive  (n-1) P on rank 0, P on the others
Steps:  ring 2 (n-1) of P/n each    naive 2 (n-1)    halving-doubling 2 log2(n)    tree 4 log2(n)
Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, JPDC 2009;
Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in MPICH, 2005.
"""

import torch
import torch.distributed as dist

from labkit import comm


def naive(tensor, group=None):
    """Send all tensors to rank 0, which adds them and sends the sum back."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    if rank > 0:
        comm.send(tensor, 0, group)
        comm.recv(tensor, 0, group)
        return
    arrived = torch.empty_like(tensor)
    for other in range(1, n):
        comm.recv(arrived, other, group)
        tensor += arrived
    for other in range(1, n):
        comm.send(tensor, other, group)


def ring(tensor, group=None):
    """Sum the chunks around the ring, then pass the sums around it. tensor: contiguous."""
    ring_reduce_scatter(tensor, group)
    ring_all_gather(tensor, group)


def ring_reduce_scatter(tensor, group=None):
    """Run the first half of the ring: afterwards rank r has the sum of chunk r."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    chunks = tensor.view(-1).tensor_split(n)
    for step in range(n - 1):
        outgoing = chunks[(rank - step - 1) % n]  # after the first step: the one just added to
        adding = chunks[(rank - step - 2) % n]
        arrived = torch.empty_like(adding)
        comm.exchange(outgoing, (rank + 1) % n, arrived, (rank - 1) % n, group)
        adding += arrived


def ring_all_gather(tensor, group=None):
    """Run the second half: rank r starts with the sum of chunk r, and passes sums on."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    chunks = tensor.view(-1).tensor_split(n)
    for step in range(n - 1):
        outgoing = chunks[(rank - step) % n]
        incoming = chunks[(rank - step - 1) % n]
        comm.exchange(outgoing, (rank + 1) % n, incoming, (rank - 1) % n, group)


def halving_doubling(tensor, group=None):
    """Exchange halves with a partner, then halves of those halves; then give the sums back.

    tensor: contiguous. The number of ranks must be a power of two.
    """
    rank, distance = dist.get_rank(group), dist.get_world_size(group) // 2
    span, done = tensor.view(-1), []
    while distance:
        partner = rank ^ distance
        first, second = span.tensor_split(2)
        mine, theirs = (first, second) if rank < partner else (second, first)
        arrived = torch.empty_like(mine)
        comm.exchange(theirs, partner, arrived, partner, group)
        mine += arrived
        done.append((partner, mine, theirs))
        span, distance = mine, distance // 2
    for partner, mine, theirs in reversed(done):
        comm.exchange(mine, partner, theirs, partner, group)


def tree(tensor, group=None):
    """Add the sums of your children, send the result to your parent, and pass the total down."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    parent = (rank - 1) // 2
    children = [child for child in (2 * rank + 1, 2 * rank + 2) if child < n]
    arrived = torch.empty_like(tensor)
    for child in children:
        comm.recv(arrived, child, group)
        tensor += arrived
    if rank > 0:
        comm.send(tensor, parent, group)
        comm.recv(tensor, parent, group)
    for child in children:
        comm.send(tensor, child, group)
