"""State dicts of FSDP: sharded, with this rank's pieces, or full.

    state_dict             this rank's pieces, under the module's own names
    full_state_dict        n ranks, pieces  --- all_gather --->  every rank: w1 [4, 6], b1 [4], ...
    load_full_state_dict   every rank: w1 [4, 6], b1 [4], ...  --- own parts ---> m ranks, pieces
    load_shards            the state_dict() of each of n ranks --- own parts ---> m ranks, pieces

Sent per rank: (n-1)/n x parameter bytes for full_state_dict, else nothing. Held while saving: the
full model.
Zhao et al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel, VLDB 2023, section 4.
"""

import torch
from torch import nn

from labkit.ddp.wrapper import plain_name
from labkit.replicas import broadcast_tensors


def full_state_dict(model):
    """Return the full module.state_dict() on every rank, with rank 0's buffers. Collective."""
    model.rest()
    broadcast_tensors(list(model.module.buffers()), 0, model.sharding.everyone)
    try:
        for flat in model.flats:
            # Copies: each tensor has its own memory, without padding, which makes smaller files.
            flat.put(
                [nn.Parameter(value.clone(), flat.trainable) for value in flat.gather_master()]
            )
        return model.module.state_dict()  # the module's own: its hooks and extra state included
    finally:
        for flat in model.flats:
            flat.put(flat.pieces)


def load_full_state_dict(model, state_dict, strict=True):
    """Load this rank's part of a full state dict. Every rank must pass the full one.

    It may come from any number of ranks, or from a model without FSDP. Returns the result of
    module.load_state_dict. Raises RuntimeError, before anything is changed, with every wrong shape
    and, if strict, every missing and unexpected name.
    """
    model.rest()
    homes = _homes(model)
    own = model.module.state_dict().keys()
    given = {plain_name(name, own): value for name, value in state_dict.items()}
    problems = [f"missing {name!r}" for name in own if name not in given and strict]
    problems += [f"unexpected {name!r}" for name in given if name not in own and strict]
    for name, value in given.items():
        if name in homes:
            flat, slot = homes[name]
            shape = flat.layout.shapes[slot]
            if value.shape != shape:
                problems.append(f"{name!r} is {list(value.shape)} and should be {list(shape)}")
            begin, end = flat.layout.ranges(flat.rank)[slot]
            given[name] = value.flatten()[begin:end]
    if problems:
        raise RuntimeError(
            f"not a state dict of this {type(model.module).__name__}: {'; '.join(problems)}"
        )
    return model.module.load_state_dict(given, strict)


def load_shards(model, state_dicts, strict=True):
    """Load the state_dict() of each of n ranks, in order of rank, into any world size."""
    given = dict(state_dicts[0])
    for name, (flat, slot) in _homes(model).items():
        if name in given:
            whole, shape = (
                torch.cat([state[name] for state in state_dicts]),
                flat.layout.shapes[slot],
            )
            if whole.numel() != shape.numel():
                raise RuntimeError(
                    f"{name!r} has {shape.numel()} elements, these {len(state_dicts)} state "
                    f"dicts have {whole.numel()} of it: "
                    "give that of every rank that saved, once, in order"
                )
            given[name] = whole.view(shape)
    return load_full_state_dict(model, given, strict)


def places(model):
    """Return {name: (start, stop, shape)}: the piece's range in the flattened full parameter."""
    model.rest()
    return {
        name: (*flat.layout.ranges(flat.rank)[slot], tuple(flat.layout.shapes[slot]))
        for name, (flat, slot) in _homes(model).items()
    }


def _homes(model):
    """Return {name: (its FlatParam, its number there)}, with every name of a tied parameter."""
    homes = {piece: (flat, slot) for flat in model.flats for slot, piece in enumerate(flat.pieces)}
    named = model.module.named_parameters(remove_duplicate=False)
    return {name: homes[p] for name, p in named if p in homes}
