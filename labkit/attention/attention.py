"""Attention tile by tile, without ever storing the full matrix of scores (tokens x tokens).

                 keys  [tile 0][tile 1][tile 2]     a tile of scores: computed, used, discarded
    queries [tile 0]      *                         * causal: half of the tiles are never computed
            [tile 1]      *       *                 state of a query from tile to tile:
            [tile 2]      *       *       *         the largest score, the sum, the output so far

A softmax needs the sum over all keys, which can be computed incrementally: when a larger score
appears, the sum so far is scaled by exp(old largest - new largest). Backward computes each tile
again from queries and keys, and divides by the sum that forward saved.

Held for backward: query, key, value, output, and one number a query; plain attention holds tokens x
tokens a head. Multiply-adds: as before, and the scores once more in backward. Sent: nothing.
Milakov and Gimelshein, Online normalizer calculation for softmax, 2018; Dao et al.,
FlashAttention, NeurIPS 2022, section 3.1; Dao, FlashAttention-2, ICLR 2024, section 3.1.
"""

import torch
from torch.autograd.function import once_differentiable

from labkit.attention.tiles import TILE, Tiles, by_key_head, checked_key_mask


def flash_attention(
    query,
    key,
    value,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    tile=TILE,
    window=None,
    key_mask=None,
):
    """Compute F.scaled_dot_product_attention without an arbitrary attn_mask.

    query: [..., H, T, d]; key, value: [..., G, S, d]: each key head serves H / G query heads.
    Returns [..., H, T, d]. is_causal: query t sees keys 0 to t. tile: a larger tile takes more
    memory and less time. Low precisions are multiplied and summed in fp32. Autocast applies as for
    PyTorch's function.
    window: with is_causal, query t sees only keys t - window + 1 to t (sliding_window of Mistral,
    arXiv:2310.06825, section 2; flash-attn's window_size = (window - 1, 0)). Tiles outside are not
    computed: about T (window + tile) scores a head instead of T^2 / 2.
    key_mask: [..., S] bool, True for a real token (nn.MultiheadAttention's key_padding_mask has
    True for padding). Padding is hidden, not skipped. A query that sees no key has an output of 0
    and adds 0 to every gradient.
    Not supported: windows on both sides of the query, masks per query, packed sequences (varlen).
    Raises ValueError for invalid shapes, dtypes, masks, windows, tiles and dropout_p.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    by_head = by_key_head(query, key, value)
    mask = checked_key_mask(key_mask, key)
    seed = torch.randint(2**31, ()).item() if dropout_p else 0
    tiles = Tiles(is_causal, scale, tile, dropout_p, seed, window=window, key_mask=mask)
    return FlashAttention.apply(*by_head, tiles).flatten(-4, -3)


class FlashAttention(torch.autograd.Function):
    """Tiled attention. forward: (query, key, value, Tiles) -> output. Saves log-sum-exp, too."""

    @staticmethod
    def forward(ctx, query, key, value, tiles):
        output, log_sum = tiles.forward(query, key, value)
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, log_sum)
        ctx.tiles = tiles
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        query, key, value, output, log_sum = ctx.saved_tensors
        within = (gradient.to(log_sum.dtype) * output).sum(-1, keepdim=True)
        return *ctx.tiles.backward(gradient, query, key, value, log_sum, within), None
