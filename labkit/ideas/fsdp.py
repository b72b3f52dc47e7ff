"""FSDP (ZeRO-3): a rank holds 1/n of every parameter, and a full unit only while it runs.

    forward    [gather 0][unit 0][free 0]  [gather 1][unit 1][free 1]  ...
    backward   ...  [gather 1][unit 1][reduce_scatter 1][free 1]  [gather 0][unit 0][...]

Sent per rank and step, on n ranks: 3 (n-1)/n x parameter bytes, 1.5 times as much as DDP.
Held: 1/n of parameters, gradients and optimizer states; in full a running unit and one gradient.
Rajbhandari et al., ZeRO, SC 2020, section 5.3; Zhao et al., PyTorch FSDP, VLDB 2023, section 3.
"""

import torch
import torch.distributed as dist

from labkit import comm
from labkit.ideas.zero import padded


def shard_units(units, group=None):
    """Keep each unit's full parameters only while the unit runs, in forward and in backward.

    units: modules that share no parameter, such as the blocks; other parameters are not averaged.
    Returns this rank's shards, for the optimizer; one backward() a step fills their .grad.
    """
    n, rank, shards = dist.get_world_size(group), dist.get_rank(group), []

    def shard(p):
        full = padded(p, n)
        part = torch.nn.Parameter(full.chunk(n)[rank].clone())
        p.data = full[: p.numel()].view_as(p)

        def keep_own_part(p):
            part.grad = torch.empty_like(part)
            comm.reduce_scatter(part.grad, padded(p.grad, n), group=group)
            part.grad /= n
            p.grad = None
            free([(full, part)])

        p.register_post_accumulate_grad_hook(keep_own_part)
        return full, part

    def gather(pieces):
        for full, part in pieces:
            full.untyped_storage().resize_(full.nbytes)
            comm.all_gather(full, part.detach(), group=group)

    def free(pieces):
        for full, _ in pieces:
            full.untyped_storage().resize_(0)

    for unit in units:
        pieces = [shard(p) for p in unit.parameters()]
        unit.register_forward_pre_hook(lambda *_, pieces=pieces: gather(pieces))
        unit.register_forward_hook(lambda *_, pieces=pieces: free(pieces))
        unit.register_full_backward_pre_hook(lambda *_, pieces=pieces: gather(pieces))
        free(pieces)
        shards += [part for _, part in pieces]
    return shards
