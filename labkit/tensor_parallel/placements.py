"""How a tensor and its gradient lie on ranks, and the way from one layout to another.

                       rank 0   rank 1   its gradient
    Replicate()        [ab]     [ab]     Replicate()   all compute alike with it
    Shard(dim)         [a]      [b]      Shard(dim)
    Partial()          [xy]     [zw]     Shared()      the tensor is the sum
    Shared()           [ab]     [ab]     Partial()     each computes a part with it

    from         to           forward          backward
    Replicate    Shared       nothing          all-reduce          f of Megatron
    Partial      Replicate    all-reduce       nothing             g of Megatron
    Shard        Shared       all-gather       reduce-scatter      g of Korthikanti et al.
    Partial      Shard        reduce-scatter   all-gather          the same, with a bar
    Replicate    Shard        own part         all-gather
    Shard        Replicate    all-gather       own part
    Shard        other Shard  all-to-all       all-to-all

The backward of a way is a way again: from the gradient's layout at the end to that at the start.
Names as in torch.distributed.tensor, which has no Shared: there the gradient's layout is found out.
"""

from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist

from labkit import comm
from labkit.tensor_parallel.rng_tracker import Draws


@dataclass(frozen=True)
class Replicate:
    """Every rank has the whole."""


@dataclass(frozen=True)
class Shard:
    """Rank i has the i-th of n equal parts along dim; -1 is the last."""

    dim: int

    def among(self, dims):
        """The same of a tensor that has so many."""
        return Shard(self.dim % dims)


@dataclass(frozen=True)
class Partial:
    """Every rank has a summand of the whole's shape."""


@dataclass(frozen=True)
class Shared:
    """Every rank has the whole, and what it computes with it is a part: gradients are summands."""


GRADIENT = {Partial(): Shared(), Shared(): Partial()}  # of all others: the same


class Axis:
    """The ranks over which a module is split: their group, and what its layers have in common.

    draws: whose random numbers come next. prepared: {module that is running: [(an input of it, the
    same as Shared)]}, where several layers take one input.
    """

    def __init__(self, group=None):
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.draws = Draws(self.rank, self.size)
        self.prepared = {}

    def __deepcopy__(self, memo):
        return self  # the copy of a module is split over the same ranks

    def shared(self, x, layout):
        """x for layers that each compute a part with it; what has been prepared is sent once."""
        for alike, shared in chain(*self.prepared.values()):
            if alike is x:
                return shared
        return self.move(x, layout, Shared())

    def prepare(self, x, layout):
        """(x whole for all who compute alike with it, and for those who compute parts)."""
        if layout == Replicate():
            return x, self.move(x, layout, Shared())
        return Gather.apply(x, layout.dim, self) if self.size > 1 else (x, x)

    def move(self, x, source, target):
        """x in another layout, differentiably. Collective, unless it is `nothing` or `own part`."""
        source, target = (
            one.among(x.dim()) if isinstance(one, Shard) else one for one in (source, target)
        )
        return x if self.size == 1 or source == target else Move.apply(x, source, target, self)


class Move(torch.autograd.Function):
    """forward: (tensor, its layout, the layout wanted, Axis) -> tensor."""

    @staticmethod
    def forward(ctx, x, source, target, axis):
        ctx.way = GRADIENT.get(target, target), GRADIENT.get(source, source), axis
        return moved(x, source, target, axis)

    @staticmethod
    def backward(ctx, gradient):
        return Move.apply(gradient, *ctx.way), None, None, None


class Gather(torch.autograd.Function):
    """A shard becomes the whole, twice: Replicate, and Shared. Only what parts say is sent back."""

    @staticmethod
    def forward(ctx, x, dim, axis):
        ctx.dim, ctx.axis = dim, axis
        ctx.set_materialize_grads(False)
        whole = gathered(x, dim, axis)
        return whole, whole.detach()

    @staticmethod
    def backward(ctx, alike, parts):
        own = Shard(ctx.dim)
        total = None if parts is None else moved(parts, Partial(), own, ctx.axis)
        if alike is not None:
            alike = moved(alike, Replicate(), own, ctx.axis)
            total = alike if total is None else total + alike
        return total, None, None


def moved(x, source, target, axis):
    whole = (Replicate(), Shared())
    if source in whole and target in whole:
        return x.view_as(x)
    if source == Partial() and target in whole:
        return comm.summed(x, axis.group)
    if source == Partial() and isinstance(target, Shard):
        parts = torch.stack(cut(x, target.dim, axis.size))
        own = torch.empty_like(parts[0])
        comm.reduce_scatter(own, parts, group=axis.group)
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
    raise ValueError(f"there is no way from {source} to {target}")


def gathered(x, dim, axis):
    """The parts of all ranks, one after the other along dim."""
    parts = x.new_empty(axis.size, *x.shape)
    comm.all_gather(parts, x.contiguous(), group=axis.group)
    return torch.cat(tuple(parts), dim)


def cut(x, dim, n):
    """n equal parts along dim; ValueError where there are none."""
    if x.shape[dim] % n:
        raise ValueError(
            f"{n} ranks cannot share a length of {x.shape[dim]}: dim {dim} of {list(x.shape)}"
        )
    return x.chunk(n, dim)
