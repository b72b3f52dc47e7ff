"""Finds the sharded parts of a model inside wrappers and containers, and their plain names.

    torch.compile(FSDP(net))                 _orig_mod.w1         ->  w1           elements 0 to 12
    Both(encoder=FSDP(net), head=Linear)     encoder.w1           ->  encoder.w1   elements 0 to 12
    parallelize_module(net, group, plan)     w1 [2, 6] of [4, 6]  ->  w1           elements 0 to 12

A checkpoint uses the names of the module without torch.compile and checkpoint_wrapper. So a
compiled model and a plain one can load each other's checkpoints.
"""

import json

from labkit.checkpoint.dtensor_ranges import span
from labkit.checkpoint.shard_ranges import in_whole
from labkit.ddp.wrapper import Wrapper, without_wrappers
from labkit.fsdp import FSDP
from labkit.replicas import gather_bytes
from labkit.tensor_parallel.tp_state_dict import named_cuts


def unwrapped(thing):
    """Return the module inside torch.compile and inside PyTorch's DDP, which prefixes all names."""
    if type(thing).__name__ == "DistributedDataParallel":
        return unwrapped(thing.module)
    if type(thing).__name__ == "OptimizedModule":
        return unwrapped(thing._orig_mod)
    return thing


def sharded_parts(module, prefix=""):
    """Yield (prefix of its names, part) for every FSDP and Composed in or at a module."""
    if isinstance(module, Wrapper) and hasattr(module, "places"):
        yield prefix, module
        return
    for name, child in module._modules.items():
        if child is not None:
            inside = prefix if isinstance(module, Wrapper) else f"{prefix}{name}."
            yield from sharded_parts(child, inside)


def places_in(module):
    """Return {plain name: (start, stop, shape[, columns])} of a module's sharded tensors.

    The values are as in Place after its name; None for tensors that only other ranks hold.
    Raises ValueError for a pipeline inside another module.
    """
    found = {}
    shards = {}
    for prefix, part in sharded_parts(module):
        if prefix and getattr(part, "pipeline", None):
            raise ValueError(
                f"{prefix[:-1]!r} is a pipeline inside a module: save it as a separate model"
            )
        places = {without_wrappers(prefix + name): place for name, place in part.places().items()}
        found |= places
        if isinstance(part, FSDP):
            shards |= dict.fromkeys(places, part.sharding.group)
    found |= split_places(module, found, shards)
    return dict.fromkeys(names_elsewhere(module)) | found


def names_elsewhere(module):
    """Yield plain names that only other ranks hold, as reported by modules such as MoE."""
    for name, part in module.named_modules():
        for own_name in part.names_elsewhere() if hasattr(part, "names_elsewhere") else ():
            yield without_wrappers(f"{name}.{own_name}".removeprefix("."))


def split_places(module, found, shards):
    """Return the places of layers split by parallelize_module outside Composed.

    shards: {name: group} of the entries of `found` that FSDP has sharded again.
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
    """Return the union of the names of all ranks, in order. Collective."""
    texts = gather_bytes(json.dumps(names).encode(), device=device)
    return list(dict.fromkeys(name for text in texts for name in json.loads(text)))
