"""Offload: optimizer states and activations in host memory or in a file."""

from labkit.offload.offload import (
    ALIGNED,
    Away,
    Offloaded,
    offload_activations,
)

__all__ = [
    "ALIGNED",
    "Away",
    "Offloaded",
    "offload_activations",
]
