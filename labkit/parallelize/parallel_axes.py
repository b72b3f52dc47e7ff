"""Which axes of a mesh can be together, and what each of them needs of the module.

          dp    cp    pp    ep    tp
    dp          yes   yes   yes   yes     pp: samples and layers only; gradients after the backward
    cp                -     yes   yes     ep: experts are whole, so no wrap that shards (FSDP)
    pp                      -     yes     cp: of a module with `attend`; ep: of one with experts
    ep                            yes

The checks use only the module and the sizes, identically on all ranks: nothing is sent.
"""

from labkit.tensor_parallel.tp_plan import matches

AXES = ("dp", "cp", "pp", "ep", "tp")


def attending(module):
    return [part for part in module.modules() if hasattr(part, "attend")]


def refuse(module, size, plan, wrap, stage, stages):
    """Raise ValueError for axes and settings that cannot be combined.

    size: {axis: ranks along it}, of all AXES. The others are arguments of Composed.
    """
    for axis in size:
        if axis not in AXES:
            raise ValueError(f"the axes of a composed job are {', '.join(AXES)}, not {axis!r}")
    mixtures = [part for part in module.modules() if hasattr(part, "spread")]
    if any(part.group is not None for part in mixtures):
        raise ValueError("the experts are spread already: make them with group=None")
    if size["tp"] > 1:
        if not plan:
            raise ValueError(f"tp={size['tp']} needs a plan: which layers are split, and how")
        matches(module, plan)
    if size["cp"] > 1 and not attending(module):
        raise ValueError(f"cp={size['cp']}: no part of this module has `attend`, to be replaced")
    if size["cp"] > 1:
        refuse_settings(size["cp"], module)
    if size["ep"] > 1:
        refuse_experts(size["ep"], mixtures, getattr(wrap, "func", wrap))
    if size["pp"] == 1:
        return
    if size["cp"] > 1:
        raise ValueError(
            "pp and cp cannot be combined: only the first pipeline stage receives token positions"
        )
    if mixtures:
        raise ValueError(
            "pp and experts cannot be combined: the last stage does not see the load of others"
        )
    if wrap is not None:
        raise ValueError(
            "wrap must be None with pp: gradients are averaged after the last backward"
        )
    if stage is None or not hasattr(module, "blocks"):
        raise ValueError(f"pp={size['pp']} needs `stage`, and a module with `blocks`")
    stages = stages or size["pp"]
    if len(module.blocks) % stages:
        raise ValueError(f"blocks={len(module.blocks)} must be divisible by stages={stages}")


def refuse_settings(ranks, module):
    """Raise ValueError if an `attend` has options (a window, a scale), which cp would drop."""
    for name, part in module.named_modules():
        if given := getattr(getattr(part, "attend", None), "keywords", None):
            said = ", ".join(f"{word}={value!r}" for word, value in given.items())
            raise ValueError(
                f"cp={ranks} replaces {name}.attend, and with it {said}: leave it out there, and "
                f"give Composed attend=partial(ring_attention, {said}), or another that takes it"
            )


def refuse_experts(ranks, mixtures, wrap):
    """Raise ValueError if the experts cannot be divided over the ranks.

    wrap: the class or function that averages gradients, or None.
    """
    if not mixtures:
        raise ValueError(f"ep={ranks}: no part of this module has experts, to be spread")
    for part in mixtures:
        if len(part.experts) % ranks:
            raise ValueError(f"experts={len(part.experts)} must be divisible by ep={ranks}")
    if hasattr(wrap, "full_state_dict"):
        raise ValueError(f"ep={ranks} with {wrap.__name__}: experts are not sharded: wrap=DDP")
