"""Top-k: of each gradient only the largest elements travel, with their indices; the rest waits.

    corrected    .1 -.9  .2  .0  .7 -.1    rank 0 sends  (1, -.9) (4, .7)
                 .3  .1 -.2  .6 -.1  .0    rank 1 sends  (3, .6)  (0, .3)
    sum          .3 -.9  .0  .6  .7  .0    each value at its own index: these differ between ranks,
    0's residual .1  .0  .2  .0  .0 -.1    so values are gathered, never all-reduced as they lie

Sent per rank and step: (n-1) k (4 + 4) bytes for k = ratio x elements; it grows with n, as an
all_reduce does not: at 8 bytes an element it pays while ratio < 1/n. Held: one residual and n
messages.
Aji and Heafield, Sparse Communication for Distributed Gradient Descent, EMNLP 2017, section 3;
Stich et al., Sparsified SGD with Memory, NeurIPS 2018.
"""

import torch

from labkit.compression.feedback import Compressor
from labkit.compression.packing import pack, unpack
from labkit.compression.select import top_indices


class TopK(Compressor):
    """Send the `ratio` largest elements of each bucket, at least one.

    ratio: in (0, 1].
    per: "bucket", or "tensor": as many of each tensor, so that large gradients silence no others.
    feedback: without it, what is not sent is lost. Raises ValueError for another ratio or per.
    """

    def __init__(self, ratio=0.01, per="bucket", feedback=True, **settings):
        check_ratio(ratio)
        if per not in ("bucket", "tensor"):
            raise ValueError(f'per must be "bucket" or "tensor", not {per!r}')
        super().__init__(feedback, ratio=ratio, per=per, **settings)
        self.ratio, self.per = ratio, per

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
                # a zero may be added anywhere
                indices.append(torch.nn.functional.pad(found, (0, lacking)).add_(start))
            start += part.numel()
        values, indices = torch.cat(values), torch.cat(indices).to(index_dtype(start))
        return pack(values, indices), (values.dtype, indices.dtype)

    def decompress(self, arrived, average, note):
        average.zero_()
        k = arrived.size(1) // sum(dtype.itemsize for dtype in note)
        for message in arrived:  # rank after rank: the same sum on all of them, to the bit
            values, indices = unpack(message, *((dtype, k) for dtype in note))
            average.index_add_(0, indices, values.div_(len(arrived)).to(average.dtype))


def check_ratio(ratio):
    if not 0 < ratio <= 1:
        raise ValueError(
            f"ratio must be above 0 and at most 1, not {ratio}: 0.01 sends one element of a hundred"
        )


def count(ratio, numel):
    """How many elements of numel are sent."""
    return max(1, round(ratio * numel))


def index_dtype(numel):
    return torch.int32 if numel < 2**31 else torch.int64
