"""Which elements of a whole a tensor is, in a row; columns of a matrix are none, and are made so.

    w [4, 6]   tp 0   held w[:, 0:3]   --- all_gather --->  w [4, 6]   keeps elements  0 to 12
               tp 1   held w[:, 3:6]   --- all_gather --->  w [4, 6]   keeps elements 12 to 24

A file has elements in a row. Some rows of a matrix are that already: a cut along dim 0 needs none
of this. Where FSDP has cut the columns once more, its ranks put those together first.

Sent per rank and matrix, to save: (n-1)/n of its bytes, with FSDP twice its columns' besides. Held
meanwhile: one whole matrix; kept: 1/n of it. Read per rank, to load: all of it, one by one.
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
    """Of a whole that is cut along `dim`, not the first, by an axis: this rank's part, of `shape`.

    shards: the group whose ranks have each some elements of that part; None: this rank has all.
    """

    dim: int
    axis: Axis
    shape: tuple
    shards: Any = None

    def take(self, values, start, stop, shape):
        """Elements start to stop of the part, flat -> a Piece of the whole, of `shape`. Collective.

        The ranks that hold parts of it have different Pieces, which are all of it.
        """
        n, place = self.axis.size, self.axis.rank
        if self.shards is not None:
            mine, values = values, values.new_zeros(prod(self.shape))
            values[start:stop] = mine
            comm.all_reduce(values.view(torch.uint8), group=self.shards)  # a byte is of one rank
            ranks = dist.get_world_size(self.shards)
            n, place = n * ranks, place * ranks + dist.get_rank(self.shards)
        whole = gathered(values.view(self.shape), self.dim, self.axis).view(-1)
        size = -(-len(whole) // n)
        own = whole[place * size : (place + 1) * size].clone()  # a view would keep all of it
        return Piece(own, min(place * size, len(whole)), shape)

    def part(self, whole, start, stop):
        """Elements start to stop of this rank's part of a whole tensor."""
        return cut(whole, self.dim, self.axis.size)[self.axis.rank].reshape(-1)[start:stop]


def in_whole(cut, start, stop, shape, shards=None):
    """(start, stop, shape, columns), as Place has it: elements of a slice, as those of the whole.

    cut: the Cut of which this rank has the slice, of `shape`. start, stop, shards: see Columns.
    """
    whole = (*shape[: cut.dim], cut.length, *shape[cut.dim + 1 :])
    if cut.dim:
        return start, stop, whole, Columns(cut.dim, cut.axis, shape, shards)
    first, end = cut.axis.rank * prod(shape), prod(whole)  # behind the end of the whole is padding
    return min(first + start, end), min(first + stop, end), whole, None


class Place(NamedTuple):
    """Which whole a tensor is, or which of its elements, start to stop, it holds; then, padding.

    columns: where it holds columns, elements start to stop of those.
    """

    name: str
    start: int
    stop: int
    shape: tuple
    columns: Columns | None = None

    def take(self, value):
        """The Piece to be written of a tensor that is here. With columns: collective."""
        values = local(value.detach()).reshape(-1)
        if self.columns:
            return self.columns.take(values, self.start, self.stop, self.shape)
        return Piece(values[: self.stop - self.start], self.start, self.shape)

    def read(self, saved, key, tensor):
        """What is here of the whole that was saved as `key`, cut as `tensor` is."""
        if self.columns:
            whole = saved.read(key).view(self.shape)
            return like(tensor, self.columns.part(whole, self.start, self.stop))
        values = saved.read(key, self.start, self.stop)
        return like(tensor, F.pad(values, (0, local(tensor).numel() - len(values))))
