"""An encoder's shape is compared with PyTorch's own layers, the memory planner and BERT's known counts."""

from dataclasses import replace

import pytest
import torch
from autograd_bytes import kept_bytes
from torch import nn
from torch.nn import functional as F

from labkit.measure.flops import step_flops
from labkit.memory import estimate
from labkit.scale.bert_shapes import BERT_BASE, BERT_LARGE, Encoder

B, T = 2, 32
SMALL = Encoder(layers=2, hidden=64, heads=4, kv_heads=4, ffn=160, vocab=96, positions=T)
HEADS = [{}, {"pooler": False}, {"masked_words": True}, {"masked_words": True, "pooler": False, "tied": False}]


def layer_of(shape):
    """PyTorch's own, with the norms behind the sums."""
    return nn.TransformerEncoderLayer(
        shape.hidden, shape.heads, shape.ffn, dropout=0.0, activation=F.gelu, batch_first=True
    )


class Bert(nn.Module):
    """BERT of a shape: forward gives the words' logits or hidden states, and what is pooled."""

    def __init__(self, shape):
        super().__init__()
        h = shape.hidden
        rows = (shape.vocab, shape.positions, shape.types)
        self.embeddings = nn.ModuleList(nn.Embedding(count, h) for count in rows)
        self.norm = nn.LayerNorm(h)
        self.layers = nn.Sequential(*(layer_of(shape) for _ in range(shape.layers)))
        self.pooler = nn.Linear(h, h) if shape.pooler else None
        self.head = None
        if shape.masked_words:
            decoder = nn.Linear(h, shape.vocab)
            decoder.weight = self.embeddings[0].weight if shape.tied else decoder.weight
            self.head = nn.Sequential(nn.Linear(h, h), nn.GELU(), nn.LayerNorm(h), decoder)

    def forward(self, words):
        places = torch.arange(words.shape[1], device=words.device).expand_as(words)
        given = (words, places, torch.zeros_like(words))
        x = self.norm(sum(embedding(ids) for embedding, ids in zip(self.embeddings, given, strict=True)))
        x = self.layers(x)
        pooled = torch.tanh(self.pooler(x[:, 0])) if self.pooler else x[:, 0]
        return self.head(x) if self.head else x, pooled


def all_of_it(output, target=None):
    words, pooled = output
    return words.sum() + pooled.sum()


def counted(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("heads", HEADS, ids=["bare", "no pooler", "words", "words alone"])
def test_parameters_and_flops_are_those_of_the_module(heads):
    shape = replace(SMALL, **heads)
    with torch.device("meta"):
        module = Bert(shape)
        words = torch.zeros(B, T, dtype=torch.int64)
    assert shape.parameters == counted(module)
    assert step_flops(module, words, words, all_of_it) == 3 * B * T * shape.forward_flops(T)


def test_the_known_counts_of_bert():
    assert (BERT_BASE.parameters, BERT_LARGE.parameters) == (109_482_240, 335_141_888)
    assert replace(BERT_BASE, masked_words=True, pooler=False).parameters == 109_514_298
    assert replace(BERT_BASE, masked_words=True).parameters == 110_104_890
    with torch.device("meta"):
        assert counted(Bert(BERT_BASE)) == BERT_BASE.parameters


STATISTICS = 4 * (4 + SMALL.heads)  # bytes a token: mean and deviation of two norms, a sum per head


def test_a_layer_keeps_the_bytes_that_are_counted():
    x = torch.randn(B, T, SMALL.hidden, requires_grad=True)
    assert kept_bytes(layer_of(SMALL), x) == B * T * (SMALL.saved_bytes(width=4) + STATISTICS)


def test_a_layer_more_is_what_the_budget_says():
    def most(shape):
        with torch.device("meta"):
            module, words = Bert(shape), torch.zeros(B, T, dtype=torch.int64)
        found = estimate(module, words, all_of_it, device="cpu")
        assert found.held["parameters"] == 4 * shape.parameters
        return max(kinds["activations"] for _, kinds in found.samples)

    more = most(replace(SMALL, layers=3)) - most(SMALL)  # both have their peak early in the backward
    assert more == B * T * (SMALL.saved_bytes(width=4) + STATISTICS)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"types": 0}, "types must be at least 1, got 0"), ({"positions": -1}, "positions must be at least 1"),
     ({"hidden": 100}, "heads must divide hidden"), ({"vocab": 0}, "vocab must be at least 1")],
)  # fmt: skip
def test_an_impossible_encoder_is_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        Encoder(**wrong)
