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

    def part(self, whole, name="a parameter"):
        """This rank's slice of the whole, with zeros behind its end.

        Raises RuntimeError where the whole is not as long as it was when it was cut.
        """
        shape = list(whole.shape)
        expected = [*shape[: self.dim], self.length, *shape[self.dim + 1 :]]
        if shape != expected:
            raise RuntimeError(f"{name!r} is {shape} and should be {expected}")
        size = -(-self.length // self.axis.size)
        start = min(self.axis.rank * size, self.length)
        own = whole.narrow(self.dim, start, min(size, self.length - start))
        missing = size - own.shape[self.dim]
        return F.pad(own, [0, 0] * (whole.dim() - 1 - self.dim) + [0, missing]) if missing else own

    def whole(self, part):
        """The whole, of the slices of all ranks. Collective."""
        every = gathered(part, self.dim, self.axis)
        if every.shape[self.dim] == self.length:
            return every
        return every.narrow(self.dim, 0, self.length).clone()  # a view is saved with its padding


def cuts_of(module):
    """{parameter: Cut} of a module, whatever is around it."""
    return {
        part._parameters[name]: Cut(dim, part.axis, getattr(part, part.shared))
        for part in module.modules()
        for name, dim in getattr(part, "cuts", {}).items()
        if part._parameters[name] is not None
    }


def named_cuts(module):
    """(name, Cut) of the parameters that are cut, by every name of theirs."""
    cuts = cuts_of(module)
    named = module.named_parameters(remove_duplicate=False)
    return ((name, cuts[p]) for name, p in named if p in cuts)


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
            given[name] = cuts[parameter].part(given[name], name)
    return module.load_state_dict(given, strict)
