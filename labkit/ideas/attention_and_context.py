"""Attention without the matrix of all scores: tile by tile, then over a sequence that is sharded.

    softmax needs the largest score and the sum of exponentials of a row. Both can be corrected
    later, so keys may come one tile at a time:

    tile 1   output of tile 1, its largest score, its sum
    tile 2   a larger score appears: scale down the output so far, add that of tile 2 ...

    ring, 4 ranks: each rank keeps its queries; keys and values travel to the next rank n-1 times

Held without autograd: T x d numbers and one tile (ring: T/n x T/n scores), not T x T; the classes
compute tiles again in backward. Sent per rank: (n-1) x its keys and values.
Dao et al., FlashAttention, NeurIPS 2022, section 3.1; Liu et al., Ring Attention, ICLR 2024.
"""

import torch
import torch.distributed as dist

from labkit import comm


def tiled_attention(query, key, value, tile):
    """Compute softmax(query key^T / sqrt(d)) value, `tile` keys at a time. All: [..., T, d]."""
    largest = torch.full_like(query[..., :1], -torch.inf)  # [..., T, 1], of each row so far
    total = torch.zeros_like(largest)
    output = torch.zeros_like(query)
    for keys, values in zip(key.split(tile, -2), value.split(tile, -2), strict=True):
        scores = query @ keys.mT * query.shape[-1] ** -0.5  # [..., T, tile]
        larger = torch.maximum(largest, scores.amax(-1, keepdim=True))
        correction = torch.exp(largest - larger)
        weights = torch.exp(scores - larger)
        total = total * correction + weights.sum(-1, keepdim=True)
        output = output * correction + weights @ values
        largest = larger
    return output / total


def attention_and_log_sum(query, key, value):
    """Attend to some keys; also return the log of each row's sum of exponentials, [..., T, 1]."""
    scores = query @ key.mT * query.shape[-1] ** -0.5
    log_sum = scores.logsumexp(-1, keepdim=True)
    return torch.exp(scores - log_sum) @ value, log_sum


def merge(output, log_sum, other, other_log_sum):
    """Combine attention over two sets of keys into attention over both."""
    both = torch.logaddexp(log_sum, other_log_sum)
    output = output * torch.exp(log_sum - both) + other * torch.exp(other_log_sum - both)
    return output, both


def ring_attention_forward(query, key, value, group=None):
    """Attend to the keys of all ranks. query, key, value: this rank's tokens, [..., T/n, d]."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    pair = torch.stack([key, value])
    incoming = torch.empty_like(pair)
    output, log_sum = attention_and_log_sum(query, *pair)
    for _ in range(n - 1):
        comm.exchange(pair, (rank + 1) % n, incoming, (rank - 1) % n, group)
        pair, incoming = incoming, pair
        output, log_sum = merge(output, log_sum, *attention_and_log_sum(query, *pair))
    return output
