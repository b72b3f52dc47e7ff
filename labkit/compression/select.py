"""Selection: find the k largest magnitudes without sorting a large tensor.

    sample of 100 n/k   its 150th largest is a threshold that about 1.5 k of all n exceed
    all n               one pass, in pieces that fit the cache, finds the elements above it
    those 1.5 k         torch.topk: the k largest of them are the k largest of all

The threshold is an estimate, but the answer is exact if at least k elements exceed it. If more than
5 % of k are missing, the estimate is discarded. Cost: one pass over n and a selection among 1.5 k;
torch.topk passes over all n several times.
Lin et al., Deep Gradient Compression, ICLR 2018, section 5 (hierarchical top-k selection).
"""

import torch

SAMPLED_FROM = 1 << 16  # elements; torch.topk is fast for fewer
EXPECTED = 100  # expected number of the k largest in the sample; relative error 1 / sqrt(100)
MARGIN = 1.5  # MARGIN * k elements should exceed the threshold: five such errors above k
SHORTAGE = 0.05  # share of k that may be missing
CACHED = 1 << 16  # elements of a piece


def top_indices(values, k):
    """Return the indices of the k largest magnitudes of values [n]: int64 [k], in any order.

    0 < k <= n. A large tensor may return fewer indices, but at least 95 % of k, and no omitted
    element is larger than a returned one. Elements that are exactly zero may be omitted.
    """
    n = values.numel()
    if k == n:
        return torch.arange(n, device=values.device)
    if n >= SAMPLED_FROM and k >= 8 * EXPECTED:  # for a small k the sample would be too large
        threshold = guess(values, k)
        found = exceeding(values, threshold)
        if found.numel() > k:
            return found[torch.topk(values[found].abs(), k, sorted=False).indices]
        if found.numel() >= (1 - SHORTAGE) * k or threshold == 0:
            return found
    return torch.topk(values.abs(), k, sorted=False).indices


def guess(values, k):
    """Estimate a magnitude that about MARGIN * k elements exceed."""
    n = values.numel()
    # A separate generator, so that compression does not change the model's random numbers.
    generator = torch.Generator(values.device).manual_seed(n)
    sample = values[
        torch.randint(n, (EXPECTED * n // k,), generator=generator, device=values.device)
    ]
    return float(torch.topk(sample.abs(), int(MARGIN * EXPECTED)).values[-1])


def exceeding(values, threshold):
    """Return the indices, ascending, of the elements whose magnitude exceeds threshold."""
    size = CACHED if values.device.type == "cpu" else values.numel()
    found = [
        (piece.abs() > threshold).nonzero().view(-1).add_(number * size)
        for number, piece in enumerate(values.split(size))
    ]
    return torch.cat(found)
