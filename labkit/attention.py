"""Attention tile by tile: the matrix of all scores, tokens x tokens, is never there as a whole.

                 keys  [tile 0][tile 1][tile 2]     a tile of scores: made, used, thrown away
    queries [tile 0]      *                         * causal: half of the tiles are never made
            [tile 1]      *       *                 per query, kept from tile to tile:
            [tile 2]      *       *       *         the largest score, the sum, the output so far

A softmax needs the sum over all keys, but it can be had as one goes: when a larger score turns up,
what has been summed so far is scaled down by exp(old largest - new largest). Backward makes each
tile again from queries and keys, and divides by the sum that forward has kept.

Held for backward: query, key, value, output, and a number a query; plain attention holds tokens x
tokens a head. Multiply-adds: as before, and the scores once more in backward. Sent: nothing.
Milakov and Gimelshein, Online normalizer calculation for softmax, 2018; Dao et al.,
FlashAttention, NeurIPS 2022, section 3.1; Dao, FlashAttention-2, ICLR 2024, section 3.1.
"""

from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable

TILE = 256  # queries, and keys: the tile of scores of one head is 256 KiB in fp32


def attend_in_tiles(query, key, value, tile):
    """The idea: softmax(query key^T / sqrt(d)) value, with one tile of keys at a time.

    query, key, value: [..., T, d].
    """
    largest = torch.full_like(query[..., :1], -torch.inf)
    total, output = torch.zeros_like(largest), torch.zeros_like(query)
    for keys, values in zip(key.split(tile, -2), value.split(tile, -2), strict=True):
        scores = query @ keys.mT * query.shape[-1] ** -0.5  # [..., T, tile]
        larger = torch.maximum(largest, scores.amax(-1, keepdim=True))
        shrunk, weights = torch.exp(largest - larger), torch.exp(scores - larger)
        total = total * shrunk + weights.sum(-1, keepdim=True)
        output = output * shrunk + weights @ values
        largest = larger
    return output / total


