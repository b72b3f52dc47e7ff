"""Scores of attention, one tile at a time: computed, masked, used, and discarded.

    [[0 . .]     rows: queries, columns: keys; a tile is a slice of each
     [1 2 .]     causal: of row 1 the tiles 1 and 2; half of 2 is hidden
     [3 4 5]]    backward computes the same tiles again, with the same dropout masks
                 window of one tile: 3 is never computed, part of 1 and 4 is hidden

Tensors in 16 bits are cast up one tile at a time: a score of 40 rounded to 8 bits is off by 0.1,
and its weight by a tenth. So scores, and everything computed from them, are fp32.
Dao et al., FlashAttention, NeurIPS 2022, algorithms 1 and 4; Dao, FlashAttention-2, ICLR 2024, 3.1.
"""

from dataclasses import dataclass

import torch

TILE = 256  # queries and keys: the scores of a tile and head take 256 KiB in fp32


@dataclass(frozen=True)
class Tiles:
    """How scores are tiled, masked, and dropped; forward and backward use the same tiles.

    first_query, first_key: the positions of the first query and key in the sequence.
    window: for causal attention, how many keys a query sees, including its own position.
    key_mask: [..., S] bool, of scores [..., G, H / G, T, S]; False hides a key.
    Raises ValueError for an invalid tile, window or dropout_p.
    """

    causal: bool = False
    scale: float = 1.0
    tile: int = TILE
    dropout_p: float = 0.0
    seed: int = 0
    first_query: int = 0
    first_key: int = 0
    window: int | None = None
    key_mask: torch.Tensor | None = None

    def __post_init__(self):
        if self.tile < 1:
            raise ValueError(f"tile={self.tile} must be at least 1")
        if not 0 <= self.dropout_p <= 1:
            raise ValueError(f"dropout_p={self.dropout_p} must be between 0 and 1")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window={self.window} must be at least 1 key; None sees all")
        if self.window is not None and not self.causal:
            raise ValueError(f"window={self.window} needs is_causal=True: it ends at the query")

    def forward(self, query, key, value):
        """Return (output [..., T, d], log of the sum of exp(scores) [..., T, 1]), at least fp32.

        A query that sees no key has an output of 0.
        """
        exact = torch.promote_types(query.dtype, torch.float32)
        log_sum = torch.empty_like(query[..., :1], dtype=exact)
        output = log_sum.new_empty((*query.shape[:-1], value.shape[-1]))
        for rows in cuts(query.shape[-2], self.tile):
            # not -inf: if all scores of a tile were -inf, exp(-inf - -inf) would be NaN
            largest = torch.full_like(log_sum[..., rows, :], torch.finfo(exact).min)
            total = torch.zeros_like(largest)
            summed = 0.0
            for columns in self.seen(rows, key.shape[-2]):
                scores = self.scores(query, key, rows, columns)
                larger = torch.maximum(largest, scores.amax(-1, keepdim=True))
                shrunk = torch.exp(largest - larger)
                weights = scores.sub_(larger).exp_()
                total = total * shrunk + weights.sum(-1, keepdim=True)
                kept = self.drop(weights, rows, columns)
                summed = summed * shrunk + product(kept, value[..., columns, :])
                largest = larger
            total = total.clamp_(min=1)  # it includes exp(0) of the largest score, if there is one
            output[..., rows, :] = summed / total
            log_sum[..., rows, :] = largest + total.log()
        return output, log_sum

    def backward(self, gradient, query, key, value, log_sum, within):
        """Return gradients of query, key, value. within: sum of gradient x output, per query."""
        exact = log_sum.dtype
        inputs = (query, key, value)
        gradients = [torch.zeros(x.shape, dtype=exact, device=x.device) for x in inputs]
        for rows in cuts(query.shape[-2], self.tile):
            q, g = query[..., rows, :], gradient[..., rows, :]
            for columns in self.seen(rows, key.shape[-2]):
                k, v = key[..., columns, :], value[..., columns, :]
                weights = self.scores(query, key, rows, columns).sub_(log_sum[..., rows, :]).exp_()
                for_weights = self.drop(product(g, v.mT), rows, columns)
                for_scores = (for_weights - within[..., rows, :]) * weights * self.scale
                kept = self.drop(weights, rows, columns)
                gradients[0][..., rows, :] += product(for_scores, k)
                gradients[1][..., columns, :] += product(for_scores.mT, q).sum_to_size(k.shape)
                gradients[2][..., columns, :] += product(kept.mT, g).sum_to_size(v.shape)
        return [x.to(like.dtype) for x, like in zip(gradients, inputs, strict=True)]

    def seen(self, rows, keys):
        """Return the tiles of keys that these queries see, by position; padding is included."""
        ahead = self.first_query - self.first_key
        last = min(rows.stop + ahead, keys) if self.causal else keys
        first = max(rows.start + ahead - self.window + 1, 0) if self.window else 0
        return cuts(last, self.tile, first)

    def scores(self, query, key, rows, columns):
        """Return a tile of scores, [..., rows, columns]; those that are not seen are -inf."""
        scores = product(query[..., rows, :], key[..., columns, :].mT).mul_(self.scale)
        if self.causal and not self.all_seen(rows, columns):
            device = scores.device
            queries = torch.arange(rows.start, rows.stop, device=device)[:, None] + self.first_query
            keys = torch.arange(columns.start, columns.stop, device=device) + self.first_key
            hidden = keys > queries
            if self.window:
                hidden |= keys <= queries - self.window
            scores.masked_fill_(hidden, -torch.inf)
        if self.key_mask is not None:
            padding = ~self.key_mask[..., None, None, None, columns]
            scores.masked_fill_(padding, -torch.inf)
        return scores

    def all_seen(self, rows, columns):
        """Return whether, by position, each of these queries sees each of these keys."""
        ahead = self.first_query - self.first_key
        not_later = columns.stop - 1 <= rows.start + ahead
        near = not self.window or columns.start > rows.stop - 1 + ahead - self.window
        return not_later and near

    def drop(self, weights, rows, columns):
        """Apply dropout; the mask is drawn per tile, so backward can draw it again."""
        if not self.dropout_p:
            return weights
        place = self.seed, self.first_query + rows.start, self.first_key + columns.start
        generator = torch.Generator(weights.device).manual_seed(hash(place) % 2**32)
        drawn = torch.rand(weights.shape, device=weights.device, generator=generator)
        return weights * (drawn >= self.dropout_p) / (1 - self.dropout_p or 1)


