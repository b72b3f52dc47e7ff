"""Checkpoints: each rank writes its own file; a checkpoint is valid when all have finished."""

from labkit.checkpoint.checkpoint import (
    CheckpointError,
    Checkpoints,
)

__all__ = [
    "CheckpointError",
    "Checkpoints",
]
