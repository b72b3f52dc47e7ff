"""Clip by the global norm if every rank has only the gradients of its shards.

    rank 0   |g0|^2 -\
                      all_reduce -> |g| = sqrt(|g0|^2 + |g1|^2) -> each scales by max_norm / |g|
    rank 1   |g1|^2 -/  8 bytes

If each shard were clipped by its own norm, the n shards together would have a norm of up to
sqrt(n) x max_norm, and their proportions would change.
Pascanu et al., On the difficulty of training recurrent neural networks, ICML 2013, section 3.2.
"""

import torch
import torch.distributed as dist

from labkit import comm
from labkit.amp.master_weights import holder


@torch.no_grad()
def clip_grad_norm_(copies, max_norm, norm_type=2.0, group=None, device="cpu"):
    """Clip the norm of all gradients over the group to max_norm; return the norm before, float64.

    copies: {parameter: number of ranks of the group with the same values}, 1 for a shard;
    replicated values count once. Collective. The result is that of torch.nn.utils.clip_grad_norm_
    on the averaged gradients in one process. Gradients that MasterWeights has moved to fp32 are
    clipped there. norm_type: positive, or inf. Raises ValueError for others: PyTorch's norms of
    type 0 and -inf need full tensors, which no rank has.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type} of shards is not known: it must be positive")
    copies = {holder(p): ranks for p, ranks in copies.items()}
    infinite = norm_type == float("inf")
    total = torch.zeros((), dtype=torch.float64, device=device)
    for p, ranks in copies.items():
        if p.grad is not None and p.grad.numel():  # a shard may hold none of a tensor
            dtype = torch.promote_types(p.grad.dtype, torch.float32)
            norm = torch.linalg.vector_norm(p.grad, norm_type, dtype=dtype)
            norm = norm.to(device, torch.float64)
            total = torch.maximum(total, norm) if infinite else total + norm.pow(norm_type) / ranks
    comm.all_reduce(total, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group)
    total = total if infinite else total.pow(1 / norm_type)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for p in copies:
        if p.grad is not None:
            p.grad.mul_(factor.to(p.grad.device))
    return total
