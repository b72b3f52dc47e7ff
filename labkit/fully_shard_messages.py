"""Count the messages of PyTorch's fully_shard in the same log as ours.

fully_shard(part)
part.set_custom_all_gather(MeteredGather())           --->  labkit.comm  --->  the log
part.set_custom_reduce_scatter(MeteredScatter())
"""

import torch

from labkit import comm


class MeteredGather:
    """The all-gather for fully_shard's set_custom_all_gather()."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        return comm.all_gather(output_tensor, input_tensor, group, async_op)


class MeteredScatter(MeteredGather):
    """The reduce-scatter for fully_shard's set_custom_reduce_scatter()."""

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        return comm.reduce_scatter(output_tensor, input_tensor, op, group, async_op)
