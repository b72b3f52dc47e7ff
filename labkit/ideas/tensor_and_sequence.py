"""Tensor parallelism: a rank has a part of every matrix. Sequence parallelism: also of the tokens.

    tensor     x [T, C] - f - [ A columns, gelu, B rows ] - g - + b      f: all-reduce in backward
                                                                         g: all-reduce in forward
    sequence   x [T/n, C] - norm - G - [ A, gelu, B ] - S - + x          G: all-gather
                                                                         S: reduce-scatter

Two layers that are split this way need one sum, because gelu works on each hidden unit alone.
Sent per rank: 2 (n-1)/n x T x C numbers in forward, and as many in backward, in either form.
Held: 1/n of the two matrices and of the hidden units; with S and G 1/n of x outside the layer, too.
Shoeybi et al., Megatron-LM, 2019, section 3; Korthikanti et al., Reducing Activation Recomputation
in Large Transformer Models, MLSys 2023, section 4.2.
"""

import torch
import torch.distributed as dist
from torch.nn import functional as F

from labkit import comm


class CopyToTensorParallel(torch.autograd.Function):
    """f of the paper: the identity in forward; in backward the ranks' gradients are summed."""

    @staticmethod
    def forward(ctx, x, group=None):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return ReduceFromTensorParallel.apply(gradient, ctx.group), None


class ReduceFromTensorParallel(torch.autograd.Function):
    """g of the paper: in forward the ranks' tensors are summed; the identity in backward."""

    @staticmethod
    def forward(ctx, x, group=None):
        ctx.group = group
        return comm.summed(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return CopyToTensorParallel.apply(gradient, ctx.group), None


class GatherTokens(torch.autograd.Function):
    """G: gather the tokens of all ranks, [T/n, ...] -> [T, ...]; in backward ScatterTokens."""

    @staticmethod
    def forward(ctx, x, group=None):
        ctx.group = group
        full = x.new_empty(len(x) * dist.get_world_size(group), *x.shape[1:])
        comm.all_gather(full, x.contiguous(), group=group)
        return full

    @staticmethod
    def backward(ctx, gradient):
        return ScatterTokens.apply(gradient, ctx.group), None


class ScatterTokens(torch.autograd.Function):
    """S: sum over the ranks, [T, ...] -> this rank's, [T/n, ...]; in backward GatherTokens."""

    @staticmethod
    def forward(ctx, x, group=None):
        ctx.group = group
        part = x.new_empty(len(x) // dist.get_world_size(group), *x.shape[1:])
        comm.reduce_scatter(part, x.contiguous(), group=group)
        return part

    @staticmethod
    def backward(ctx, gradient):
        return GatherTokens.apply(gradient, ctx.group), None


def tensor_parallel_mlp(x, A, a, B, b, group=None):
    """Apply two layers with 1/n of the hidden units on each rank. x: [..., C], equal on all ranks.

    A [hidden/n, C] and a [hidden/n]: the first layer's weight and bias. B [C, hidden/n]: the second
    layer's weight. b [C]: its full bias, added once, after the sum.
    """
    hidden = F.gelu(F.linear(CopyToTensorParallel.apply(x, group), A, a))
    return ReduceFromTensorParallel.apply(F.linear(hidden, B), group) + b


def sequence_parallel_mlp(x, norm, A, a, B, group=None):
    """Apply both layers, a norm and a residual to this rank's tokens. x: [T/n, C] -> [T/n, C].

    Sum the gradients of the norm over the ranks: each saw its own tokens. B has no bias.
    """
    hidden = F.gelu(F.linear(GatherTokens.apply(norm(x), group), A, a))
    return x + ScatterTokens.apply(F.linear(hidden, B), group)
