"""Memory of a training step, predicted before anything runs; and which strategy fits."""

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
