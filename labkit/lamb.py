"""LAMB: Adam with a step length for each tensor, in proportion to the tensor's own weights.

    m, v    Adam's averages of the gradient and of its square, with bias correction
    u       m / (sqrt(v) + eps) + weight_decay p
    ratio   |p| / |u|                                    the trust ratio, one number a tensor
    p      -= lr ratio u                                 so each tensor changes by lr |p|

A batch k times as large needs a larger learning rate, and then the tensor with the largest update
for its weights diverges first. With LAMB a rate of 0.01 changes every tensor by 1 %.

A shard does not know the norms of its tensor, so ranks add the squares:

    rank 0   |p0|^2  |u0|^2 -\
                              all_reduce -> |p|, |u| of every tensor -> each rank steps its shard
    rank 1   |p1|^2  |u1|^2 -/   16 bytes a tensor

Sent per rank and step: nothing; for shards one all_reduce of 16 bytes a tensor. Held per rank:
m, v, and during a step the updates.
You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 minutes, ICLR 2020,
algorithm 2, with the identity as phi.
"""

import torch

from labkit import comm


class LAMB(torch.optim.Optimizer):
    """LAMB for full parameters, or for shards of them.

    ratio_bounds: smallest and largest trust ratio. DeepSpeed's LAMB has (0.01, 10).
    sharded: parameters are shards, of FSDP or tensor parallelism, and step with the norms of their
        full tensors. Replicated ones may be among them. step() is then collective, and all ranks
        need the same order of parameters. Without it, shards raise ValueError. ZeRO1 and ZeRO2
        have no place for LAMB: they take elementwise optimizers only.
    process_group: the ranks that have the shards of one tensor; for FSDP `model.sharding.group`.

    A tensor whose weights or whose update are zero has a ratio of 1, so that it can leave zero.
    After a step, state[p]["ratio"] is the trust ratio, a float64 scalar.
    """

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-6,
        weight_decay=0.0,
        ratio_bounds=(0.0, float("inf")),
        sharded=False,
        process_group=None,
    ):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"ratio_bounds": ratio_bounds})
        self.sharded, self.process_group = sharded, process_group
        if sharded:
            self.shards_checked = True  # refuse_shards() accepts an optimizer that has this

    @torch.no_grad()
    def step(self, closure=None):
        """Update the parameters. closure: as in torch."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        owners = [(p, group) for group in self.param_groups for p in group["params"]]
        updates = [self._update(p, group) for p, group in owners]
        norms = norms_of([p for p, _ in owners], updates)
        if self.sharded:
            norms = added_up(norms, self.process_group)
        for (p, group), update, pair in zip(owners, updates, norms, strict=True):
            if update is not None:
                ratio = trust_ratio(*pair, group["ratio_bounds"])
                self.state[p]["ratio"] = ratio
                p.sub_(update.mul_(group["lr"] * ratio))
        return loss

    def _update(self, p, group):
        """Return the update u, in the shape and dtype of p; None without a gradient."""
        if p.grad is None:
            return None
        state = self.state[p]
        if not state:
            # A tensor, as in torch: checkpoints of shards hold tensors.
            state.update(step=torch.zeros(()), m=torch.zeros_like(p), v=torch.zeros_like(p))
        state["step"] += 1
        step = int(state["step"])
        average(state["m"], state["v"], p.grad, group["betas"])
        direction = direction_of(state["m"], root_of(state["v"], step, group), step, group)
        return direction.add_(p, alpha=group["weight_decay"])

    def __getstate__(self):
        added = {"sharded": self.sharded, "process_group": self.process_group}  # torch's omits them
        return super().__getstate__() | added


def average(m, v, gradient, betas):
    """Update Adam's averages of the gradient and of its square, in place."""
    m.lerp_(gradient, 1 - betas[0])
    v.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])


def root_of(v, step, group):
    """Return sqrt(v) + eps, with bias correction for this number of steps."""
    return (v / (1 - group["betas"][1] ** step)).sqrt_().add_(group["eps"])


def direction_of(m, root, step, group):
    """Return m / root, with bias correction of m for this number of steps."""
    return (m / (1 - group["betas"][0] ** step)).div_(root)


def norms_of(parameters, updates):
    """Return |p| and |u| of each tensor, float64 [parameters, 2]; zeros where an update is None."""
    norms = torch.zeros(len(parameters), 2, dtype=torch.float64, device=parameters[0].device)
    for row, p, update in zip(norms, parameters, updates, strict=True):
        if update is not None:
            row[0] = norm(p)
            row[1] = norm(update)
    return norms


def added_up(norms, group=None):
    """Return norms of full tensors from those of each rank's shards, [parameters, 2]. Collective.

    A tensor that n ranks have in full gets sqrt(n) times its norms, which have the same ratio.
    """
    squares = norms.square().to(comm.device(group))
    comm.all_reduce(squares, group=group)
    return squares.sqrt()


def norm(tensor):
    """Return the 2-norm of a tensor, a float64 scalar; computed in at least float32."""
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    return torch.linalg.vector_norm(tensor, dtype=dtype).double()


def trust_ratio(weight_norm, update_norm, bounds):
    """Return |p| / |u| within bounds, or 1 if one of the norms is zero. Scalar tensors."""
    known = (weight_norm > 0) & (update_norm > 0)
    return torch.where(known, (weight_norm / update_norm).clamp(*bounds), 1.0)
