"""Emulated fp8 products: each tensor is scaled and rounded to 8 bits, then multiplied in fp32.

    x        --- times 448 / max |x|   ---> e4m3 --+
                                                   +--> x weight^T in fp32, over both scales --> y
    weight   --- times 448 / max |w|   ---> e4m3 --+
    backward:  gradient of y --- times 57344 / max |g| ---> e5m2, then times weight, and times x

e4m3 has the finer resolution; e5m2 has the larger range, which gradients need. A product of two
such numbers has at most eight significant bits, so fp32 holds it exactly. Only the order of
summation may differ from a GPU's fp8 units.

Cost on such a unit: one byte a number instead of two, and a maximum over each tensor. The emulation
is slower than fp32.
Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433, sections 2 (scales) and 3
(formats).
"""

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from labkit.torch_private import function_modes

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def rounded(tensor, dtype, scaled=True):
    """Round `tensor` to the nearest numbers of `dtype`, and return them in the tensor's dtype.

    scaled: first scale its largest value to dtype's largest. Values beyond that are clamped.
    """
    largest = torch.finfo(dtype).max
    scale = largest / tensor.abs().amax().clamp(min=1e-30) if scaled else 1.0
    return (tensor * scale).clamp(-largest, largest).to(dtype).to(tensor.dtype) / scale


class Product(torch.autograd.Function):
    """x @ weight.T for x [..., in] and weight [out, in]; scaled as in rounded()."""

    @staticmethod
    def forward(context, x, weight, scaled):
        x, weight = rounded(x, E4M3, scaled), rounded(weight, E4M3, scaled)
        context.save_for_backward(x, weight)
        context.scaled = scaled
        return x @ weight.T

    @staticmethod
    def backward(context, gradient):
        x, weight = context.saved_tensors
        gradient = rounded(gradient, E5M2, context.scaled)
        return gradient @ weight, gradient.flatten(0, -2).T @ x.flatten(0, -2), None


class fp8(TorchFunctionMode):
    """`with fp8(): loss = ...`: run the products of linear layers in fp8, and nothing else.

    scaled=False: no scales. For forward and loss; backward runs the operations recorded there.
    """

    def __init__(self, scaled=True):
        super().__init__()
        self.scaled = scaled

    @classmethod
    def is_on(cls):
        """Return whether a `with fp8():` encloses the caller."""
        return any(isinstance(mode, cls) for mode in function_modes())

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is functional.linear:
            return self.linear(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    def linear(self, input, weight, bias=None):
        y = Product.apply(input, weight, self.scaled)
        return y if bias is None else y + bias
