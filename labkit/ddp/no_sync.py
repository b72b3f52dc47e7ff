"""Gradient accumulation: gradients of several backwards add up on each rank; one message at last.

    with no_sync()   backward   g0             nothing is sent
                     backward   g0 + g1
    without          backward   g0 + g1 + g2   averaged over the ranks: the whole sum

Sent: for k backwards as much as for one. In DDP and FSDP, as in PyTorch, the forward decides: with
only the backward in the block, gradients are averaged. An optimizer, as ZeRO's, sees no forward:
there the backward decides. Memory: where shards of gradients would be left, whole ones stay.
"""

from contextlib import contextmanager


class NoSync:
    """Base of what averages in backward, if require_backward_grad_sync (PyTorch's name) is True."""

    require_backward_grad_sync = True

    @contextmanager
    def no_sync(self):
        """In this block nothing is averaged; the first averaging backward sends the whole sum."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before
