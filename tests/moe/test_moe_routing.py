"""Published mixtures, with groups, gates, z-loss and padding, against their formulas in plain loops over tokens."""

import pytest
import torch
import torch.distributed as dist
from tensors import noise
from torch import nn

from labkit.ddp import DDP
from labkit.moe import MoE, Routing, balanced, names_of_experts

F64, WIDTH, EXPERTS, TOKENS = torch.float64, 5, 8, 6
V3 = Routing("sigmoid", routed_scaling_factor=2.5, n_group=4, topk_group=2)
OPTIONS = {
    "OLMoE": {"routing": Routing(norm_topk_prob=False)},
    "Qwen2-MoE": {"routing": Routing(norm_topk_prob=False), "shared": 2, "shared_expert_gate": True},
    "DeepSeek-V2": {"routing": Routing(norm_topk_prob=False, routed_scaling_factor=16.0, n_group=4, topk_group=2)},
    "DeepSeek-V3": {"routing": V3, "shared": 1, "balance": "bias"},
    "ST-MoE": {"router_z_loss_coef": 0.1},
}


def expert():
    return nn.Sequential(nn.Linear(WIDTH, 7), nn.GELU(), nn.Linear(7, WIDTH))


def make(group=None, **options):
    torch.manual_seed(0)
    moe = MoE(WIDTH, EXPERTS, 3, expert=expert, group=group, **options).to(F64)
    moe.bias.copy_(torch.linspace(-0.1, 0.1, EXPERTS)[torch.arange(EXPERTS) * 3 % EXPERTS])
    return moe


def plain(moe, tokens):
    """(outputs of the tokens, balance loss + z-loss, loads) by the published formulas, one token at a time."""
    how, outputs, likely, loads, squares = moe.routing, [], [], [0] * EXPERTS, []
    for u in tokens:
        logits = moe.router.weight @ u
        s = logits.exp() / logits.exp().sum() if how.score == "softmax" else 1 / (1 + (-logits).exp())
        wanted = (s.detach() + moe.bias).tolist()
        size = EXPERTS // how.n_group
        groups = [range(i * size, (i + 1) * size) for i in range(how.n_group)]
        counted = 2 if how.score == "sigmoid" else 1
        groups.sort(key=lambda group: -sum(sorted((wanted[i] for i in group), reverse=True)[:counted]))
        allowed = [i for group in groups[: how.topk_group] for i in group]
        chosen = sorted(allowed, key=lambda i: -wanted[i])[:3]
        total = sum(s[i] for i in chosen) if how.norm_topk_prob else 1.0
        y = sum(how.routed_scaling_factor * s[i] / total * moe.experts[str(i)](u) for i in chosen)
        gate = 1.0 if moe.shared_expert_gate is None else 1 / (1 + (-(moe.shared_expert_gate.weight @ u)).exp())
        outputs.append(y + gate * sum(one(u) for one in moe.shared))
        likely.append(s / s.sum())
        squares.append(logits.exp().sum().log() ** 2)
        for i in chosen:
            loads[i] += 1
    n = len(tokens)
    added = moe.router_z_loss_coef * sum(squares) / n
    if moe.balance == "loss":
        added = added + 0.01 * EXPERTS * sum(loads[i] / (3 * n) * sum(p[i] for p in likely) / n for i in range(EXPERTS))
    return torch.stack(outputs), added, loads


def inputs(world_size, padded):
    x = noise(world_size, TOKENS, WIDTH, seed=1, dtype=F64)
    mask = torch.zeros(world_size, TOKENS, dtype=torch.bool)
    for rank in range(world_size if padded else 0):
        mask[rank, 1 : 3 + 2 * rank] = True  # unequal on ranks; the fourth has one token
    return x.masked_fill(mask[..., None], torch.nan), mask


def beside_the_formula(rank, world_size, options, padded):
    oracle, moe = make(**options), make(dist.group.WORLD, **options)
    x, mask = inputs(world_size, padded)
    whole, own = x.clone().requires_grad_(), x[rank].clone().requires_grad_()
    of_tokens, added, loads = plain(oracle, whole[~mask])
    (of_tokens.square().sum() / world_size + added).backward()
    moe._ddp_params_and_buffers_to_ignore = names_of_experts(moe)
    output = DDP(moe)(own, mask[rank]) if padded else DDP(moe)(own)
    balanced(lambda output, target: output.square().sum(), moe)(output, None).backward()
    assert moe.load.tolist() == loads and not output[mask[rank]].any()
    apart = [(output[~mask[rank]] - of_tokens.split((~mask).sum(1).tolist())[rank]).abs().max()]
    apart += [(own.grad / world_size - whole.grad[rank]).abs().max()]
    theirs = dict(oracle.named_parameters())
    for name, p in moe.named_parameters():
        of_all = theirs[name].grad
        apart.append((p.grad - (torch.zeros_like(p) if of_all is None else of_all)).abs().max())
    return max(map(float, apart))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_it_is_the_published_formula(ranks, world_size, options, padded):
    assert max(ranks(world_size, beside_the_formula, options=options, padded=padded)) < 1e-11


def test_groups_by_two_best():
    scores = torch.tensor([[3.0, -9.0, 2.0, 2.0]], dtype=F64)
    routing = Routing("sigmoid", n_group=2, topk_group=1)
    assert sorted(routing.choose(scores, torch.zeros(4), 2)[2].flatten().tolist()) == [2, 3]
    routing = Routing("softmax", n_group=2, topk_group=1)
    assert sorted(routing.choose(scores, torch.zeros(4), 2)[2].flatten().tolist()) == [0, 1]


@pytest.mark.parametrize(
    "make_wrong, words",
    [
        (lambda: Routing("tanh"), "score='tanh' must be"),
        (lambda: Routing(n_group=2, topk_group=3), "topk_group=3 must be 1 to n_group=2"),
        (lambda: make(routing=Routing(n_group=3)), "experts=8 must be divisible by n_group=3"),
        (lambda: make(routing=Routing(n_group=4)), "top_k=3 must be between 1 and 2"),
        (lambda: make(shared_expert_gate=True), "needs shared experts: use shared=1 or more"),
        (lambda: make()(torch.zeros(2, WIDTH, dtype=F64), torch.zeros(2)), "padding_mask must be bool of the tokens'"),
    ],
)
def test_what_cannot_be_is_refused(make_wrong, words):
    with pytest.raises(ValueError, match=words):
        make_wrong()


def masked_wrongly(rank, world_size):
    moe, x = make(dist.group.WORLD), torch.zeros(3, TOKENS, WIDTH, dtype=F64)
    mask = {0: None, 1: torch.zeros(TOKENS, dtype=torch.bool)}.get(rank, torch.zeros(3, TOKENS, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"padding_mask must be bool of the tokens' shape: ranks \[1\]"):
        moe(x, mask)


def test_a_mask_that_is_wrong_on_one_rank_is_refused_on_all(ranks):
    ranks(4, masked_wrongly)
