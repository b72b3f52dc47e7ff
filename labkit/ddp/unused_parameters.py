"""Unused parameters: what becomes of a gradient that does not come, as the loss does without it.

                     backward                   its end
    AllUsed       w3 .. w2 ...........       w1 never came: zeros are sent for it, an error names it
    FindUnused    w3 [w1 will not] .. w2     no bucket has waited; where no rank has it, .grad stays

The first gradient of a backward is the moment to ask: the engine then knows every node of the graph
that it will visit. Sent besides, by FindUnused: one int32 per parameter and step, which some rank
has used. Semantics: find_unused_parameters of torch.nn.parallel.DistributedDataParallel. See
labkit/ddp/static_graph.py for models that leave the same parameters unused in every step.
"""

import torch
from torch.autograd.graph import get_gradient_edge


class AllUsed:
    """Every backward brings every gradient. What others know about a backward, by default."""

    def __init__(self, reducer):
        self.reducer = reducer

    def forget(self):
        """A forward begins: what an earlier backward has left does not count."""

    def begin(self, backward):
        """A backward begins, or goes on to another output; the outermost. backward: its number."""

    def arrive(self, index, slot):
        """A gradient has been added to."""
        self.reducer.arrive(index, slot)

    def used(self, failed=False):
        """Which gradients some rank has: [[bool]] by bucket. Collective, unless known.

        failed: a backward that an exception has left; say all, where that would be remembered.
        """
        return [[True] * len(bucket.members) for bucket in self.reducer.buckets]

    def close(self, absent):
        """Backward is over; absent: names of the gradients that have not come. Raises if wrong."""
        if absent:
            raise RuntimeError(
                f"the loss does not depend on {', '.join(absent)}: "
                "pass find_unused_parameters=True if it need not depend on every parameter"
            )


class FindUnused(AllUsed):
    """Each backward may leave other parameters out."""

    def __init__(self, reducer):
        super().__init__(reducer)
        # The node of the autograd graph that adds to p.grad; holding it keeps it the same one.
        self._nodes = [
            [get_gradient_edge(p).node for p in bucket.members] for bucket in reducer.buckets
        ]
        self._backward = None

    def begin(self, backward):
        self._backward = backward

    def arrive(self, index, slot):
        first = not self.reducer.started
        self.reducer.arrive(index, slot)
        # In a backward inside it, of a reentrant checkpoint, the engine knows that segment only.
        if first and self.reducer.overlap and self._backward == torch._C._current_graph_task_id():
            self._skip_unused()

    def _skip_unused(self):
        for bucket, nodes in zip(self.reducer.buckets, self._nodes, strict=True):
            for slot, node in enumerate(nodes):
                if not bucket.arrived[slot] and not torch._C._will_engine_execute_node(node):
                    self.reducer.skip(bucket.index(), slot)
        self.reducer.launch_full()

    def used(self, failed=False):
        return self.reducer.used()

    def close(self, absent):
        """Nothing is wrong with any."""
