"""1-bit Adam: Adam at first; then its variance is frozen, and momentum travels, one bit an element.

    warm-up   m = mean of gradients ...  v = mean of squares ...  plain averaging, plain Adam
    then      own = b1 m + (1 - b1) own gradient                  each rank, from the same m
              m   = mean of one bit of (own + residual)           what travels
              p  -= lr  m / (sqrt(v) + eps)                       v stays: it has become steady

Adam divides by the root of the squares, so an error in a gradient enters twice and does not cancel:
error feedback fails there. With v fixed the step is linear in what is sent, and what is late
arrives as it should have.

Sent per rank and step: as plain averaging in the warm-up, then as OneBit. Held: m, v, residual.
Tang et al., 1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed,
ICML 2021, algorithm 1 (here messages are gathered, not scattered and compressed again). OneBit's
magnitude is the mean |x| of a chunk, DeepSpeed's the 2-norm / sqrt(elements) of a whole tensor.
"""

from functools import partial

import torch

from labkit.compression.feedback import start_mean
from labkit.compression.onebit import OneBit
from labkit.replicas import check_agreement


class OneBitAdam(torch.optim.Optimizer):
    """An optimizer and the comm hook that goes with it:

        optimizer = OneBitAdam(model.parameters(), lr=1e-3, warmup=100)
        model.register_comm_hook(None, optimizer.hook)

    warmup: steps of plain Adam, so many that v is steady. An element whose v is still tiny gets a
        sign of full size over a root of nearly nothing, and training diverges: more steps, or a
        larger eps, help.
    compressor: of the momentum, OneBit() unless another is given.

    After the warm-up p.grad is the new momentum, no gradient any more: do not clip it, nor use a
    loss scale (labkit's GradScaler and a Trainer that clips raise RuntimeError). Where warmup or
    steps differ between ranks, the next backward raises ValueError on all of them. state_dict()
    holds this rank's residual too.
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, warmup=100, compressor=None):
        if type(warmup) is not int or warmup < 1:
            raise ValueError(
                f"warmup must be at least 1 step of plain Adam, not {warmup}: v would be zero"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})
        self.warmup, self.steps, self.compressor = warmup, 0, compressor or OneBit()
        self._agreed = False

    @property
    def frozen(self):
        """Whether the variance stays as it is, and momenta travel."""
        return self.steps >= self.warmup

    def hook(self, group, bucket):
        """hook(state, bucket) of DDP: averages gradients, or what each rank's momentum would be."""
        if not self._agreed:
            check_agreement(
                [f"1-bit Adam, warmup={self.warmup}, step {self.steps}"],
                group,
                bucket.buffer().device,
            )
            self._agreed = True
        if not self.frozen:
            future = start_mean(bucket.buffer(), group).get_future()
            return future.then(partial(first, bucket.buffer()))
        b1 = {p: group["betas"][0] for group in self.param_groups for p in group["params"]}
        for p, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            gradient.mul_(1 - b1[p])
            if self.state[p]:  # else it has never had a gradient
                gradient.add_(self.state[p]["m"], alpha=b1[p])
        return self.compressor.hook(group, bucket)

    def take_gradients(self):
        """GradScaler.unscale_() begins with it, and so does Trainer before it clips."""
        raise RuntimeError(
            "OneBitAdam takes no loss scale and no clipping: after its warm-up .grad has momenta"
        )

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, self.state[p], group)
        self.steps += 1
        return loss

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
        # Both start from zero: what is missing is made up for, in v only as long as it changes.
        denominator = (v / (1 - b2 ** min(steps, self.warmup))).sqrt_().add_(eps)
        if self.frozen:  # where there never was a gradient a sign is noise: 1/eps would blow it up
            denominator.masked_fill_(v == 0, torch.inf)
        p.addcdiv_(m, denominator, value=-group["lr"] / (1 - b1**steps))

    def __getstate__(self):
        own = {"warmup": self.warmup, "steps": self.steps, "compressor": self.compressor}
        return super().__getstate__() | own | {"_agreed": False}  # torch's has only what it knows

    def state_dict(self):
        return super().state_dict() | {
            "steps": self.steps,
            "compressor": self.compressor.state_dict(),
        }

    def load_state_dict(self, state_dict):
        self.steps, self._agreed = state_dict["steps"], False
        self.compressor.load_state_dict(state_dict["compressor"])
        super().load_state_dict({name: state_dict[name] for name in ("state", "param_groups")})


def first(buffer, travelled):
    travelled.value()  # raises what has gone wrong on the way
    return buffer
