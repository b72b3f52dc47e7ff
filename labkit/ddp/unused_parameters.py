"""find_unused_parameters: parameters that the loss of this rank does not depend on in this step.

    backward    w3 .. [w1: no gradient will come] .. w2       no bucket waits for w1
    its end     one message: which rank has used w1?          if none has, w1.grad is not changed

The search runs at the first gradient of a backward, when the autograd engine has listed all nodes
of the graph that it will visit. Sent in addition: one int32 per parameter and step. Semantics:
find_unused_parameters of torch.nn.parallel.DistributedDataParallel. See labkit/ddp/static_graph.py
for models that leave the same parameters unused in every step.
"""

from torch.autograd.graph import get_gradient_edge

from labkit.torch_private import current_backward, will_visit


class FindUnused:
    """Find the unused parameters of each backward, which may differ from step to step."""

    def __init__(self, reducer):
        self.reducer = reducer
        # The node of the autograd graph that adds to p.grad; holding it keeps it the same one.
        self._nodes = [
            [get_gradient_edge(p).node for p in bucket.members] for bucket in reducer.buckets
        ]

    def forget(self):
        """Forget the last backward, because a forward begins."""

    def arrive(self, index, slot, backward):
        """Note a complete gradient. backward: the engine's number of the outermost backward."""
        first = not self.reducer.started
        self.reducer.arrive(index, slot)
        # In a reentrant checkpoint's own backward, the engine lists only that segment's nodes.
        if first and self.reducer.overlap and backward == current_backward():
            self._skip_unused()

    def _skip_unused(self):
        for bucket, nodes in zip(self.reducer.buckets, self._nodes, strict=True):
            for slot, node in enumerate(nodes):
                if not bucket.arrived[slot] and not will_visit(node):
                    self.reducer.skip(bucket.index(), slot)
        self.reducer.launch_full()

    def used(self, failed=False):
        """Return which parameters some rank has used, [[bool]] by bucket. Collective.

        failed: an exception has left the backward.
        """
        return self.reducer.used()

    def close(self, absent):
        """End a backward. absent: names of parameters without a gradient, which are allowed."""
