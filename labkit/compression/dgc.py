"""Deep Gradient Compression: top-k of momentum instead of gradients, with a warm-up.

    velocity  = momentum x velocity + gradient   on each rank, before anything is sent
    residual += velocity                         unsent values accumulate momentum
    sent      = top-k of residual                where sent, both become 0: stale momentum would
                                                 push on after the direction has changed

    step / warmup        0      1       2       3       4 ...
    ratio                1/4    1/16    1/64    1/256   ratio

With momentum in the optimizer, an element sent after 100 steps would start its momentum only then.
So use DGC with torch.optim.SGD without momentum. At a ratio of 0.001 an element waits for hundreds
of steps. The optimizer's weight decay has no momentum here. The authors' DGCSGD applies momentum to
it, which in the long run makes it 1 / (1 - momentum) times as strong.

Sent: as top-k. Held per rank: residual and velocity, each as large as the gradients.
Lin et al., Deep Gradient Compression, ICLR 2018, section 3 (momentum correction, factor masking,
warm-up). The paper selects per tensor, like per="tensor". Its clipping of local gradients is not
included.
"""

from labkit.compression.packing import unpack
from labkit.compression.residual import Residuals
from labkit.compression.topk import TopK


class DGC(TopK):
    """Top-k of accumulated momentum.

    ratio: share of the elements that is sent after the warm-up, in (0, 1].
    momentum: in [0, 1). warmup: steps of each stage of the warm-up; 0: no warm-up.
    masking: reset the velocity of sent elements. Without masking, ratio=1 is SGD with momentum.
    per: as in TopK. Raises ValueError for another ratio, momentum or per.
    """

    def __init__(self, ratio=0.001, momentum=0.9, warmup=0, masking=True, per="bucket"):
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum={momentum} must be at least 0 and below 1")
        super().__init__(ratio, per, momentum=momentum, warmup=warmup, masking=masking)
        self.momentum = momentum
        self.warmup = warmup
        self.masking = masking
        self.final_ratio = ratio
        self.velocities = Residuals()

    def ratio_at(self, step):
        """Return the ratio of a step: a quarter of the previous stage's, down to `ratio`."""
        if not self.warmup:
            return self.final_ratio
        return max(self.final_ratio, 0.25 ** (1 + step // self.warmup))

    def accumulate(self, residual, gradient, bucket):
        return residual.add_(self.velocities.of(bucket).mul_(self.momentum).add_(gradient))

    def compress(self, corrected, bucket):
        self.ratio = self.ratio_at(self.step)
        message, kinds = super().compress(corrected, bucket)
        if self.masking:
            k = message.numel() // sum(dtype.itemsize for dtype in kinds)
            values, places = unpack(message, *((dtype, k) for dtype in kinds))
            real = (
                values != 0
            ) & values.isfinite()  # neither padding nor a gradient with inf or NaN
            self.velocities.of(bucket)[places[real].long()] = 0
        return message, kinds

    def scale_residuals(self, factor):
        super().scale_residuals(factor)
        self.velocities.scale(factor)

    def state_dict(self):
        return super().state_dict() | {"velocities": self.velocities.state_dict()}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.velocities.load_state_dict(state["velocities"])
