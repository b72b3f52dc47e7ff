"""1-bit LAMB: LAMB whose trust ratios continue when momentum is sent with one bit an element.

    warm-up   LAMB;  mean ratio = average of each tensor's trust ratios
    then      m      = mean of one bit of the ranks' momentum         see onebit_optimizer.py
              factor = max sqrt(v) / sqrt(fresh v)                    one number a tensor
              u      = m / (sqrt(v) + eps) + weight_decay p           v is constant
              p     -= lr (mean ratio x factor) u

With constant v, |u| no longer says how large Adam's step would be, so LAMB's ratio |p| / |u| cannot
be computed. What Adam would have is estimated: the change of m gives the mean gradient back,
(m - b1 m of the last step) / (1 - b1), and a second variance, `fresh v`, goes on with it.

One magnitude for a chunk suits tensors of similar momentum, so before it is sent each tensor's
momentum is scaled to the mean size of all tensors, and back afterwards.

Sent per rank and step: in the warm-up as plain averaging, then as OneBit. Held: m, v, residual, and
after the warm-up fresh v.
Li et al., 1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training with LAMB's
Convergence Speed, 2021, arXiv:2104.06069. As in LAMB's paper, m and v have bias correction here;
DeepSpeed 0.16's OnebitLamb has none. As there, the factor is 1 for weight decay's share of |u|.
"""

from functools import partial

import torch

from labkit.compression.onebit_optimizer import OneBitOptimizer
from labkit.lamb import average, direction_of, norm, root_of, trust_ratio


class OneBitLamb(OneBitOptimizer):
    """1-bit LAMB: an optimizer and its comm hook for DDP.

        optimizer = OneBitLamb(model.parameters(), lr=0.01, warmup=1000)
        model.register_comm_hook(None, optimizer.hook)

    warmup: steps of LAMB, until v and the ratios are stable. compressor: of the momentum; default
        OneBit(). Raises ValueError for a warmup below 1.
    ratio_bounds: smallest and largest trust ratio. ratio_beta: of its average, which starts at 0:
        the warm-up must be several times as long as 1 / (1 - ratio_beta) steps.
    factor_bounds, factor_change: the factor of a tensor stays within these bounds, and changes by
        at most this share per step.

    See OneBitOptimizer for clipping, loss scales and states.
    """

    title = "1-bit LAMB"

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-6,
        weight_decay=0.0,
        warmup=100,
        compressor=None,
        ratio_bounds=(0.01, 10.0),
        ratio_beta=0.9,
        factor_bounds=(0.5, 4.0),
        factor_change=0.1,
    ):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"ratio_bounds": ratio_bounds, "ratio_beta": ratio_beta}
        defaults |= {"factor_bounds": factor_bounds, "factor_change": factor_change}
        super().__init__(params, defaults, warmup, compressor)

    def _send(self, group, bucket):
        """Average the bucket's momentum: scaled, compressed, and scaled back. Returns a Future."""
        scales = [self.state[p].get("scale", 1.0) for p in bucket.parameters()]
        gradients = bucket.gradients()
        for gradient, scale in zip(gradients, scales, strict=True):
            gradient.mul_(scale)
        return super()._send(group, bucket).then(partial(scaled_back, gradients, scales))

    def step(self, closure=None):
        """Update the parameters. closure: as in torch."""
        loss = super().step(closure)
        if self.steps == self.warmup:
            self._end_warmup()
        return loss

    @torch.no_grad()
    def _end_warmup(self):
        """Start the fresh variances, and choose the scale of each tensor's momentum."""
        states = [state for state in self.state.values() if state]
        sizes = [float(norm(state["m"])) / state["m"].numel() ** 0.5 for state in states]
        for state, size in zip(states, sizes, strict=True):
            state["fresh"] = state["v"].clone()
            state["scale"] = sum(sizes) / len(sizes) / size if size else 1.0

    def _update(self, p, state, group):
        if self.frozen:
            if state:  # a parameter without gradients in the warm-up has no ratio, and stays
                self._frozen_update(p, state, group)
            return
        if not state:
            state.update(m=torch.zeros_like(p), v=torch.zeros_like(p), ratio=0.0, factor=1.0)
        average(state["m"], state["v"], p.grad, group["betas"])
        root = root_of(state["v"], self.steps + 1, group)
        update = direction_of(state["m"], root, self.steps + 1, group)
        update.add_(p, alpha=group["weight_decay"])
        norms = norm(p), norm(update)
        ratio = trust_ratio(*norms, group["ratio_bounds"])
        if min(norms) > 0:  # otherwise the ratio is 1, whatever the tensor
            state["ratio"] += (1 - group["ratio_beta"]) * (float(ratio) - state["ratio"])
        p.sub_(update.mul_(group["lr"] * ratio))

    def _frozen_update(self, p, state, group):
        b1, b2 = group["betas"]
        gradient = (p.grad - b1 * state["m"]) / (1 - b1)
        state["m"].copy_(p.grad)
        state["fresh"].mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
        root = root_of(state["v"], self.warmup, group)
        fresh = root_of(state["fresh"], self.steps + 1, group)
        factor = float((root / fresh).max())
        root.masked_fill_(state["v"] == 0, torch.inf)  # as in 1-bit Adam: the sign is noise there
        update = direction_of(state["m"], root, self.steps + 1, group)
        if group["weight_decay"]:  # the decay does not depend on v
            size = norm(update)
            update.add_(p, alpha=group["weight_decay"])
            share = min(1.0, float(size / norm(update)))
            factor = factor * share + 1 - share
        state["factor"] = limited(factor, state["factor"], group)
        p.sub_(update.mul_(group["lr"] * state["ratio"] * state["factor"]))


def scaled_back(gradients, scales, travelled):
    """Divide the averages by the scales, in place; return the buffer that they are in."""
    buffer = travelled.value()  # raises an error of the collective
    for gradient, scale in zip(gradients, scales, strict=True):
        gradient.div_(scale)
    return buffer


def limited(factor, last, group):
    """Return the factor within its bounds, and not too far from that of the last step."""
    smallest, largest = group["factor_bounds"]
    factor = min(max(factor, smallest), largest)
    change = group["factor_change"]
    return min(max(factor, last * (1 - change)), last * (1 + change))
