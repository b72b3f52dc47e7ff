"""Clipping by the global norm, where every rank has the gradients of its shards only.

    rank 0   |g0|^2 -\
                      all_reduce -> |g| = sqrt(|g0|^2 + |g1|^2) -> each scales by max_norm / |g|
    rank 1   |g1|^2 -/  8 bytes

Clipping each shard by its own norm instead clips n shards to a norm of sqrt(n) x max_norm, each in
another proportion.
Pascanu et al., On the difficulty of training recurrent neural networks, ICML 2013, section 3.2.
"""

import torch
import torch.distributed as dist

from labkit import comm


@torch.no_grad()
def clip_grad_norm_(shards, whole, max_norm, norm_type=2.0, group=None, device="cpu"):
    """Clip the norm of all gradients over the group to max_norm; returns the norm before, float64.

    shards: parameters of which each rank has a part of its own. whole: those that are the same on
    all ranks, and so count once. Collective. As torch.nn.utils.clip_grad_norm_ on the averaged
    gradients in one process.
    """
    total = _power(shards, norm_type, device)
    infinite = norm_type == float("inf")
    comm.all_reduce(total, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group)
    own = _power(whole, norm_type, device)
    total = torch.maximum(total, own) if infinite else (total + own).pow(1 / norm_type)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for p in (*shards, *whole):
        if p.grad is not None:
            p.grad.mul_(factor.to(p.grad.device))
    return total


def _power(parameters, norm_type, device):
    """Sum of |g|^norm_type, or the largest |g|: what adds up over ranks."""
    # a shard may hold none of a tensor
    grads = [p.grad for p in parameters if p.grad is not None and p.grad.numel()]
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.stack(
        [torch.linalg.vector_norm(g, norm_type).to(device, torch.float64) for g in grads]
    )
    return norms.max() if norm_type == float("inf") else norms.pow(norm_type).sum()
