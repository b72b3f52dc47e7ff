"""Gradient accumulation: several backwards add up gradients on each rank; the last one sends them.

    with no_sync()   backward   g0             nothing is sent
                     backward   g0 + g1
    without          backward   g0 + g1 + g2   averaged over the ranks: the complete sum

Sent: for k backwards as much as for one. In DDP and FSDP, as in PyTorch, the forward decides: with
only the backward in the block, gradients are averaged. The optimizers ZeRO1 and ZeRO2 see no
forward, so for them the backward decides. Memory: FSDP and ZeRO-2 keep full gradients in the block.
"""

from contextlib import contextmanager


class NoSync:
    """Base of classes that average in backward if require_backward_grad_sync (as in PyTorch)."""

    require_backward_grad_sync = True

    @contextmanager
    def no_sync(self):
        """Average nothing in this block; the first backward after it sends the complete sum."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before
