"""A mixture of experts: each token is sent to k of E experts, which are sharded over the ranks.

    rank 0   tokens > router > [to 0][to 1] \\          / experts 0 1 \\          [from 0][from 1]
                                             all-to-all               all-to-all   weighted sum
    rank 1   tokens > router > [to 0][to 1] /          \\ experts 2 3 /          [from 0][from 1]

Parameters grow with E, work per token only with k. An expert that the router prefers is trained
more, and is then preferred more. So the load is balanced: by a loss that is lowest for an even
load, or by a bias that is used in the choice of experts but not in their weights.

Sent per rank: the rows that leave it (of k x tokens rows of `width` numbers), twice in forward and
twice in backward; before them 2E + 1 counts. Held: E/n experts, and the received rows.
Shazeer et al., Outrageously Large Neural Networks, ICLR 2017, section 2; Lepikhin et al., GShard,
ICLR 2021, section 2.2 (capacity, all-to-all); Fedus et al., Switch Transformers, JMLR 2022, section
2.2 (the loss); Wang et al., Auxiliary-Loss-Free Load Balancing, 2024, section 3 (the bias).
"""

import copy
import math
from functools import wraps

import torch
import torch.distributed as dist
from torch import nn

from labkit import comm
from labkit.moe.routing import Routing
from labkit.moe.token_dispatch import Exchange

ROUTING = Routing()


