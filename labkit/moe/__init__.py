"""Mixture of experts: a router sends each token to k of E networks, on one rank or several."""

from labkit.moe.moe import (
    ROUTING,
    MoE,
    Routing,
    balanced,
    mixtures,
    names_of_experts,
)

__all__ = [
    "ROUTING",
    "MoE",
    "Routing",
    "balanced",
    "mixtures",
    "names_of_experts",
]