def flash_attention(query, key, value, dropout_p=0.0, is_causal=False, scale=None, tile=TILE):
    """Like F.scaled_dot_product_attention without a mask of one's own.

    query: [..., H, T, d]; key, value: [..., G, S, d]: each key head serves H / G query heads.
    Returns [..., H, T, d]. is_causal: query t sees keys 0 to t. tile: memory grows with it, time
    falls. Low precisions are summed up in fp32. Raises ValueError for shapes that do not fit.
    """
    H, G = query.shape[-3], key.shape[-3]
    if key.shape != (*query.shape[:-3], G, *key.shape[-2:-1], query.shape[-1]):
        raise ValueError(f"query {list(query.shape)} and key {list(key.shape)} do not fit")
    if value.shape[:-1] != key.shape[:-1]:
        raise ValueError(f"key {list(key.shape)} and value {list(value.shape)} do not fit")
    if G == 0 or H % G:
        raise ValueError(f"{G} key heads cannot serve {H} query heads: {H} is no multiple of {G}")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    seed = torch.randint(2**31, ()).item() if dropout_p else 0
    grouped = query.unflatten(-3, (G, H // G))  # [..., G, H / G, T, d]
    keys, values = key.unsqueeze(-3), value.unsqueeze(-3)
    tiles = Tiles(is_causal, scale, tile, dropout_p, seed)
    return FlashAttention.apply(grouped, keys, values, tiles).flatten(-4, -3)


class FlashAttention(torch.autograd.Function):
    """forward: (query, key, value, Tiles) -> output. Kept: these, and log-sum-exp of each query."""

    @staticmethod
    def forward(ctx, query, key, value, tiles):
        output, log_sum = tiles.forward(query, key, value)
        ctx.save_for_backward(query, key, value, output, log_sum)
        ctx.tiles = tiles
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        query, key, value, output, log_sum = ctx.saved_tensors
        within = (gradient * output).sum(-1, keepdim=True, dtype=log_sum.dtype)
        return *ctx.tiles.backward(gradient, query, key, value, log_sum, within), None


@dataclass(frozen=True)
class Tiles:
    """How the scores are cut, masked, and dropped: forward and backward over the same tiles.

    first_query, first_key: the positions that these queries and keys have in the sequence.
    """

    causal: bool = False
    scale: float = 1.0
    tile: int = TILE
    dropout_p: float = 0.0
    seed: int = 0
    first_query: int = 0
    first_key: int = 0

    def forward(self, query, key, value):
        """(output [..., T, d] of the query's dtype, log of the sum of exp(scores) [..., T, 1])."""
        output = query.new_empty((*query.shape[:-1], value.shape[-1]))
        exact = torch.promote_types(query.dtype, torch.float32)
        log_sum = torch.empty_like(query[..., :1], dtype=exact)
        for rows in cuts(query.shape[-2], self.tile):
            largest = torch.full_like(log_sum[..., rows, :], -torch.inf)
            total, summed = torch.zeros_like(largest), 0.0
            for columns in self.seen(rows, key.shape[-2]):
                scores = self.scores(query, key, rows, columns)
                larger = torch.maximum(largest, scores.amax(-1, keepdim=True))
                shrunk, weights = torch.exp(largest - larger), scores.sub_(larger).exp_()
                total = total * shrunk + weights.sum(-1, keepdim=True)
                kept = self.drop(weights, rows, columns).to(value.dtype)
                summed = summed * shrunk + kept @ value[..., columns, :]
                largest = larger
            output[..., rows, :] = summed / total
            log_sum[..., rows, :] = largest + total.log()
        return output, log_sum

    def backward(self, gradient, query, key, value, log_sum, within):
        """Gradients of query, key and value. within: per query, the sum of gradient x output."""
        exact, of = log_sum.dtype, (query, key, value)
        found = [torch.zeros(one.shape, dtype=exact, device=one.device) for one in of]
        for rows in cuts(query.shape[-2], self.tile):
            q, g = query[..., rows, :], gradient[..., rows, :]
            for columns in self.seen(rows, key.shape[-2]):
                k, v = key[..., columns, :], value[..., columns, :]
                weights = self.scores(query, key, rows, columns).sub_(log_sum[..., rows, :]).exp_()
                for_weights = self.drop((g @ v.mT).to(exact), rows, columns)
                for_scores = (for_weights - within[..., rows, :]) * weights * self.scale
                for_scores, kept = for_scores.to(q.dtype), self.drop(weights, rows, columns)
                found[0][..., rows, :] += for_scores @ k
                found[1][..., columns, :] += (for_scores.mT @ q).sum_to_size(k.shape)
                found[2][..., columns, :] += (kept.to(g.dtype).mT @ g).sum_to_size(v.shape)
        return [one.to(like.dtype) for one, like in zip(found, of, strict=True)]

    def seen(self, rows, keys):
        """The tiles of keys of which these queries see any."""
        last = self.first_query + rows.stop - self.first_key
        return cuts(min(last, keys) if self.causal else keys, self.tile)

    def scores(self, query, key, rows, columns):
        """A tile of them, [..., rows, columns]; those that a query does not see are -inf."""
        scores = query[..., rows, :] @ key[..., columns, :].mT
        scores = scores.to(torch.promote_types(query.dtype, torch.float32)).mul_(self.scale)
        query_at, key_at = self.first_query + rows.start, self.first_key + columns.start
        if self.causal and key_at + columns.stop - columns.start > query_at + 1:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
            scores.masked_fill_(later.triu(query_at - key_at + 1), -torch.inf)
        return scores

    def drop(self, weights, rows, columns):
        """Dropout, whose mask is drawn anew in backward: by the tile, so that it is the same."""
        if not self.dropout_p:
            return weights
        place = self.seed, self.first_query + rows.start, self.first_key + columns.start
        generator = torch.Generator(weights.device).manual_seed(hash(place) % 2**32)
        drawn = torch.rand(weights.shape, device=weights.device, generator=generator)
        return weights * (drawn >= self.dropout_p) / (1 - self.dropout_p)


def cuts(length, tile):
    return [slice(start, min(start + tile, length)) for start in range(0, length, tile)]
