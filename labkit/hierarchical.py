"""Hierarchical all-reduce: sum inside each node first, so that slow links transfer each byte once.

    m = 2 nodes of k = 2 ranks; tensor in k parts a b; ' = summed over the node, A B = over all

        inside: reduce-scatter    across: all-reduce         inside: all-gather
        0  a b  ->  a' .          0 <====> 2:  A .           0  A B
        1  a b  ->  .  b'         1 <====> 3:  . B           1  A B
        2  a b  ->  a' .          k all-reduces at the       2  A B
        3  a b  ->  .  b'         same time, of P/k each     3  A B

    by leaders: reduce to the first rank of each node, all-reduce among those, broadcast. One
    all-reduce of P across; other ranks wait. Nodes may have different numbers of ranks.

Bytes that leave each node for P bytes, m nodes of k ranks, n = m k:

    flat ring        2 (n-1)/n P      of its n arrows, one leaves each node
    hierarchical     2 (m-1)/m P      m = 2: P, instead of 1.5 P (k = 2), 1.75 P (k = 4), ... 2 P
    by leaders       2 (m-1)/m P

Inside, each rank sends 2 (k-1)/k P more over fast links. If all links are equal, it is no faster.
Thakur et al., Optimization of Collective Communication Operations in MPICH, IJHPCA 2005 (the
building blocks); Mikami et al., Massively Distributed SGD, arXiv:1811.05233, 2018 (two levels); Jia
et al., arXiv:1807.11205, 2018 (by leaders).
"""

from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from labkit import comm
from labkit.replicas import check_agreement

# Keeps the link busy: one segment is sent across while others are summed or gathered inside.
SEGMENT_BYTES = 2 << 20


def hierarchical(tensor, inside, across):
    """Sum tensor over all ranks, in place: reduce-scatter inside, all-reduce across, all-gather.

    inside: process group of this node's ranks. across: group of the ranks with this rank's position
        in each node. On a Mesh({"node": m, "local": k}): group("local"), group("node").
    Any shape and dtype; all ranks end bitwise equal.
    """
    k = dist.get_world_size(inside)
    flat = tensor.detach().contiguous().view(-1)
    if k == 1 or dist.get_world_size(across) == 1:
        comm.all_reduce(flat, group=across if k == 1 else inside)
    else:
        in_segments(flat, inside, across)
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


def in_segments(flat, inside, across):
    """Run the three phases segment by segment, so that inside and across overlap."""
    k = dist.get_world_size(inside)
    divided, rest = flat.split([flat.numel() // k * k, flat.numel() % k])
    if rest.numel():  # fewer elements than ranks: every position sends all of them
        comm.all_reduce(rest, group=inside)
        comm.all_reduce(rest, group=across)
    pending = []
    size = max(1, SEGMENT_BYTES // (k * flat.itemsize)) * k
    for segment in divided.split(size) if divided.numel() else ():
        part = torch.empty(segment.numel() // k, dtype=flat.dtype, device=flat.device)
        comm.reduce_scatter(part, segment, group=inside)
        pending.append((segment, part, comm.all_reduce(part, group=across, async_op=True)))
    for segment, part, work in pending:
        work.wait()
        comm.all_gather(segment, part, group=inside)


def by_leaders(tensor, inside, across):
    """Sum tensor over all ranks, in place: reduce to first ranks, all-reduce there, broadcast.

    inside: as above. across: the group of the nodes' first ranks; other ranks do not use it. Nodes
    may have different sizes.
    """
    flat = tensor.detach().contiguous().view(-1)
    reduce_to_first(flat, inside)
    if dist.get_rank(inside) == 0:
        comm.all_reduce(flat, group=across)
    comm.broadcast(flat, 0, inside)
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


def reduce_to_first(flat, group):
    """Reduce flat to rank 0 of the group, in log2(k) steps. Other ranks keep partial sums."""
    rank, k = dist.get_rank(group), dist.get_world_size(group)
    distance = 1
    while distance < k:
        if rank % (2 * distance):
            comm.send(flat, rank - distance, group)
            return
        if rank + distance < k:
            arrived = torch.empty_like(flat)
            comm.recv(arrived, rank + distance, group)
            flat.add_(arrived)
        distance *= 2


FORMS = {"hierarchical": hierarchical, "leaders": by_leaders}


class Hierarchical:
    """A comm hook for DDP: model.register_comm_hook(None, Hierarchical(inside, across).hook).

    DDP: labkit's or PyTorch's. form: "hierarchical" or "leaders". Averages over all ranks.
    A thread (on CUDA: a stream) reduces the buckets one after the other during backward. Ranks must
    start them in the same order, so use the groups for nothing else: create a Mesh for them.
    Raises ValueError for another form, and in the first step, on every rank, if ranks differ in it.
    """

    def __init__(self, inside, across, form="hierarchical"):
        if form not in FORMS:
            raise ValueError(f"unknown form {form!r}: choose one of {', '.join(FORMS)}")
        self.inside = inside
        self.across = across
        self.form = form
        self.all_reduce = FORMS[form]
        self._agreed = False
        # One node, or one rank a node: the only group may be DDP's, so no thread is used.
        alone = 1 in (dist.get_world_size(inside), dist.get_world_size(across))
        self.courier = None if alone else ThreadPoolExecutor(1, thread_name_prefix="hierarchical")
        self.stream = None  # used instead of the courier on CUDA

    def hook(self, _, bucket):
        """Return a Future of the bucket's average, in the bucket's buffer."""
        if not self._agreed:
            check_agreement(
                [f"an all-reduce of the form {self.form}"], None, bucket.buffer().device
            )
            self._agreed = True
        buffer = bucket.buffer().div_(dist.get_world_size())  # before the sum: fp16 could overflow
        future = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
        if self.courier is None:
            self.carry(buffer, future)
        elif buffer.is_cuda:
            # NCCL calls only enqueue; groups used from two threads could deadlock
            self.stream = self.stream or torch.cuda.Stream(buffer.device)
            filled = torch.cuda.current_stream(buffer.device).record_event()
            self.carry_on_stream(buffer, future, filled)
        else:
            self.courier.submit(self.carry, buffer, future)
        return future

    def carry(self, buffer, future):
        try:
            with torch.no_grad():
                self.all_reduce(buffer, self.inside, self.across)
            future.set_result(buffer)
        except Exception as error:
            future.set_exception(error)

    def carry_on_stream(self, buffer, future, filled):
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(filled)
            buffer.record_stream(self.stream)
            self.carry(buffer, future)
