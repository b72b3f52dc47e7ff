"""Deep Gradient Compression: top-k of momentum instead of gradients, and a slow start.

    velocity  = momentum x velocity + gradient   on each rank, before anything is sent
    residual += velocity                         what waits is accelerated, as if it had been sent
    sent      = top-k of residual                there both become 0: momentum that arrives stale
                                                 would push on after the direction has changed

    step / warmup        0      1       2       3       4 ...
    ratio                1/4    1/16    1/64    1/256   ratio

With momentum in the optimizer instead, an element sent after 100 steps would begin to build its
momentum only then. So use it with torch.optim.SGD without momentum. At a ratio of 0.001 an element
waits for hundreds of steps. The weight decay of that optimizer has no momentum: the authors' DGCSGD
gives it some, which in the long run makes it 1 / (1 - momentum) times as strong.

Sent: as top-k. Held per rank: residual and velocity, each as large as the gradients.
Lin et al., Deep Gradient Compression, ICLR 2018, section 3 (momentum correction, factor masking,
warm-up). The paper chooses in each tensor, as per="tensor" does here. Its clipping of local
gradients is not part of this.
"""

from labkit.compression.packing import unpack
from labkit.compression.residual import Residuals
from labkit.compression.topk import TopK


class DGC(TopK):
    """ratio: at the end of the warm-up, whose stages last `warmup` steps each; 0: at once.

    masking: forget the velocity of what was sent. Without it, at ratio=1: SGD with momentum.
    """

    def __init__(self, ratio=0.001, momentum=0.9, warmup=0, masking=True, per="bucket"):
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be at least 0 and below 1, not {momentum}")
        super().__init__(ratio, per, momentum=momentum, warmup=warmup, masking=masking)
        self.momentum, self.warmup, self.masking, self.final_ratio = (
            momentum,
            warmup,
            masking,
            ratio,
        )
        self.velocities = Residuals()

    def ratio_at(self, step):
        """The share sent in a step: a quarter of the stage before's, until it is `ratio`."""
        return (
            max(self.final_ratio, 0.25 ** (1 + step // self.warmup))
            if self.warmup
            else self.final_ratio
        )

    def accumulate(self, residual, gradient, bucket):
        return residual.add_(self.velocities.of(bucket).mul_(self.momentum).add_(gradient))

    def compress(self, corrected, bucket):
        self.ratio = self.ratio_at(self.step)
        message, kinds = super().compress(corrected, bucket)
        if self.masking:
            k = message.numel() // sum(dtype.itemsize for dtype in kinds)
            values, places = unpack(message, *((dtype, k) for dtype in kinds))
            real = (values != 0) & values.isfinite()  # neither filling nor a refused gradient
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
