"""Data parallelism: each rank has the full model; gradients are averaged during backward."""

from labkit.ddp.ddp import (
    DDP,
    UNTAKEN,
    check_keywords,
)

__all__ = [
    "DDP",
    "UNTAKEN",
    "check_keywords",
]
