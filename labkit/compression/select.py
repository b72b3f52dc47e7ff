"""Selection: where the k largest magnitudes are, without sorting a large tensor.

    sample of 100 n/k   its 150th largest is a threshold that about 1.5 k of all n exceed
    all n               one pass, in pieces that fit the cache: which exceed it
    those 1.5 k         torch.topk: the k largest of them are the k largest of all

The threshold is only guessed, but the answer is exact whenever k or more exceed it; a guess that is
too high by so much that more than 5 % are lacking is thrown away. Cost: one pass over n and a
selection among 1.5 k; torch.topk goes over all n several times.
Lin et al., Deep Gradient Compression, ICLR 2018, section 5 (hierarchical top-k selection).
"""

import torch

SAMPLED_FROM = 1 << 16  # elements: below, torch.topk is quick
EXPECTED = 100  # how many of the k largest the sample holds, with an error of 1 / sqrt of that
MARGIN = 1.5  # how many times k should exceed the threshold: five such errors more than k
SHORTAGE = 0.05  # of k, that may be lacking
CACHED = 1 << 16  # elements of a piece


def top_indices(values, k):
    """Indices, int64 [k] in any order, of the k largest magnitudes of values [n], 0 < k <= n.

    Of a large tensor: at least 95 % of k, and no element that is left out is larger than one that
    is told; of an element that is exactly zero there is nothing to tell.
    """
    n = values.numel()
    if k == n:
        return torch.arange(n, device=values.device)
    if n >= SAMPLED_FROM and k >= 8 * EXPECTED:  # else the sample would be as large as the tensor
        threshold = guess(values, k)
        found = exceeding(values, threshold)
        if found.numel() > k:
            return found[torch.topk(values[found].abs(), k, sorted=False).indices]
        if found.numel() >= (1 - SHORTAGE) * k or threshold == 0:
            return found
    return torch.topk(values.abs(), k, sorted=False).indices


def guess(values, k):
    """A magnitude that about MARGIN * k elements exceed. float."""
    n = values.numel()
    # A generator of its own: compression must not change the model's random numbers.
    generator = torch.Generator(values.device).manual_seed(n)
    sample = values[
        torch.randint(n, (EXPECTED * n // k,), generator=generator, device=values.device)
    ]
    return float(torch.topk(sample.abs(), int(MARGIN * EXPECTED)).values[-1])


def exceeding(values, threshold):
    """Indices, ascending, of the elements whose magnitude is above threshold."""
    size = CACHED if values.device.type == "cpu" else values.numel()
    found = [
        (piece.abs() > threshold).nonzero().view(-1).add_(number * size)
        for number, piece in enumerate(values.split(size))
    ]
    return torch.cat(found)
