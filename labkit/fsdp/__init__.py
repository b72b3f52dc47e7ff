"""FSDP (ZeRO-3): each rank keeps 1/n of the parameters, and gathers a unit while it runs."""

from labkit.fsdp.fsdp import (
    FSDP,
)

__all__ = [
    "FSDP",
]
