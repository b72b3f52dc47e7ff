"""Collectives with a log: every message of the lab is sent from here, and `record()` lists them.

    comm.all_reduce --> torch.distributed.all_reduce     with record() as log:  also an Event in log

Each function is torch.distributed's of the same name (reduce_scatter and all_gather: the
single-tensor forms; summed: all_reduce, out of place), but src and dst count *within the group*.
comm_log.py says what an Event contains.

Bytes that a rank sends: labkit/ring_cost.py has the formula of each operation. "counted": send,
recv, exchange and barrier, as we send those messages ourselves. "derived": the others.

"derived" is the formula rounded down to whole bytes, not a measurement: the backend may choose
another algorithm. On gloo the sum over the ranks is what leaves real nodes; only a reduce_scatter
of anything other than a sum sends a whole all_reduce. Notebook 01 and the tests of the namespaces
compare both with the counters of the nodes' interfaces.
"""

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from labkit import gloo_workarounds
from labkit.comm_log import HOST, Event, HostClock, MeteredWork, metered, record

__all__ = [
    "HOST",
    "Event",
    "HostClock",
    "MeteredWork",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "device",
    "exchange",
    "record",
    "recv",
    "reduce_scatter",
    "send",
    "summed",
]

# torch 2.13 deprecates *_tensor for *_single, which torch 2.11 does not have for both.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def device(group=None):
    """Return the device for small tensors that are sent: this rank's GPU on NCCL, else the CPU."""
    if "nccl" in str(dist.get_backend(group)):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _finish(work):
    work.wait()  # and return None, as torch's operations do that are not asynchronous


def all_reduce(tensor, op=ReduceOp.SUM, group=None, async_op=False):
    """Every rank's tensor becomes the sum (or op) of all of them, in place."""

    def launch():
        return dist.all_reduce(tensor, op, group, async_op)

    return metered("all_reduce", group, tensor, async_op, launch)


def summed(tensor, group=None):
    """The sum of all ranks' tensors, a new one and contiguous: an all_reduce out of place."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    all_reduce(total, group=group)
    return total


def reduce_scatter(output, input, op=ReduceOp.SUM, group=None, async_op=False):
    """output becomes this rank's n-th part of the sum of all inputs.

    input: n times the elements of output, contiguous. On gloo a sum is an all_to_all and n-1
    additions, in the order of the ranks: gloo's own sends a whole all_reduce.
    """

    def launch():
        if op == ReduceOp.SUM and gloo_workarounds.serves(input, group):
            work = gloo_workarounds.reduce_scatter(output, input, group)
            return work if async_op else _finish(work)
        return _reduce_scatter(output, input, op, group, async_op)

    return metered("reduce_scatter", group, input, async_op, launch)


def all_gather(output, input, group=None, async_op=False):
    """output becomes the inputs of all ranks, one after the other.

    output: n times the elements of input, contiguous. On gloo all send to all, both ways at once,
    or it is n broadcasts: gloo's own copies everything twice more.
    """

    def launch():
        if gloo_workarounds.serves(input, group):
            work = gloo_workarounds.all_gather(output, input, group)
            return work if async_op else _finish(work)
        return _all_gather(output, input, group, async_op)

    return metered("all_gather", group, output, async_op, launch)


def broadcast(tensor, src=0, group=None, async_op=False):
    """Every rank's tensor becomes that of src (a rank within the group)."""

    def launch():
        return dist.broadcast(tensor, group=group, async_op=async_op, group_src=src)

    return metered("broadcast", group, tensor, async_op, launch)


def all_to_all(
    output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False
):
    """Send part i of input to rank i; part j of output is from rank j.

    Split sizes: rows (dim 0); None: equal parts.
    """

    def launch():
        split = output, input, output_split_sizes, input_split_sizes, group
        if gloo_workarounds.serves(input, group) and not gloo_workarounds.on_loopback():
            work = gloo_workarounds.all_to_all(*split)
            return work if async_op else _finish(work)
        return dist.all_to_all_single(*split, async_op)

    def sent(n, payload):
        """Return the payload without the part that the rank keeps."""
        if not input_split_sizes:
            return payload - payload // n
        kept = input_split_sizes[dist.get_rank(group)]
        return payload - payload * kept // max(1, sum(input_split_sizes))

    return metered("all_to_all", group, input, async_op, launch, sent=sent)


def send(tensor, dst, group=None, async_op=False):
    """Send a contiguous tensor to dst (a rank within the group), which must call recv."""

    def launch():
        return (dist.isend if async_op else dist.send)(tensor, group=group, group_dst=dst)

    def pairs(rank):
        return ((rank, dst),)

    return metered("send", group, tensor, async_op, launch, pairs)


def recv(tensor, src, group=None, async_op=False):
    """Fill a contiguous tensor with what src (a rank within the group) sends."""

    def launch():
        return (dist.irecv if async_op else dist.recv)(tensor, group=group, group_src=src)

    def pairs(rank):
        return ((src, rank),)

    return metered("recv", group, tensor, async_op, launch, pairs)


def exchange(outgoing, dst, incoming, src, group=None, async_op=False):
    """Send outgoing to dst while src fills incoming (ranks within the group): MPI's sendrecv.

    Safe in a circle. Both tensors contiguous; a rank that sends must find the other receiving as
    many elements. payload: outgoing.
    """

    def launch():
        receive = dist.P2POp(dist.irecv, incoming, group=group, group_peer=src)
        works = dist.batch_isend_irecv(
            [receive, dist.P2POp(dist.isend, outgoing, group=group, group_peer=dst)]
        )
        fused = len(works) == 1  # by NCCL
        work = works[0] if fused else gloo_workarounds.All(works)
        if async_op:
            return work
        work.wait()

    def pairs(rank):
        return (rank, dst), (src, rank)

    return metered("exchange", group, outgoing, async_op, launch, pairs)


def barrier(group=None):
    """Return once every rank of the group has called."""

    def launch():
        return dist.barrier(group)

    return metered("barrier", group, None, False, launch)
