"""Chunks: a flat gradient as rows of `chunk` elements, each with its own scale.

    gradient    | . . . . | . . . . | . . 0 0 |      the last row is padded with zeros
    message     s s s | codes codes codes |          one float a row, then a few bits an element

An outlier affects only the scale of its own row. Codes and sums are computed in float32 (float64
for float64 gradients) whatever the gradients' dtype: bfloat16 has too few digits for 8-bit codes.
The work is done in pieces that fit the cache, without a temporary tensor as large as the gradient.
Alistarh et al., QSGD, NeurIPS 2017, section 4 (there: buckets).
"""

import torch

from labkit.compression.feedback import Compressor
from labkit.compression.packing import pack, unpack
from labkit.compression.residual import wide

CACHED = 1 << 16  # elements of a piece


class ByChunk(Compressor):
    """Base of compressors that encode rows. chunk: elements of a row, a multiple of 8.

    Raises ValueError for another chunk.
    """

    bits = 8  # of one element's code

    def __init__(self, chunk, feedback, **settings):
        if type(chunk) is not int or chunk < 8 or chunk % 8:
            raise ValueError(f"chunk={chunk} must be a positive multiple of 8")
        super().__init__(feedback, chunk=chunk, **settings)
        self.chunk = chunk

    def encode(self, values, counts):
        """Encode values [rows, chunk] as scale [rows, 1] and codes [bytes].

        counts, [rows, 1]: elements of a row without padding. Values, counts and scale are float32
        or float64, codes uint8.
        """
        raise NotImplementedError

    def decode(self, scale, codes):
        """Return the values, [rows, chunk], that the receivers compute."""
        raise NotImplementedError

    def compress(self, corrected, bucket):
        scales = []
        codes = []
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
            for each in sent[1:]:  # in rank order: bit-identical sums on all ranks
                total += self.decode(*each)
            piece.copy_(total.view(-1)[: len(piece)])

    def width(self, numel):
        """Return the elements of a row: `chunk`, or fewer if the bucket has fewer."""
        return min(self.chunk, -(-numel // 8) * 8)


def rows_at_once(flat, chunk):
    """Return the rows of a piece. On a GPU all rows, as each piece launches every kernel."""
    return max(1, CACHED // chunk if flat.device.type == "cpu" else -(-flat.numel() // chunk))
