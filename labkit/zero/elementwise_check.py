"""Check that an optimizer is elementwise: each element's update depends on its own history only.

    whole   [ a b c ]  step, step -> [ a' b' c' ]    the same numbers: SGD, Adam, RMSprop, Adagrad
            [ d e f ]                [ d' e' f' ]
    pieces  [ a b c d ]  [ e f ]  -> [ a' b' c' d' ]  [ e' f' ]

Only such an optimizer can work on shards. LAMB reads a tensor's norm, Adafactor and Muon its rows
and columns, LBFGS all parameters. A list of names cannot cover classes outside torch, so the check
runs two steps on six numbers.
Rajbhandari et al., ZeRO, SC 2020, section 5.1, shards Adam; for the others see You et al., LAMB,
ICLR 2020.
"""

import torch


def check_elementwise(optimizer_class, defaults, group=None, device="cpu"):
    """Raise ValueError if two steps of optimizer_class treat a matrix and its parts differently.

    defaults: keyword arguments of the class. group: options of the parameter group that differ, or
    are its own. Errors of optimizer_class about its arguments pass through.
    """
    device = "cpu" if torch.device(device).type == "meta" else device
    whole = torch.linspace(-1.0, 1.0, 6, device=device).view(2, 3)
    parts = [whole.flatten()[:4], whole.flatten()[4:]]
    optimizer_class([{**(group or {}), "params": [torch.nn.Parameter(whole.clone())]}], **defaults)
    try:
        together, apart = (
            _two_steps(optimizer_class, defaults, group or {}, tensors)
            for tensors in ([whole], parts)
        )
        same = torch.allclose(together, apart, rtol=1e-4)
    except Exception:  # it needs what a shard does not have: a closure, rows, sparse gradients
        same = False
    if not same:
        raise ValueError(
            f"{optimizer_class.__name__} is not elementwise: the update of one element depends on "
            "others, so it cannot work on shards; use SGD, Adam, AdamW, RMSprop, Adagrad or "
            "another elementwise optimizer"
        )


def _two_steps(optimizer_class, defaults, group, tensors):
    parameters = [torch.nn.Parameter(t.clone()) for t in tensors]
    optimizer = optimizer_class([{**group, "params": parameters}], **defaults)
    for options in optimizer.param_groups:
        options["lr"] = 0.1  # a rate of 0 would hide the difference
    for slope in (1.0, -0.3):
        for p in parameters:
            p.grad = slope * p.detach() + 0.1
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in parameters])
