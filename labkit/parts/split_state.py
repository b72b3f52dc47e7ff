"""Parameters of which each rank holds a slice along one dim, and state dicts of the whole.

    rank 0   weight [2, 6]  --- all_gather ---\\
                                                weight [3, 6] on every rank  --- own slice ---> ...
    rank 1   weight [2, 6]  --- all_gather ---/
             its second row is padding: zero, and never in the whole

Sent per rank: (n-1)/n x bytes of the split parameters for full_state_dict; nothing to load one.
"""

from typing import NamedTuple

import torch
from torch.nn import functional as F

from labkit.parts.layouts import Axis, gathered


class Cut(NamedTuple):
    """How a parameter is cut: dim along which it is, over which Axis, length of the whole there."""

    dim: int
    axis: Axis
    length: int

    @property
    def size(self):
        """Of a rank's slice along dim, padding and all."""
        return -(-self.length // self.axis.size)

    def part(self, whole):
        """This rank's slice of the whole, with zeros behind its end."""
        start, stop = (min(r * self.size, self.length) for r in (self.axis.rank, self.axis.rank + 1))
        own = whole.narrow(self.dim, start, stop - start)
        missing = self.size - (stop - start)
        behind = [0, 0] * (whole.dim() - 1 - self.dim) + [0, missing]
        return F.pad(own, behind) if missing else own

    def whole(self, part):
        """The whole, of the slices of all ranks. Collective."""
        every = gathered(part, self.dim, self.axis)
        own = every.narrow(self.dim, 0, self.length)
        return own if own.shape == every.shape else own.clone()  # a view would be saved with padding


def cuts_of(module):
    """{parameter: Cut} of a module, whatever is around it."""
    return {
        part._parameters[name]: Cut(dim, part.axis, getattr(part, part.shared))
        for part in module.modules()
        for name, dim in getattr(part, "cuts", {}).items()
        if part._parameters[name] is not None
    }


def take_part(parameter, cut):
    """The parameter becomes this rank's slice, in place: ties, optimizers and names stay."""
    own = cut.part(parameter.data)
    parameter.data = own.clone(memory_format=torch.contiguous_format)


def full_state_dict(module):
    """module.state_dict() as if it had never been split, on every rank. Collective."""
    cuts, wholes = cuts_of(module), {}
    state = module.state_dict()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter in cuts:
            if parameter not in wholes:
                wholes[parameter] = cuts[parameter].whole(parameter.detach())
            state[name] = wholes[parameter]
    return state


def load_full_state_dict(module, state_dict, strict=True):
    """Take this rank's slice of each value of the whole; every rank must be given all.

    Returns what module.load_state_dict returns, and raises RuntimeError as it does.
    """
    cuts, given = cuts_of(module), dict(state_dict)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter in cuts and name in given:
            cut = cuts[parameter]
            shape = list(parameter.shape)
            shape[cut.dim] = cut.length
            if list(given[name].shape) != shape:
                raise RuntimeError(f"{name!r} is {list(given[name].shape)} and should be {shape}")
            given[name] = cut.part(given[name])
    return module.load_state_dict(given, strict)
