"""Random-k: elements at random places travel; all ranks know the places, so only the values do.

    strata        |..x.|x...|...x|.x..|   k parts of n/k elements, one of each is drawn
    rank 0 sends     v  v       v  v      the same places on all ranks, drawn from the same seed and
    rank 1 sends     w  w       w  w      step: an all_reduce adds like to like (places that differ
                                          between ranks are the mistake)

Sent per rank and step: 2 (n-1)/n x 4 k bytes for k = ratio x elements: it does not grow with n, and
no indices travel. What is drawn is not what is large, so it loses more than top-k of the same k;
choosing costs next to nothing.
Held: one residual. Without feedback each value is multiplied by the size of its part, so that what
arrives is right on average: an element of a part of two is drawn half of the time.
Stich et al., Sparsified SGD with Memory, NeurIPS 2018, definition 2.2; Konecny et al., Federated
Learning: Strategies for Improving Communication Efficiency, 2016, section 2 (random masks from a
seed that both sides know).
"""

import torch

from labkit.compression.feedback import Compressor
from labkit.compression.residual import wide
from labkit.compression.topk import check_ratio, count


class RandomK(Compressor):
    """Send the share `ratio`, in (0, 1], of each bucket's elements, at least one.

    seed: the same on all ranks.
    """

    collective = "mean"

    def __init__(self, ratio=0.01, feedback=True, seed=0):
        check_ratio(ratio)
        super().__init__(feedback, ratio=ratio, seed=seed)
        self.ratio, self.seed = ratio, seed

    def compress(self, corrected, bucket):
        numel, device = corrected.numel(), corrected.device
        places = self.draw(numel, bucket.index(), device)
        values = corrected[places]
        if self.feedback:
            corrected[places] = 0
        else:  # 16 bits cannot hold every size
            values.copy_(values.to(wide(values.dtype)) * self.edges(numel, device).diff())
        return values, places

    def decompress(self, arrived, average, places):
        average.zero_()
        average[places] = arrived.to(average.dtype)

    def draw(self, numel, index, device):
        """int64 [k], ascending and distinct: one place of each part."""
        edges = self.edges(numel, device)
        generator = torch.Generator(device).manual_seed(hash((self.seed, self.step, index)) % 2**63)
        drawn = torch.rand(len(edges) - 1, generator=generator, device=device, dtype=torch.float64)
        return edges[:-1] + (drawn * edges.diff()).long()

    def edges(self, numel, device):
        """int64 [k + 1]: where k parts begin, as equal as they can be, and where the last ends."""
        k = count(self.ratio, numel)
        return torch.arange(k + 1, device=device) * numel // k
