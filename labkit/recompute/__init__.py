"""Activation checkpointing: drop activations in forward and recompute them in backward."""

from labkit.recompute.recompute import (
    Call,
    Enough,
    Held,
    Hold,
    Place,
    appearance,
    checkpoint,
    checkpoint_every,
    is_parameter,
)

__all__ = [
    "Call",
    "Enough",
    "Held",
    "Hold",
    "Place",
    "appearance",
    "checkpoint",
    "checkpoint_every",
    "is_parameter",
]
