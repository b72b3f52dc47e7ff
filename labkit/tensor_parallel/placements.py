"""Layouts of a tensor and its gradient over ranks, and the conversions between layouts.

                       rank 0   rank 1   its gradient
    Replicate()        [ab]     [ab]     Replicate()   all ranks compute the same with it
    Shard(dim)         [a]      [b]      Shard(dim)
    Partial()          [xy]     [zw]     Shared()      the tensor is the sum over ranks
    Shared()           [ab]     [ab]     Partial()     each rank computes a part with it

    from         to           forward          backward
    Replicate    Shared       nothing          all-reduce          f of Megatron
    Partial      Replicate    all-reduce       nothing             g of Megatron
    Shard        Shared       all-gather       reduce-scatter      g of Korthikanti et al.
    Partial      Shard        reduce-scatter   all-gather          its conjugate, g with a bar
    Replicate    Shard        own part         all-gather
    Shard        Replicate    all-gather       own part
    Shard        other Shard  all-to-all       all-to-all

The backward of a conversion is a conversion too: from the gradient's layout at the end to the one
at the start. Names follow torch.distributed.tensor, which infers the gradient's layout and so has
no Shared.
"""

from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist

from labkit import comm
from labkit.tensor_parallel.rng_tracker import RngTracker


@dataclass(frozen=True)
class Replicate:
    """Every rank has the complete tensor, and all ranks compute the same with it."""


@dataclass(frozen=True)
class Shard:
    """Rank i has the i-th of n equal parts along dim; -1 is the last dim."""

    dim: int

    def among(self, dims):
        """Return the placement with a non-negative dim, for a tensor with `dims` dimensions."""
        return Shard(self.dim % dims)


@dataclass(frozen=True)
class Partial:
    """Every rank has a summand of the full shape."""


@dataclass(frozen=True)
class Shared:
    """Every rank has the complete tensor and computes a part with it; gradients are summands."""


GRADIENT = {Partial(): Shared(), Shared(): Partial()}  # other layouts: the same as the tensor's


class Axis:
    """The ranks over which a module is sharded: their group, and the common state of its layers.

    rng: the random state of each rank. prepared: {running module: [(an input, the same tensor as
    Shared)]}, for inputs that several layers use. grouped: {layer of a running block:
    [(a parameter, its output of grouped_sums)]}.
    """

    def __init__(self, group=None):
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.rng = RngTracker(self.rank, self.size)
        self.prepared = {}
        self.grouped = {}

    def __deepcopy__(self, memo):
        return self  # a copy of a module is sharded over the same ranks

    def shared(self, x):
        """Return x as Shared if it was prepared, or if there is one rank; else None."""
        for replicated, shared in chain(*self.prepared.values()):
            if replicated is x:
                return shared
        return x if self.size == 1 else None

    def prepare(self, x, layout):
        """Return (x as Replicate, x as Shared)."""
        if layout == Replicate():
            return x, self.move(x, layout, Shared())
        return Gather.apply(x, layout.dim, self) if self.size > 1 else (x, x)

    def move(self, x, source, target):
        """Convert x to another layout, differentiably. Collective, unless it sends nothing."""
        source, target = (
            layout.among(x.dim()) if isinstance(layout, Shard) else layout
            for layout in (source, target)
        )
        return x if self.size == 1 or source == target else Move.apply(x, source, target, self)


class Move(torch.autograd.Function):
    """Convert between layouts. forward: (tensor, its layout, target layout, Axis) -> tensor."""

    @staticmethod
    def forward(ctx, x, source, target, axis):
        ctx.way = GRADIENT.get(target, target), GRADIENT.get(source, source), axis
        return moved(x, source, target, axis)

    @staticmethod
    def backward(ctx, gradient):
        return Move.apply(gradient, *ctx.way), None, None, None


class Gather(torch.autograd.Function):
    """All-gather a shard once, as Replicate and as Shared. Backward sends only the latter's sum."""

    @staticmethod
    def forward(ctx, x, dim, axis):
        ctx.dim = dim
        ctx.axis = axis
        ctx.set_materialize_grads(False)
        whole = gathered(x, dim, axis)
        return whole, whole.detach()

    @staticmethod
    def backward(ctx, replicated, parts):
        own = Shard(ctx.dim)
        total = None if parts is None else moved(parts, Partial(), own, ctx.axis)
        if replicated is not None:
            replicated = moved(replicated, Replicate(), own, ctx.axis)
            total = replicated if total is None else total + replicated
        return total, None, None


def moved(x, source, target, axis):
    whole = (Replicate(), Shared())
    if source in whole and target in whole:
        return x.view_as(x)
    if source == Partial() and target in whole:
        return comm.summed(x, axis.group)
    if source == Partial() and isinstance(target, Shard):
        own, work = start_sum(x, target.dim, axis)
        work.wait()
        return own
    if isinstance(source, Shard) and target in whole:
        return gathered(x, source.dim, axis)
    if isinstance(source, Shard) and isinstance(target, Shard):
        parts = torch.stack(cut(x, target.dim, axis.size))
        arrived = torch.empty_like(parts)
        comm.all_to_all(arrived, parts, group=axis.group)
        return torch.cat(tuple(arrived), source.dim)
    if source in whole and isinstance(target, Shard):
        return cut(x, target.dim, axis.size)[axis.rank].contiguous()
    raise ValueError(f"cannot convert the layout {source} to {target}")


def start_backward_sum(gradient, source, axis):
    """Start to sum the gradients of a tensor that was moved from `source` to Shared.

    Return (the sum in the layout of the source's gradient, its Work). Overwrites `gradient`.
    """
    if isinstance(source, Shard):
        return start_sum(gradient, source.dim, axis)
    return gradient, comm.all_reduce(gradient, group=axis.group, async_op=True)


def start_sum(x, dim, axis):
    """Start a reduce-scatter of x along dim. Return (this rank's part of the sum, the Work)."""
    parts = torch.stack(cut(x, dim, axis.size))
    own = torch.empty_like(parts[0])
    return own, comm.reduce_scatter(own, parts, group=axis.group, async_op=True)


def gathered(x, dim, axis):
    """Return the parts of all ranks, concatenated along dim."""
    parts = x.new_empty(axis.size, *x.shape)
    comm.all_gather(parts, x.contiguous(), group=axis.group)
    return torch.cat(tuple(parts), dim)


def cut(x, dim, n):
    """Return n equal parts of x along dim. Raises ValueError if n does not divide its length."""
    if x.shape[dim] % n:
        raise ValueError(
            f"dim {dim} of {list(x.shape)} must be divisible by {n}, the number of ranks"
        )
    return x.chunk(n, dim)
