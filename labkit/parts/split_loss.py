"""Cross entropy of logits over a vocabulary that no rank has whole: they are never gathered.

    loss = log sum exp(logits) - logits[target]       rank 0 has the logits of words 0 to V/n - 1

    all-reduce, max    the largest logit of each token, so that no exp overflows
    all-reduce, sum    of each token the sum of exp, and the target's logit, from whoever has it
    backward           softmax - one at the target: of a rank's own words, without a message

Sent per rank: 3 numbers a token in two all-reduces; gathering would send V/n of them, n-1 times.
Shoeybi et al., Megatron-LM, 2019, section 3 (fused with the cross entropy).
"""

import torch
import torch.distributed as dist
from torch import nn

from labkit import comm


def vocabulary_parallel_cross_entropy(
    logits, target, group=None, ignore_index=-100, reduction="mean"
):
    """F.cross_entropy of logits of which each rank has V/n words. Collective.

    logits: [..., V/n] float, -inf where the last ranks' words are padding; target: [...] int64, of
    the whole vocabulary; both in any shape, the same on all ranks. Returns, on all ranks, a scalar;
    with reduction="none" losses like target. Logits of 16 bits have losses of 32, as under
    PyTorch's autocast. RuntimeError for a second derivative.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"there is no reduction {reduction!r}, only 'mean', 'sum' and 'none'")
    counts = target != ignore_index
    logits = logits.float() if logits.element_size() < 4 else logits
    losses = CrossEntropy.apply(logits, target, counts, group)
    if reduction == "none":
        return losses
    return losses.sum() / counts.sum() if reduction == "mean" else losses.sum()


class VocabularyParallelCrossEntropy(nn.Module):
    """The function with its settings, as nn.CrossEntropyLoss. forward: (logits, target)."""

    def __init__(self, group=None, ignore_index=-100, reduction="mean"):
        super().__init__()
        self.group, self.ignore_index, self.reduction = group, ignore_index, reduction

    def forward(self, logits, target):
        return vocabulary_parallel_cross_entropy(
            logits, target, self.group, self.ignore_index, self.reduction
        )


class CrossEntropy(torch.autograd.Function):
    """forward: (logits, target, which tokens count, group) -> losses, like target."""

    @staticmethod
    def forward(ctx, logits, target, counts, group):
        words, n = logits.shape[-1], dist.get_world_size(group)
        known = (target >= 0) & (target < words * n) | ~counts
        torch._assert_async(known.all(), f"a target is not one of {words * n} words")
        own = target - dist.get_rank(group) * words
        here = counts & (own >= 0) & (own < words)
        own = own.masked_fill(~here, 0).unsqueeze(-1)

        largest = logits.amax(-1)
        comm.all_reduce(largest, dist.ReduceOp.MAX, group)
        shifted = logits - largest.unsqueeze(-1)
        exps = shifted.exp()
        wanted = shifted.gather(-1, own).squeeze(-1).where(here, 0.0)
        # -inf alone may be an overflow; +inf, which no logit minus the largest is, tells all ranks
        padded = logits[..., -1].isneginf().all()
        wanted = wanted.masked_fill(padded & wanted.isneginf(), torch.inf)
        sums = torch.stack([exps.sum(-1), wanted])
        comm.all_reduce(sums, group=group)
        torch._assert_async((sums[1] != torch.inf).all(), "a target is padding, and no word")
        ctx.save_for_backward(exps.div_(sums[0].unsqueeze(-1)), own, here, counts)
        return (sums[0].log() - sums[1]).where(counts, 0.0)

    @staticmethod
    def backward(ctx, gradient):
        if torch.is_grad_enabled():  # create_graph: the softmax would be taken for a constant
            raise RuntimeError("a cross entropy over shards has no second derivative")
        softmax, own, here, counts = ctx.saved_tensors
        result = softmax.scatter_add(-1, own, -here.to(softmax.dtype).unsqueeze(-1))
        return result * (gradient * counts).unsqueeze(-1), None, None, None
