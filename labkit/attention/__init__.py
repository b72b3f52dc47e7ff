"""Attention tile by tile, and over a sequence that is sharded over ranks."""

from labkit.attention.attention import (
    FlashAttention,
    flash_attention,
)

__all__ = [
    "FlashAttention",
    "flash_attention",
]
