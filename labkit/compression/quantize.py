"""Quantization: send each element as a small integer, with unbiased rounding.

    chunk     .30 -.05  .11 -.70   scale: the largest magnitude, .70; 4 bits: -7 ... 7 steps of .10
    in steps  3.0 -0.5  1.1 -7.0   1.1 becomes 1 with probability 0.9, 2 with 0.1
    codes       3   -1    1   -7   E[sent] = corrected: noise cancels over ranks and steps

Sent per rank and step: (n-1) (bits/8 + 4/chunk) bytes an element; for two ranks 4 or 8 times less
than plain averaging. Held: n messages; with feedback one residual, which reduces the noise but is
not needed for an unbiased average.
Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding, NeurIPS
2017, section 3.1; the largest magnitude instead of the norm: section 4.
"""

import torch
import torch.distributed as dist

from labkit.compression.chunks import ByChunk


class Quantize(ByChunk):
    """Send integers of `bits` bits and one scale for each chunk. bits: 8 or 4, else ValueError.

    chunk: elements, a multiple of 8. stochastic: round at random, otherwise to the nearest.
    seed: of the random rounding, which differs between ranks and steps.
    """

    def __init__(self, bits=8, chunk=512, stochastic=True, feedback=False, seed=0):
        if bits not in (4, 8):
            raise ValueError(f"bits={bits} must be 8 or 4")
        super().__init__(chunk, feedback, bits=bits, stochastic=stochastic, seed=seed)
        self.bits = bits
        self.stochastic = stochastic
        self.seed = seed
        self.levels = 2 ** (bits - 1) - 1
        self._generator = None

    def compress(self, corrected, bucket):
        # Seeded by the position: no state to save, and the model's generator is not used.
        seed = hash((self.seed, dist.get_rank(), self.step, bucket.index())) % 2**63
        self._generator = torch.Generator(corrected.device).manual_seed(seed)
        return super().compress(corrected, bucket)

    def encode(self, values, counts):
        scale = values.abs().amax(1, keepdim=True)
        # The smallest normal number instead of 0; NaN stays NaN.
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
