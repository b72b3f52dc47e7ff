"""Experts spread over ranks, against one process that holds them all and sees every rank's tokens."""

import copy

import pytest
import torch
import torch.distributed as dist
from moe_models import F64, STEPS, TOKENS, WIDTH, Model, alone, batch, expert
from tensors import noise

from labkit import comm
from labkit.ddp import DDP
from labkit.ideas.experts import mixture_of_experts
from labkit.mesh import Mesh
from labkit.moe import MoE, Routing, balanced, names_of_experts

OPTIONS = {
    "top 1": {"top_k": 1},
    "top 2": {},
    "all": {"top_k": 4},
    "sigmoid": {"routing": Routing("sigmoid")},
    "bias": {"balance": "bias"},
    "shared": {"shared": 1, "balance": None},
}


def train(model, moe, batches, rate=0.05):
    """Outputs and gradients of inputs, by step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for x in batches:
        x = x.clone().requires_grad_()
        optimizer.zero_grad()
        output = model(x)
        loss = output.square().mean()
        if moe.balance == "loss":
            loss = loss + 0.1 * moe.balance_loss
        loss.backward()
        optimizer.step()
        if moe.balance == "bias":
            moe.rebalance(rate)
        found.append((output.detach(), x.grad))
    return found


def beside_one_process(rank, world_size, options, favourite=None):
    """The furthest that outputs, inputs' gradients and weights are from those of one process.

    favourite: an expert that all tokens go to.
    """
    oracle, model = Model(**options), Model(dist.group.WORLD, **options)
    for one in (oracle, model) if favourite is not None else ():
        one.moe.bias[favourite] = 10.0
    model.moe.experts = copy.deepcopy(model.moe.experts)  # a copy loses hooks of its parameters
    model._ddp_params_and_buffers_to_ignore = names_of_experts(model)
    batches = [batch(step, world_size) for step in range(STEPS)]
    theirs = train(oracle, oracle.moe, [x.flatten(0, 1) for x in batches])
    ours = train(DDP(model), model.moe, [x[rank] for x in batches])
    apart = [0.0]
    for (output, gradient), (whole, of_whole) in zip(ours, theirs, strict=True):
        mine = slice(2 * rank, 2 * rank + 2)
        apart += [(output - whole[mine]).abs().max(), (gradient / world_size - of_whole[mine]).abs().max()]
    everything = dict(oracle.named_parameters())
    apart += [(p - everything[name]).abs().max() for name, p in model.named_parameters()]
    same = model.moe.load.tolist() == oracle.moe.load.tolist() and torch.equal(model.moe.bias, oracle.moe.bias)
    idle = [number for number in model.moe.experts if favourite not in (None, int(number))]
    assert not any(p.grad.any() for number in idle for p in model.moe.experts[number].parameters())
    return max(map(float, apart)), same, len(model.moe.experts)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_it_is_the_mixture_of_one_process(ranks, world_size, options):
    for rank, (apart, same, held) in enumerate(ranks(world_size, beside_one_process, options=options)):
        assert apart < 1e-12 and same and held == 4 // world_size, f"rank {rank}"


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_k": 1, "balance": "bias"}])
def test_all_tokens_may_go_to_one_expert_and_none_to_the_others(ranks, options):
    for favourite in (0, 3):
        for rank, (apart, same, _) in enumerate(ranks(4, beside_one_process, options=options, favourite=favourite)):
            assert apart < 1e-12 and same, f"rank {rank}, {favourite}"


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_the_idea_is_the_class(top_k):
    moe, x = Model(top_k=top_k).moe, batch(0, 1)[0, 0]
    assert torch.allclose(mixture_of_experts(x, moe.router, moe.experts.values(), top_k), moe(x), rtol=0, atol=1e-14)


def test_capacity_drops_the_last():
    moe, x = alone(top_k=1, capacity=1.0), batch(0, 1)[0].reshape(-1, WIDTH)
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.weight[2] = x.sum(0)  # most go to one
    _, _, chosen = moe.route(x)
    output, seen = moe(x), {}
    for token, number in enumerate(chosen.flatten().tolist()):
        seen[number] = seen.get(number, 0) + 1
        assert bool(output[token].abs().sum() == 0) == (seen[number] > 3)  # 10 tokens, 4 experts: at most 3 each
    assert moe.load.max() > 3 and moe.load.sum() == len(x)
    assert moe.dropped.tolist() == [max(0, load - 3) for load in moe.load.tolist()]


def test_the_router_of_one_expert_learns_what_it_is_worth():
    moe = alone(top_k=1, balance=None)
    moe(batch(0, 1)[0]).square().sum().backward()
    assert moe.router.weight.grad.abs().max() > 1e-3


def test_a_rank_without_tokens_balances_nothing():
    moe = alone()
    assert moe(torch.zeros(0, WIDTH, dtype=F64)).shape == (0, WIDTH)
    assert moe.balance_loss.item() == 0 and moe.load.sum() == 0


def test_an_expert_without_tokens_has_gradients_of_zero():
    moe = alone(top_k=1)
    with torch.no_grad():
        moe.router.weight.zero_()
    moe.bias[1] = 1.0  # every token is routed to one expert
    moe(batch(0, 1)[0]).sum().backward()
    assert moe.load.tolist() == [0, TOKENS, 0, 0]
    assert all(p.grad is not None for p in moe.experts.parameters())
    assert not any(p.grad.any() for p in moe.experts["0"].parameters())


def test_the_balancing_loss_is_one_at_best():
    moe, x = alone(top_k=1), torch.ones(8, WIDTH, dtype=F64)
    with torch.no_grad():
        moe.router.weight.zero_()
        moe(x)
        even = moe.balance_loss.item()
        moe.router.weight[3] = 50.0
        moe(x)
    assert even == pytest.approx(1.0) and moe.balance_loss.item() == pytest.approx(4.0)


def test_the_bias_brings_balance():
    moe = alone(top_k=1, balance="bias")
    x = noise(400, WIDTH, seed=0, dtype=F64) + 1.0
    moe(x)
    before = moe.load.max().item()
    for _ in range(300):
        moe.rebalance(0.003)
        moe(x)
    assert before > 130 and moe.load.max() <= 115


def sent(rank, world_size):
    moe = Model(dist.group.WORLD, balance=None).moe
    x = batch(0, world_size)[rank].requires_grad_()
    with comm.record() as events:
        moe(x).sum().backward()
    _, _, chosen = moe.route(x.flatten(0, 1))
    leaving = ((chosen * world_size // 4) != rank).sum().item()
    there, back, *_ = [event.sent_bytes for event in events if event.op == "all_to_all"]
    counts = sum(event.sent_bytes for event in events if event.op == "all_gather")
    return there, leaving * WIDTH * 8, back, [event.op for event in events].count("all_to_all"), counts


@pytest.mark.parametrize("world_size", [2, 4])
def test_rows_that_leave_a_rank_are_what_is_sent(ranks, world_size):
    told = ranks(world_size, sent)
    for rank, (there, leaving, _, messages, _) in enumerate(told):
        assert there == leaving and messages == 4, f"rank {rank}"
    assert sum(there for there, *_ in told) == sum(back for _, _, back, *_ in told)
    for rank, (*_, counts) in enumerate(told):
        assert counts == (world_size - 1) * 9 * 8, f"rank {rank}"


def not_a_number(rank, world_size, axes):
    mesh, moe = Mesh(axes), Model().moe
    moe.spread(mesh.group("ep"), dist.group.WORLD)
    x = batch(0, world_size)[rank]
    try:
        moe(x * float("nan") if rank == 1 else x)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("axes", [{"ep": 2}, {"dp": 2, "ep": 2}, {"ep": 2, "dp": 2}])
def test_a_score_that_is_no_number_ends_the_step_on_all_ranks(ranks, axes):
    told = ranks(2 * len(axes), not_a_number, axes=axes)
    assert told == ["the router's scores are NaN or infinite on ranks [1]"] * len(told)


def counted(rank, world_size):
    """A mesh whose ep groups are not neighbours: output and loads compared with one process."""
    mesh, oracle, moe = Mesh({"ep": 2, "dp": 2}), Model().moe, Model().moe
    moe.spread(mesh.group("ep"), dist.group.WORLD)
    x = batch(0, world_size)
    whole, own = oracle(x), moe(x[rank])
    return (own - whole[rank]).abs().max().item(), moe.load.tolist() == oracle.load.tolist(), list(moe.experts)


def test_what_was_made_whole_is_spread_and_counted_over_more_ranks(ranks):
    told = ranks(4, counted)
    for rank, (apart, same, _) in enumerate(told):
        assert apart < 1e-12 and same, f"rank {rank}"
    assert [held for *_, held in told] == [["0", "1"]] * 2 + [["2", "3"]] * 2


def test_the_loss_has_what_balances_while_something_learns():
    model, plain = Model(), lambda output, target: output.sum()
    loss = balanced(plain, model, 0.5)
    output = model(batch(0, 1)[0])
    assert torch.equal(loss(output, None), output.sum() + 0.5 * model.moe.balance_loss)
    with torch.no_grad():
        assert torch.equal(loss(output, None), output.sum())


def cannot_share(rank, world_size):
    try:
        MoE(WIDTH, 4, expert=expert, group=dist.group.WORLD)
    except ValueError as error:
        return str(error)


def test_experts_that_the_ranks_do_not_divide(ranks):
    assert ranks(3, cannot_share) == ["experts=4 must be divisible by 3 ranks"] * 3
    with pytest.raises(ValueError, match="top_k=5 must be between 1 and experts=4"):
        MoE(WIDTH, 4, top_k=5, expert=expert)
    for wrong in (None, torch.nn.Linear(4, 4)):
        with pytest.raises(ValueError, match="pass a function that makes one expert"):
            MoE(4, 4, 2, wrong)
    with pytest.raises(ValueError, match="balance='none' must be 'loss', 'bias' or None"):
        MoE(WIDTH, 4, expert=expert, balance="none")
