"""Linear layers and embeddings of which each rank holds a part: rows or columns of the matrix.

    y = x W^T + b       column-parallel                     row-parallel
                        rank 0  x [rows 0-1 of W] + b01     x01 [W: inputs 0-1]  \\
                        rank 1  x [rows 2-3 of W] + b23     x23 [W: inputs 2-3]  / sum, then + b
    y = E[tokens]       [channels 0-1 of E]                 [words 0-1 of E], zero for other words

5 words on 2 ranks are 3 each: the last row is zero, no token finds it, and its logit is -inf, so it
gets no gradient, counts in no norm, and stays zero.

The paper multiplies x A: columns of A are rows of PyTorch's weight. A layer becomes one of these
in place, by its class: whoever refers to it has the split one. Its sizes stay those of the whole.
"""

import torch
from torch import nn
from torch.nn import functional as F

from labkit.tensor_parallel.placements import Partial, Replicate, Shard, Shared
from labkit.tensor_parallel.tp_state_dict import whole_parameters


class SplitLayer:
    """axis: an Axis. source, target: layouts of input and output.

    cuts: {parameter's name: dim along which it is cut}. shared: which size the ranks share. padded:
    whether that need not be a multiple of them.
    """

    padded = False

    def reset_parameters(self):
        """Draw what one process draws for the whole layer, and keep this rank's slice."""
        with whole_parameters(self):
            super().reset_parameters()

    def apply(self, fn):
        """As of nn.Module; fn sees whole parameters, see whole_parameters."""
        with whole_parameters(self):
            return super().apply(fn)

    def hand_on(self, y, layout):
        """The output, as wanted; and who draws the random numbers of what comes next."""
        y = self.axis.move(y, layout, self.target)
        if self.training:
            draws = self.axis.draws
            draws.own(y.device) if isinstance(self.target, Shard) else draws.alike()
        return y


class ColumnLinear(SplitLayer, nn.Linear):
    """Some of the outputs, of all inputs. forward: [..., in] -> [..., out / n]."""

    cuts, shared = {"weight": 0, "bias": 0}, "out_features"

    def forward(self, x):
        return self.hand_on(super().forward(self.axis.shared(x, self.source)), Shard(-1))


class PaddedColumnLinear(ColumnLinear):
    """Some of the logits, -inf behind the last. forward: [..., in] -> [..., out / n, or more]."""

    padded = True

    def forward(self, x):
        logits, own = super().forward(x), len(self.weight)
        self.axis.draws.alike()  # nobody draws behind them, and no row-parallel layer will say so
        if own * self.axis.size == self.out_features:
            return logits
        if self.target == Replicate():
            return logits[..., : self.out_features]
        words = torch.arange(own, device=logits.device) + self.axis.rank * own
        return logits.masked_fill(words >= self.out_features, -torch.inf)


class RowLinear(SplitLayer, nn.Linear):
    """A summand of all outputs, of some inputs. forward: [..., in / n] -> [..., out]."""

    cuts, shared = {"weight": 1}, "in_features"

    def forward(self, x):
        summand = F.linear(self.axis.move(x, self.source, Shard(-1)), self.weight)
        y = self.hand_on(summand, Partial())
        if self.bias is None:
            return y
        # of shards of the sequence each rank sees a part of what the bias does
        parts = isinstance(self.target, Shard)
        bias = self.axis.move(self.bias, Replicate(), Shared()) if parts else self.bias
        return y + bias.to(y.dtype)  # under autocast as a linear layer's


class ColumnEmbedding(SplitLayer, nn.Embedding):
    """Some channels of every word. forward: [...] int -> [..., width / n]."""

    cuts, shared = {"weight": 1}, "embedding_dim"

    def forward(self, tokens):
        return self.hand_on(super().forward(tokens), Shard(-1))


class RowEmbedding(SplitLayer, nn.Embedding):
    """Some words, zero for the others. forward: [...] int -> [..., width], a summand."""

    cuts, shared, padded = {"weight": 0}, "num_embeddings", True

    def forward(self, tokens):
        words = len(self.weight)
        inside = (tokens >= 0) & (tokens < self.num_embeddings)
        torch._assert_async(inside.all(), f"a token is not one of {self.num_embeddings} words")
        own = tokens - self.axis.rank * words
        others = (own < 0) | (own >= words)
        pad = -1 if self.padding_idx is None else self.padding_idx - self.axis.rank * words
        pad = pad if 0 <= pad < words else None  # the rank that has its row gives it no gradient
        found = F.embedding(own.masked_fill(others, 0), self.weight, pad)
        return self.hand_on(found.masked_fill(others.unsqueeze(-1), 0.0), Partial())
