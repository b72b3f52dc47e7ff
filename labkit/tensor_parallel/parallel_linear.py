"""Linear layers and embeddings whose matrix is sharded over ranks, by rows or by columns.

    y = x W^T + b       column-parallel                     row-parallel
                        rank 0  x [rows 0-1 of W] + b01     x01 [W: inputs 0-1]  \\
                        rank 1  x [rows 2-3 of W] + b23     x23 [W: inputs 2-3]  / sum, then + b
    y = E[tokens]       [channels 0-1 of E]                 [tokens 0-1 of E], zero for others

A vocabulary of 5 on 2 ranks has 3 rows on each. The last row is padding: it is zero, no token uses
it, and its logit is -inf, so it gets no gradient, adds nothing to a norm, and stays zero.

The paper multiplies x A: columns of A are rows of PyTorch's weight. A layer changes its class in
place, so every reference to it sees the sharded layer. Its sizes remain those of the full layer.

    backward of a column-parallel layer      compute   gradient of x | gradients of W and b | wait
                                             network                 [ sum of x's gradients ]

Only the last part of the sum is exposed, as in Megatron-LM's
LinearWithGradAccumulationAndAsyncCommunication.
"""

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from labkit.amp.fp8 import fp8
from labkit.tensor_parallel.grouped_sums import with_sums
from labkit.tensor_parallel.placements import (
    Partial,
    Replicate,
    Shard,
    Shared,
    moved,
    start_backward_sum,
)
from labkit.tensor_parallel.tp_state_dict import whole_parameters
from labkit.torch_private import assert_async, will_visit


class SplitLayer:
    """Base of the sharded layers. axis: an Axis. source, target: layouts of input and output.

    cuts: {parameter's name: dim along which it is sharded}. shared: the name of the sharded size.
    padded: whether that size need not be divisible by the ranks.
    """

    padded = False

    def reset_parameters(self):
        """Draw what one process draws for the full layer, and keep this rank's slice."""
        with whole_parameters(self):
            super().reset_parameters()

    def apply(self, fn):
        """Apply fn as nn.Module does; fn sees full parameters (whole_parameters)."""
        with whole_parameters(self):
            return super().apply(fn)

    def redistribute(self, y, layout):
        """Return the output in the target layout, and set who draws the next random numbers."""
        y = self.axis.move(y, layout, self.target)
        if self.training:
            rng = self.axis.rng
            rng.per_rank(y.device) if isinstance(self.target, Shard) else rng.same_on_all()
        return y


class ColumnProduct(torch.autograd.Function):
    """x W^T + b; in backward the sum of x's gradients travels while those of W and b are computed.

    forward: (x in the layout source, the full x [..., in], W [out / n, in], b or None, source,
    Axis) -> [tokens, out / n]. The full x, W and b have the dtype of the product. x keeps its own,
    in which its gradients are summed. No second derivative. x and W are no leaves (will_visit).
    """

    @staticmethod
    def forward(ctx, x, full, weight, bias, source, axis):
        rows = full.reshape(-1, full.shape[-1])
        of_x, _, of_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(rows if of_weight else None, weight if of_x else None)
        ctx.sum = full.shape, x.dtype, source, axis
        return F.linear(rows, weight, bias)  # not a view, which could not be changed in place

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        rows, weight = ctx.saved_tensors
        shape, dtype, source, axis = ctx.sum
        (x_node, _), _, (weight_node, _), *_ = ctx.next_functions
        of_x = of_weight = of_bias = None
        if weight is not None and will_visit(x_node):
            summand = (gradient @ weight).view(shape).to(dtype)
            of_x, work = start_backward_sum(summand, source, axis)
        if rows is not None and will_visit(weight_node):
            of_weight = gradient.t() @ rows
        if ctx.needs_input_grad[3]:
            of_bias = gradient.sum(0)
        if of_x is not None:
            work.wait()
        return of_x, None, of_weight, of_bias, None, None


