"""The sharded parts of a model, in whatever wrappers and containers they are, by plain names.

    torch.compile(FSDP(net))                 _orig_mod.w1         ->  w1           elements 0 to 12
    Both(encoder=FSDP(net), head=Linear)     encoder.w1           ->  encoder.w1   elements 0 to 12
    parallelize_module(net, group, plan)     w1 [2, 6] of [4, 6]  ->  w1           elements 0 to 12

A checkpoint has the names that a module has without torch.compile and checkpoint_wrapper, so that a
compiled model and a plain one load each other's.
"""

import json

from labkit.checkpoint.dtensor_ranges import span
from labkit.checkpoint.shard_ranges import in_whole
from labkit.ddp.wrapper import Wrapper, without_wrappers
from labkit.fsdp import FSDP
from labkit.replicas import gather_bytes
from labkit.tensor_parallel.tp_state_dict import named_cuts


def unwrapped(thing):
    """The module in torch.compile and in PyTorch's DDP, which puts its name before every other."""
    if type(thing).__name__ == "DistributedDataParallel":
        return unwrapped(thing.module)
    if type(thing).__name__ == "OptimizedModule":
        return unwrapped(thing._orig_mod)
    return thing


def sharded_parts(module, prefix=""):
    """(prefix of its names, part) of every FSDP and Composed in a module, or the module itself."""
    if isinstance(module, Wrapper) and hasattr(module, "places"):
        yield prefix, module
        return
    for name, child in module._modules.items():
        if child is not None:
            inside = prefix if isinstance(module, Wrapper) else f"{prefix}{name}."
            yield from sharded_parts(child, inside)


def places_in(module):
    """{plain name: (start, stop, shape[, columns])}: which elements of which whole a module holds.

    As Place has it after its name. Of what is sharded only; None of what only other ranks hold.
    Raises ValueError for a pipeline inside another module.
    """
    found, shards = {}, {}
    for prefix, part in sharded_parts(module):
        if prefix and getattr(part, "pipeline", None):
            raise ValueError(f"{prefix[:-1]!r} has a pipeline: save it as a model of its own")
        own = {without_wrappers(prefix + name): place for name, place in part.places().items()}
        found |= own
        if isinstance(part, FSDP):
            shards |= dict.fromkeys(own, part.sharding.group)
    found |= split_places(module, found, shards)
    return dict.fromkeys(names_elsewhere(module)) | found


def names_elsewhere(module):
    """Plain names of what only other ranks have, by a part's own word: an MoE's other experts."""
    for name, part in module.named_modules():
        for own_name in part.names_elsewhere() if hasattr(part, "names_elsewhere") else ():
            yield without_wrappers(f"{name}.{own_name}".removeprefix("."))


def split_places(module, found, shards):
    """The same of layers that parallelize_module has split, where no Composed has done it.

    shards: {name: group}, of those in `found` that FSDP has sharded once more.
    """
    if isinstance(module, Wrapper) and hasattr(module, "cuts"):  # Composed has counted them
        return {}
    values, split = dict(module.named_parameters(remove_duplicate=False)), {}
    for own_name, cut in named_cuts(module):
        name = without_wrappers(own_name)
        if name in shards or name not in found:
            held = found.get(name) or span(values[own_name])
            split[name] = in_whole(cut, *held, shards.get(name))
    return split


def of_all_ranks(names, device):
    """The names, together with those that other ranks give. Collective."""
    told = gather_bytes(json.dumps(names).encode(), device=device)
    return list(dict.fromkeys(name for text in told for name in json.loads(text)))
