"""ZeRO-1 and ZeRO-2: each rank keeps 1/n of the optimizer states, then of the gradients, too."""

from labkit.zero.zero import (
    ZeRO1,
    ZeRO2,
)

__all__ = [
    "ZeRO1",
    "ZeRO2",
]
