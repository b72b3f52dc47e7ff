"""Gradient compression: comm hooks for labkit's or PyTorch's DDP that send fewer bytes.

    feedback.py     error feedback, the base of all: add unsent values to the next gradient; uses
        residual.py     the unsent values of each parameter
        packing.py      several dtypes as the bytes of one message
    topk.py         the largest elements, with their indices; uses
        select.py       finds them without sorting
    randomk.py      elements at random places that all ranks know
    dgc.py          top-k of momentum, with a warm-up
    powersgd.py     matrices as products of thin ones
    cast.py         16 bits
    quantize.py     8 or 4 bits, rounded at random; uses
        chunks.py       one scale for every chunk of elements
    onebit.py       signs
    onebit_adam.py  Adam that sends its momentum as signs
    onebit_lamb.py  LAMB that does; both use
        onebit_optimizer.py  the warm-up, the hook and the state

    model.register_comm_hook(None, TopK(0.01).hook)

COMPRESSORS: name -> function without arguments that builds a compressor.
"""

from functools import partial

import torch

from labkit.compression.cast import Cast
from labkit.compression.dgc import DGC
from labkit.compression.onebit import OneBit
from labkit.compression.onebit_adam import OneBitAdam
from labkit.compression.onebit_lamb import OneBitLamb
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
    "OneBitLamb",
    "PowerSGD",
    "Quantize",
    "RandomK",
    "TopK",
    "build",
]


def build(name):
    """Return a new compressor. name: a key of COMPRESSORS, otherwise raises ValueError."""
    if name not in COMPRESSORS:
        raise ValueError(f"unknown compressor {name!r}: choose one of {', '.join(COMPRESSORS)}")
    return COMPRESSORS[name]()
