"""Sequence parallelism: between the tensor-parallel parts each rank has a part of the tokens.

    tensor     x [all tokens] - norm - f - [ columns, rows ] - g - dropout - + x    f, g: all-reduce
    sequence   x [T/n tokens] - norm - G - [ columns, rows ] - S - dropout - + x    G, S: half of it

        G   forward: all-gather        backward: reduce-scatter    from tokens to heads or channels
        S   forward: reduce-scatter    backward: all-gather        and back

Tensor parallelism does the same norm, dropout and addition on every rank, and keeps their
activations n times. An all-reduce is a reduce-scatter and an all-gather: do the work between them.

Sent: what tensor parallelism sends, 4 x 2 (n-1)/n x tokens x width numbers a block and step; and
gradients of norms and of row-parallel biases, 6 x width numbers, of which each rank sees a part.
Held: 1/n of the activations outside of the parts; the gathered input of each part is whole.
Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, MLSys 2023,
section 4.2 (there G and S are called g and g with a bar).
"""

import torch
import torch.distributed as dist
from torch.nn import functional as F

from labkit import comm
from labkit.parts.on_shards import SequenceParallel

__all__ = ["SequenceParallel", "gather", "network", "scatter_sum"]


class gather(torch.autograd.Function):
    """All tokens of what each rank has some of. [T/n, ...] -> [T, ...]; backward sums the parts."""

    @staticmethod
    def forward(ctx, x, group=None):
        ctx.group = group
        whole = x.new_empty(len(x) * dist.get_world_size(group), *x.shape[1:])
        comm.all_gather(whole, x.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx, gradient):
        return scatter_sum.apply(gradient, ctx.group), None


class scatter_sum(torch.autograd.Function):
    """The sum over the ranks, of which each gets some tokens. [T, ...] -> [T/n, ...]."""

    @staticmethod
    def forward(ctx, x, group=None):
        ctx.group = group
        own = x.new_empty(len(x) // dist.get_world_size(group), *x.shape[1:])
        comm.reduce_scatter(own, x.contiguous(), group=group)
        return own

    @staticmethod
    def backward(ctx, gradient):
        return gather.apply(gradient, ctx.group), None


def network(x, norm, A, a, B, group=None):
    """The idea: norm and addition see this rank's tokens, the matrices see all. [T/n, C] -> same.

    A [hidden/n, C], a, B [C, hidden/n]: this rank's hidden units. norm: whole on every rank, which
    sees a part of the tokens: the gradients of its parameters are to be summed over the ranks.
    """
    hidden = F.gelu(F.linear(gather.apply(norm(x), group), A, a))
    return x + scatter_sum.apply(F.linear(hidden, B), group)
