"""Routing: the scores of a token choose k experts and weight their outputs.

    scores > softmax or sigmoid > (+ bias) > best groups > best k         which experts
                               \\ of those k: / their sum, x routed_scaling_factor   weights

Local: nothing is sent. With groups, a token is routed to experts on few nodes only.
DeepSeek-V2, 2024, section 2.1.2 (groups, softmax); DeepSeek-V3, 2024, section 2.1.2 (sigmoid).
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F


@dataclass(frozen=True)
class Routing:
    """How scores choose and weight experts, with the argument names of Hugging Face configs.

    score: "softmax" over the experts, or "sigmoid" of each.
    norm_topk_prob: divide the k weights by their sum. Not for k = 1, whose weight would be 1.
    routed_scaling_factor: multiplies the weights.
    n_group, topk_group: choose only among the best topk_group of n_group groups of neighboring
        experts. A group's score is the sum of its two best experts ("sigmoid": DeepSeek-V3) or
        its best one ("softmax": DeepSeek-V2).
    Mixtral, Qwen3-MoE: Routing(). Qwen2-MoE, OLMoE: norm_topk_prob=False. DeepSeek-V3: "sigmoid",
    routed_scaling_factor=2.5, n_group=8, topk_group=4, with MoE(balance="bias", shared=1).
    Raises ValueError for another score, and for invalid groups.
    """

    score: str = "softmax"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1

    def __post_init__(self):
        if self.score not in ("softmax", "sigmoid"):
            raise ValueError(f"score={self.score!r} must be 'softmax' or 'sigmoid'")
        if not 1 <= self.topk_group <= self.n_group:
            raise ValueError(f"topk_group={self.topk_group} must be 1 to n_group={self.n_group}")

    def check(self, experts, top_k):
        """Raise ValueError if n_group does not divide experts, or top_k is not 1 to the maximum.

        The maximum is the number of experts in topk_group groups.
        """
        if experts % self.n_group:
            raise ValueError(f"experts={experts} must be divisible by n_group={self.n_group}")
        if not 1 <= top_k <= self.topk_group * experts // self.n_group:
            allowed = self.topk_group * experts // self.n_group
            raise ValueError(
                f"top_k={top_k} must be between 1 and {allowed}, the experts in topk_group groups"
            )

    def choose(self, scores, bias, top_k):
        """Choose experts. Return (probabilities, weights, numbers of the chosen experts).

        scores: [tokens, E]. bias: [E], used in the choice but not in the weights. probabilities:
        [tokens, E], with sum 1. weights and numbers (int64): [tokens, top_k].
        """
        # In logarithms, which stay finite where all sigmoids underflow to 0.
        logs = scores.log_softmax(-1) if self.score == "softmax" else F.logsigmoid(scores)
        wanted = self.in_best_groups(logs.detach().exp() + bias)
        chosen = wanted.topk(top_k).indices
        weights = logs.gather(-1, chosen)
        normalized = self.norm_topk_prob and top_k > 1  # a single weight is 1, without gradient
        weights = weights.softmax(-1) if normalized else weights.exp()
        return logs.softmax(-1), weights * self.routed_scaling_factor, chosen

    def in_best_groups(self, wanted):
        """Return wanted, [tokens, E], with -inf outside each token's best groups."""
        if self.topk_group == self.n_group:
            return wanted
        groups = wanted.unflatten(-1, (self.n_group, -1))
        counted = min(groups.shape[-1], 2 if self.score == "sigmoid" else 1)
        best = groups.topk(counted).values.sum(-1).topk(self.topk_group).indices
        outside = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, False)
        return groups.masked_fill(outside[..., None], -torch.inf).flatten(-2)
