"""Gradient compression: comm hooks of DDP, ours or PyTorch's, that send few bytes.

    feedback.py     error feedback, which all share: what is not sent now is sent later; on
        residual.py     what is not sent yet, by parameter
        packing.py      several dtypes as the bytes of one message
    topk.py         the largest elements, with their indices; on
        select.py       where they are, without sorting
    randomk.py      elements at random places that all ranks know
    dgc.py          top-k of momentum, with a warm-up
    powersgd.py     matrices as products of thin ones
    cast.py         16 bits
    quantize.py     8 or 4 bits, rounded at random; on
        chunks.py       a scale for every few elements
    onebit.py       signs
    onebit_adam.py  Adam whose momentum travels as signs

    model.register_comm_hook(None, TopK(0.01).hook)

COMPRESSORS: name -> function of nothing that makes a compressor, for whoever compares them.
"""

from functools import partial

import torch

from labkit.compression.cast import Cast
from labkit.compression.dgc import DGC
from labkit.compression.onebit import OneBit
from labkit.compression.onebit_adam import OneBitAdam
from labkit.compression.powersgd import PowerSGD
from labkit.compression.quantize import Quantize
from labkit.compression.randomk import RandomK
from labkit.compression.topk import TopK

COMPRESSORS = {
    "fp16": partial(Cast, torch.float16),
    "bf16": partial(Cast, torch.bfloat16),
    "quantize8": partial(Quantize, 8),
    "quantize4": partial(Quantize, 4),
    "onebit": OneBit,
    "topk": partial(TopK, 0.01),
    "randomk": partial(RandomK, 0.01),
    "dgc": partial(DGC, 0.01),
    "powersgd": partial(PowerSGD, 4),
}

__all__ = [
    "COMPRESSORS",
    "DGC",
    "Cast",
    "OneBit",
    "OneBitAdam",
    "PowerSGD",
    "Quantize",
    "RandomK",
    "TopK",
    "build",
]


def build(name):
    """The compressor of that name. Raises ValueError naming the known ones."""
    if name not in COMPRESSORS:
        raise ValueError(f"unknown compressor {name!r}: known are {', '.join(COMPRESSORS)}")
    return COMPRESSORS[name]()
