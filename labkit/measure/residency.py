"""Residency: the times when each FSDP unit is gathered, and the unit of each message.

    gather()                        free()
       |--- span "blocks.0" in the lane "whole" ---|   payload_bytes: memory of the gathered unit

A FlatParam's memory exists from the beginning of its gather until it is freed; then its size is 0.
So the size before and after each of its methods shows its state.
"""


def watch_units(model, timeline, names=None):
    """From now on, add a span to the timeline each time a unit of an FSDP model is gathered.

    names: one name per unit, by default "root" and the units' own names.
    Returns labels, a growing list for timeline.add_comm(events, labels): "gather NAME" or
    "reduce NAME" for each message, in the order of their start. They match if gathers and
    reductions are the only messages: not with shard="hybrid" or root="replicate".
    """
    labels = []
    names = [unit.name or "root" for unit in model.units] if names is None else names
    for name, unit in zip(names, model.units, strict=True):
        for flat in unit.flats:
            follow(flat, name, timeline, labels)
    return labels


def follow(flat, name, timeline, labels):
    """Wrap gather, free and launch_reduce of one FlatParam; a second call replaces the wrappers."""
    memory = flat.flat.untyped_storage()
    kind = type(flat)
    since = []

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

    flat.gather = gather
    flat.free = free
    flat.launch_reduce = launch_reduce
