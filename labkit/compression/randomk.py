"""Random-k: send elements at random places that all ranks know, so no indices are sent.

    strata        |..x.|x...|...x|.x..|   k parts of n/k elements; one element of each is drawn
    rank 0 sends     v  v       v  v      all ranks draw the same places, from the same seed and
    rank 1 sends     w  w       w  w      step, so an all_reduce adds matching elements (places
                                          that differ between ranks are the typical mistake)

Sent per rank and step: 2 (n-1)/n x 4 k bytes for k = ratio x elements, without indices; it does not
grow with n. Selection costs almost nothing, but drops large elements: it loses more than top-k with
the same k.
Held: one residual. Without feedback each value is multiplied by the size of its part, which makes
the result unbiased: an element of a part of two is drawn half of the time.
Stich et al., Sparsified SGD with Memory, NeurIPS 2018, definition 2.2; Konecny et al., Federated
Learning: Strategies for Improving Communication Efficiency, 2016, section 2 (random masks from a
seed that both sides know).
"""

import torch

from labkit.compression.feedback import Compressor
from labkit.compression.residual import wide
from labkit.compression.topk import check_ratio, count


class RandomK(Compressor):
    """Send a random share of each bucket's elements, at least one.

    ratio: the share, in (0, 1], otherwise raises ValueError. feedback: keep unsent values.
    seed: must be the same on all ranks.
    """

    collective = "mean"

    def __init__(self, ratio=0.01, feedback=True, seed=0):
        check_ratio(ratio)
        super().__init__(feedback, ratio=ratio, seed=seed)
        self.ratio = ratio
        self.seed = seed

    def compress(self, corrected, bucket):
        numel, device = corrected.numel(), corrected.device
        places = self.draw(numel, bucket.index(), device)
        values = corrected[places]
        if self.feedback:
            corrected[places] = 0
        else:  # in fp32, as 16 bits cannot represent every size
            values.copy_(values.to(wide(values.dtype)) * self.edges(numel, device).diff())
        return values, places

    def decompress(self, arrived, average, places):
        average.zero_()
        average[places] = arrived.to(average.dtype)

    def draw(self, numel, index, device):
        """Draw one place of each part: int64 [k], ascending and distinct."""
        edges = self.edges(numel, device)
        generator = torch.Generator(device).manual_seed(hash((self.seed, self.step, index)) % 2**63)
        drawn = torch.rand(len(edges) - 1, generator=generator, device=device, dtype=torch.float64)
        return edges[:-1] + (drawn * edges.diff()).long()

    def edges(self, numel, device):
        """Return the boundaries of k parts of almost equal size: int64 [k + 1], 0 to numel."""
        k = count(self.ratio, numel)
        return torch.arange(k + 1, device=device) * numel // k
