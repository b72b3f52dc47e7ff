"""Mixed precision: autocast, a loss scale that all ranks agree on, fp32 master weights."""

from labkit.amp.grad_scaler import (
    NO_GRADIENTS,
    GradScaler,
    MasterWeights,
    autocast,
    gradients_of,
    unscale_and_check,
)

__all__ = [
    "NO_GRADIENTS",
    "GradScaler",
    "MasterWeights",
    "autocast",
    "gradients_of",
    "unscale_and_check",
]
