"""Layers that process each token separately, on a rank's shard of the tokens.

    rank 0   tokens 0-3 --- norm w --- ...      gradient of w: from tokens 0-3  \\
    rank 1   tokens 4-7 --- norm w --- ...      gradient of w: from tokens 4-7  / summed, before w

Parameters are replicated; each rank computes a part of their gradients.
"""

from torch import nn

from labkit.tensor_parallel.grouped_sums import with_sums
from labkit.tensor_parallel.tp_plan import Style


class SequenceParallel(Style):
    """A norm or dropout on this rank's tokens, with replicated parameters and gradients.

    For modules that process each token separately. The input must be sharded already: give the
    layer before output_layouts=Shard(sequence_dim), and the next column-parallel layer the same
    input_layouts.
    """

    def __init__(self, *, sequence_dim=1, use_local_output=False):
        self.sequence_dim = sequence_dim

    def check(self, name, module, axis):
        if isinstance(module, nn.modules.batchnorm._BatchNorm) or list(module.children()):
            kind = type(module).__name__
            raise ValueError(f"{name} is a {kind}: SequenceParallel supports norms and dropout")

    def leaves_shards(self, module):
        return True

    def apply(self, module, axis):
        kind = type(module)
        module.__class__ = type(f"Sequence{kind.__name__}", (OnShards, kind), {})
        module.axis = axis


class OnShards:
    """A module on shards of its input, with replicated parameters. axis: an Axis."""

    def parameters_with_parts(self):
        return {name: p for name, p in self._parameters.items() if p is not None}

    def forward(self, x):
        if self.training:
            self.axis.rng.per_rank(x.device)
        whole = dict(self._parameters)
        self._parameters.update(with_sums(self))
        try:
            return super().forward(x)
        finally:
            self._parameters.update(whole)
