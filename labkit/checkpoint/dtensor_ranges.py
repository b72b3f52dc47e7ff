"""PyTorch's fully_shard cuts tensors by rows: a rank's rows are elements of the whole in a row.

    w [5, 3]   rank 0 of 2   rows 0 to 3   elements 0 to 9
               rank 1        rows 3 to 5   elements 9 to 15

Other tensors are whole, and pass through unchanged.
"""

from typing import NamedTuple

import torch


class Piece(NamedTuple):
    """Elements start, start + 1, ... of a tensor of some shape, flat. values: [k]."""

    values: torch.Tensor
    start: int
    shape: tuple


def local(tensor):
    """What this rank holds of it."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def span(tensor):
    """(start, stop, shape of the whole): which elements, flat, this rank holds."""
    numel, shape = local(tensor).numel(), tuple(tensor.shape)
    if not hasattr(tensor, "to_local"):
        return 0, numel, shape
    start = 0
    for axis, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            if type(placement).__name__ != "Shard" or placement.dim or start:
                raise ValueError(f"a tensor cut by {tensor.placements} is not cut into rows")
            rows, ranks = shape[0], tensor.device_mesh.size(axis)
            first = min(rows, -(-rows // ranks) * tensor.device_mesh.get_local_rank(axis))
            start = first * (tensor.numel() // max(rows, 1))
    return start, start + numel, shape


def like(tensor, values):
    """values, flat, of this rank: as a tensor that is cut as `tensor` is."""
    values = values.view(local(tensor).shape)
    if not hasattr(tensor, "to_local"):
        return values
    cut = tensor.device_mesh, tensor.placements
    return type(tensor).from_local(values, *cut, shape=tensor.shape, stride=tensor.stride())
