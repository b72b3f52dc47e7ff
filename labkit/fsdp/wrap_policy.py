"""Units: which parts of a model are gathered together, and which parameters each of them owns.

    GPT                      unit=(Block,)    root      E, position, norm, head (tied to E)
    |- token_embedding   E                    blocks.0  its norms, attention, network
    |- blocks.0   Block                       blocks.1  its norms, attention, network
    |- blocks.1   Block
    |- norm, head                             a parameter belongs to the innermost unit around it

Large units need few messages but much memory: at most the root and two units are gathered at the
same time. Zhao et al., PyTorch FSDP, VLDB 2023, section 3.2.1.
"""

import os
from contextlib import nullcontext
from zlib import crc32

import torch

from labkit.ddp.wrapper import find_tensors
from labkit.fsdp.fsdp_unit import Unit
from labkit.replicas import broadcast_tensors


def split_units(module, unit, keep=False):
    """Return [Unit], root first, then in named_modules() order.

    unit: see FSDP. keep: see Unit; of all units but the root. Raises ValueError if unit matches
    nothing, or if two units share a parameter or a module.
    """
    matches = as_policy(unit)
    units, homes = [Unit("", module, keep=True)], {}

    def walk(part, name, home):
        if part is not module and matches(part) and part not in homes:
            home = Unit(name, part, keep)
            units.append(home)
        if part in homes:
            if homes[part] is not home and homes[part].module is not part:
                raise ValueError(
                    f"module {name!r} lies in {homes[part]} and in {home}: "
                    "one unit must contain both places"
                )
            return
        homes[part] = home
        home.modules[name] = part
        for key, child in part.named_children():
            walk(child, f"{name}.{key}".removeprefix("."), home)

    walk(module, "", units[0])
    if unit is not None and len(units) == 1:
        classes = sorted(
            {type(part).__name__ for part in module.modules()} - {type(module).__name__}
        )
        raise ValueError(
            f"no part of the model matches unit {unit}; "
            f"its parts are {', '.join(classes) or 'none'}"
        )
    _check_ties(units)
    return units


def _check_ties(units):
    owners = {}
    for unit in units:
        for p, places in unit.own_parameters().items():
            if p in owners:
                name, other = owners[p]
                raise ValueError(
                    f"{name!r} in {other} and {places[0][0]!r} in {unit} are one parameter: "
                    "choose units so that one contains both, or leave both to the root"
                )
            owners[p] = places[0][0], unit


def read_elsewhere(error, units):
    """Return an error text if a forward has read a parameter of a unit that it does not call.

    The parameter is a 1-D piece then, and some operation fails. The parameter's name is found in
    the frames of the traceback.
    """
    pieces = {
        p: f"{name}.{attribute}".removeprefix(".")
        for unit in units
        for name, module in unit.modules.items()
        for attribute, p in module._parameters.items()
        if p is not None and hasattr(p, "is_piece")
    }
    step = error.__traceback__
    while step is not None:
        ours = step.tb_frame.f_code.co_filename.startswith(os.path.dirname(__file__))
        for value in () if ours else step.tb_frame.f_locals.values():
            if isinstance(value, torch.nn.Parameter) and value in pieces:
                return (
                    f"{pieces[value]!r} was read outside the forward of its unit, where it is a "
                    "shard: choose units that contain whatever reads it, as unit=(Block,)"
                )
        step = step.tb_next
    return None


# ---- policies: functions module -> bool


def as_policy(unit):
    """Return the function module -> bool for a class, a tuple of classes, a function, or None."""
    if unit is None:
        return lambda module: False
    if isinstance(unit, type | tuple | list):
        classes = unit if isinstance(unit, type) else tuple(unit)
        return lambda module: isinstance(module, classes)
    if not callable(unit):
        raise TypeError(f"unit must be module classes or a function module -> bool, not {unit!r}")
    return unit


def by_size(numel):
    """Match the smallest modules with at least numel parameters."""

    def large(module):
        return sum(p.numel() for p in module.parameters()) >= numel

    return lambda module: large(module) and not any(large(child) for child in module.children())


def excluding(unit, *excluded):
    """Match the modules of `unit`, except the excluded modules and classes."""
    matches = as_policy(unit)
    classes = tuple(item for item in excluded if isinstance(item, type))
    modules = [item for item in excluded if not isinstance(item, type)]
    return lambda module: (
        matches(module)
        and not isinstance(module, classes)
        and not any(module is item for item in modules)
    )


# ---- the meta device


def materialise(unit, device, seed=None):
    """Allocate and initialise the unit's tensors on the meta device, tied ones included.

    Each module with parameters or buffers of its own must have reset_parameters(), as torch's have;
    ValueError if not. seed: each module draws from a generator of its own, by this and its name.
    In a dry run (device: "meta") nothing gets memory.
    """
    if torch.device(device).type == "meta":
        return
    ties = [places for places in unit.own_parameters().values() if len(places) > 1]
    for name, module in unit.modules.items():
        own = [*module._parameters.values(), *module._buffers.values()]
        if not any(t.is_meta for t in find_tensors(own)):
            continue
        if not hasattr(module, "reset_parameters"):
            raise ValueError(
                f"{name or 'the root'!r} ({type(module).__name__}) is on the meta device and has "
                "no reset_parameters() to give it values: "
                "write one, or build this module on a real device"
            )
        module.to_empty(device=device, recurse=False)
        alone = nullcontext() if seed is None else torch.random.fork_rng(generators(device))
        with torch.no_grad(), alone:
            if seed is not None:
                torch.manual_seed(seed ^ crc32(name.encode()))
            module.reset_parameters()
    for (_, first, attribute), *others in ties:
        for _, module, other in others:
            module._parameters[other] = first._parameters[attribute]


def generators(device):
    return [] if device.type == "cpu" else [device]


def materialise_alike(modules, device):
    """Materialise parts of one model, seeded by name, so identical on any mesh. Collective."""
    seed = torch.tensor(torch.initial_seed() % 2**62, device=device)
    broadcast_tensors([seed])
    for module in modules:
        materialise(split_units(module, None)[0], device, seed.item())
