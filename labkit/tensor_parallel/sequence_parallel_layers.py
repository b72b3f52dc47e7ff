"""Modules that treat each token by itself, on a rank's shard of the tokens.

    rank 0   tokens 0-3 --- norm w --- ...      gradient of w: from tokens 0-3  \\
    rank 1   tokens 4-7 --- norm w --- ...      gradient of w: from tokens 4-7  / summed, before w

Parameters are whole, and the same on all ranks; each rank sees a part of what they do.
"""

from torch import nn

from labkit.tensor_parallel.placements import Replicate, Shared
from labkit.tensor_parallel.tp_plan import Style


class SequenceParallel(Style):
    """A norm or dropout that sees this rank's tokens; parameters are whole, their gradients too.

    For modules that treat each token by itself. The input must be shards already: of a layer with
    output_layouts=Shard(sequence_dim), and the next column-parallel layer has input_layouts so.
    """

    def __init__(self, *, sequence_dim=1, use_local_output=False):
        self.sequence_dim = sequence_dim

    def check(self, name, module, axis):
        if isinstance(module, nn.modules.batchnorm._BatchNorm) or list(module.children()):
            kind = type(module).__name__
            raise ValueError(f"{name} is a {kind}, and SequenceParallel takes norms and dropout")

    def leaves_shards(self, module):
        return True

    def apply(self, module, axis):
        kind = type(module)
        module.__class__ = type(f"Sequence{kind.__name__}", (OnShards, kind), {})
        module.axis = axis


class OnShards:
    """A module on shards of its input, with whole parameters. axis: an Axis."""

    def forward(self, x):
        if self.training:
            self.axis.draws.own(x.device)
        whole = dict(self._parameters)
        for name, parameter in whole.items():
            if parameter is not None:
                self._parameters[name] = self.axis.move(parameter, Replicate(), Shared())
        try:
            return super().forward(x)
        finally:
            self._parameters.update(whole)