def cuts(length, tile, first=0):
    """Return the tiles of [0, length) that have elements from `first` on."""
    if first >= length:
        return []
    starts = range(first // tile * tile, length, tile)
    return [slice(start, min(start + tile, length)) for start in starts]


def product(a, b):
    """Return a @ b in at least fp32. With an `out` tensor, autocast does not change the dtype."""
    exact = torch.promote_types(a.dtype, torch.float32)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    made = a.new_empty((*batch, a.shape[-2], b.shape[-1]), dtype=exact)
    return torch.matmul(a.to(exact), b.to(exact), out=made)


def by_key_head(query, key, value):
    """Return ([..., G, H / G, T, d], twice [..., G, 1, S, d]): a key head serves H / G heads.

    query: [..., H, T, d]; key, value: [..., G, S, d]. The dtype is that of their product under
    autocast, torch's or the lab's. Raises ValueError for shapes or dtypes that do not fit.
    """
    if min(query.dim(), key.dim()) < 3:
        raise ValueError(
            f"query {list(query.shape)} and key {list(key.shape)} are not [..., heads, tokens, d]"
        )
    H, G = query.shape[-3], key.shape[-3]
    if key.shape != (*query.shape[:-3], G, *key.shape[-2:-1], query.shape[-1]):
        raise ValueError(f"query {list(query.shape)} and key {list(key.shape)} do not fit")
    if value.shape[:-1] != key.shape[:-1]:
        raise ValueError(
            f"key {list(key.shape)} and value {list(value.shape)} must have equal heads and lengths"
        )
    if G == 0 or H % G:
        raise ValueError(f"{H} query heads must be divisible by {G} key heads")
    nothing = [x[..., :0, :] for x in (query, key, value)]  # shows the dtype that autocast chooses
    dtypes = [(none @ none.mT).dtype for none in nothing]
    if len(set(dtypes)) > 1:
        raise ValueError(f"query, key and value must have one dtype, not {dtypes}")
    query, key, value = (x.to(dtypes[0]) for x in (query, key, value))
    return query.unflatten(-3, (G, H // G)), key.unsqueeze(-3), value.unsqueeze(-3)


def checked_key_mask(key_mask, key):
    """Return a copy of key_mask, [..., S], or None. key: [..., G, S, d].

    Raises ValueError for another shape, or a dtype other than bool.
    """
    if key_mask is None:
        return None
    if key_mask.dtype != torch.bool:
        raise ValueError(f"key_mask is {key_mask.dtype}: pass torch.bool, True for a real token")
    wanted = [*key.shape[:-3], key.shape[-2]]
    if list(key_mask.shape) != wanted:
        raise ValueError(f"key_mask has shape {list(key_mask.shape)}, expected {wanted}")
    return key_mask.clone()
