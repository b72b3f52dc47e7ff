"""Top-k: send only the largest elements of each gradient with their indices, the rest later.

    corrected    .1 -.9  .2  .0  .7 -.1    rank 0 sends  (1, -.9) (4, .7)
                 .3  .1 -.2  .6 -.1  .0    rank 1 sends  (3, .6)  (0, .3)
    sum          .3 -.9  .0  .6  .7  .0    each value at its own index: indices differ between
    0's residual .1  .0  .2  .0  .0 -.1    ranks, so values are gathered instead of all-reduced

Sent per rank and step: (n-1) k (4 + 4) bytes for k = ratio x elements. Unlike an all_reduce it
grows with n: with 8 bytes an element it saves bytes only while ratio < 1/n. Held: one residual and
n messages.
Aji and Heafield, Sparse Communication for Distributed Gradient Descent, EMNLP 2017, section 3;
Stich et al., Sparsified SGD with Memory, NeurIPS 2018.
"""

import torch

from labkit.compression.feedback import Compressor
from labkit.compression.packing import pack, unpack
from labkit.compression.select import top_indices


class TopK(Compressor):
    """Send the largest elements of each bucket.

    ratio: the share that is sent, in (0, 1]; at least one element.
    per: "bucket", or "tensor": the same share of each tensor, so that no tensor is starved.
    feedback: keep unsent values; otherwise they are lost.
    Raises ValueError for another ratio or per.
    """

    def __init__(self, ratio=0.01, per="bucket", feedback=True, **settings):
        check_ratio(ratio)
        if per not in ("bucket", "tensor"):
            raise ValueError(f'per must be "bucket" or "tensor", not {per!r}')
        super().__init__(feedback, ratio=ratio, per=per, **settings)
        self.ratio = ratio
        self.per = per

    def compress(self, corrected, bucket):
        sizes = (
            [p.numel() for p in bucket.parameters()]
            if self.per == "tensor"
            else [corrected.numel()]
        )
        values, indices = [], []
        start = 0
        for part in corrected.split(sizes):
            if part.numel():
                k = count(self.ratio, part.numel())
                found = top_indices(part, k)
                lacking = k - found.numel()
                values.append(torch.nn.functional.pad(part[found], (0, lacking)))
                part[found] = 0
                # padding adds zeros, at any index
                indices.append(torch.nn.functional.pad(found, (0, lacking)).add_(start))
            start += part.numel()
        values, indices = torch.cat(values), torch.cat(indices).to(index_dtype(start))
        return pack(values, indices), (values.dtype, indices.dtype)

    def decompress(self, arrived, average, note):
        average.zero_()
        k = arrived.size(1) // sum(dtype.itemsize for dtype in note)
        for message in arrived:  # in rank order: bit-identical sums on all ranks
            values, indices = unpack(message, *((dtype, k) for dtype in note))
            average.index_add_(0, indices, values.div_(len(arrived)).to(average.dtype))


def check_ratio(ratio):
    if not 0 < ratio <= 1:
        raise ValueError(
            f"ratio={ratio} must be above 0 and at most 1: 0.01 sends one element of a hundred"
        )


def count(ratio, numel):
    """Return the number of elements to send of numel: at least 1."""
    return max(1, round(ratio * numel))


def index_dtype(numel):
    return torch.int32 if numel < 2**31 else torch.int64
