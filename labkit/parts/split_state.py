"""Parameters of which each rank holds a slice along one dim, and state dicts of the whole.

    rank 0   weight [2, 6]  --- all_gather ---\\
                                                weight [4, 6] on every rank  --- own slice ---> ...
    rank 1   weight [2, 6]  --- all_gather ---/

Sent per rank: (n-1)/n x bytes of the split parameters for full_state_dict; nothing to load one.
"""

import torch

from labkit.parts.layouts import cut, gathered


def cuts_of(module):
    """{parameter: (dim along which it is cut, Axis)} of a module, whatever is around it."""
    return {
        part._parameters[name]: (dim, part.axis)
        for part in module.modules()
        for name, dim in getattr(part, "cuts", {}).items()
        if part._parameters[name] is not None
    }


def take_part(parameter, dim, axis):
    """The parameter becomes this rank's slice, in place: ties, optimizers and names stay."""
    own = cut(parameter.data, dim, axis.size)[axis.rank]
    parameter.data = own.clone(memory_format=torch.contiguous_format)


def full_state_dict(module):
    """module.state_dict() as if it had never been split, on every rank. Collective."""
    cuts, wholes = cuts_of(module), {}
    state = module.state_dict()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter in cuts:
            if parameter not in wholes:
                wholes[parameter] = gathered(parameter.detach(), *cuts[parameter])
            state[name] = wholes[parameter]
    return state


def load_full_state_dict(module, state_dict, strict=True):
    """Take this rank's slice of each value of the whole; every rank must be given all.

    Returns what module.load_state_dict returns, and raises RuntimeError as it does.
    """
    cuts, given = cuts_of(module), dict(state_dict)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter in cuts and name in given:
            dim, axis = cuts[parameter]
            shape = list(parameter.shape)
            shape[dim] *= axis.size
            if list(given[name].shape) != shape:
                raise RuntimeError(f"{name!r} is {list(given[name].shape)} and should be {shape}")
            given[name] = cut(given[name], dim, axis.size)[axis.rank]
    return module.load_state_dict(given, strict)
