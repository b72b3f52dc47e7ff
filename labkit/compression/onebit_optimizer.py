"""Optimizers that freeze the variance after a warm-up, and then send momentum in one bit.

    warm-up   average the gradients, update the variance
    then      own = b1 m + (1 - b1) own gradient      each rank, from the same m
              m   = mean of one bit of (own + residual)          what is sent
              the variance is constant, as it is stable now

Such an optimizer divides by the root of the squares, so an error in a gradient enters twice and
does not cancel: error feedback fails. With a constant variance the step is linear in the message,
and delayed values arrive unchanged.

Sent per rank and step: in the warm-up as plain averaging, then as OneBit. Held: m, v, residual.
Tang et al., 1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed,
ICML 2021, algorithm 1 (here messages are gathered, not scattered and compressed again). OneBit's
magnitude is the mean |x| of a chunk, DeepSpeed's the 2-norm / sqrt(elements) of a full tensor.
"""

from functools import partial

import torch

from labkit.compression.feedback import start_mean
from labkit.compression.onebit import OneBit
from labkit.replicas import check_agreement


class OneBitOptimizer(torch.optim.Optimizer):
    """Base of optimizers with a comm hook for DDP.

        optimizer = OneBitAdam(model.parameters(), lr=1e-3, warmup=100)
        model.register_comm_hook(None, optimizer.hook)

    defaults: options of a group, with "betas". warmup: steps with averaged gradients, until the
        variance is stable. compressor: of the momentum; default OneBit(). Raises ValueError for a
        warmup below 1. A subclass implements `_update` and has a `title` for messages.

    After the warm-up p.grad holds the new momentum instead of a gradient: do not clip it, and use
    no loss scale (labkit's GradScaler and a Trainer that clips raise RuntimeError). If warmup or
    steps differ between ranks, the next backward raises ValueError on all of them. state_dict()
    includes this rank's residual.
    """

    title = "a 1-bit optimizer"

    def __init__(self, params, defaults, warmup, compressor):
        if type(warmup) is not int or warmup < 1:
            raise ValueError(
                f"warmup={warmup} must be at least 1: without plain steps v would be zero"
            )
        super().__init__(params, defaults)
        self.warmup = warmup
        self.steps = 0
        self.compressor = compressor or OneBit()
        self._agreed = False

    @property
    def frozen(self):
        """Whether the variance is frozen and momentum is sent."""
        return self.steps >= self.warmup

    def hook(self, group, bucket):
        """Average the gradients, or after the warm-up the ranks' momentum. A comm hook of DDP.

        Returns a Future of the bucket's average, [elements].
        """
        if not self._agreed:
            check_agreement(
                [f"{self.title}, warmup={self.warmup}, step {self.steps}"],
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
            if self.state[p]:  # empty before the first gradient
                gradient.add_(self.state[p]["m"], alpha=b1[p])
        return self._send(group, bucket)

    def _send(self, group, bucket):
        """Average the bucket's momentum, compressed. Returns a Future."""
        return self.compressor.hook(group, bucket)

    def take_gradients(self):
        """Refuse loss scaling and clipping: called by GradScaler.unscale_() and Trainer."""
        raise RuntimeError(
            f"{type(self).__name__} supports neither a loss scale nor clipping: after its warm-up "
            ".grad holds the momentum"
        )

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.numel():
                    self._update(p, self.state[p], group)
        self.steps += 1
        return loss

    def _update(self, p, state, group):
        """Update one parameter, and its state, from p.grad: a gradient, or the new momentum."""
        raise NotImplementedError

    def __getstate__(self):
        added = {"warmup": self.warmup, "steps": self.steps, "compressor": self.compressor}
        return super().__getstate__() | added | {"_agreed": False}  # torch's omits these

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
    """Return the buffer after its collective; raise the collective's error."""
    travelled.value()
    return buffer