class MoE(nn.Module):
    """Experts that are sharded over a group whose ranks have different tokens. Collective.

    forward: [..., width] -> the same shape. expert: a function that makes one expert; all ranks
        must call it with the same random state. group: None for a single process.
    capacity: an expert accepts at most capacity x (tokens x top_k / experts) of a rank's rows, the
        first ones; further rows are dropped and add nothing. None: no limit.
    balance: "loss": after forward, add .balance_loss x 0.01 or so to the loss; "bias": call
        rebalance() after each optimizer step; None: neither. A reentrant checkpoint of torch around
        forward removes the gradient of the loss.
    shared: number of experts that process every token. shared_expert_gate: multiply their sum by a
        sigmoid of the token, as in Qwen2-MoE. routing: how scores choose and weight experts.
    router_z_loss_coef: if not 0, .z_loss is this times the mean of logsumexp(scores)^2, to be added
        to the loss (Zoph et al., ST-MoE, 2022, section 3). balanced() adds both losses.
    padding_mask: bool [...], True for padding. Padding is not routed, counts in no loss, load or
        capacity, and has an output of 0. Both losses divide by the mean number of tokens of a rank,
        so that their mean over the ranks equals that of one process with all tokens.
    .load, .dropped: [experts] int64: rows per expert in the last forward, over all ranks that have
        different tokens, and how many of them exceeded the capacity.
    Gradients of experts are those of the mean of the ranks' losses, as DDP computes them for other
    parameters: set module._ddp_params_and_buffers_to_ignore = names_of_experts(module). In a mesh,
    build the full module and call spread(). Raises ValueError for invalid arguments and if experts
    is not divisible by the ranks; in forward, on all ranks, for an invalid mask and if a score is
    NaN or infinite.
    """

    def __init__(
        self,
        width,
        experts=8,
        top_k=2,
        expert=None,
        group=None,
        capacity=None,
        balance="loss",
        shared=0,
        routing=ROUTING,
        router_z_loss_coef=0.0,
        shared_expert_gate=False,
    ):
        super().__init__()
        if not 1 <= top_k <= experts:
            raise ValueError(f"top_k={top_k} must be between 1 and experts={experts}")
        if not callable(expert) or isinstance(expert, nn.Module):
            kind = type(expert).__name__
            raise ValueError(f"expert is of type {kind}: pass a function that makes one expert")
        routing.check(experts, top_k)
        if balance not in ("loss", "bias", None):
            raise ValueError(f"balance={balance!r} must be 'loss', 'bias' or None")
        if shared_expert_gate and not shared:
            raise ValueError("shared_expert_gate=True needs shared experts: use shared=1 or more")
        if capacity is not None and not 0 <= capacity < math.inf:
            raise ValueError(f"capacity={capacity} must be a finite number of at least 0, or None")
        self.top_k = top_k
        self.capacity = capacity
        self.balance = balance
        self.routing = routing
        self.router_z_loss_coef = router_z_loss_coef
        self.router = nn.Linear(width, experts, bias=False)
        self.register_buffer("bias", torch.zeros(experts, dtype=torch.float32))
        own = self.own_experts(group)
        made = ((number, expert()) for number in range(experts))
        self.experts = nn.ModuleDict({str(i): module for i, module in made if i in own})
        self.shared = nn.ModuleList(expert() for _ in range(shared))
        self.shared_expert_gate = nn.Linear(width, 1, bias=False) if shared_expert_gate else None
        self.load = None
        self.dropped = None
        self.balance_loss = None
        self.z_loss = None

    def reset_parameters(self):
        """Reset the module's own parameters, not its experts': no expert is preferred."""
        nn.init.zeros_(self.bias)

    def _apply(self, fn, recurse=True):
        bias = self.bias
        super()._apply(fn, recurse)
        if self.bias.dtype.itemsize < 4:  # in bf16 0.5 + 0.001 is 0.5: the bias would never change
            self.bias = bias.to(self.bias.device, torch.float32)
        return self

    def __deepcopy__(self, memo):
        """Copy the module: the experts stay on the same ranks, and the losses are reset."""
        copied = memo[id(self)] = self.__class__.__new__(self.__class__)
        memo.update({id(group): group for group in (self.group, self.counted)})
        copied.__dict__ = copy.deepcopy(
            self.__dict__ | {"balance_loss": None, "z_loss": None}, memo
        )
        return copied

    def own_experts(self, group, counted=None):
        """Set the groups, as in spread(), and return the range of this rank's expert numbers.

        Raises ValueError if the number of experts is not divisible by the group's ranks.
        """
        E = len(self.bias)
        self.group = group
        self.counted = counted or group
        self.n = dist.get_world_size(group) if group else 1
        self.rank = dist.get_rank(group) if group else 0
        if E % self.n:
            raise ValueError(f"experts={E} must be divisible by {self.n} ranks")
        self.tellers = dist.get_process_group_ranks(self.counted) if self.counted else [0]
        alone = [dist.get_rank()] if self.counted else [0]
        near = dist.get_process_group_ranks(group) if group else alone
        self.near = [self.tellers.index(rank) for rank in near]  # positions of the group's ranks
        return range(self.rank * E // self.n, (self.rank + 1) * E // self.n)

    def spread(self, group, counted=None):
        """Keep this rank's part of a full set of experts. Sends nothing.

        group: the ranks that the experts are sharded over; None if each rank has all of them.
        counted: all ranks that have different tokens, over which load and losses are counted; None:
        the group.
        """
        own = self.own_experts(group, counted)
        for number in [number for number in self.experts if int(number) not in own]:
            del self.experts[number]

    def names_elsewhere(self):
        """Return the names of other ranks' expert tensors in the full state dict."""
        expert = next(iter(self.experts.values()))
        others = [i for i in range(len(self.bias)) if str(i) not in self.experts]
        return [f"experts.{i}.{name}" for i in others for name in expert.state_dict()]

    def forward(self, x, padding_mask=None):
        if padding_mask is None:
            return self.mix(x.reshape(-1, x.shape[-1])).view(x.shape)
        fits = padding_mask.dtype == torch.bool and padding_mask.shape == x.shape[:-1]
        tokens = ~padding_mask if fits else torch.zeros_like(x[..., 0], dtype=torch.bool)
        output = self.mix(x[tokens], fits)
        return output.new_zeros(x.shape).index_put((tokens,), output)

    def mix(self, rows, fits=True):
        """Route rows through their experts; return the weighted sums. Both: [tokens, width].

        fits: False on a rank with an invalid mask.
        """
        scores = self.scores(rows)
        likely, weights, chosen = self.routing.choose(scores, self.bias, self.top_k)
        order, taken = self.taken(chosen, len(self.bias))
        counts = self.tell(chosen, taken, likely, fits)  # [ranks of the group, experts]
        self.set_losses(scores, likely)
        token = order // self.top_k
        place = order % self.top_k
        back = self.by_experts(rows[token], counts)
        weighed = (weights[token, place, None] * back).to(rows.dtype)
        output = torch.zeros_like(rows).index_add(0, token, weighed)
        if self.shared_expert_gate is not None:
            gate = self.shared_expert_gate(rows).sigmoid()
            return output + gate * sum(expert(rows) for expert in self.shared)
        for expert in self.shared:
            output = output + expert(rows)
        return output

    def scores(self, rows):
        scores = self.router(rows)
        return scores.to(torch.promote_types(scores.dtype, torch.float32))

    def route(self, rows):
        """Return Routing.choose() for rows [tokens, width]: probabilities, weights, numbers."""
        return self.routing.choose(self.scores(rows), self.bias, self.top_k)

    def taken(self, chosen, E):
        """Return (indices of accepted rows in chosen.flatten(), sorted by expert; rows per expert).

        chosen: [tokens, top_k] expert numbers. Rows beyond the capacity are not accepted.
        """
        of = chosen.flatten()
        order = of.argsort(stable=True)
        counts = of.bincount(minlength=E)
        if self.capacity is None:
            return order, counts
        most = math.ceil(self.capacity * len(of) / E)
        first = counts.cumsum(0) - counts
        within = torch.arange(len(of), device=of.device) - first[of[order]]
        return order[within < most], counts.clamp(max=most)

    def tell(self, chosen, taken, likely, fits):
        """All-gather the number of rows of each rank for each expert; set load and dropped.

        Returns the numbers of the group's ranks, [ranks, experts]. Raises ValueError on all ranks
        if a rank has an invalid mask, or scores that are NaN or infinite.
        """
        E = len(self.bias)
        invalid = (~likely.isfinite()).sum() if fits else taken.new_tensor(-1)
        counts = torch.cat([taken, chosen.flatten().bincount(minlength=E), invalid[None]])
        counts = self.gather(counts)
        if counts[:, -1].any():
            wrong = counts[:, -1] if counts[:, -1].min() >= 0 else counts[:, -1] < 0
            where = [self.tellers[i] for i in wrong.nonzero().flatten()]
            if counts[:, -1].min() < 0:
                raise ValueError(f"padding_mask must be bool of the tokens' shape: ranks {where}")
            raise ValueError(f"the router's scores are NaN or infinite on ranks {where}")
        self.load = counts[:, E:-1].sum(0)
        self.dropped = self.load - counts[:, :E].sum(0)
        return counts[self.near, :E]

    def set_losses(self, scores, likely):
        """Set the balance loss and the z-loss; their mean over the ranks is that of all tokens."""
        load = self.load.to(likely.dtype)  # division of integers would use fp32
        rows = load.sum().clamp(min=1)
        tokens = rows / (self.top_k * len(self.tellers))  # of a rank, on average
        if self.balance == "loss":  # 1 for an even load, E if all rows go to one expert
            self.balance_loss = len(load) * (load / rows * (likely.sum(0) / tokens)).sum()
        if self.router_z_loss_coef:
            squares = scores.logsumexp(-1).square().sum()
            self.z_loss = self.router_z_loss_coef * squares / tokens

    def gather(self, counts):
        if len(self.tellers) == 1:
            return counts[None]
        gathered = counts.new_empty(len(self.tellers) * len(counts))
        comm.all_gather(gathered, counts, group=self.counted)
        return gathered.view(len(self.tellers), -1)

    def by_experts(self, rows, counts):
        """Compute each row by its expert, on any rank of the group; return the results in order.

        rows: sorted by expert. counts: rows per rank of the group and expert.
        """
        own = len(self.experts)
        received = counts[:, self.rank * own : (self.rank + 1) * own]  # [ranks, own experts]
        outgoing = counts[self.rank].view(self.n, own).sum(1).tolist()
        incoming = received.sum(1).tolist()
        came = self.exchange(rows, outgoing, incoming, self.n)
        numbers = torch.arange(own, device=rows.device).repeat(self.n)
        by_expert = numbers.repeat_interleave(received.flatten()).argsort(stable=True)
        parts = came[by_expert].split(received.sum(0).tolist())
        done = torch.cat(
            [expert(part) for expert, part in zip(self.experts.values(), parts, strict=True)]
        )
        done = done[by_expert.argsort()]
        return self.exchange(done, incoming, outgoing, 1 / self.n)

    def exchange(self, rows, outgoing, incoming, scale):
        if self.n == 1:
            return rows
        return Exchange.apply(rows, outgoing, incoming, scale, self.group)

    @torch.no_grad()
    def rebalance(self, rate=1e-3):
        """Change the bias by +-rate, so that experts with a low load are chosen more often."""
        if self.load is not None:
            above = self.load * len(self.load) - self.load.sum()  # fp32 is exact to 2^24 rows only
            self.bias -= rate * torch.sign(above)


def mixtures(module):
    """Return [(name, MoE)] of all mixtures in the module."""
    return [(name, part) for name, part in module.named_modules() if isinstance(part, MoE)]


def names_of_experts(module):
    """Return the names of the experts' parameters and buffers, which DDP must not average."""
    return [
        f"{name}.experts.{own}".lstrip(".")
        for name, mixture in mixtures(module)
        for own in mixture.experts.state_dict()
    ]


def balanced(loss, module, weight=0.01):
    """Return a loss (output, target) -> scalar that adds balance_loss x weight, and z_loss.

    It adds those of the module's last forward, and nothing under torch.no_grad(). It raises
    ValueError if the router requires a gradient but would get none from them.
    """
    parts = [part for _, part in mixtures(module)]

    @wraps(loss)  # Trainer asks the loss which targets it counts
    def total(output, target):
        main = loss(output, target)
        if not torch.is_grad_enabled():
            return main
        for part in parts:
            terms = [part.balance_loss] if part.balance == "loss" else []
            terms += [part.z_loss] if part.router_z_loss_coef else []
            learns = main.requires_grad and part.router.weight.requires_grad
            if learns and not all(term.requires_grad for term in terms):
                raise ValueError(
                    "balance_loss or z_loss has no gradient: run forward with gradients and "
                    "without a reentrant checkpoint"
                )
        balance = sum(part.balance_loss for part in parts if part.balance == "loss")
        z_loss = sum(part.z_loss for part in parts if part.router_z_loss_coef)
        return main + weight * balance + z_loss

    return total
