"""Parameters sharded along one dim, and state dicts with full parameters.

    rank 0   weight [2, 6]  --- all_gather ---\\
                                                weight [3, 6] on every rank  --- own slice ---> ...
    rank 1   weight [2, 6]  --- all_gather ---/
             its second row is padding: zero, and not part of the full weight

Sent per rank: (n-1)/n x bytes of the sharded parameters for full_state_dict; nothing to load one.
"""

from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.nn import functional as F

from labkit.tensor_parallel.placements import Axis, gathered
from labkit.zero.flat_shards import mark_shard


class Cut(NamedTuple):
    """How a parameter is sharded: along which dim, over which Axis, and its full length there."""

    dim: int
    axis: Axis
    length: int

    @property
    def size(self):
        """The length of every rank's slice along dim, including padding."""
        return -(-self.length // self.axis.size)

    def narrowed(self, whole):
        """Return a view of this rank's slice of a full tensor, without padding."""
        start = min(self.axis.rank * self.size, self.length)
        return whole.narrow(self.dim, start, min(self.size, self.length - start))

    def part(self, whole, name="a parameter"):
        """Return this rank's slice of a full tensor, padded with zeros.

        Raises RuntimeError if the full tensor has another shape than expected.
        """
        shape = list(whole.shape)
        expected = [*shape[: self.dim], self.length, *shape[self.dim + 1 :]]
        if shape != expected:
            raise RuntimeError(f"{name!r} has shape {shape}, expected {expected}")
        own = self.narrowed(whole)
        missing = self.size - own.shape[self.dim]
        return F.pad(own, [0, 0] * (whole.dim() - 1 - self.dim) + [0, missing]) if missing else own

    def surrounded(self, part):
        """Return a tensor of the full shape with this rank's slice in its place, NaN elsewhere."""
        shape = [*part.shape[: self.dim], self.length, *part.shape[self.dim + 1 :]]
        whole = part.new_full(shape, torch.nan)
        own = self.narrowed(whole)
        own.copy_(part.narrow(self.dim, 0, own.shape[self.dim]))
        return whole

    def is_part(self, parameter):
        """Return whether a parameter is a rank's slice: not full, and not FSDP's shard of it."""
        return not hasattr(parameter, "is_piece") and parameter.shape[self.dim] == self.size

    def whole(self, part):
        """Return the full tensor, from the slices of all ranks. Collective."""
        every = gathered(part, self.dim, self.axis)
        if every.shape[self.dim] == self.length:
            return every
        return every.narrow(self.dim, 0, self.length).clone()  # a view is saved with its padding


def cuts_of(module):
    """Return {parameter: Cut} of the sharded parameters of a module."""
    return {
        part._parameters[name]: Cut(dim, part.axis, getattr(part, part.shared))
        for part in module.modules()
        for name, dim in getattr(part, "cuts", {}).items()
        if part._parameters[name] is not None
    }


def named_cuts(module):
    """Return (name, Cut) of the sharded parameters, once for every name that they have."""
    cuts = cuts_of(module)
    named = module.named_parameters(remove_duplicate=False)
    return ((name, cuts[p]) for name, p in named if p in cuts)


def take_part(parameter, cut):
    """Replace a parameter by this rank's slice, in place: ties, optimizers and names remain."""
    own = cut.part(parameter.data)
    parameter.data = own.clone(memory_format=torch.contiguous_format)
    mark_shard(parameter)


@contextmanager
def whole_parameters(module):
    """Give the sharded parameters of a module their full shape inside, for initialisers.

    An initialiser then sees the sizes of one process and draws its numbers; each rank keeps its
    slice. Values of other ranks are NaN until they are drawn. Sends nothing. All ranks must have
    the same random state, as after parallelize_module.
    """
    cuts = cuts_of(module)
    held = {p: p.data for p, cut in cuts.items() if cut.is_part(p)}
    for p, slice_ in held.items():
        cuts[p].axis.rng.same_on_all()
        p.data = cuts[p].surrounded(slice_)
    try:
        yield
    finally:
        # if nothing was held, an outer whole_parameters made them full, and will put them back
        for p, cut in cuts_of(module).items() if held else ():
            if p in held:
                put_back(p, held[p], cut)
            elif p not in cuts:  # a new parameter replaced an old one
                take_part(p, cut)


def put_back(parameter, slice_, cut):
    """Copy the slice back to where it was, which may be a view of a larger buffer."""
    own = cut.part(parameter.data)
    if (own.dtype, own.device) == (slice_.dtype, slice_.device):
        parameter.data = slice_.copy_(own)
    else:
        take_part(parameter, cut)


def full_state_dict(module):
    """Return module.state_dict() with full parameters, on every rank. Collective."""
    cuts = cuts_of(module)
    wholes = {}
    state = module.state_dict()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter in cuts:
            if parameter not in wholes:
                wholes[parameter] = cuts[parameter].whole(parameter.detach())
            state[name] = wholes[parameter]
    return state


def load_full_state_dict(module, state_dict, strict=True):
    """Load this rank's slice of each full value; every rank must be given all values.

    Returns what module.load_state_dict returns, and raises RuntimeError as it does.
    """
    cuts = cuts_of(module)
    given = dict(state_dict)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter in cuts and name in given:
            given[name] = cuts[parameter].part(given[name], name)
    return module.load_state_dict(given, strict)
