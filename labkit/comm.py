"""Collectives with a log: every message of the lab is sent from here, and `record()` lists them.

    comm.all_reduce --> torch.distributed.all_reduce     with record() as log:  also an Event in log

Each function is torch.distributed's of the same name (reduce_scatter and all_gather: the
single-tensor variants; summed: an all_reduce out of place), but src and dst count *within the
group*. With async_op=True it returns a Work. comm_log.py describes an Event.

Bytes that a rank sends: labkit/ring_cost.py has the formula of each operation. "counted": send,
recv, exchange and barrier, because labkit sends those messages itself. "derived": the others.

"derived" is the formula rounded down to whole bytes, not a measurement: the backend may choose
another algorithm. On gloo the sum over the ranks equals the bytes that leave real nodes, except
that a reduce_scatter with an op other than SUM sends a complete all_reduce. Notebook 01 and the
tests of the namespaces compare both with the counters of the nodes' interfaces.
"""

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from labkit import gloo_workarounds
from labkit.comm_log import HOST, Event, HostClock, MeteredWork, metered, record
from labkit.ring_cost import sent_of_splits

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
    """Return the device for small tensors to send: this rank's GPU on NCCL, else the CPU."""
    if "nccl" in str(dist.get_backend(group)):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _finish(work):
    work.wait()  # and return None, like torch's synchronous operations


def _check_other(rank, group):
    if rank == dist.get_rank(group):
        raise ValueError(f"rank {rank} cannot send to itself: copy the tensor")


def _message(work, tensor, group, async_op):
    if work is None:  # not a member of the group: torch has warned
        return None
    [work] = gloo_workarounds.with_timeout([work], tensor, group)
    return work if async_op else _finish(work)


def all_reduce(tensor, op=ReduceOp.SUM, group=None, async_op=False):
    """Replace every rank's tensor with the sum (or op) of all of them, in place.

    On gloo two ranks swap a small tensor whole: as many bytes, in one message, not two. Wait for
    the Work, or for its future: only that completes it.
    """

    def launch():
        if gloo_workarounds.swaps(tensor, op, group):
            work = gloo_workarounds.all_reduce(tensor, op, group)
            return work if async_op else _finish(work)
        return dist.all_reduce(tensor, op, group, async_op)

    return metered("all_reduce", group, tensor, async_op, launch)


def summed(tensor, group=None):
    """Return the sum of all ranks' tensors, a new contiguous tensor: an all_reduce out of place."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    all_reduce(total, group=group)
    return total


def reduce_scatter(output, input, op=ReduceOp.SUM, group=None, async_op=False):
    """Set output to this rank's part of the sum (or op) of all inputs; rank r has the r-th part.

    input: n times the elements of output, contiguous. On gloo a sum is an all_to_all and n-1
    additions in the order of the ranks, because gloo's own sends a complete all_reduce.
    """

    def launch():
        if op == ReduceOp.SUM and gloo_workarounds.serves(input, group):
            work = gloo_workarounds.reduce_scatter(output, input, group)
            return work if async_op else _finish(work)
        return _reduce_scatter(output, input, op, group, async_op)

    return metered("reduce_scatter", group, input, async_op, launch)


def all_gather(output, input, group=None, async_op=False):
    """Set output to the inputs of all ranks, in the order of the ranks.

    output: n times the elements of input, contiguous. On gloo each rank sends its input to every
    other rank, on loopback by n broadcasts (two ranks by an all_to_all), because gloo's own copies
    everything twice more.
    """

    def launch():
        if gloo_workarounds.serves(input, group):
            work = gloo_workarounds.all_gather(output, input, group)
            return work if async_op else _finish(work)
        return _all_gather(output, input, group, async_op)

    return metered("all_gather", group, output, async_op, launch)


def broadcast(tensor, src=0, group=None, async_op=False):
    """Set every rank's tensor to that of src (a rank within the group), in place."""

    def launch():
        return dist.broadcast(tensor, group=group, async_op=async_op, group_src=src)

    return metered("broadcast", group, tensor, async_op, launch)


def all_to_all(
    output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False
):
    """Send part i of input to rank i, and fill part j of output with what rank j sends.

    output_split_sizes, input_split_sizes: rows (dim 0) per rank; None: equal parts.
    """

    def launch():
        split = output, input, output_split_sizes, input_split_sizes, group
        if gloo_workarounds.serves(input, group) and not gloo_workarounds.on_loopback():
            work = gloo_workarounds.all_to_all(*split)
            return work if async_op else _finish(work)
        return dist.all_to_all_single(*split, async_op)

    def sent(n, payload):
        if not input_split_sizes:
            return payload - payload // n
        return sent_of_splits(payload, input_split_sizes, dist.get_rank(group))

    return metered("all_to_all", group, input, async_op, launch, sent=sent)


def send(tensor, dst, group=None, async_op=False):
    """Send a contiguous tensor to dst (a rank within the group), which must call recv."""

    def launch():
        _check_other(dst, group)
        work = dist.isend(tensor, group=group, group_dst=dst)
        return _message(work, tensor, group, async_op)

    def pairs(rank):
        return ((rank, dst),)

    return metered("send", group, tensor, async_op, launch, pairs)


def recv(tensor, src, group=None, async_op=False):
    """Fill a contiguous tensor with the one that src (a rank within the group) sends."""

    def launch():
        _check_other(src, group)
        work = dist.irecv(tensor, group=group, group_src=src)
        return _message(work, tensor, group, async_op)

    def pairs(rank):
        return ((src, rank),)

    return metered("recv", group, tensor, async_op, launch, pairs)


def exchange(outgoing, dst, incoming, src, group=None, async_op=False):
    """Send outgoing to dst while src fills incoming (ranks within the group): MPI's sendrecv.

    Ranks that exchange in a circle do not deadlock. Both tensors are contiguous, and dst's incoming
    has as many elements as this rank's outgoing. The payload in the log is outgoing.
    """

    def launch():
        receive = dist.P2POp(dist.irecv, incoming, group=group, group_peer=src)
        works = dist.batch_isend_irecv(
            [receive, dist.P2POp(dist.isend, outgoing, group=group, group_peer=dst)]
        )
        works = gloo_workarounds.with_timeout(works, outgoing, group)
        fused = len(works) == 1  # by NCCL
        work = works[0] if fused else gloo_workarounds.All(works)
        return work if async_op else _finish(work)

    def pairs(rank):
        return (rank, dst), (src, rank)

    return metered("exchange", group, outgoing, async_op, launch, pairs)


def barrier(group=None):
    """Wait until every rank of the group has called barrier()."""

    def launch():
        return dist.barrier(group)

    return metered("barrier", group, None, False, launch)
