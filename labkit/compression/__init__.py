"""Gradient compression: comm hooks of DDP, ours or PyTorch's, that send few bytes for many gradients.

    feedback.py     error feedback, which all share: what is not sent now is sent later; it stands on
        residual.py     what is not sent yet, by parameter
        packing.py      several dtypes as the bytes of one message
    topk.py         the largest elements, with their indices; on
        select.py       where they are, without sorting
    randomk.py      elements at random places that all ranks know
    powersgd.py     matrices as products of thin ones
    cast.py         16 bits

    model.register_comm_hook(None, TopK(0.01).hook)

COMPRESSORS: name -> function of nothing that makes a compressor, for whoever compares them.
"""

from functools import partial

import torch

from labkit.compression.cast import Cast
from labkit.compression.powersgd import PowerSGD
from labkit.compression.randomk import RandomK
from labkit.compression.topk import TopK

COMPRESSORS = {
    "fp16": partial(Cast, torch.float16),
    "bf16": partial(Cast, torch.bfloat16),
    "topk": partial(TopK, 0.01),
    "randomk": partial(RandomK, 0.01),
    "powersgd": partial(PowerSGD, 4),
}

__all__ = ["COMPRESSORS", "Cast", "PowerSGD", "RandomK", "TopK", "build"]


def build(name):
    """The compressor of that name. Raises ValueError naming the known ones."""
    if name not in COMPRESSORS:
        raise ValueError(f"unknown compressor {name!r}: known are {', '.join(COMPRESSORS)}")
    return COMPRESSORS[name]()
