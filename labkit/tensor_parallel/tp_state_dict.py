"""Parameters of which each rank holds a slice along one dim, and state dicts of the whole.

    rank 0   weight [2, 6]  --- all_gather ---\\
                                                weight [3, 6] on every rank  --- own slice ---> ...
    rank 1   weight [2, 6]  --- all_gather ---/
             its second row is padding: zero, and never in the whole

Sent per rank: (n-1)/n x bytes of the split parameters for full_state_dict; nothing to load one.
"""

from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.nn import functional as F

from labkit.tensor_parallel.placements import Axis, gathered
from labkit.zero.flat_shards import mark_shard


class Cut(NamedTuple):
    """How a parameter is cut: dim along which it is, over which Axis, length of the whole there."""

    dim: int
    axis: Axis
    length: int

    @property
    def size(self):
        """The length of every rank's slice along dim, with padding."""
        return -(-self.length // self.axis.size)

    def narrowed(self, whole):
        """A view of this rank's slice of the whole, without padding."""
        start = min(self.axis.rank * self.size, self.length)
        return whole.narrow(self.dim, start, min(self.size, self.length - start))

    def part(self, whole, name="a parameter"):
        """This rank's slice of the whole, with zeros behind its end.

        Raises RuntimeError where the whole is not as long as it was when it was cut.
        """
        shape = list(whole.shape)
        expected = [*shape[: self.dim], self.length, *shape[self.dim + 1 :]]
        if shape != expected:
            raise RuntimeError(f"{name!r} is {shape} and should be {expected}")
        own = self.narrowed(whole)
        missing = self.size - own.shape[self.dim]
        return F.pad(own, [0, 0] * (whole.dim() - 1 - self.dim) + [0, missing]) if missing else own

    def surrounded(self, part):
        """A tensor of the whole's shape with this rank's slice in its place and NaN elsewhere."""
        shape = [*part.shape[: self.dim], self.length, *part.shape[self.dim + 1 :]]
        whole = part.new_full(shape, torch.nan)
        own = self.narrowed(whole)
        own.copy_(part.narrow(self.dim, 0, own.shape[self.dim]))
        return whole

    def is_part(self, parameter):
        """Whether a parameter is a rank's slice: neither the whole nor FSDP's piece of a slice."""
        return not hasattr(parameter, "is_piece") and parameter.shape[self.dim] == self.size

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
    mark_shard(parameter)


@contextmanager
def whole_parameters(module):
    """Give the split parameters of a module the shape of the whole inside, for initialisers.

    An initialiser then sees the sizes of one process and draws its numbers, and each rank keeps its
    slice. Values of other ranks are NaN until something is drawn. Sends nothing: all ranks must be
    in one random state, as parallelize_module leaves them.
    """
    cuts = cuts_of(module)
    held = {p: p.data for p, cut in cuts.items() if cut.is_part(p)}
    for p, slice_ in held.items():
        cuts[p].axis.draws.alike()
        p.data = cuts[p].surrounded(slice_)
    try:
        yield
    finally:
        # without any held, they were whole before, and whoever made them so takes them back
        for p, cut in cuts_of(module).items() if held else ():
            if p in held:
                put_back(p, held[p], cut)
            elif p not in cuts:  # a new parameter in the place of one
                take_part(p, cut)


def put_back(parameter, slice_, cut):
    """The slice of a whole goes to where it was: it may be a view of a larger buffer."""
    own = cut.part(parameter.data)
    if (own.dtype, own.device) == (slice_.dtype, slice_.device):
        parameter.data = slice_.copy_(own)
    else:
        take_part(parameter, cut)


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
