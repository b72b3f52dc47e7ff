"""A GPT: embeddings, blocks of causal attention and a two-layer network, tied output embedding.

    tokens - E + position - | x + attention(norm(x)) ; x + network(norm(x)) | - norm - E^T - logits
             ^                         one block, layers times                         ^
             |________________________ tied: the same matrix __________________________|

Parameters: 12 x layers x width^2 in the blocks' matrices, plus (vocab + context) x width.
Multiply-adds of a forward, per token: the blocks' matrices + 2 x layers x context x width
(attention) + vocab x width.
Vaswani et al., Attention Is All You Need, NeurIPS 2017, section 3; Radford et al., Language Models
are Unsupervised Multitask Learners, 2019, section 2.3 (norms first, scaled initialisation); Press
and Wolf, EACL 2017 (tied embeddings).
"""

import math

import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Causal self-attention. forward: [B, T, C] -> [B, T, C]; position t sees positions 0 to t.

    attend: the attention function, with F.scaled_dot_product_attention's arguments.
    """

    attend = staticmethod(F.scaled_dot_product_attention)

    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x):
        B, T, C = x.shape
        # heads first, so that a slice of rows has complete heads: [B, T, heads, 3, C / heads]
        heads = self.query_key_value(x).view(B, T, -1, 3, C // self.heads)
        query, key, value = heads.permute(3, 0, 2, 1, 4)  # each [B, heads, T, C / heads]
        dropout = self.dropout if self.training else 0.0
        mixed = self.attend(query, key, value, dropout_p=dropout, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(B, T, -1)
        return F.dropout(self.output(mixed), self.dropout, self.training)


class Network(nn.Sequential):
    """Two layers with a hidden width of 4 C. forward: [..., C] -> [..., C]."""

    def __init__(self, width, dropout=0.0):
        inner = nn.Linear(width, 4 * width)
        output = nn.Linear(4 * width, width)
        super().__init__(inner, nn.GELU(), output, nn.Dropout(dropout))


class Block(nn.Module):
    """Attention, then a network, each added to its input [B, T, C]."""

    def __init__(self, width, heads, dropout=0.0, network=Network):
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.network_norm = nn.LayerNorm(width)
        self.network = network(width, dropout)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.network(self.network_norm(x))


class GPT(nn.Module):
    """`layers` blocks of `heads` heads and `width` channels, for `vocab` tokens.

    context: the largest number of positions.
    tied: the output layer *is* the token embedding: one parameter, whose gradient is the sum over
        both uses.
    network: a function (width, dropout) that makes a block's network, such as a mixture of experts.
    forward: tokens [B, T] int64 -> logits [B, T, vocab].
        positions: [T] int64, the tokens' positions in their sequence; None: 0 to T - 1.
    Raises ValueError if `heads` does not divide `width`, and in forward if T > context.
    """

    def __init__(
        self,
        vocab=256,
        context=64,
        layers=4,
        heads=4,
        width=128,
        dropout=0.0,
        tied=True,
        network=Network,
    ):
        super().__init__()
        if width % heads:
            raise ValueError(f"width={width} must be divisible by heads={heads}")
        self.context = context
        self.dropout = dropout
        self.token_embedding = nn.Embedding(vocab, width)
        self.position_embedding = nn.Embedding(context, width)
        blocks = [Block(width, heads, dropout, network) for _ in range(layers)]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.initialise(layers)
        if tied:
            self.head.weight = self.token_embedding.weight

    def initialise(self, layers):
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for block in self.blocks:  # 2 x layers terms are added, so smaller ones keep the sum's size
            nn.init.normal_(block.attention.output.weight, std=0.02 / math.sqrt(2 * layers))
            for network in block.modules():
                if isinstance(network, Network):
                    nn.init.normal_(network[2].weight, std=0.02 / math.sqrt(2 * layers))

    def forward(self, tokens, positions=None):  # [B, T]
        return self.read_out(self.blocks(self.embed(tokens, positions)))  # [B, T, vocab]

    def embed(self, tokens, positions=None):  # [B, T] -> [B, T, C]
        T = tokens.shape[1]
        if self.context < T:
            raise ValueError(f"{T} tokens exceed the model's context of {self.context}")
        if positions is None:
            positions = torch.arange(T, device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        return F.dropout(x, self.dropout, self.training)

    def read_out(self, x):  # [B, T, C] -> [B, T, vocab]
        return self.head(self.norm(x))


class Stage(nn.Module):
    """Some blocks of a GPT, for a pipeline; the first stage has the embeddings, the last the head.

    blocks: a range of block numbers. Parameters are those of `gpt`, with the same names.
    forward: [B, T, C] -> [B, T, C]; the first stage takes tokens, the last returns logits.
    """

    embed, read_out = GPT.embed, GPT.read_out

    def __init__(self, gpt, blocks):
        super().__init__()
        self.context = gpt.context
        self.dropout = gpt.dropout
        self.first = blocks.start == 0
        self.last = blocks.stop == len(gpt.blocks)
        if self.first:
            self.token_embedding = gpt.token_embedding
            self.position_embedding = gpt.position_embedding
        self.blocks = nn.ModuleDict({str(number): gpt.blocks[number] for number in blocks})
        if self.last:
            self.norm = gpt.norm
            self.head = gpt.head

    def forward(self, x, positions=None):
        if self.first:
            x = self.embed(x, positions)
        for block in self.blocks.values():
            x = block(x)
        return self.read_out(x) if self.last else x
