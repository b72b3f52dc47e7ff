"""Maps PyTorch's DTensor shards to flat index ranges: fully_shard cuts along dim 0.

    w [5, 3]   rank 0 of 2   rows 0 to 3   elements 0 to 9
               rank 1        rows 3 to 5   elements 9 to 15

Other tensors are complete and pass through unchanged.
"""

from typing import NamedTuple

import torch


class Piece(NamedTuple):
    """Elements start, start + 1, ... of a flattened tensor of `shape`. values: [k]."""

    values: torch.Tensor
    start: int
    shape: tuple


def local(tensor):
    """Return this rank's shard."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def span(tensor):
    """Return (start, stop, full shape): the flat range of elements that this rank holds."""
    numel, shape = local(tensor).numel(), tuple(tensor.shape)
    if not hasattr(tensor, "to_local"):
        return 0, numel, shape
    start = 0
    for axis, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            if type(placement).__name__ != "Shard" or placement.dim or start:
                raise ValueError(
                    f"unsupported placements {tensor.placements}: only Shard(0) is supported"
                )
            rows, ranks = shape[0], tensor.device_mesh.size(axis)
            first = min(rows, -(-rows // ranks) * tensor.device_mesh.get_local_rank(axis))
            start = first * (tensor.numel() // max(rows, 1))
    return start, start + numel, shape


def like(tensor, values):
    """Return this rank's flat values with the placements of `tensor`."""
    values = values.view(local(tensor).shape)
    if not hasattr(tensor, "to_local"):
        return values
    cut = tensor.device_mesh, tensor.placements
    return type(tensor).from_local(values, *cut, shape=tensor.shape, stride=tensor.stride())
