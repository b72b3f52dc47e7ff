"""Maps a shard to flat index ranges of the full tensor. Column shards are gathered first.

    w [4, 6]   tp 0   held w[:, 0:3]   --- all_gather --->  w [4, 6]   keeps elements  0 to 12
               tp 1   held w[:, 3:6]   --- all_gather --->  w [4, 6]   keeps elements 12 to 24

A file stores contiguous elements. Row shards (dim 0) are contiguous and need no communication.
Column shards are not. If FSDP has sharded the columns again, its ranks gather those first.

Sent per rank and matrix, to save: (n-1)/n of its bytes; with FSDP also twice the bytes of its
columns. Memory meanwhile: one full matrix; kept: 1/n of it. Read per rank, to load: the full
matrices, one by one.
"""

from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional as F

from labkit import comm
from labkit.checkpoint.dtensor_ranges import Piece, like, local
from labkit.tensor_parallel.placements import Axis, cut, gathered


@dataclass(frozen=True)
class Columns:
    """This rank's part, of `shape`, of a tensor that `axis` cuts along `dim`, not the first.

    shards: the group whose ranks each hold some elements of that part; None: this rank has all.
    """

    dim: int
    axis: Axis
    shape: tuple
    shards: Any = None

    def take(self, values, start, stop, shape):
        """Turn elements start to stop of the flat part into a Piece of the full tensor. Collective.

        Each rank gets a different Piece; together they cover the full tensor, of `shape`.
        """
        n = self.axis.size
        index = self.axis.rank
        if self.shards is not None:
            shard = values
            values = shard.new_zeros(prod(self.shape))
            values[start:stop] = shard
            comm.all_reduce(values.view(torch.uint8), group=self.shards)  # one rank sets each byte
            ranks = dist.get_world_size(self.shards)
            n *= ranks
            index = index * ranks + dist.get_rank(self.shards)
        full = gathered(values.view(self.shape), self.dim, self.axis).view(-1)
        size = -(-len(full) // n)
        part = full[index * size : (index + 1) * size].clone()  # a view would keep the full tensor
        return Piece(part, min(index * size, len(full)), shape)

    def part(self, full, start, stop):
        """Return elements start to stop of this rank's part of a full tensor, flat."""
        return cut(full, self.dim, self.axis.size)[self.axis.rank].reshape(-1)[start:stop]


def in_whole(cut, start, stop, shape, shards=None):
    """Map a slice's elements to the full tensor's: (start, stop, shape, columns), as in Place.

    cut: the Cut that produced this rank's slice, of `shape`. start, stop, shards: see Columns.
    """
    full = (*shape[: cut.dim], cut.length, *shape[cut.dim + 1 :])
    if cut.dim:
        return start, stop, full, Columns(cut.dim, cut.axis, shape, shards)
    first = cut.axis.rank * prod(shape)
    end = prod(full)  # padding follows
    return min(first + start, end), min(first + stop, end), full, None


class Place(NamedTuple):
    """Elements start to stop of a full tensor. The local tensor may end with padding.

    columns: set for a column shard; start and stop then count its elements.
    """

    name: str
    start: int
    stop: int
    shape: tuple
    columns: Columns | None = None

    def take(self, value):
        """Return the Piece of a local tensor that is to be written. With columns: collective."""
        values = local(value.detach()).reshape(-1)
        if self.columns:
            return self.columns.take(values, self.start, self.stop, self.shape)
        return Piece(values[: self.stop - self.start], self.start, self.shape)

    def read(self, saved, key, tensor):
        """Read this rank's part of the full tensor saved as `key`, placed as `tensor` is."""
        if self.columns:
            full = saved.read(key).view(self.shape)
            return like(tensor, self.columns.part(full, self.start, self.stop))
        values = saved.read(key, self.start, self.stop)
        return like(tensor, F.pad(values, (0, local(tensor).numel() - len(values))))
