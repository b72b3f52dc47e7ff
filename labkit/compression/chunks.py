"""Chunks: a flat gradient as rows of `chunk` elements, each with a scale of its own.

    gradient    | . . . . | . . . . | . . 0 0 |      the last row is filled up with zeros
    message     s s s | codes codes codes |          one float a row, then a few bits an element

One outlier spoils the scale of its own row only. Codes and sums are computed in float32 (float64
for float64 gradients), whatever the gradients' dtype: the 8 binary digits of a bfloat16 are too few
for a code of 8 bits and its rounding. The work goes piece by piece, each small enough for the
cache, so that it needs no temporary tensor as large as the gradient.
Alistarh et al., QSGD, NeurIPS 2017, section 4 (there: buckets).
"""

import torch

from labkit.compression.feedback import Compressor
from labkit.compression.packing import pack, unpack
from labkit.compression.residual import wide

CACHED = 1 << 16  # elements of a piece


class ByChunk(Compressor):
    """Base: subclasses encode a row. `chunk`: its elements, a multiple of 8, else ValueError."""

    bits = 8  # of one element's code

    def __init__(self, chunk, feedback, **settings):
        if type(chunk) is not int or chunk < 8 or chunk % 8:
            raise ValueError(f"chunk must be a multiple of 8 elements, not {chunk}")
        super().__init__(feedback, chunk=chunk, **settings)
        self.chunk = chunk

    def encode(self, values, counts):
        """values [rows, chunk], counts [rows, 1] of them real -> scale [rows, 1], codes [bytes].

        Values, counts and scale are float32 or float64, codes uint8.
        """
        raise NotImplementedError

    def decode(self, scale, codes):
        """What the receivers make of it: values [rows, chunk]."""
        raise NotImplementedError

    def compress(self, corrected, bucket):
        scales, codes = [], []
        chunk = self.width(corrected.numel())
        for piece in corrected.split(rows_at_once(corrected, chunk) * chunk):
            lacking = -len(piece) % chunk
            values = piece.to(wide(piece.dtype))
            if lacking:
                values = torch.nn.functional.pad(values, (0, lacking))
            values = values.view(-1, chunk)
            counts = torch.full((len(values), 1), chunk, dtype=values.dtype, device=piece.device)
            counts[-1] -= lacking
            scale, code = self.encode(values, counts)
            if self.feedback:
                piece -= self.decode(scale, code).view(-1)[: len(piece)]
            scales.append(scale.view(-1))
            codes.append(code)
        return pack(*scales, *codes), values.dtype

    def decompress(self, arrived, average, dtype):
        chunk = self.width(average.numel())
        rows = -(-average.numel() // chunk)
        step = rows_at_once(average, chunk)
        senders = []
        for message in arrived:
            scales, codes = unpack(
                message, (dtype, rows), (torch.uint8, rows * chunk * self.bits // 8)
            )
            scales = (scales / len(arrived)).view(-1, 1).split(step)
            senders.append(zip(scales, codes.split(step * chunk * self.bits // 8), strict=True))
        for piece, *sent in zip(average.split(step * chunk), *senders, strict=True):
            total = self.decode(*sent[0])
            for each in sent[1:]:  # rank after rank: the same sum on all of them, to the bit
                total += self.decode(*each)
            piece.copy_(total.view(-1)[: len(piece)])

    def width(self, numel):
        """Elements of a row: fewer than `chunk` where the whole bucket has fewer."""
        return min(self.chunk, -(-numel // 8) * 8)


def rows_at_once(flat, chunk):
    """Rows of a piece. On a GPU all: no cache to fit, and each piece launches every kernel."""
    return max(1, CACHED // chunk if flat.device.type == "cpu" else -(-flat.numel() // chunk))
