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
from torch import nn
from torch.nn import functional as F

from labkit import comm
from labkit.parts.layouts import Replicate, Shard, Shared
from labkit.parts.plan import Style

__all__ = ["Replicate", "SequenceParallel", "Shard"]


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


class SequenceParallel(Style):
    """A norm or dropout that sees this rank's tokens; parameters are whole, their gradients too.

    For modules that treat each token by itself. The input must be shards already: of a layer with
    output_layouts=Shard(sequence_dim), and the next column-parallel layer has input_layouts so.
    """

    def __init__(self, *, sequence_dim=1, use_local_output=False):
        self.sequence_dim = sequence_dim

    def check(self, name, module, axis):
        if isinstance(module, nn.modules.batchnorm._BatchNorm) or list(module.children()):
            kind = type(module).__name__
            raise ValueError(f"{name} is a {kind}, and SequenceParallel takes norms and dropout")

    def apply(self, module, axis):
        kind = type(module)
        module.__class__ = type(f"Sequence{kind.__name__}", (OnShards, kind), {})
        module.axis = axis


class OnShards:
    """A module on shards of its input, with whole parameters. axis: an Axis."""

    def forward(self, x):
        if self.training:
            self.axis.draws.own(x.device)
        whole = dict(self._parameters)
        for name, parameter in whole.items():
            if parameter is not None:
                self._parameters[name] = self.axis.move(parameter, Replicate(), Shared())
        try:
            return super().forward(x)
        finally:
            self._parameters.update(whole)
