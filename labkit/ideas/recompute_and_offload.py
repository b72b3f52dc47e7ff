"""When memory runs out: drop activations and compute them again, or move tensors to host memory.

    kept        forward [a1 a2 a3 a4]                       backward uses a4 a3 a2 a1
    recompute   forward [a1       a3]   a2, a4 dropped      backward computes them once more
    offload     forward [a1 a2 a3 a4] -> host               backward copies them back
    states      step    of each parameter: copy its states here, update, copy them back

Cost: recompute one more forward; offload each byte twice over the link to the host.
Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016; Ren et al., ZeRO-Offload, USENIX
ATC 2021.
"""

import torch
from torch.autograd.graph import saved_tensors_hooks


class Recompute(torch.autograd.Function):
    """Recompute.apply(function, x): keep x only, and compute function(x) again in backward().

    One tensor in, one out; x requires a gradient. The backward runs another backward inside. A
    parameter that two such calls use gets its gradient in two parts, and DDP cannot know which is
    the last. Dropout in the function would draw other numbers the second time.
    labkit.recompute.checkpoint has a single backward and restores the random state.
    """

    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.save_for_backward(x)
        return function(x)  # autograd is off here, so no intermediate result is kept

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.function(x)
        torch.autograd.backward(output, gradient)
        return None, x.grad


def offload_activations(home="cpu"):
    """Move all saved tensors to `home`: `with offload_activations(): loss = model(x)`."""

    def pack(tensor):
        return tensor.device, tensor.to(home)

    def unpack(packed):
        device, tensor = packed
        return tensor.to(device)

    return saved_tensors_hooks(pack, unpack)


def step_with_offloaded_states(optimizer, home="cpu"):
    """Take a step one parameter at a time, with optimizer states that stay in `home` otherwise."""
    groups = optimizer.param_groups
    for group in groups:
        for p in group["params"]:
            state = optimizer.state[p]
            state.update({name: value.to(p.device) for name, value in state.items()})
            optimizer.param_groups = [{**group, "params": [p]}]
            optimizer.step()
            state.update({name: value.to(home) for name, value in state.items()})
    optimizer.param_groups = groups
