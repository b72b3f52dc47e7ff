"""Cross entropy of logits that are sharded over the vocabulary, without gathering them.

    loss = log sum exp(logits) - logits[target]       rank 0 has logits 0 to V/n - 1

    all-reduce, max    the largest logit of each token, so that no exp overflows
    all-reduce, sum    for each token the sum of exp, and the target's logit
    backward           softmax - one at the target: for a rank's own logits, without a message

Sent per rank: 3 numbers a token in two all-reduces. Gathering would send V/n of them, n-1 times.
Label smoothing needs one more number a token: the sum of its logits.
Shoeybi et al., Megatron-LM, 2019, section 3 (fused with the cross entropy).
"""

import torch
import torch.distributed as dist
from torch import nn

from labkit import comm
from labkit.torch_private import assert_async


def vocabulary_parallel_cross_entropy(
    logits,
    target,
    group=None,
    ignore_index=-100,
    reduction="mean",
    weight=None,
    label_smoothing=0.0,
):
    """Compute F.cross_entropy of logits of which each rank has V/n. Collective.

    logits: [..., V/n] float, -inf for the padding of the last ranks; target: [...] int64, indices
    in the full vocabulary; both in any shape, target identical on all ranks. Returns, on all ranks,
    a scalar; with reduction="none" losses like target. Logits of 16 bits have losses of 32, as
    under PyTorch's autocast.
    weight: [V] of the full vocabulary without padding, identical on all ranks. label_smoothing: in
    [0, 1]; without a weight, indices whose logits are -inf for all tokens are padding.
    Raises ValueError for an invalid reduction, label_smoothing or weight, and RuntimeError for a
    second derivative.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r} must be 'mean', 'sum' or 'none'")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing={label_smoothing} must be between 0 and 1")
    words = logits.shape[-1] * dist.get_world_size(group)
    if weight is not None and not (weight.dim() == 1 and 0 < len(weight) <= words):
        raise ValueError(
            f"weight has shape {list(weight.shape)}; it must be [V] with at most {words} entries"
        )
    counts = target != ignore_index
    logits = logits.float() if logits.element_size() < 4 else logits
    weights = counts.to(logits.dtype)  # of each token
    if weight is not None:
        # A target past the end of weight has a loss of NaN.
        padded = weight.new_full((words,), torch.nan, dtype=logits.dtype)
        padded[: len(weight)] = weight
        weights = padded[target.clamp(0, words - 1)].where(counts, 0.0)
    smooth = smoothing(logits.detach(), group, weight, label_smoothing) if label_smoothing else None
    losses = CrossEntropy.apply(logits, target, counts, group, weights, smooth, label_smoothing)
    if reduction == "none":
        return losses
    return losses.sum() / weights.sum() if reduction == "mean" else losses.sum()


def smoothing(logits, group, weight, label_smoothing):
    """Return (own entries [V/n], sum over all entries []) of label_smoothing x weight / V."""
    own = logits.shape[-1]
    begin = dist.get_rank(group) * own
    if weight is None:
        weight = (~logits.isneginf().reshape(-1, own).all(0)).to(logits.dtype)
        total = weight.sum()
        comm.all_reduce(total, group=group)
        return weight * (label_smoothing / total), total.new_tensor(label_smoothing)
    weight = weight.to(logits.dtype) * (label_smoothing / len(weight))
    shares = logits.new_zeros(own)
    part = weight[begin : begin + own]
    shares[: len(part)] = part
    return shares, weight.sum()


class VocabularyParallelCrossEntropy(nn.Module):
    """The function as a module, like nn.CrossEntropyLoss. forward: (logits, target)."""

    def __init__(
        self, group=None, ignore_index=-100, reduction="mean", weight=None, label_smoothing=0.0
    ):
        super().__init__()
        self.group = group
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.register_buffer("weight", weight)

    def forward(self, logits, target):
        return vocabulary_parallel_cross_entropy(
            logits,
            target,
            self.group,
            self.ignore_index,
            self.reduction,
            self.weight,
            self.label_smoothing,
        )


class CrossEntropy(torch.autograd.Function):
    """Compute the losses, in the shape of target.

    counts: whether each token counts. weights: of each token. smooth: None, or from `smoothing`.
    """

    @staticmethod
    def forward(ctx, logits, target, counts, group, weights, smooth, label_smoothing):
        words = logits.shape[-1]
        n = dist.get_world_size(group)
        known = (target >= 0) & (target < words * n) | ~counts
        assert_async(known.all(), f"target out of range: the vocabulary has {words * n} entries")
        own = target - dist.get_rank(group) * words
        local = counts & (own >= 0) & (own < words)
        own = own.masked_fill(~local, 0).unsqueeze(-1)

        largest = logits.amax(-1)
        comm.all_reduce(largest, dist.ReduceOp.MAX, group)
        shifted = logits - largest.unsqueeze(-1)
        exps = shifted.exp()
        wanted = shifted.gather(-1, own).squeeze(-1).where(local, 0.0)
        # +inf marks a padded target for all ranks: no shifted logit is +inf, and -inf may overflow
        padded = logits[..., -1].isneginf().all()
        wanted = wanted.masked_fill(padded & wanted.isneginf(), torch.inf)
        sums = [exps.sum(-1), wanted]
        if smooth is not None:
            sums.append(shifted.masked_fill_(smooth[0] == 0, 0.0) @ smooth[0])
        sums = torch.stack(sums)
        comm.all_reduce(sums, group=group)
        assert_async((sums[1] != torch.inf).all(), "target is a padding entry")
        softmax = exps.div_(sums[0].unsqueeze(-1))
        log = sums[0].log()
        weights = weights * (1 - label_smoothing)
        losses = weights * (log - sums[1])
        shares, total = smooth or (None, None)
        if smooth is not None:
            losses += total * log - sums[2]
        ctx.save_for_backward(softmax, own, local, counts, weights, shares, total)
        return losses.where(counts, 0.0)

    @staticmethod
    def backward(ctx, gradient):
        if torch.is_grad_enabled():  # with create_graph the softmax would be treated as a constant
            raise RuntimeError("vocabulary-parallel cross entropy has no second derivative")
        softmax, own, local, counts, weights, shares, total = ctx.saved_tensors
        mass = weights if shares is None else weights + total
        result = softmax * mass.unsqueeze(-1)
        result.scatter_add_(-1, own, -(weights * local).unsqueeze(-1))
        if shares is not None:
            result -= shares
        # where instead of a product: the mean over no tokens has a gradient of inf
        result *= gradient.where(counts, 0.0).unsqueeze(-1)
        return result, None, None, None, None, None, None
