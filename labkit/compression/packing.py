"""Packing: tensors of several dtypes as the bytes of one message, and back.

    values  float32 [k]    --->   | values: 4 k bytes | indices: 4 k bytes |   uint8 [8 k]
    indices int32   [k]

One message costs one latency instead of two.
"""

import torch


def pack(*tensors):
    """Concatenate the bytes of contiguous tensors: uint8 [sum of their bytes]."""
    return torch.cat([t.reshape(-1).view(torch.uint8) for t in tensors])


def unpack(message, *kinds):
    """Return the packed tensors, flat. kinds: (dtype, elements) of each.

    A tensor is a view of the message if it is aligned to its dtype, else a copy.
    """
    parts = message.split([dtype.itemsize * numel for dtype, numel in kinds])
    return [as_dtype(part, dtype) for part, (dtype, _) in zip(parts, kinds, strict=True)]


def as_dtype(part, dtype):
    # A view as another dtype must begin at a multiple of its size.
    return (part.clone() if part.storage_offset() % dtype.itemsize else part).view(dtype)
