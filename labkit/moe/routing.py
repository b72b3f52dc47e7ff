"""Routing: a token's scores choose k experts and weigh their outputs.

    scores > softmax or sigmoid > (+ bias) > best groups > best k         which experts
                               \\ of those k: / their sum, x routed_scaling_factor   weights

Local: nothing is sent. Groups let a token go to experts on few nodes only.
DeepSeek-V2, 2024, section 2.1.2 (groups, softmax); DeepSeek-V3, 2024, section 2.1.2 (sigmoid).
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F


@dataclass(frozen=True)
class Routing:
    """How scores choose and weigh experts, with the names of Hugging Face configs.

    score: "softmax" over the experts, or "sigmoid" of each.
    norm_topk_prob: divide the k weights by their sum. Not for k = 1, whose weight would be 1.
    routed_scaling_factor: multiplies the weights.
    n_group, topk_group: choose only among the best topk_group of n_group groups of neighbouring
        experts. A group is as good as its two best experts ("sigmoid": DeepSeek-V3) or its best
        one ("softmax": DeepSeek-V2).
    Mixtral, Qwen3-MoE: Routing(). Qwen2-MoE, OLMoE: norm_topk_prob=False. DeepSeek-V3: "sigmoid",
    routed_scaling_factor=2.5, n_group=8, topk_group=4, with MoE(balance="bias", shared=1).
    Raises ValueError for another score, and for groups that cannot be.
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
        """Raise ValueError where groups do not divide the experts or have fewer than top_k."""
        if experts % self.n_group:
            raise ValueError(f"n_group={self.n_group} must divide the {experts} experts")
        if not 1 <= top_k <= self.topk_group * experts // self.n_group:
            allowed = self.topk_group * experts // self.n_group
            raise ValueError(f"a token cannot go to {top_k} of {allowed} experts")

    def choose(self, scores, bias, top_k):
        """(how likely each expert is, [tokens, E]; weights and numbers of the k chosen).

        scores: [tokens, E]. bias: [E], counts in the choice and not in the weights.
        """
        # In logarithms: where all sigmoids are 0 they have no shares, but these are numbers still.
        logs = scores.log_softmax(-1) if self.score == "softmax" else F.logsigmoid(scores)
        wanted = self.in_best_groups(logs.detach().exp() + bias)
        chosen = wanted.topk(top_k).indices
        weights = logs.gather(-1, chosen)
        normalized = self.norm_topk_prob and top_k > 1  # one share is 1: the router learns nothing
        weights = weights.softmax(-1) if normalized else weights.exp()
        return logs.softmax(-1), weights * self.routed_scaling_factor, chosen

    def in_best_groups(self, wanted):
        """wanted, [tokens, E], with -inf outside each token's best groups."""
        if self.topk_group == self.n_group:
            return wanted
        groups = wanted.unflatten(-1, (self.n_group, -1))
        counted = min(groups.shape[-1], 2 if self.score == "sigmoid" else 1)
        best = groups.topk(counted).values.sum(-1).topk(self.topk_group).indices
        outside = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, False)
        return groups.masked_fill(outside[..., None], -torch.inf).flatten(-2)
