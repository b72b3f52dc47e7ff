"""All-reduce: sum a tensor over all ranks; here built from messages between two ranks.

    ring (n = 4; each tensor cut into n chunks a b c d; ' = partly summed, A B C D = summed)
    rank 0 -> 1 -> 2 -> 3 -> 0     each rank sends to the right and receives from the left at once

    reduce-scatter: n-1 steps, add what arrives               all-gather: n-1 steps, keep it
    0  a b c d    a  b  c' d     a  b' c' d     A  b' c' d     A  b' c' D     A  b' C  D     A B C D
    1  a b c d  > a  b  c  d'  > a  b  c' d'  > a  B  c' d'  > A  B  c' d'  > A  B  c' D   > A B C D
    2  a b c d    a' b  c  d     a' b  c  d'    a' b  C  d'    a' B  C  d'    A  B  C  d'    A B C D
    3  a b c d    a  b' c  d     a' b' c  d     a' b' c  D     a' b' C  D     a' B  C  D     A B C D

    tree (n = 7)        halving-doubling (n = 4)
         0                halve:   0 <-> 2, 1 <-> 3   send one half of the tensor, add the other
      1     2                      0 <-> 1, 2 <-> 3   send one half of that half, add the other
     3 4   5 6            double:  the same pairs in reverse order return their sums
    sums go up, the total down

Time for P bytes, with alpha seconds per message and beta seconds per byte, and bytes sent per rank:

    ring              2 (n-1) alpha + 2 (n-1)/n P beta     2 (n-1)/n P, the minimum
    halving-doubling  2 log2(n) alpha + 2 (n-1)/n P beta   the same; n no power of two: up to P more
    tree              about 2 log2(n) alpha + 4 P beta     P (leaf), 2 P (root), 3 P (in between)
    naive             2 alpha + 2 (n-1) P beta             (n-1) P (rank 0), P (the others)

So for many ranks and few bytes use few steps; for many bytes minimize the bytes.
Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, JPDC 2009
(the ring). Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in
MPICH, IJHPCA 2005, on Reduce and Allreduce (halving-doubling, the extra ranks beyond a power of
two, and when to use which).
"""

import torch
import torch.distributed as dist

from labkit import comm
from labkit.allreduce.chunk_pipelining import cut, exchange, in_line, receive, send


def naive(tensor, group=None):
    """Sum tensor over the group, in place: rank 0 receives all tensors and sends the sum back.

    Any shape, dtype, world size. The baseline: rank 0 receives (n-1) P and sends (n-1) P, one by
    one.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    with in_line(tensor) as flat:
        if rank > 0:
            comm.send(flat, 0, group)
            comm.recv(flat, 0, group)
            return
        arrived = torch.empty_like(flat)
        for other in range(1, n):
            comm.recv(arrived, other, group)
            flat.add_(arrived)
        for other in range(1, n):
            comm.send(flat, other, group)


def ring(tensor, group=None):
    """Sum tensor over the group, in place: ring_reduce_scatter, then ring_all_gather.

    Any shape, dtype, world size. Each chunk is summed once, then copied: results are bitwise equal.
    """
    with in_line(tensor) as flat:
        ring_reduce_scatter(flat, group)
        ring_all_gather(flat, group)


def ring_reduce_scatter(flat, group=None):
    """First half of the ring: chunk r of flat.tensor_split(n) becomes the sum, on rank r.

    flat: contiguous, 1-dimensional; its other chunks are overwritten. Returns a view of chunk r.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    left, right = (rank - 1) % n, (rank + 1) % n
    chunks = cut(flat, n)
    for step in range(1, n):
        outgoing, incoming = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        exchange(outgoing, right, incoming, left, group, add=True)
    return flat.tensor_split(n)[rank]


