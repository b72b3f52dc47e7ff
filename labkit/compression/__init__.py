"""Gradient compression: comm hooks of DDP, ours or PyTorch's, that send few bytes for many gradients.

    feedback.py     error feedback, which all share: what is not sent now is sent later; it stands on
        residual.py     what is not sent yet, by parameter
        packing.py      several dtypes as the bytes of one message
    topk.py         the largest elements, with their indices; on
        select.py       where they are, without sorting

    model.register_comm_hook(None, TopK(0.01).hook)

COMPRESSORS: name -> function of nothing that makes a compressor, for whoever compares them.
"""

from functools import partial

from labkit.compression.topk import TopK

COMPRESSORS = {
    "topk": partial(TopK, 0.01),
}

__all__ = ["COMPRESSORS", "TopK", "build"]


def build(name):
    """The compressor of that name. Raises ValueError naming the known ones."""
    if name not in COMPRESSORS:
        raise ValueError(f"unknown compressor {name!r}: known are {', '.join(COMPRESSORS)}")
    return COMPRESSORS[name]()
