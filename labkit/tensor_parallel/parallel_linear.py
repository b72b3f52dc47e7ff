"""Linear layers and embeddings whose matrix is sharded over ranks, by rows or by columns.

    y = x W^T + b       column-parallel                     row-parallel
                        rank 0  x [rows 0-1 of W] + b01     x01 [W: inputs 0-1]  \\
                        rank 1  x [rows 2-3 of W] + b23     x23 [W: inputs 2-3]  / sum, then + b
    y = E[tokens]       [channels 0-1 of E]                 [tokens 0-1 of E], zero for others

A vocabulary of 5 on 2 ranks has 3 rows on each. The last row is padding: it is zero, no token uses
it, and its logit is -inf, so it gets no gradient, adds nothing to a norm, and stays zero.

The paper multiplies x A: columns of A are rows of PyTorch's weight. A layer changes its class in
place, so every reference to it sees the sharded layer. Its sizes remain those of the full layer.
"""

import torch
from torch import nn
from torch.nn import functional as F

from labkit.tensor_parallel.grouped_sums import with_sums
from labkit.tensor_parallel.placements import Partial, Replicate, Shard
from labkit.tensor_parallel.tp_state_dict import whole_parameters
from labkit.torch_private import assert_async


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


class ColumnLinear(SplitLayer, nn.Linear):
    """A linear layer with a part of the outputs. forward: [..., in] -> [..., out / n]."""

    cuts, shared = {"weight": 0, "bias": 0}, "out_features"

    def forward(self, x):
        return self.redistribute(super().forward(self.axis.shared(x, self.source)), Shard(-1))


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
