"""The states that an optimizer will have, before its first step: to make room, or to count them.

    optimizer    p1, p2: nothing yet              a twin, whose parameters have a shape and no data,
    twin         p1, p2: exp_avg, exp_avg_sq      takes one step, and shows what it has made

Nothing is computed and nothing is allocated: a tensor on the meta device is a shape and a dtype.
"""

import copy
from collections import defaultdict

import torch


def expected_states(optimizer, parameters):
    """parameter -> {name: tensor} of its states: as they are, or without data as they will be.

    A copy of the optimizer, with parameters that have a shape and no data, takes one step and shows
    what it makes.
    """
    looks = {p: optimizer.state[p] for p in parameters if p in optimizer.state}
    new = [p for p in parameters if p not in looks and p.requires_grad]
    twins = {id(p): torch.empty_like(p, device="meta").requires_grad_() for p in new}
    states, groups = optimizer.state, optimizer.param_groups
    try:
        wanted = [
            group | {"params": [p for p in group["params"] if id(p) in twins]} for group in groups
        ]
        optimizer.state, optimizer.param_groups = (
            defaultdict(dict),
            [group for group in wanted if group["params"]],
        )
        twin = copy.deepcopy(optimizer, dict(twins))
    finally:
        optimizer.state, optimizer.param_groups = states, groups
    for p in twins.values():
        p.grad = torch.empty_like(p)
    for group in twin.param_groups:
        group.update({key: False for key in ("foreach", "fused") if key in group})
        group["capturable"] = False  # on a GPU a copied optimizer is asked for it, Adafactor too
        twin.param_groups = [group]
        try:
            twin.step()
        except Exception as error:
            # else it failed for want of data, with states made
            if any(p not in twin.state for p in group["params"]):
                told = (
                    f"the states of {type(optimizer).__name__} cannot be told in advance: {error}"
                )
                raise ValueError(told) from None
    looks |= {p: twin.state.get(twins[id(p)], {}) for p in new}
    return {
        p: {name: value for name, value in states.items() if isinstance(value, torch.Tensor)}
        for p, states in looks.items()
    }
