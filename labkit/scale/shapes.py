"""The shape of a transformer: parameters, FLOPs and activation bytes from its configuration.

    one layer:   x - norm - [ Q K V ] - attention - [ out ] - + - norm - [ network ] - +
                             h x (h + 2 h_kv)         h x h            2 or 3 matrices h x ffn

    parameters of a layer     2 h^2 + 2 h h_kv + (2 or 3) h ffn x experts     ~ 12 h^2 of a GPT
    FLOPs forward, a token    2 x the weights it meets + 2 s h: the unmasked half of attention
    kept for the backward     the input of every product, norm and nonlinearity: ~ 34 h of a GPT

A gated network (LLaMA's SwiGLU) has three matrices, a plain one two. Each token is routed to
`top_k` of the `experts`. Kaplan et al., Scaling Laws for Neural Language Models, 2020, section 2.1;
Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, MLSys 2023,
section 4.1 (activations; there with dropout and without fused attention); Shazeer, GLU Variants
Improve Transformer, 2020.
"""

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Shape:
    """The numbers of a decoder's configuration; every network has the width `ffn`.

    kv_heads: heads of keys and values, fewer than heads in grouped-query attention.
    gated: three matrices in a network, not two. tied: the output layer is the embedding.
    positions: the number of learned position embeddings. biases: in linear layers and norms.
    Raises ValueError if a number is not positive or the heads do not divide.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    gated: bool = True
    tied: bool = False
    positions: int = 0
    biases: bool = False
    experts: int = 1
    top_k: int = 1

    def __post_init__(self):
        for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "experts", "top_k"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.hidden % self.heads or self.heads % self.kv_heads:
            raise ValueError(
                f"heads must divide hidden and kv_heads must divide heads, got hidden="
                f"{self.hidden}, heads={self.heads}, kv_heads={self.kv_heads}"
            )
        if self.top_k > self.experts:
            raise ValueError(f"top_k={self.top_k} must be at most experts={self.experts}")

    @cached_property
    def key_width(self):
        """Width of the keys and of the values."""
        return self.hidden * self.kv_heads // self.heads

    @cached_property
    def attention_weights(self):
        return 2 * self.hidden * (self.hidden + self.key_width)

    @cached_property
    def network_weights(self):
        """Weights of one network, or of one expert if there are several."""
        return (3 if self.gated else 2) * self.hidden * self.ffn

    @cached_property
    def expert_weights(self):
        """Weights of all experts of a layer; 0 if there is only one network."""
        return self.experts * self.network_weights if self.experts > 1 else 0

    @cached_property
    def layer_products(self):
        """Weights that one token is multiplied with in a layer, with the router."""
        router = self.hidden * self.experts if self.experts > 1 else 0
        return self.attention_weights + self.top_k * self.network_weights + router

    @cached_property
    def layer_parameters(self):
        """Parameters of a layer: with all experts, norms and biases."""
        idle = (self.experts - self.top_k) * self.network_weights
        norms = 2 * self.hidden * (1 + self.biases)
        inner = self.ffn * (2 if self.gated else 1) + self.hidden
        biases = self.biases * (2 * self.hidden + 2 * self.key_width + self.experts * inner)
        return self.layer_products + idle + norms + biases

    @cached_property
    def embedding_parameters(self):
        return self.vocab * self.hidden

    @cached_property
    def input_parameters(self):
        """Parameters of the input layers without the word embedding."""
        return self.positions * self.hidden

    @cached_property
    def head_parameters(self):
        """Parameters of the head without the matrix of the output layer and the norm."""
        return 0

    @cached_property
    def head_weights(self):
        """Weights that one token is multiplied with in the head."""
        return self.embedding_parameters

    @cached_property
    def parameters(self):
        """All parameters; a tied matrix counts once."""
        ends = (1 if self.tied else 2) * self.embedding_parameters + self.input_parameters
        return self.layers * self.layer_parameters + ends + self.hidden * (1 + self.biases)

    def attention_flops(self, context):
        """Forward FLOPs of attention per token and layer, without the masked half."""
        return 2 * context * self.hidden

    def forward_flops(self, context):
        """Forward FLOPs per token of the whole model, without the masked half of attention."""
        layer = 2 * self.layer_products + self.attention_flops(context)
        return self.layers * layer + 2 * self.embedding_parameters

    def saved_bytes(self, width=2):
        """Return the bytes per token that a layer keeps for its backward. width: bytes per element.

        This assumes fused attention (no scores) and no dropout. Norms and linear layers keep their
        input. Attention keeps queries, keys, values and its output (the next layer's input). GELU
        keeps its input. A gate keeps its input, its output and the factor that it multiplies.
        """
        attention = 4 * self.hidden + 2 * self.key_width
        network = 2 * self.hidden + (4 if self.gated else 2) * self.ffn * self.top_k
        return width * (attention + network)

    def moved_bytes(self, width=2):
        """Return the bytes per token that norms, sums and nonlinearities move in a layer's forward.

        Each reads its inputs and writes its output once: two norms, two sums, GELU or SiLU with a
        product. Their backward moves twice as much, because it also reads the saved tensors.
        """
        norms, sums = 2 * 2 * self.hidden, 2 * 3 * self.hidden
        return width * (norms + sums + (5 if self.gated else 2) * self.ffn * self.top_k)
