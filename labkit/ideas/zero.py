"""ZeRO: data parallelism in which each rank keeps the optimizer states of 1/n of the elements.

                 parameters   gradients    optimizer states       rank 0 of 4: # held   . not held
    DDP          [########]   [########]   [########|########]
    ZeRO-1       [########]   [########]   [##......|##......]
    ZeRO-2       [########]   [##......]   [##......|##......]

    backward   ZeRO-2: reduce_scatter each gradient once computed, keep the own part, free the rest
    step       ZeRO-1: reduce_scatter here. Both: update the own part, all_gather the parameters

Sent per rank and step, on n ranks: (n-1)/n x (gradient + parameter bytes), as much as DDP.
Rajbhandari et al., ZeRO, SC 2020, sections 5 and 7.
"""

import torch
import torch.distributed as dist

from labkit import comm


def padded(tensor, n):
    """Copy the elements into one dimension, with zeros at the end so that n divides the length."""
    flat = tensor.new_zeros(-(-tensor.numel() // n) * n)
    flat[: tensor.numel()] = tensor.detach().flatten()
    return flat


def shard_optimizer_states(parameters, optimizer_class, group=None, **options):
    """Shard optimizer states (ZeRO-1): each rank updates a part of the flat parameters.

    All parameters become views of one flat tensor. Returns a function: call it in place of
    optimizer.step(), then set the gradients to None.
    """
    parameters, n = list(parameters), dist.get_world_size(group)
    flat = padded(torch.cat([p.detach().flatten() for p in parameters]), n)
    sizes = [p.numel() for p in parameters]
    for p, view in zip(parameters, flat[: sum(sizes)].split(sizes), strict=True):
        p.data = view.view_as(p)
    part = flat.chunk(n)[dist.get_rank(group)]
    optimizer = optimizer_class([part], **options)

    def step():
        gradients = padded(torch.cat([p.grad.flatten() for p in parameters]), n)
        part.grad = torch.empty_like(part)
        comm.reduce_scatter(part.grad, gradients, group=group)
        part.grad /= n
        optimizer.step()
        comm.all_gather(flat, part, group=group)

    return step


def shard_gradients(parameters, optimizer_class, group=None, **options):
    """Shard gradients, too (ZeRO-2): each rank keeps its part of a gradient and frees the rest.

    Returns a function: call it in place of optimizer.step(), after one backward() only.
    """
    n, pieces = dist.get_world_size(group), []
    for p in parameters:
        flat = padded(p, n)
        p.data = flat[: p.numel()].view_as(p)
        part = flat.chunk(n)[dist.get_rank(group)]

        def keep_own_part(p, part=part):
            part.grad = torch.empty_like(part)
            comm.reduce_scatter(part.grad, padded(p.grad, n), group=group)
            part.grad /= n
            p.grad = None

        p.register_post_accumulate_grad_hook(keep_own_part)
        pieces.append((flat, part))
    optimizer = optimizer_class([part for _, part in pieces], **options)

    def step():
        optimizer.step()
        for flat, part in pieces:
            comm.all_gather(flat, part, group=group)

    return step
