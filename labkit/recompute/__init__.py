"""Activation checkpointing: drop what forward computed, and compute it again in backward."""

from labkit.recompute.recompute import (
    Call,
    Enough,
    Held,
    Hold,
    Place,
    appearance,
    as_it_is,
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
    "as_it_is",
    "checkpoint",
    "checkpoint_every",
    "is_parameter",
]
