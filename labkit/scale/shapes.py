"""The shape of a transformer: parameters, FLOPs and activation bytes from its configuration.

    one layer:   x - norm - [ Q K V ] - attention - [ out ] - + - norm - [ network ] - +
                             h x (h + 2 h_kv)         h x h            2 or 3 matrices h x ffn

    parameters of a layer     2 h^2 + 2 h h_kv + (2 or 3) h ffn x experts     ~ 12 h^2 of a GPT
    FLOPs forward, a token    2 x the weights it meets + 2 s h: the unmasked half of attention
    kept for the backward     the input of every product, norm and nonlinearity: ~ 34 h of a GPT

A gated network (LLaMA's SwiGLU) has three matrices, a plain one two. Each token is routed to
`top_k` of the `experts`, and passes through the shared experts, too. If layers differ (dense layers
before those with experts, windows in some layers), a layer's figures are the mean over all layers.
Kaplan et al., Scaling Laws for Neural Language Models, 2020, section 2.1; Korthikanti et al.,
Reducing Activation Recomputation in Large Transformer Models, MLSys 2023, section 4.1 (activations;
there with dropout and without fused attention); Shazeer, GLU Variants Improve Transformer, 2020;
DeepSeek-AI, DeepSeek-V2, 2024, section 2.1 (multi-head latent attention) and 2.2 (shared experts).
"""

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: queries, keys and values come from narrow vectors.

    queries: width of the queries' vector; 0: queries come from the input. keys: width of the
    vector of keys and values. plain, rotated: the two parts of a head's query and key; the rotated
    part of the key is shared by all heads. value: width of a head's value.
    """

    queries: int
    keys: int
    plain: int
    rotated: int
    value: int

    def weights(self, hidden, heads):
        """Return the weights of the attention of a layer, without norms."""
        query = heads * (self.plain + self.rotated)
        asked = self.queries * (hidden + query) if self.queries else hidden * query
        narrow = hidden * (self.keys + self.rotated)
        wide = self.keys * heads * (self.plain + self.value)
        return asked + narrow + wide + heads * self.value * hidden

    def sides(self, hidden, heads):
        """Return the sum of both sides of the matrices of a layer's attention."""
        query = heads * (self.plain + self.rotated)
        asked = hidden + 2 * self.queries + query if self.queries else hidden + query
        narrow = hidden + self.keys + self.rotated
        wide = self.keys + heads * (self.plain + self.value)
        return asked + narrow + wide + heads * self.value + hidden


