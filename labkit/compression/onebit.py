"""One bit: send the sign of each element, and one magnitude for each chunk of elements.

    corrected   .3 -.1  .2 -.6 |  4. -1. -2.  1.   two chunks
    message     + - + -   .3   |  + - - +   2.     a byte of eight signs; the chunk's mean |x|
    sent        .3 -.3  .3 -.3 |  2. -2. -2.  2.
    residual    .0  .2 -.1 -.3 |  2.  1.  0. -1.   without it signs may diverge from the optimum

Sent per rank and step: (n-1) (1/8 + 4/chunk) bytes an element: for two ranks 31 times less than
plain averaging. It grows with n: signs cannot be summed, so the signs of all ranks are gathered.
Held: one residual and n messages.
Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014; Bernstein et al., signSGD, ICML
2018; Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019, algorithm 1 (the scaled sign).
"""

import torch

from labkit.compression.chunks import ByChunk

PLACES = tuple(1 << place for place in range(8))  # the value of each bit in a byte


class OneBit(ByChunk):
    """Send the signs, and the mean magnitude of every `chunk` elements, a multiple of 8."""

    bits = 1

    def __init__(self, chunk=2048, feedback=True):
        super().__init__(chunk, feedback)
        # The eight signs of every byte, [256, 8]: a lookup is faster than bit operations.
        self.signs = torch.tensor(
            [[1.0 if byte & place else -1.0 for place in PLACES] for byte in range(256)]
        )

    def encode(self, values, counts):
        return values.abs().sum(1, keepdim=True) / counts, pack_bits(values.view(-1) >= 0)

    def decode(self, scale, codes):
        self.signs = self.signs.to(scale.device, scale.dtype)  # once, not for each piece
        return self.signs.index_select(0, codes.int()).view(len(scale), -1).mul_(scale)


def pack_bits(bits):
    """Pack eight bits into a byte, the first into the lowest place: bool [8 m] -> uint8 [m]."""
    places = 1 << torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits.view(-1, 8) * places).sum(1, dtype=torch.uint8)
