"""Predicts the states of an optimizer before its first step, to allocate or count them.

    optimizer    p1, p2: no states yet            a copy, with meta parameters, takes one step
    twin         p1, p2: exp_avg, exp_avg_sq      and shows which states it creates

Nothing is computed and nothing is allocated: a tensor on the meta device is a shape and a dtype.
"""

import copy
from collections import defaultdict

import torch


def expected_states(optimizer, parameters):
    """Return {parameter: {name: tensor}} of the states: existing ones, or meta tensors.

    Raises ValueError if the optimizer's step fails before it has created the states.
    """
    known = {p: optimizer.state[p] for p in parameters if p in optimizer.state}
    new = [p for p in parameters if p not in known and p.requires_grad]
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
        group["capturable"] = False  # a GPU optimizer would require it of the copy, Adafactor's too
        twin.param_groups = [group]
        try:
            twin.step()
        except Exception as error:
            # otherwise it failed because of missing data, after creating the states
            if any(p not in twin.state for p in group["params"]):
                name = type(optimizer).__name__
                raise ValueError(f"cannot predict the states of {name}: {error}") from None
    known |= {p: twin.state.get(twins[id(p)], {}) for p in new}
    return {
        p: {name: value for name, value in states.items() if isinstance(value, torch.Tensor)}
        for p, states in known.items()
    }
