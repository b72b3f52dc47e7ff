"""Packing: tensors of several dtypes as the bytes of one message, and back.

    values  float32 [k]    --->   | values: 4 k bytes | indices: 4 k bytes |   uint8 [8 k]
    indices int32   [k]

One message costs one latency, where two would cost two.
"""

import torch


def pack(*tensors):
    """The bytes of contiguous tensors, one after the other: uint8 [sum of their bytes]."""
    return torch.cat([t.reshape(-1).view(torch.uint8) for t in tensors])


def unpack(message, *kinds):
    """What pack was given, flat; kinds: (dtype, elements) of each. Views of message if aligned."""
    parts = message.split([dtype.itemsize * numel for dtype, numel in kinds])
    return [as_dtype(part, dtype) for part, (dtype, _) in zip(parts, kinds, strict=True)]


def as_dtype(part, dtype):
    # A view as another dtype must begin at a multiple of its size.
    return (part.clone() if part.storage_offset() % dtype.itemsize else part).view(dtype)
