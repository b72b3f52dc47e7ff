"""Quantisation: each element becomes a small whole number, rounded so that it is right on average.

    chunk     .30 -.05  .11 -.70   scale: the largest magnitude, .70; 4 bits: -7 ... 7 steps of .10
    in steps  3.0 -0.5  1.1 -7.0   1.1 becomes 1 nine times of ten, 2 once: rounded at random
    codes       3   -1    1   -7   E[sent] = what should be sent: over ranks and steps noise cancels

Sent per rank and step: (n-1) (bits/8 + 4/chunk) bytes an element; for two ranks 4 or 8 times less
than plain averaging. Held: n messages; with feedback one residual, not needed for the average to be
right, but it lessens the noise.
Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding, NeurIPS
2017, section 3.1; the largest magnitude in place of the norm: section 4.
"""

import torch
import torch.distributed as dist

from labkit.compression.chunks import ByChunk


class Quantize(ByChunk):
    """Send whole numbers of `bits` bits, 8 or 4, else ValueError, and a scale for each `chunk`.

    chunk: elements, a multiple of 8. stochastic: round at random, else to the nearest.
    seed: of the roundings, which differ between ranks and steps.
    """

    def __init__(self, bits=8, chunk=512, stochastic=True, feedback=False, seed=0):
        if bits not in (4, 8):
            raise ValueError(f"bits must be 8 or 4, not {bits}")
        super().__init__(chunk, feedback, bits=bits, stochastic=stochastic, seed=seed)
        self.bits, self.stochastic, self.seed = bits, stochastic, seed
        self.levels = 2 ** (bits - 1) - 1
        self._generator = None

    def compress(self, corrected, bucket):
        # Made anew from where we are: nothing to save, and the model's random numbers stay its own.
        seed = hash((self.seed, dist.get_rank(), self.step, bucket.index())) % 2**63
        self._generator = torch.Generator(corrected.device).manual_seed(seed)
        return super().compress(corrected, bucket)

    def encode(self, values, counts):
        scale = values.abs().amax(1, keepdim=True)
        # The smallest normal number in place of 0; NaN stays NaN.
        steps = values * (
            self.levels / scale.clamp_min(torch.finfo(scale.dtype).tiny * self.levels)
        )
        if self.stochastic:
            steps += torch.rand(
                steps.shape, generator=self._generator, dtype=steps.dtype, device=steps.device
            )
        else:
            steps += 0.5
        codes = steps.floor_().clamp_(-self.levels, self.levels).to(torch.int8).view(-1)
        if self.bits == 4:
            low, high = (codes + 8).view(torch.uint8).view(-1, 2).unbind(1)
            return scale, low | (high << 4)
        return scale, codes.view(torch.uint8)

    def decode(self, scale, codes):
        if self.bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], 1).view(torch.int8) - 8
        return codes.view(torch.int8).view(len(scale), -1) * (scale / self.levels)
