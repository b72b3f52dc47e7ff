"""Hierarchical all-reduce: sum inside each node first, so that slow links carry each byte once.

    m = 2 nodes of k = 2 ranks; tensor in k parts a b; ' = summed over the node, A B = over all

        inside: reduce-scatter    across: all-reduce         inside: all-gather
        0  a b  ->  a' .          0 <====> 2:  A .           0  A B
        1  a b  ->  .  b'         1 <====> 3:  . B           1  A B
        2  a b  ->  a' .          k all-reduces at the       2  A B
        3  a b  ->  .  b'         same time, of P/k each     3  A B

    by leaders: reduce to the first rank of each node, all-reduce between those, broadcast: one
    across, of P, while the other ranks wait. Nodes may then have different numbers of ranks.

Leaving each node for P bytes, m nodes of k ranks, n = m k:

    flat ring        2 (n-1)/n P      of its n arrows, one leaves each node
    hierarchical     2 (m-1)/m P      m = 2: P, in place of 1.5 P (k = 2), 1.75 P (k = 4), ... 2 P
    by leaders       2 (m-1)/m P

Inside, each rank sends 2 (k-1)/k P more, on what is fast. Where all links are alike nothing is won.
Thakur et al., Optimization of Collective Communication Operations in MPICH, IJHPCA 2005 (the
pieces); Mikami et al., Massively Distributed SGD, arXiv:1811.05233, 2018 (in two levels); Jia et
al., arXiv:1807.11205, 2018 (by leaders).
"""

from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from labkit import comm
from labkit.replicas import check_agreement

# The link never rests: one segment is between the nodes, the next summed inside, the last gathered.
SEGMENT_BYTES = 2 << 20


def hierarchical(tensor, inside, across):
    """Sum tensor over all ranks, in place: reduce-scatter inside, all-reduce across, all-gather.

    inside: process group of this node's ranks. across: of the ranks in this one's position, one of
        each node. On a Mesh({"node": m, "local": k}): group("local"), group("node").
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
    """The three phases for one segment after the other, so that inside and across overlap."""
    k = dist.get_world_size(inside)
    divided, rest = flat.split([flat.numel() // k * k, flat.numel() % k])
    if rest.numel():  # fewer elements than ranks: every position carries all of them
        comm.all_reduce(rest, group=inside)
        comm.all_reduce(rest, group=across)
    under_way = []
    for segment in (
        divided.split(max(1, SEGMENT_BYTES // (k * flat.itemsize)) * k) if divided.numel() else ()
    ):
        part = torch.empty(segment.numel() // k, dtype=flat.dtype, device=flat.device)
        comm.reduce_scatter(part, segment, group=inside)
        under_way.append((segment, part, comm.all_reduce(part, group=across, async_op=True)))
    for segment, part, work in under_way:
        work.wait()
        comm.all_gather(segment, part, group=inside)


def by_leaders(tensor, inside, across):
    """Sum tensor over all ranks, in place: reduce to first ranks, all-reduce there, broadcast.

    inside: as above. across: the group of the nodes' first ranks; the others do not look at it.
    Nodes may differ in size.
    """
    flat = tensor.detach().contiguous().view(-1)
    reduce_to_first(flat, inside)
    if dist.get_rank(inside) == 0:
        comm.all_reduce(flat, group=across)
    comm.broadcast(flat, 0, inside)
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


def reduce_to_first(flat, group):
    """flat becomes the sum on rank 0 of the group, partly on others: by pairs, in log2(k) steps."""
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

    DDP: ours or PyTorch's. form: "hierarchical" or "leaders". Averages over all ranks of the job.
    Buckets are carried one after the other by a thread of its own (on CUDA: in a stream), while
    backward goes on: the steps of one wait for each other, and ranks must start them in the same
    order. So let the groups be used by nothing else: a Mesh made for this.
    Raises ValueError for another form, and in the first step, on every rank, if ranks differ in it.
    """

    def __init__(self, inside, across, form="hierarchical"):
        if form not in FORMS:
            raise ValueError(f"unknown form {form!r}: known are {', '.join(FORMS)}")
        self.inside, self.across, self.form, self.all_reduce = inside, across, form, FORMS[form]
        self._agreed = False
        # One node, or one rank a node: the only group may be DDP's own. No thread.
        alone = 1 in (dist.get_world_size(inside), dist.get_world_size(across))
        self.courier = None if alone else ThreadPoolExecutor(1, thread_name_prefix="hierarchical")
        self.stream = None  # in place of the courier, on CUDA

    def hook(self, _, bucket):
        """Future of the bucket's average, in the bucket's own buffer."""
        if not self._agreed:
            check_agreement(
                [f"an all-reduce of the form {self.form}"], None, bucket.buffer().device
            )
            self._agreed = True
        buffer = bucket.buffer().div_(dist.get_world_size())  # first: fp16 sums might overflow
        future = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
        if self.courier is None:
            self.carry(buffer, future)
        elif buffer.is_cuda:
            # NCCL only enqueues; groups used from two threads could wait for each other
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
