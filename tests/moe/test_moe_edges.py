"""Experts at the edges of numbers and in company: sigmoids of zero, low precision, copies, checkpoints."""

import copy

import pytest
import torch
import torch.distributed as dist
from moe_models import F64, TOKENS, WIDTH, Model, alone, batch, expert
from torch import nn
from torch.utils.checkpoint import checkpoint

from labkit.moe import MoE, Routing, balanced


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"top_k": 1}, {"balance": "bias"}], ids=str)
def test_scores_of_which_all_sigmoids_are_zero(options, dtype):
    moe, x = alone(routing=Routing("sigmoid"), **options).to(dtype), batch(0, 1)[0].reshape(-1, WIDTH).abs().to(dtype)
    with torch.no_grad():
        moe.router.weight.fill_(-3e3)
        moe.router.weight[2] = -1e3
    likely, weights, _ = moe.route(x)
    assert torch.equal(weights.sum(-1), torch.full_like(weights[:, 0], len(options) < 1 or "balance" in options))
    assert torch.equal(likely, torch.tensor([0, 0, 1, 0]).to(likely).expand(TOKENS, 4))
    (moe(x).sum() + (moe.balance_loss if moe.balance_loss is not None else 0)).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in moe.parameters())


def test_sigmoids_share_as_they_are():
    moe, x = alone(routing=Routing("sigmoid")), batch(0, 1)[0]
    likely, weights, chosen = moe.route(x)
    scores = moe.router(x).sigmoid()
    top = scores.topk(2)
    assert torch.equal(chosen, top.indices)
    assert torch.allclose(weights, top.values / top.values.sum(-1, keepdim=True), rtol=0, atol=1e-14)
    assert torch.allclose(likely, scores / scores.sum(-1, keepdim=True), rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, F64], ids=str)
def test_the_bias_is_not_rounded_with_the_model(dtype):
    moe = nn.Sequential(alone(balance="bias")).to(dtype)[0]
    moe(batch(0, 1)[0].to(dtype))
    for _ in range(1000):
        moe.rebalance(1e-3)
    assert moe.bias.abs().max().item() == pytest.approx(1.0, abs=1e-4)
    before = moe.bias.double()
    assert torch.equal(moe.bfloat16().bias, before.float()) and moe.to("meta").bias.device.type == "meta"


def test_without_a_forward_nothing_is_rebalanced():
    moe = alone(balance="bias")
    moe.rebalance()
    assert not moe.bias.any()


def test_the_balancing_loss_is_not_rounded_to_fp32():
    moe, x = alone(top_k=1), batch(0, 1)[0].reshape(-1, WIDTH)[:7]  # sevenths are no binary numbers
    likely, _, chosen = moe.route(x)
    shares = [chosen.flatten().tolist().count(number) / len(x) for number in range(4)]
    moe(x)
    plain = 4 * sum(share * p for share, p in zip(shares, likely.mean(0).tolist(), strict=True))
    assert moe.balance_loss.item() == pytest.approx(plain, rel=1e-14, abs=0)


def test_loads_that_fp32_cannot_tell_apart_are_rebalanced():
    moe = alone(balance="bias")
    moe.load = torch.tensor([2**25 + 1, 2**25 - 1, 2**25, 2**25])
    moe.rebalance(0.5)
    assert moe.bias.tolist() == [-0.5, 0.5, 0, 0]


def copied(rank, world_size, group):
    """Does a copy, made after a forward, train as the module does, and is it one of its own?"""
    moe, x = Model(dist.group.WORLD if group else None).moe, batch(0, world_size)[rank]
    moe(x)
    other = copy.deepcopy(nn.ModuleList([moe, moe]))[1]
    for one in (moe, other):
        (one(x).sum() + one.balance_loss).backward()
    pairs = list(zip(moe.parameters(), other.parameters(), strict=True))
    same = all(torch.equal(p, q) and torch.equal(p.grad, q.grad) and p is not q for p, q in pairs)
    return same and other.group is moe.group and torch.equal(moe.bias, other.bias)


def test_a_copy_is_split_over_the_same_ranks(ranks):
    assert all(ranks(1, copied, group=False) + ranks(2, copied, group=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_balances_is_not_lost_in_a_checkpoint(reentrant):
    model, x = Model(), batch(0, 1)[0].requires_grad_()
    loss = balanced(lambda output, target: output.sum(), model, 0.5)
    loss(model(x), None).backward()
    plain, model.moe.router.weight.grad = model.moe.router.weight.grad, None
    output = checkpoint(model, x, use_reentrant=reentrant)
    if reentrant:
        with pytest.raises(
            ValueError, match=r"balance_loss or z_loss has no gradient: .* without a reentrant checkpoint"
        ):
            loss(output, None)
        return
    loss(output, None).backward()
    assert torch.equal(model.moe.router.weight.grad, plain)


def test_a_capacity_that_cannot_be():
    for capacity in (-1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"capacity={capacity} must be a finite number of at least 0"):
            MoE(WIDTH, 4, expert=expert, capacity=capacity)
