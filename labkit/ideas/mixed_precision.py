"""Mixed precision: compute in 16 bits where it is safe, and scale the loss to keep gradients.

    weights fp32 --cast--> 16 bits --linear--> 16 bits --cast--> fp32 --cross_entropy--> loss
                                                                         x scale, then backward
    all gradients finite on all ranks   divide them by the scale, step; double it now and then
    an inf or nan on any rank           no rank steps; halve the scale

Also sent: one number a step. Held: 2 bytes a parameter until backward() is over.
Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.
"""

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from labkit import comm


class CastInputs(TorchFunctionMode):
    """Cast the inputs of functions: `with CastInputs({functional.linear: torch.bfloat16}): ...`

    Autograd records each cast, so gradients are cast back on their way.
    """

    def __init__(self, dtypes):
        super().__init__()
        self.dtypes = dtypes

    def __torch_function__(self, function, types, args=(), kwargs=None):
        dtype = self.dtypes.get(function)

        def cast(value):
            if dtype and isinstance(value, torch.Tensor) and value.is_floating_point():
                return value.to(dtype)
            return value

        named = {name: cast(value) for name, value in (kwargs or {}).items()}
        return function(*map(cast, args), **named)


def scaled_steps(losses, optimizer, scale=2.0**16, growth_interval=2000, group=None):
    """Step for each loss; backward() must average over ranks (DDP). Yield the next step's scale."""
    good_steps = 0
    for loss in losses:
        optimizer.zero_grad()
        (loss * scale).backward()
        gradients = [p.grad for one in optimizer.param_groups for p in one["params"]]
        overflow = torch.stack([~gradient.isfinite().all() for gradient in gradients]).any().float()
        comm.all_reduce(overflow, op=dist.ReduceOp.MAX, group=group)
        if overflow:  # on any rank: of sharded gradients the others do not see it
            scale, good_steps = scale / 2, 0
        else:
            for gradient in gradients:
                gradient /= scale
            optimizer.step()
            good_steps += 1
            if good_steps == growth_interval:
                scale, good_steps = scale * 2, 0
        yield scale
