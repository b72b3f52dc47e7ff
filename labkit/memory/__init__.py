"""Memory of a training step, predicted before anything runs; and which strategy fits.

This is the memory of labkit's own program: eager PyTorch, with the dtypes of the module that is
given. labkit.scale predicts that of a training stack in 16 bits (Megatron-LM, torchtitan), whose
kernels keep fewer activations. Their figures for the same model differ for that reason.
"""

from labkit.memory.batch_size import BatchSize, find_batch_size, last_true
from labkit.memory.memory_estimate import PRECISIONS, Estimate, estimate
from labkit.memory.memory_planner import (
    ALONE,
    LADDER,
    WORDS,
    Choice,
    Search,
    binary,
    choose,
    first_that_fits,
    ways_out,
    words_of,
)

__all__ = [
    "ALONE",
    "LADDER",
    "PRECISIONS",
    "WORDS",
    "BatchSize",
    "Choice",
    "Estimate",
    "Search",
    "binary",
    "choose",
    "estimate",
    "find_batch_size",
    "first_that_fits",
    "last_true",
    "ways_out",
    "words_of",
]