def ring_all_gather(flat, group=None):
    """Second half of the ring: copy chunk r of flat.tensor_split(n) from rank r. In place."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    left, right = (rank - 1) % n, (rank + 1) % n
    chunks = cut(flat, n)
    for step in range(n - 1):
        outgoing, incoming = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        exchange(outgoing, right, incoming, left, group, add=False)


def halving_doubling(tensor, group=None):
    """Sum tensor over the group, in place: recursive halving, then recursive doubling.

    Any shape, dtype, world size. With p the largest power of two up to n, each of the n-p extra
    ranks sends its tensor to one of the first p, and receives the sum at the end.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    p = 1 << (n.bit_length() - 1)
    extra = rank + p if rank + p < n else None
    with in_line(tensor) as flat:
        if rank >= p:
            send(flat, rank - p, group)
            receive(flat, rank - p, group, add=False)
            return
        if extra is not None:
            receive(flat, extra, group, add=True)
        _halve_and_double(flat, rank, p // 2, group)
        if extra is not None:
            send(flat, extra, group)


def _halve_and_double(span, rank, distance, group):
    """Sum span over the 2 * distance ranks that differ from this one in bits up to distance."""
    if distance == 0:
        return
    partner = rank ^ distance
    mine, theirs = (0, 1) if rank < partner else (1, 0)
    halves = cut(span, 2)
    exchange(halves[theirs], partner, halves[mine], partner, group, add=True)
    _halve_and_double(span.tensor_split(2)[mine], rank, distance // 2, group)
    exchange(halves[mine], partner, halves[theirs], partner, group, add=False)


def tree(tensor, group=None):
    """Sum tensor over the group, in place: sums go up a binary tree, the total comes down.

    Any shape, dtype, world size. Rank r has the parent (r-1)//2 and the children 2r+1 and 2r+2.
    The tensor is sent in segments, so that all levels work at once.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    parent = (rank - 1) // 2
    children = [child for child in (2 * rank + 1, 2 * rank + 2) if child < n]
    with in_line(tensor) as flat:
        (segments,) = cut(flat, 1)
        received = torch.empty_like(segments[0])
        for segment in segments:
            for child in children:
                arrived = received[: segment.numel()]
                comm.recv(arrived, child, group)
                segment.add_(arrived)
            if rank > 0:
                comm.send(segment, parent, group)
        for segment in segments:
            if rank > 0:
                comm.recv(segment, parent, group)
            for child in children:
                comm.send(segment, child, group)


ALGORITHMS = {"ring": ring, "tree": tree, "halving_doubling": halving_doubling}


class PipelinedRing:
    """Sums tensors over the group in place when called: a ring with pipelined halves. For gloo.

        hop 0   arriving, added      | 0 | 1 | 2 | 3 |          two ranks: hop 0 adds what arrives,
        hop 1   sent on, arriving        | 0 | 1 | 2 | 3 |      hop 1 keeps it; n: 2 (n-1) hops

    A segment is sent on as soon as it is added. It sends the same bytes as `ring`, but is faster:
    - Receive buffers exist before a segment is sent, and are reused in the next call: new memory
      costs a page fault every 4 KiB.
    - Even ranks send over one connection, odd ranks over another. If a connection also receives,
      gloo's thread spins until the writing thread releases it. With two ranks, ring has only one
      connection.

    In the second half a segment may arrive where one is still being sent. It is the reply to that
    segment, and cannot arrive before the other side has received all of it.

    twin: a second group of the same ranks, such as dist.new_group(): groups do not share
        connections.
    Any shape, dtype, world size; all ranks end bitwise equal. Held: 2/n of the largest tensor so
    far, 1/2 of it with two ranks.
    Raises ValueError for a backend other than gloo, and for a twin that is the group itself or has
    other ranks.
    """

    def __init__(self, twin, group=None):
        backend = dist.get_backend(group)
        if backend != "gloo":
            raise ValueError(
                f"PipelinedRing supports gloo only, not {backend}, which pipelines messages itself"
            )
        self.groups = (group or dist.group.WORLD, twin)
        ranks, twins = map(dist.get_process_group_ranks, self.groups)
        if twin is self.groups[0] or ranks != twins:
            raise ValueError("twin must be a second group of the same ranks: use dist.new_group()")
        self.rank = dist.get_rank(group)
        self.n = dist.get_world_size(group)
        self._memory = [torch.empty(0, dtype=torch.uint8)] * 2  # for this hop and the next

    def __call__(self, tensor):
        if self.n == 1:
            return
        right, over = (self.rank + 1) % self.n, self.groups[self.rank % 2]
        with in_line(tensor) as flat:
            chunks = cut(flat, self.n)
            hops = range(2 * (self.n - 1))
            arrivals = [self._expect(chunks, hop) for hop in hops[:2]]
            first = chunks[self.rank - 1]
            sends = [comm.send(segment, right, over, async_op=True) for segment in first]
            for hop in hops:
                for work, place, segment in arrivals[hop]:
                    work.wait()
                    if place is not segment:
                        segment.add_(place)
                    if hop < hops[-1]:
                        sends.append(comm.send(segment, right, over, async_op=True))
                if hop + 2 in hops:
                    arrivals.append(self._expect(chunks, hop + 2))
            for work in sends:
                work.wait()

    def _expect(self, chunks, hop):
        """Start receiving a chunk's segments: [(work, destination, segment)].

        In the first half the destinations are buffers, then the segments themselves.
        """
        left = (self.rank - 1) % self.n
        segments = chunks[(self.rank - hop - 2) % self.n]
        places = self._places(segments, hop % 2) if hop < self.n - 1 else segments
        works = [comm.recv(place, left, self.groups[left % 2], async_op=True) for place in places]
        return list(zip(works, places, segments, strict=True))

    def _places(self, segments, which):
        size = sum(segment.nbytes for segment in segments)
        if self._memory[which].nbytes < size:
            self._memory[which] = torch.empty(size, dtype=torch.uint8)
        line = self._memory[which][:size].view(segments[0].dtype)
        return line.split([segment.numel() for segment in segments])
