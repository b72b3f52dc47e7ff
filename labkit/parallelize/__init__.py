"""Several kinds of parallelism at once, on a mesh of ranks."""

from labkit.parallelize.parallelize import (
    Composed,
    compose,
)

__all__ = [
    "Composed",
    "compose",
]