@dataclass(frozen=True)
class Shape:
    """The numbers of a decoder's configuration.

    kv_heads: heads of keys and values, fewer than heads in grouped-query attention.
    gated: three matrices in a network, not two. tied: the output layer is the embedding.
    positions: the number of learned position embeddings. biases: in linear layers and norms.
    ffn: width of a network; with experts, of one expert. head_dim: width of a head; 0: hidden /
    heads. window: keys that a token attends to, in windowed_layers of the layers. latent: a Latent,
    or None. shared_ffn: width of all shared experts together. dense_layers: the layers that have
    one network, of width dense_ffn, instead of experts. norms: of a layer. qkv_biases: only there.
    qk_norms: norms of each head's query and key. vision: an ImageEncoder of vit_shapes.py, or None;
    images: that pass through it, of each sequence.
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
    head_dim: int = 0
    window: int = 0
    windowed_layers: int = 0
    latent: Latent | None = None
    shared_ffn: int = 0
    dense_layers: int = 0
    dense_ffn: int = 0
    norms: int = 2
    qkv_biases: bool = False
    qk_norms: bool = False
    vision: object = None
    images: int = 1

    def __post_init__(self):
        for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "experts", "top_k"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        whole = self.head_dim or self.latent or self.hidden % self.heads == 0
        if not whole or self.heads % self.kv_heads:
            raise ValueError(
                f"heads must divide hidden and kv_heads must divide heads, got hidden="
                f"{self.hidden}, heads={self.heads}, kv_heads={self.kv_heads}"
            )
        if self.top_k > self.experts:
            raise ValueError(f"top_k={self.top_k} must be at most experts={self.experts}")
        for name in ("dense_layers", "windowed_layers"):
            if not 0 <= getattr(self, name) <= self.layers:
                raise ValueError(f"{name} must be 0 to {self.layers}, got {getattr(self, name)}")

    @cached_property
    def query_width(self):
        """Width of the queries of all heads."""
        if self.latent:
            return self.heads * (self.latent.plain + self.latent.rotated)
        return self.heads * (self.head_dim or self.hidden // self.heads)

    @cached_property
    def value_width(self):
        """Width of the output of attention, before the last matrix."""
        return self.heads * self.latent.value if self.latent else self.query_width

    @cached_property
    def key_width(self):
        """Width of the keys and of the values, the mean of both."""
        if self.latent:
            return (self.query_width + self.value_width) // 2
        return self.query_width * self.kv_heads // self.heads

    @cached_property
    def attention_weights(self):
        if self.latent:
            return self.latent.weights(self.hidden, self.heads)
        return 2 * self.hidden * (self.query_width + self.key_width)

    @cached_property
    def matrices(self):
        """The number of matrices in a network."""
        return 3 if self.gated else 2

    def mean(self, sparse, dense):
        """Return the mean over the layers of a figure of those with experts and of dense ones."""
        if not self.dense_layers:
            return sparse
        total = (self.layers - self.dense_layers) * sparse + self.dense_layers * dense
        return total / self.layers

    @cached_property
    def network_weights(self):
        """Weights of one network, or of one expert if there are several."""
        return self.matrices * self.hidden * self.ffn

    @cached_property
    def expert_weights(self):
        """Weights of all experts of a layer, without shared ones; 0 without experts."""
        return self.mean(self.experts * self.network_weights if self.experts > 1 else 0, 0)

    @cached_property
    def met_width(self):
        """Width of all networks that a token passes through in a layer."""
        return self.mean(self.top_k * self.ffn + self.shared_ffn, self.dense_ffn)

    @cached_property
    def layer_products(self):
        """Weights that one token is multiplied with in a layer, with the router."""
        router = self.mean(self.hidden * self.experts if self.experts > 1 else 0, 0)
        return self.attention_weights + self.matrices * self.hidden * self.met_width + router

    @cached_property
    def layer_parameters(self):
        """Parameters of a layer: with all experts, norms and biases."""
        idle = self.mean((self.experts - self.top_k) * self.network_weights, 0)
        inner = self.ffn * (2 if self.gated else 1) + self.hidden
        biases = self.biases * (2 * self.hidden + 2 * self.key_width + self.experts * inner)
        biases += self.qkv_biases * (self.query_width + 2 * self.key_width)
        return self.layer_products + idle + self.norm_parameters + biases

    @cached_property
    def norm_parameters(self):
        """Parameters of the norms of a layer."""
        found = self.norms * self.hidden * (1 + self.biases)
        if self.latent:
            found += self.latent.queries + self.latent.keys
        return found + self.qk_norms * 2 * self.query_width // self.heads

    @cached_property
    def embedding_parameters(self):
        return self.vocab * self.hidden

    @cached_property
    def input_parameters(self):
        """Parameters of the input layers without the word embedding, with those of an encoder."""
        return self.positions * self.hidden + self.vision_parameters

    @cached_property
    def vision_parameters(self):
        """Parameters of the image encoder and its projector; 0 without one."""
        return self.vision.parameters + self.vision.projector if self.vision else 0

    @cached_property
    def divided_by_tp(self):
        """{name: count} of what the ranks of tp must divide."""
        names = ("heads", "kv_heads", "ffn")
        found = {name: getattr(self, name) for name in names}
        encoder = self.vision.divided_by_tp if self.vision else {}
        return found | {f"vision_{name}": count for name, count in encoder.items()}

    @cached_property
    def head_parameters(self):
        """Parameters of the head without the matrix of the output layer and the norm."""
        return 0

    @cached_property
    def own_head(self):
        """Parameters of the head alone: without the output matrix if it is the embedding."""
        return self.head_parameters + (0 if self.tied else self.embedding_parameters)

    @cached_property
    def head_weights(self):
        """Weights that one token is multiplied with in the head."""
        return self.embedding_parameters

    @cached_property
    def parameters(self):
        """All parameters; a tied matrix counts once."""
        ends = (1 if self.tied else 2) * self.embedding_parameters + self.input_parameters
        return round(self.layers * self.layer_parameters) + ends + self.hidden * (1 + self.biases)

    @cached_property
    def active_parameters(self):
        """The parameters that one token meets: all but the experts it is not routed to."""
        idle = self.mean((self.experts - self.top_k) * self.network_weights, 0)
        return self.parameters - round(self.layers * idle)

    def adapters(self, rank):
        """Return (parameters, of which in experts) of a layer's LoRA adapters: on all matrices.

        A matrix h x f gets A, h x rank, and B, rank x f. The output layer and the router get none.
        Hu et al., LoRA, ICLR 2022, section 4.1.
        """
        sides = 4 * self.hidden + 2 * self.query_width + 2 * self.key_width  # q, k, v, output
        if self.latent:
            sides = self.latent.sides(self.hidden, self.heads)
        network = self.matrices * (self.hidden + self.ffn)
        experts = self.mean(self.experts * network if self.experts > 1 else 0, 0)
        dense = self.matrices * (self.hidden + (self.dense_ffn or self.ffn))
        shared = self.matrices * (self.hidden + self.shared_ffn) if self.shared_ffn else 0
        dense = self.mean(shared if self.experts > 1 else dense, dense)
        return rank * (sides + dense + experts), rank * experts

    def keys_met(self, context):
        """Return the number of keys that a token attends to, the mean over tokens and layers."""
        if not self.window:
            return context / 2
        width = min(self.window, context)
        windowed = width - width**2 / (2 * context)  # the first tokens have fewer before them
        return context / 2 + (windowed - context / 2) * self.windowed_layers / self.layers

    def attention_flops(self, context):
        """Forward FLOPs of attention per token and layer, without what the mask hides."""
        return 2 * (self.query_width + self.value_width) * self.keys_met(context)

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
        attention = 2 * self.hidden + self.query_width + self.value_width + 2 * self.key_width
        if self.latent:  # the narrow vectors, before and after their norms
            attention += 2 * (self.latent.queries + self.latent.keys)
        network = 2 * self.hidden + (4 if self.gated else 2) * self.met_width
        return width * (attention + network)

    def moved_bytes(self, width=2):
        """Return the bytes per token that norms, sums and nonlinearities move in a layer's forward.

        Each reads its inputs and writes its output once: two norms, two sums, GELU or SiLU with a
        product. Their backward moves twice as much, because it also reads the saved tensors.
        """
        norms, sums = 2 * 2 * self.hidden, 2 * 3 * self.hidden
        return width * (norms + sums + (5 if self.gated else 2) * self.met_width)
