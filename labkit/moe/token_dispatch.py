"""All-to-all of rows with different counts per rank; backward sends the gradients back.

    rank 0   [to 0][  to 1  ]          [from 0][1]
                                 ->
    rank 1   [0][to 1]                 [from 0   ][from 1]

Sent per rank: the rows that leave it. Lepikhin et al., GShard, ICLR 2021, section 2.2.
"""

import torch

from labkit import comm


class Exchange(torch.autograd.Function):
    """All-to-all of rows: outgoing[i] rows to rank i, incoming[j] rows from rank j.

    Backward sends the gradients back, times scale. With n before the experts and 1/n after them,
    the gradients of experts are a mean over ranks.
    """

    @staticmethod
    def forward(ctx, rows, outgoing, incoming, scale, group):
        ctx.sizes = (incoming, outgoing)
        ctx.scale = scale
        ctx.group = group
        came = rows.new_empty(sum(incoming), *rows.shape[1:])
        comm.all_to_all(came, rows.contiguous(), incoming, outgoing, group)
        return came

    @staticmethod
    def backward(ctx, gradient):
        back = Exchange.apply(gradient * ctx.scale, *ctx.sizes, ctx.scale, ctx.group)
        return back, None, None, None, None
