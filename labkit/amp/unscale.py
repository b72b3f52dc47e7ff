"""Divides gradients by the loss scale and searches them for inf and NaN, in one pass over memory.

    device 0   [ g1  g2  g3 ] fp32  x 1/scale   found_inf |= any inf, NaN   one call for one dtype
    device 1   [ g4 ] bf16          x 1/scale   found_inf |= ...

Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2.
"""

from collections import defaultdict

import torch

from labkit.torch_private import unscale_and_find_inf


@torch.no_grad()
def gradients_of(optimizer):
    """Return {device: {dtype: [gradients]}} of an optimizer.

    Of a sparse gradient its values, of a DTensor this rank's shard. Raises ValueError for fp16
    gradients: divided by the scale in fp16, they would underflow.
    """
    found = defaultdict(lambda: defaultdict(list))
    for group in optimizer.param_groups:
        for p in group["params"]:
            gradient = p.grad
            if gradient is None:
                continue
            if gradient.dtype is torch.float16:
                raise ValueError(
                    "cannot unscale fp16 gradients: "
                    "use autocast, or MasterWeights for an fp16 model"
                )
            if gradient.is_sparse:
                gradient = gradient._values()
            elif hasattr(gradient, "to_local"):
                gradient = gradient.to_local()  # fully_shard's: this rank's shard
            found[gradient.device][gradient.dtype].append(gradient)
    return found


@torch.no_grad()
def unscale_and_check(gradients, inverse_scale, found_inf):
    """Multiply each gradient by inverse_scale in place; set found_inf to 1 for an inf or NaN.

    gradients: a list of tensors of one device and dtype. inverse_scale, found_inf: fp32 tensors of
    one element on that device. One pass over memory.
    """
    if gradients[0].dtype is torch.bfloat16 and gradients[0].is_cuda:
        one_by_one(gradients, inverse_scale, found_inf)  # torch has no fused kernel for these
    else:
        unscale_and_find_inf(gradients, found_inf, inverse_scale)


def one_by_one(gradients, inverse_scale, found_inf):
    """Do the same for one gradient after the other, in fp32 and rounded once."""
    for gradient in gradients:
        gradient.copy_(gradient.float() * inverse_scale)
        found_inf.copy_(torch.maximum(found_inf, (~gradient.isfinite()).any().float()))
