"""Flat shards: several tensors as one flat buffer, cut into one equal part per rank.

    tensors              [ w1 .......... | b1 | w2 ............. | b2 ]    each flattened, in a row
    flat                 |    shard 0    |    shard 1    |    shard 2  00| zeros: n divides it
    pieces of rank 1                     [ b1 | w2 ..... ]                 views; of w1 and b2 none

One message then moves all of them, every rank holds and sends the same number of bytes, and no
tensor need be divisible by anything. The price: a shard is one-dimensional, and its edges fall
anywhere.

Held per rank: ceil(elements / n). Padding: fewer than n elements per layout.
Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020,
section 5; Zhao et al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel, VLDB 2023,
section 3.2.3.
"""

import inspect
from functools import cache
from itertools import accumulate
from math import prod

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from labkit.zero.elementwise_check import check_elementwise


class Layout:
    """The layout of tensors in a flat buffer, and the shard of each rank.

    numel: elements of all tensors. padded: of the flat buffer. shard_numel: padded / world_size.
    """

    def __init__(self, shapes, world_size):
        self.shapes, self.world_size = [torch.Size(shape) for shape in shapes], world_size
        sizes = [prod(shape) for shape in self.shapes]
        self.stops = list(accumulate(sizes))
        self.starts = [stop - size for stop, size in zip(self.stops, sizes, strict=True)]
        self.numel = sum(sizes)
        self.shard_numel = -(-self.numel // world_size)
        self.padded = self.shard_numel * world_size

    def views(self, flat):
        """Views of a flat buffer, [padded] or [numel], with the tensors' shapes."""
        return [
            flat[start:stop].view(shape)
            for start, stop, shape in zip(self.starts, self.stops, self.shapes, strict=True)
        ]

    def ranges(self, rank):
        """Per tensor, (start, stop) of the flat elements that this rank holds; 0, 0 for none."""
        first = rank * self.shard_numel
        last = first + self.shard_numel
        found = []
        for start, stop in zip(self.starts, self.stops, strict=True):
            begin, end = max(start, first), min(stop, last)
            found.append((begin - start, end - start) if begin < end else (0, 0))
        return found

    def pieces(self, shard, rank):
        """Per tensor, the view of `shard`, [shard_numel], with this rank's part; may be empty."""
        first = rank * self.shard_numel
        return [
            shard[max(0, start + begin - first) :][: end - begin]
            for start, (begin, end) in zip(self.starts, self.ranges(rank), strict=True)
        ]

    def shard(self, flat, rank):
        """The view of a flat buffer, [padded], that is this rank's shard."""
        return flat[rank * self.shard_numel : (rank + 1) * self.shard_numel]

    @torch.no_grad()
    def flatten(self, tensors, flat):
        """Copy the tensors into a flat buffer, [padded] or [numel]; the padding becomes zero."""
        for view, tensor in zip(self.views(flat), tensors, strict=True):
            view.copy_(tensor)
        flat[self.numel :].zero_()
        return flat


def mark_shard(parameter):
    """Have each optimizer of this parameter checked before its first step: it must be elementwise.

    FSDP and split layers do not make the optimizer, so they watch all optimizers.
    """
    parameter.is_shard = True
    _watch_optimizers()


@cache
def _watch_optimizers():
    register_optimizer_step_pre_hook(refuse_shards)


def refuse_shards(optimizer, args, kwargs):
    """Raise ValueError where an optimizer with shards is not elementwise."""
    if hasattr(optimizer, "shards_checked"):
        return
    optimizer.shards_checked = True
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    taken = inspect.signature(type(optimizer)).parameters
    if any(hasattr(p, "is_shard") for p in parameters) and {"params", "lr"} <= set(taken):
        defaults = {name: value for name, value in optimizer.defaults.items() if name in taken}
        check_elementwise(type(optimizer), defaults)
