"""The shape of a BERT encoder: layers without a causal mask, other input and output layers.

    word + position + type - norm - [ attention - + - norm - network - + - norm ] x layers -+
                                                                                            |
              masked words:  h x h - GELU - norm - the embedding again, and a bias  <-------+
              pooler:        first token of the sequence - h x h - tanh             <-------+

    parameters     layers x 12 h^2  +  (vocab + positions + types) h  [+ h^2]  [+ h^2]
    FLOPs forward  a token attends to all s tokens: 4 s h a layer; with a causal mask it is 2 s h
    kept           post-norm instead of pre-norm: the same number of inputs, ~ 34 h

BERT-base has 109,482,240 parameters and BERT-large 335,141,888, with the pooler and without the
head for masked words. Dropout masks are not counted, as in shapes.py. All words pass through the
head, not only the masked ones.
Devlin et al., BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding,
NAACL 2019, section 3 and appendix A.2; Vaswani et al., Attention Is All You Need, 2017, section 3.
"""

from dataclasses import dataclass
from functools import cached_property

from labkit.scale.shapes import Shape


@dataclass(frozen=True)
class Encoder(Shape):
    """The numbers of an encoder's configuration. The defaults are those of BERT-base.

    positions, types: rows of the learned embeddings of position and of token type. pooler: whether
    the model has one. masked_words: whether it has the head for masked words, which training needs.
    tied: that head's matrix is the embedding.
    Raises ValueError if a number is not positive or the heads do not divide.
    """

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    kv_heads: int = 12
    ffn: int = 3072
    vocab: int = 30522
    gated: bool = False
    tied: bool = True
    positions: int = 512
    biases: bool = True
    types: int = 2
    pooler: bool = True
    masked_words: bool = False

    def __post_init__(self):
        super().__post_init__()
        for name in ("positions", "types"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @cached_property
    def input_parameters(self):
        """Parameters of the input layers without the word embedding."""
        return (self.positions + self.types + 1 + self.biases) * self.hidden

    @cached_property
    def head_parameters(self):
        """Parameters of pooler and head without the matrix of the output layer."""
        square, norm = self.hidden * (self.hidden + 1), self.hidden * (1 + self.biases)
        return self.pooler * square + self.masked_words * (square + norm + self.vocab)

    @cached_property
    def head_weights(self):
        """Weights that one token is multiplied with in the head, without the pooler."""
        return self.masked_words * (self.hidden**2 + self.embedding_parameters)

    @cached_property
    def parameters(self):
        """All parameters; a tied matrix counts once."""
        matrices = 1 + (self.masked_words and not self.tied)
        ends = matrices * self.embedding_parameters + self.input_parameters + self.head_parameters
        return self.layers * self.layer_parameters + ends

    def keys_met(self, context):
        """Return the number of keys that a token attends to: all, as there is no mask."""
        return context

    def forward_flops(self, context):
        """Forward FLOPs per token of the whole model; the pooler uses one token a sequence."""
        layer = 2 * self.layer_products + self.attention_flops(context)
        pooler = self.pooler * 2 * self.hidden**2 / context
        return self.layers * layer + pooler + 2 * self.head_weights


BERT_BASE = Encoder()
BERT_LARGE = Encoder(layers=24, hidden=1024, heads=16, kv_heads=16, ffn=4096)
