"""Whole values out of shards, and into shards of any other number: state dicts of a sharded model.

    full_state_dict         n ranks, pieces  --- all_gather --->  every rank: w1 [4, 6], b1 [4], ...   as unsharded
    load_full_state_dict    every rank: w1 [4, 6], b1 [4], ...  --- own part of each --->  m ranks, pieces

Sent per rank: (n-1)/n x parameter bytes to save, nothing to load. Held while saving: the whole model, on every rank.
Zhao et al., PyTorch FSDP, VLDB 2023, section 4.
"""

from torch import nn

from labkit.replicas import broadcast_tensors
from labkit.wrapper import plain_name


def full_state_dict(fsdp):
    """What fsdp.module.state_dict() would be had it never been sharded. Collective; nothing may be gathered."""
    broadcast_tensors(list(fsdp.module.buffers()), 0, fsdp.process_group)
    try:
        for flat in fsdp.flats:
            # Copies: each tensor alone in its memory, without padding, as savers of files want them.
            flat.put([nn.Parameter(value.clone(), flat.trainable) for value in flat.gather_master()])
        return fsdp.module.state_dict()  # the module's own: its hooks and extra state included
    finally:
        for flat in fsdp.flats:
            flat.put(flat.pieces)


def load_full_state_dict(fsdp, state_dict, strict=True):
    """Copy this rank's part of every whole value into the pieces. Sends nothing."""
    homes = {piece: (flat, slot) for flat in fsdp.flats for slot, piece in enumerate(flat.pieces)}
    held = dict(fsdp.module.named_parameters(remove_duplicate=False))
    own = fsdp.module.state_dict().keys()
    given = {plain_name(name, own): value for name, value in state_dict.items()}
    problems = [f"missing {name!r}" for name in own if name not in given and strict]
    problems += [f"unexpected {name!r}" for name in given if name not in own and strict]
    parts = {}
    for name, value in given.items():
        if held.get(name) in homes:
            flat, slot = homes[held[name]]
            shape = flat.layout.shapes[slot]
            if value.shape != shape:
                problems.append(f"{name!r} is {list(value.shape)} and should be {list(shape)}")
                continue
            begin, end = flat.layout.ranges(flat.rank)[slot]
            value = value.flatten()[begin:end]
        parts[name] = value
    if problems:
        raise RuntimeError(f"not a state dict of this {type(fsdp.module).__name__}: {'; '.join(problems)}")
    return fsdp.module.load_state_dict(parts, strict)
