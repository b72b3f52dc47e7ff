"""Residency: when each unit of a sharded model is whole, and which message belongs to which unit.

    gather()                        free()
       |--- span "blocks.0" in the lane "whole" ---|   payload_bytes: what the unit takes meanwhile

A FlatParam's memory is there from the moment that its gather begins until it is freed, and what is
freed has size 0; so the size of that memory, before and after each of its methods, says all.
"""


def watch_units(model, timeline, names=None):
    """From now on `timeline` gets a span each time a unit of `model`, an FSDP, is whole.

    names: one word per unit, by default the root and its units' own names.
    Returns labels, a list that grows, for timeline.add_comm(events, labels): "gather NAME" or
    "reduce NAME" for each message, in the order of their start. They fit where gathers and
    reductions are the only messages: not with shard="hybrid" or root="replicate".
    """
    labels = []
    names = [unit.name or "root" for unit in model.units] if names is None else names
    for name, unit in zip(names, model.units, strict=True):
        for flat in unit.flats:
            follow(flat, name, timeline, labels)
    return labels


def follow(flat, name, timeline, labels):
    """Wrap gather, free and launch_reduce of one FlatParam; a second call replaces the first."""
    memory, kind, since = flat.flat.untyped_storage(), type(flat), []

    def gather():
        if not memory.nbytes():
            labels.append(f"gather {name}")
            since[:] = [timeline.begin(name, "whole", payload_bytes=flat.flat.nbytes)]
        kind.gather(flat)

    def free():
        kind.free(flat)
        if since and not memory.nbytes():
            timeline.end(since.pop())

    def launch_reduce(owed=False):
        if any(p.grad is not None for p in flat.wholes):
            labels.append(f"reduce {name}")
        kind.launch_reduce(flat, owed)

    flat.gather, flat.free, flat.launch_reduce = gather, free, launch_reduce
