"""Consolidate sharded optimizer states into those of full parameters, and shard them again.

    rank 0   exp_avg of its pieces [####    ]                      by parameter, on every rank:
    rank 1                         [    ####] --- all_gather --->  {0: {"exp_avg": [[..]]}, 1: ..}
                                              <---- slice -------  of a dict from any world size

States with the shape of the parameter are gathered. Scalar states (a count of steps) are identical
on all ranks that have them, and are taken from one of these. First the ranks exchange, as JSON,
which states they have, because a rank may have no piece of a parameter.

Sent per rank: (n-1)/n x state bytes. Held: the full states, once. Loading sends nothing. The
format is that of torch.optim.Optimizer.state_dict. Rajbhandari et al., ZeRO, SC 2020, section 5.1.
"""

import json

import torch

from labkit import comm
from labkit.replicas import gather_bytes


def gather_state(optimizer, whole_groups, pieces, buckets, group=None):
    """Return the state_dict of the unsharded optimizer on every rank. Collective.

    optimizer: that of this rank's pieces. whole_groups: its groups with the full parameters.
    pieces: {parameter: piece}. buckets: list of ShardedBucket.
    """
    numbers = {p: i for i, p in enumerate(p for whole in whole_groups for p in whole["params"])}
    held = _held(optimizer)
    mine = {numbers[p]: _describe(piece, held.get(piece, {})) for p, piece in pieces.items()}
    told = {}
    for text in gather_bytes(json.dumps(mine).encode(), group, buckets[0].device):
        told |= {int(i): entries for i, entries in json.loads(text).items() if entries}
    state = {i: {key: _value(entry) for key, entry in told[i].items()} for i in sorted(told)}
    for bucket in buckets:
        slots = [
            (slot, told.get(numbers[p], {}), numbers[p]) for slot, p in enumerate(bucket.members)
        ]
        for key, dtype in sorted(
            {(key, e[1]) for _, entries, _ in slots for key, e in entries.items() if e[0] == "each"}
        ):
            whole = _gather(held, bucket, key, getattr(torch, dtype), group)
            for slot, entries, i in slots:
                if key in entries:
                    state[i][key] = whole[slot].clone()  # a view would keep all of the buffer
    return {"state": state, "param_groups": _number(optimizer.param_groups, whole_groups, numbers)}


def _held(optimizer):
    """Return {piece: its states}. state_dict() waits for an offloading optimizer's transfers."""
    order = (piece for group in optimizer.param_groups for piece in group["params"])
    state = optimizer.state_dict()["state"]
    return {piece: state[i] for i, piece in enumerate(order) if i in state}


def _describe(piece, state):
    """{key: ["each", dtype] | ["same", dtype, value] | ["plain", None, value]}, fit for JSON."""
    found = {}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            found[key] = ["plain", None, value]
        elif value.shape == piece.shape:
            found[key] = ["each", str(value.dtype).removeprefix("torch.")]
        elif value.dim() == 0:
            found[key] = ["same", str(value.dtype).removeprefix("torch."), value.item()]
        else:
            raise ValueError(
                f"state {key!r} has shape {list(value.shape)}: neither a number nor one per element"
            )
    return found


def _value(entry):
    kind, dtype, *value = entry
    if kind == "same":
        return torch.tensor(*value, dtype=getattr(torch, dtype))
    return value[0] if kind == "plain" else None  # "each": still to be gathered


def _gather(held, bucket, key, dtype, group):
    """Gather state `key` of all parameters of a bucket; zeros for parameters without it."""
    shard = torch.zeros(bucket.layout.shard_numel, dtype=dtype, device=bucket.device)
    for piece, part in zip(bucket.pieces, bucket.layout.pieces(shard, bucket.rank), strict=True):
        if piece is not None and key in held.get(piece, {}):
            part.copy_(held[piece][key])
    flat = torch.empty(bucket.layout.padded, dtype=dtype, device=bucket.device)
    comm.all_gather(flat, shard, group)
    return bucket.shaped(flat)


def options_of(group):
    """Return the options of a parameter group, without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _number(groups, whole_groups, numbers):
    """Return the current options of the groups, with the parameters' numbers."""
    numbered = []
    for group, whole in zip(groups, whole_groups, strict=True):
        names = {"param_names": list(whole["param_names"])} if "param_names" in whole else {}
        numbered.append(
            {**options_of(group), **names, "params": [numbers[p] for p in whole["params"]]}
        )
    return numbered


def slice_state(state_dict, whole_groups, pieces, buckets):
    """Return this rank's part of a full state_dict, for load_state_dict of the pieces' optimizer.

    Raises ValueError if its groups or shapes are not those of these parameters.
    """
    saved = state_dict["param_groups"]
    counts = [[len(group["params"]) for group in groups] for groups in (saved, whole_groups)]
    if counts[0] != counts[1]:
        raise ValueError(
            f"the state dict has groups of {counts[0]} parameters, this optimizer of {counts[1]}"
        )
    places = {p: (bucket, slot) for bucket in buckets for slot, p in enumerate(bucket.members)}
    state, groups = {}, []
    for group, whole in zip(saved, whole_groups, strict=True):
        held = []
        for i, p in zip(group["params"], whole["params"], strict=True):
            entries = state_dict["state"].get(i, {})
            if p in places:
                # also if other ranks take this state
                _check_shapes(entries, p, places[p][0].names[places[p][1]])
            if p in pieces:
                held.append(i)
                state[i] = {
                    key: _slice(key, value, p, *places[p]) for key, value in entries.items()
                }
        groups.append({**options_of(group), "params": held})
    return {
        "state": {i: entries for i, entries in state.items() if entries},
        "param_groups": groups,
    }


def _check_shapes(entries, p, name):
    for key, value in entries.items():
        if isinstance(value, torch.Tensor) and value.dim() and value.shape != p.shape:
            raise ValueError(
                f"{name!r} has shape {list(p.shape)}, "
                f"its {key!r} in the state dict {list(value.shape)}"
            )


def _slice(key, value, p, bucket, slot):
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim() == 0 and (p.dim() or key == "step"):
        return value.clone()  # the optimizer counts in place, and the dict is the caller's
    start, stop = bucket.layout.ranges(bucket.rank)[slot]
    return bucket.in_memory_order(slot, value)[start:stop].clone()