class ColumnLinear(SplitLayer, nn.Linear):
    """A linear layer with a part of the outputs. forward: [..., in] -> [..., out / n].

    Backward hides the sum of the input's gradients behind the weight's, unless the input was
    prepared for several layers (PrepareModuleInput): their gradients are added first. Products in
    fp8 have a backward of their own, which hides nothing.
    """

    cuts, shared = {"weight": 0, "bias": 0}, "out_features"

    def forward(self, x):
        shared = self.axis.shared(x)
        if shared is None and fp8.is_on():
            shared = self.axis.move(x, self.source, Shared())
        y = self.product(x) if shared is None else super().forward(shared)
        return self.redistribute(y, Shard(-1))

    def product(self, x):
        source = self.source.among(x.dim()) if isinstance(self.source, Shard) else self.source
        # the dtype of products, which autocast changes: torch's or the lab's
        dtype = (x.new_empty(0, 1) @ self.weight.new_empty(1, 0)).dtype
        with torch.no_grad():
            full = moved(x, source, Shared(), self.axis).to(dtype)
        weight = self.weight.to(dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        edges = x.view_as(x), full, weight.view_as(weight), bias
        return ColumnProduct.apply(*edges, source, self.axis).view(*full.shape[:-1], len(weight))


class PaddedColumnLinear(ColumnLinear):
    """A column-parallel layer for logits, padded with -inf. forward: [..., in] -> [..., out / n].

    The size of the output is rounded up if the ranks do not divide the vocabulary.
    """

    padded = True

    def forward(self, x):
        logits = super().forward(x)
        own = len(self.weight)
        self.axis.rng.same_on_all()  # nothing draws per rank after the logits
        if own * self.axis.size == self.out_features:
            return logits
        if self.target == Replicate():
            return logits[..., : self.out_features]
        words = torch.arange(own, device=logits.device) + self.axis.rank * own
        return logits.masked_fill(words >= self.out_features, -torch.inf)


class RowLinear(SplitLayer, nn.Linear):
    """A linear layer with a part of the inputs. forward: [..., in / n] -> [..., out], summed."""

    cuts, shared = {"weight": 1}, "in_features"

    def parameters_with_parts(self):
        """Return {"bias": bias} if each rank sees only a part of the tokens, else {}."""
        parts = isinstance(self.target, Shard) and self.bias is not None
        return {"bias": self.bias} if parts else {}

    def forward(self, x):
        summand = F.linear(self.axis.move(x, self.source, Shard(-1)), self.weight)
        y = self.redistribute(summand, Partial())
        if self.bias is None:
            return y
        bias = with_sums(self).get("bias", self.bias)
        return y + bias.to(y.dtype)  # as a linear layer does under autocast


class ColumnEmbedding(SplitLayer, nn.Embedding):
    """An embedding with a part of the channels. forward: [...] int -> [..., width / n]."""

    cuts, shared = {"weight": 1}, "embedding_dim"

    def forward(self, tokens):
        return self.redistribute(super().forward(tokens), Shard(-1))


class RowEmbedding(SplitLayer, nn.Embedding):
    """An embedding with a part of the vocabulary. forward: [...] int -> [..., width], summed."""

    cuts, shared, padded = {"weight": 0}, "num_embeddings", True

    def forward(self, tokens):
        words = len(self.weight)
        inside = (tokens >= 0) & (tokens < self.num_embeddings)
        assert_async(
            inside.all(), f"token out of range: the vocabulary has {self.num_embeddings} entries"
        )
        own = tokens - self.axis.rank * words
        others = (own < 0) | (own >= words)
        pad = -1 if self.padding_idx is None else self.padding_idx - self.axis.rank * words
        pad = pad if 0 <= pad < words else None  # its own rank gives it no gradient
        rows = F.embedding(own.masked_fill(others, 0), self.weight, pad)
        return self.redistribute(rows.masked_fill(others.unsqueeze(-1), 0.0), Partial())
