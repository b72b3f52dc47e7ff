"""1-bit Adam: after a warm-up the variance is frozen, and momentum is sent with one bit an element.

    warm-up   m = mean of gradients ...  v = mean of squares ...  plain averaging, plain Adam
    then      m   = mean of one bit of the ranks' momentum        see onebit_optimizer.py
              p  -= lr  m / (sqrt(v) + eps)                       v is constant

Sent per rank and step: in the warm-up as plain averaging, then as OneBit. Held: m, v, residual.
Tang et al., 1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed,
ICML 2021, algorithm 1.
"""

import torch

from labkit.compression.onebit_optimizer import OneBitOptimizer


class OneBitAdam(OneBitOptimizer):
    """1-bit Adam: an optimizer and its comm hook for DDP.

        optimizer = OneBitAdam(model.parameters(), lr=1e-3, warmup=100)
        model.register_comm_hook(None, optimizer.hook)

    warmup: steps of plain Adam, until v is stable. If v of an element is still tiny, its sign is
        divided by almost nothing and training diverges: use more steps or a larger eps.
    compressor: of the momentum; default OneBit(). Raises ValueError for a warmup below 1.

    See OneBitOptimizer for clipping, loss scales and states.
    """

    title = "1-bit Adam"

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, warmup=100, compressor=None):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps}, warmup, compressor)

    def _update(self, p, state, group):
        (b1, b2), eps = group["betas"], group["eps"]
        if not state:
            state.update(m=torch.zeros_like(p), v=torch.zeros_like(p))
        m, v, steps = state["m"], state["v"], self.steps + 1
        if self.frozen:
            m.copy_(p.grad)
        else:
            m.lerp_(p.grad, 1 - b1)
            v.mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
        # Bias correction; in v only while it changes.
        denominator = (v / (1 - b2 ** min(steps, self.warmup))).sqrt_().add_(eps)
        if self.frozen:  # without any gradient so far the sign is noise, which 1/eps would amplify
            denominator.masked_fill_(v == 0, torch.inf)
        p.addcdiv_(m, denominator, value=-group["lr"] / (1 - b1**steps))
