"""A mixture of experts: a token goes to k of E networks; a rank holds some experts, not all.

    rank 0   tokens > router > [to 0][to 1] \\          / experts 0 1 \\          [from 0][from 1]
                                             all-to-all               all-to-all   weighed, added
    rank 1   tokens > router > [to 0][to 1] /          \\ experts 2 3 /          [from 0][from 1]

Parameters grow with E, work per token with k only. What the router prefers it trains, and then
prefers it more; so the load is balanced: by a loss that is least when all experts are chosen alike,
or by a bias that counts when experts are chosen, and not when their outputs are weighed.

Sent per rank: forward, of its k x tokens rows of `width` those that leave it, there and back; the
same in backward; before them 2E + 1 counts. Held: E/n experts, and the rows that came.
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
    """Experts that are split over a group, whose ranks have tokens of their own. Collective.

    forward: [..., width] -> the same. expert: function that makes one; all ranks must call it with
        the same random state. group: None is one process alone.
    capacity: an expert takes at most capacity x (tokens x top_k / experts) of a rank's rows, the
        first ones; what is beyond adds nothing. None: all are taken.
    balance: "loss": after forward, .balance_loss wants to be added to the loss, times 0.01 or so;
        "bias": call rebalance() after each optimizer step; None. A reentrant checkpoint of torch
        around forward takes the loss's gradient away.
    shared: experts that take every token. shared_expert_gate: their sum is multiplied by a sigmoid
        of the token, as in Qwen2-MoE. routing: how scores choose and weigh experts: a Routing.
    router_z_loss_coef: if not 0, .z_loss is this times the mean of logsumexp(scores)^2, to be added
        to the loss (Zoph et al., ST-MoE, 2022, section 3). balanced() adds both losses.
    padding_mask: bool [...], True for padding: such tokens are not routed and counted in no loss,
        load or capacity, and their output is 0. Both losses divide by the mean number of tokens of
        a rank, so that their mean over the ranks is that of one process with all tokens.
    .load, [experts] int64: rows for each in the last forward, of the group's ranks; .dropped:
        those of them that were beyond its capacity.
    Gradients of experts are those of the mean of the ranks' losses, as DDP makes them for the rest:
    module._ddp_params_and_buffers_to_ignore = names_of_experts(module). In a mesh: spread() what
    was made whole. Raises ValueError for experts that the ranks do not divide, top_k beyond them,
    and on all ranks where a score is no number.
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
            raise ValueError(f"a token cannot go to {top_k} of {experts} experts")
        routing.check(experts, top_k)
        if balance not in ("loss", "bias", None):
            raise ValueError(f"balance={balance!r} must be 'loss', 'bias' or None")
        if shared_expert_gate and not shared:
            raise ValueError("shared_expert_gate=True has nothing to gate: use shared=1 or more")
        if capacity is not None and not 0 <= capacity < math.inf:
            raise ValueError(f"an expert cannot take {capacity} times its share of a rank's rows")
        self.top_k, self.capacity, self.balance, self.routing = top_k, capacity, balance, routing
        self.router_z_loss_coef = router_z_loss_coef
        self.router = nn.Linear(width, experts, bias=False)
        self.register_buffer("bias", torch.zeros(experts, dtype=torch.float32))
        own = self.own_experts(group)
        made = ((number, expert()) for number in range(experts))
        self.experts = nn.ModuleDict({str(i): one for i, one in made if i in own})
        self.shared = nn.ModuleList(expert() for _ in range(shared))
        self.shared_expert_gate = nn.Linear(width, 1, bias=False) if shared_expert_gate else None
        self.load, self.dropped, self.balance_loss, self.z_loss = None, None, None, None

    def reset_parameters(self):
        """Those that are its own, not its experts': no expert is preferred."""
        nn.init.zeros_(self.bias)

    def _apply(self, fn, recurse=True):
        bias = self.bias
        super()._apply(fn, recurse)
        if self.bias.dtype.itemsize < 4:  # in bf16 0.5 + 0.001 is 0.5: balance would stand still
            self.bias = bias.to(self.bias.device, torch.float32)
        return self

    def __deepcopy__(self, memo):
        """The copy's experts are those of the same ranks; its loss is that of its own forward."""
        copied = memo[id(self)] = self.__class__.__new__(self.__class__)
        memo.update({id(group): group for group in (self.group, self.counted)})
        copied.__dict__ = copy.deepcopy(
            self.__dict__ | {"balance_loss": None, "z_loss": None}, memo
        )
        return copied

    def own_experts(self, group, counted=None):
        """A range of their numbers: those of this rank, in these groups from now on."""
        E, self.group, self.counted = len(self.bias), group, counted or group
        self.n = dist.get_world_size(group) if group else 1
        self.rank = dist.get_rank(group) if group else 0
        if E % self.n:
            raise ValueError(f"{self.n} ranks cannot share {E} experts alike")
        self.tellers = dist.get_process_group_ranks(self.counted) if self.counted else [0]
        alone = [dist.get_rank()] if self.counted else [0]
        near = dist.get_process_group_ranks(group) if group else alone
        self.near = [self.tellers.index(rank) for rank in near]  # the group's, of those who tell
        return range(self.rank * E // self.n, (self.rank + 1) * E // self.n)

    def spread(self, group, counted=None):
        """Keep this rank's part of the experts that it has, which are all. Sends nothing.

        counted: all ranks that have tokens of their own; theirs make the load and what balances.
        None: the group's. group: None where each of these has all experts.
        """
        own = self.own_experts(group, counted)
        for number in [number for number in self.experts if int(number) not in own]:
            del self.experts[number]

    def names_elsewhere(self):
        """Names, in its state dict, of the experts that other ranks have."""
        one = next(iter(self.experts.values()))
        others = [i for i in range(len(self.bias)) if str(i) not in self.experts]
        return [f"experts.{i}.{name}" for i in others for name in one.state_dict()]

    def forward(self, x, padding_mask=None):
        if padding_mask is None:
            return self.mix(x.reshape(-1, x.shape[-1])).view(x.shape)
        fits = padding_mask.dtype == torch.bool and padding_mask.shape == x.shape[:-1]
        tokens = ~padding_mask if fits else torch.zeros_like(x[..., 0], dtype=torch.bool)
        output = self.mix(x[tokens], fits)
        return output.new_zeros(x.shape).index_put((tokens,), output)

    def mix(self, rows, fits=True):
        """rows: [tokens, width]. fits: False on a rank whose mask was wrong: all will raise."""
        scores = self.scores(rows)
        likely, weights, chosen = self.routing.choose(scores, self.bias, self.top_k)
        order, taken = self.taken(chosen, len(self.bias))
        told = self.tell(chosen, taken, likely, fits)  # [ranks of the group, experts]
        self.set_losses(scores, likely)
        token, place = order // self.top_k, order % self.top_k
        back = self.by_experts(rows[token], told)
        weighed = (weights[token, place, None] * back).to(rows.dtype)
        output = torch.zeros_like(rows).index_add(0, token, weighed)
        if self.shared_expert_gate is not None:
            gate = self.shared_expert_gate(rows).sigmoid()
            return output + gate * sum(one(rows) for one in self.shared)
        for one in self.shared:
            output = output + one(rows)
        return output

    def scores(self, rows):
        scores = self.router(rows)
        return scores.to(torch.promote_types(scores.dtype, torch.float32))

    def route(self, rows):
        """(how likely each expert is, [tokens, E]; weights and numbers of the k chosen)."""
        return self.routing.choose(self.scores(rows), self.bias, self.top_k)

    def taken(self, chosen, E):
        """(the places in chosen.flatten() that experts take, by expert; how many each takes)."""
        of = chosen.flatten()
        order, counts = of.argsort(stable=True), of.bincount(minlength=E)
        if self.capacity is None:
            return order, counts
        most = math.ceil(self.capacity * len(of) / E)
        first = counts.cumsum(0) - counts
        within = torch.arange(len(of), device=of.device) - first[of[order]]
        return order[within < most], counts.clamp(max=most)

    def tell(self, chosen, taken, likely, fits):
        """How many rows each rank has for each expert; the load, of all ranks' choices."""
        E, lost = len(self.bias), (~likely.isfinite()).sum() if fits else taken.new_tensor(-1)
        told = self.gather(torch.cat([taken, chosen.flatten().bincount(minlength=E), lost[None]]))
        if told[:, -1].any():
            wrong = told[:, -1] if told[:, -1].min() >= 0 else told[:, -1] < 0
            where = [self.tellers[i] for i in wrong.nonzero().flatten()]
            if told[:, -1].min() < 0:
                raise ValueError(f"padding_mask is not bool of the tokens' shape on ranks {where}")
            raise ValueError(f"the router's scores are no numbers on ranks {where}")
        self.load = told[:, E:-1].sum(0)
        self.dropped = self.load - told[:, :E].sum(0)
        return told[self.near, :E]

    def set_losses(self, scores, likely):
        """What balances and the z-loss. Their mean over the ranks is that of all ranks' tokens."""
        load = self.load.to(likely.dtype)  # integers divide in fp32, whatever the model is in
        rows = load.sum().clamp(min=1)
        tokens = rows / (self.top_k * len(self.tellers))  # of a rank, on average
        if self.balance == "loss":  # 1 where all are chosen alike, E where one is
            self.balance_loss = len(load) * (load / rows * (likely.sum(0) / tokens)).sum()
        if self.router_z_loss_coef:
            squares = scores.logsumexp(-1).square().sum()
            self.z_loss = self.router_z_loss_coef * squares / tokens

    def gather(self, counts):
        if len(self.tellers) == 1:
            return counts[None]
        told = counts.new_empty(len(self.tellers) * len(counts))
        comm.all_gather(told, counts, group=self.counted)
        return told.view(len(self.tellers), -1)

    def by_experts(self, rows, told):
        """The rows, each through its expert, wherever that is, and back in their order."""
        own = len(self.experts)
        mine = told[:, self.rank * own : (self.rank + 1) * own]  # [ranks, own experts]
        outgoing = told[self.rank].view(self.n, own).sum(1).tolist()
        incoming = mine.sum(1).tolist()
        came = self.exchange(rows, outgoing, incoming, self.n)
        numbers = torch.arange(own, device=rows.device).repeat(self.n)
        by_expert = numbers.repeat_interleave(mine.flatten()).argsort(stable=True)
        parts = came[by_expert].split(mine.sum(0).tolist())
        done = torch.cat(
            [one(part) for one, part in zip(self.experts.values(), parts, strict=True)]
        )
        done = done[by_expert.argsort()]
        return self.exchange(done, incoming, outgoing, 1 / self.n)

    def exchange(self, rows, outgoing, incoming, scale):
        if self.n == 1:
            return rows
        return Exchange.apply(rows, outgoing, incoming, scale, self.group)

    @torch.no_grad()
    def rebalance(self, rate=1e-3):
        """After a step: experts that were chosen less than the mean are chosen more readily."""
        if self.load is not None:
            above = self.load * len(self.load) - self.load.sum()  # fp32 is exact to 2^24 rows only
            self.bias -= rate * torch.sign(above)


def mixtures(module):
    """[(name, MoE)] of all in the module."""
    return [(name, one) for name, one in module.named_modules() if isinstance(one, MoE)]


def names_of_experts(module):
    """Names, in its state dict, of what is on one rank only: DDP is not to average it."""
    return [
        f"{name}.experts.{own}".lstrip(".")
        for name, one in mixtures(module)
        for own in one.experts.state_dict()
    ]


def balanced(loss, module, weight=0.01):
    """The loss (output, target) -> scalar, and the module's balance_loss x weight, and z_loss.

    These are of the last forward, and left out where nothing learns: under torch.no_grad().
    Raises ValueError where the router would not learn from them, though the rest does.
    """
    parts = [one for _, one in mixtures(module)]

    @wraps(loss)  # Trainer asks the loss which targets it counts
    def total(output, target):
        main = loss(output, target)
        if not torch.is_grad_enabled():
            return main
        for one in parts:
            terms = [one.balance_loss] if one.balance == "loss" else []
            terms += [one.z_loss] if one.router_z_loss_coef else []
            learns = main.requires_grad and one.router.weight.requires_grad
            if learns and not all(term.requires_grad for term in terms):
                raise ValueError(
                    "a balance_loss has no gradient: its forward ran under torch.no_grad(), "
                    "or in a reentrant checkpoint"
                )
        balance = sum(one.balance_loss for one in parts if one.balance == "loss")
        return main + weight * balance + sum(one.z_loss for one in parts if one.router_z_loss_coef)

    return total
