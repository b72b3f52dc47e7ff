"""Attention by its definition: which key each query sees, pair by pair."""

import torch
from torch.nn import functional as F


def allowed(T, S, is_causal=False, window=None, key_mask=None):
    """Which key each query sees: bool of shape (T, S), or (B, 1, T, S) with a key mask of shape (B, S)."""
    seen = torch.ones(T, S, dtype=torch.bool)
    for query in range(T):
        for key in range(S):
            if is_causal:
                seen[query, key] = query - (window or T) < key <= query
    return seen if key_mask is None else seen & key_mask[..., None, None, :]


def masked_attention(*these, **options):
    """PyTorch's attention of (query, key, value), given what each query sees; options: those of allowed()."""
    seen = allowed(these[0].shape[-2], these[1].shape[-2], **options)
    return F.scaled_dot_product_attention(*these, attn_mask=seen, enable_gqa=True)
