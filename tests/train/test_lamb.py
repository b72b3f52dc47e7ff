"""LAMB against its paper's algorithm, written again in float64; and on shards against one process."""

import copy

import oracle_models
import pytest
import tensor_parallel_models as split_models
import torch
from oracle_models import build
from tensors import gap, mlp, noise, state
from torch import nn

from labkit import comm, models
from labkit.fsdp import FSDP
from labkit.lamb import LAMB
from labkit.mesh import Mesh
from labkit.models.plans import gpt as gpt_plan
from labkit.tensor_parallel import VocabularyParallelCrossEntropy, full_state_dict, parallelize_module, tensor_parallel
from labkit.zero import ZeRO1, ZeRO2
from labkit.zero.flat_shards import Layout

CLOSE = 1e-12
SHAPES = [(6, 4), (5,), (3, 2, 2)]
OPTIONS = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def parameters():
    """A matrix, a vector of zeros as a bias may be, a tensor of three axes; float64."""
    starts = [noise(*shape, seed=i, dtype=torch.float64) for i, shape in enumerate(SHAPES)]
    starts[1].zero_()
    return [nn.Parameter(start) for start in starts]


def gradient(shape, step, number):
    return noise(*shape, seed=100 * step + number, dtype=torch.float64)


def algorithm_2(starts, steps, lr, betas, eps, weight_decay, smallest=0.0, largest=float("inf")):
    """You et al., algorithm 2, a tensor at a time; a ratio of 1 where a norm is zero."""
    ends = []
    for number, x in enumerate(starts):
        m, v = torch.zeros_like(x), torch.zeros_like(x)
        for t in range(1, steps + 1):
            g = gradient(x.shape, t - 1, number)
            m = betas[0] * m + (1 - betas[0]) * g
            v = betas[1] * v + (1 - betas[1]) * g**2
            r = m / (1 - betas[0] ** t) / ((v / (1 - betas[1] ** t)).sqrt() + eps)
            u = r + weight_decay * x
            ratio = 1.0
            if x.norm() > 0 and u.norm() > 0:
                ratio = min(max(float(x.norm() / u.norm()), smallest), largest)
            x = x - lr * ratio * u
        ends.append(x)
    return ends


def run(optimizer, members, steps):
    for step in steps:
        for number, p in enumerate(members):
            p.grad = gradient(p.shape, step, number)
        optimizer.step()
    return [p.detach().clone() for p in members]


@pytest.mark.parametrize("bounds", [(0.0, float("inf")), (0.4, 0.9)])
def test_it_is_the_papers_algorithm(bounds):
    members = parameters()
    wanted = algorithm_2([p.detach().clone() for p in members], 6, **OPTIONS, smallest=bounds[0], largest=bounds[1])
    assert gap(run(LAMB(members, **OPTIONS, ratio_bounds=bounds), members, range(6)), wanted) < CLOSE


def test_each_tensor_changes_by_the_rate_times_its_norm():
    members = parameters()[::2]
    before = [p.detach().clone() for p in members]
    optimizer = LAMB(members, lr=0.01)
    for p, old, new in zip(members, before, run(optimizer, members, [0]), strict=True):
        assert float((new - old).norm() / old.norm()) == pytest.approx(0.01, abs=CLOSE)
        assert float(optimizer.state[p]["ratio"]) == pytest.approx(float(old.norm()) / p.numel() ** 0.5, rel=1e-5)


def test_groups_have_options_of_their_own_and_a_tensor_without_gradient_stays():
    members = parameters()
    starts = [p.detach().clone() for p in members]
    optimizer = LAMB([{"params": members[:1]}, {"params": members[1:], "lr": 0.3, "weight_decay": 0.0}], **OPTIONS)
    for p, number in ((members[0], 0), (members[1], 1)):
        p.grad = gradient(p.shape, 0, number)
    optimizer.step()
    assert gap([members[0].detach()], algorithm_2(starts[:1], 1, **OPTIONS)) < CLOSE
    second = algorithm_2(starts[:2], 1, **OPTIONS | {"lr": 0.3, "weight_decay": 0.0})[1]
    assert gap([members[1].detach()], [second]) < CLOSE
    assert torch.equal(members[2], starts[2]) and not optimizer.state[members[2]]


def test_a_closure_is_called_with_gradients_on():
    p = nn.Parameter(torch.ones(3))
    optimizer = LAMB([p])

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0 and p[0].item() < 1.0


@pytest.mark.parametrize("how", ["state_dict", "deepcopy"])
def test_it_resumes_to_the_bit(how):
    members = parameters()
    optimizer = LAMB(members, **OPTIONS)
    run(optimizer, members, range(3))
    if how == "deepcopy":
        others, again = copy.deepcopy((members, optimizer))
    else:
        others = [nn.Parameter(p.detach().clone()) for p in members]
        again = LAMB(others)
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    straight = run(optimizer, members, range(3, 6))
    assert gap(run(again, others, range(3, 6)), straight) == 0.0


# ---- shards

FORMS = {"full": {}, "grad_op": {"shard": "grad_op"}, "replicate": {"root": "replicate"}, "hybrid": {"shard": "hybrid"}}
SETTINGS = {"lr": 0.05, "weight_decay": 0.1, "eps": 1e-3}


def on_shards(rank, world_size, form, name):
    settings = dict(FORMS[form])
    if form == "hybrid":
        settings["mesh"] = Mesh({"replicate": 2, "shard": world_size // 2})
    model = FSDP(build(name, torch.float64, seed=rank), models.unit(name), **settings)
    optimizer = LAMB(model.parameters(), **SETTINGS, sharded=True, process_group=model.sharding.group)
    oracle_models.fit(model, optimizer, name, torch.float64, world_size, rank)
    return model.full_state_dict()


@pytest.mark.parametrize("name", ["mlp", "gpt"])
@pytest.mark.parametrize(
    ("form", "world_size"), [("full", 2), ("full", 3), ("grad_op", 2), ("replicate", 2), ("hybrid", 4)]
)
def test_ranks_with_shards_train_what_one_process_trains(ranks, form, world_size, name):
    model = build(name, torch.float64, seed=0)
    oracle_models.fit(model, LAMB(model.parameters(), **SETTINGS), name, torch.float64, world_size)
    for rank, found in enumerate(ranks(world_size, on_shards, form=form, name=name)):
        assert gap(found, state(model)) <= CLOSE, f"rank {rank}"


def on_flat_shards(rank, world_size):
    members = parameters()
    layout = Layout([p.shape for p in members], world_size)

    def pieces(tensors):
        flat = layout.flatten(tensors, torch.zeros(layout.padded, dtype=torch.float64))
        return layout.pieces(layout.shard(flat, rank), rank)

    own = [nn.Parameter(piece) for piece in pieces(members)]
    optimizer = LAMB(own, **OPTIONS, sharded=True)
    for step in range(6):
        gradients = [gradient(p.shape, step, number) for number, p in enumerate(members)]
        for p, piece in zip(own, pieces(gradients), strict=True):
            p.grad = piece
        optimizer.step()
    return [p.detach().clone() for p in own]


@pytest.mark.parametrize("world_size", [2, 3])
def test_pieces_of_a_flat_buffer_some_of_them_empty_are_the_papers_algorithm(ranks, world_size):
    found = ranks(world_size, on_flat_shards)
    whole = [torch.cat(pieces).view(shape) for pieces, shape in zip(zip(*found, strict=True), SHAPES, strict=True)]
    assert gap(whole, algorithm_2([p.detach() for p in parameters()], 6, **OPTIONS)) < CLOSE
    assert not all(piece.numel() for pieces in found for piece in pieces)


def split(rank, world_size):
    model = parallelize_module(split_models.gpt(rank), None, gpt_plan(tensor_parallel))
    optimizer = LAMB(model.parameters(), lr=0.01, sharded=True)
    return fit_split(model, optimizer, VocabularyParallelCrossEntropy(), full_state_dict)


def fit_split(model, optimizer, loss, values):
    for tokens, targets in split_models.batches(4, split_models.VOCAB):
        optimizer.zero_grad()
        loss(model(tokens), targets).backward()
        optimizer.step()
    return values(model)


def test_split_layers_train_what_one_process_trains(ranks):
    model = split_models.gpt(0)
    wanted = fit_split(model, LAMB(model.parameters(), lr=0.01), split_models.whole_loss, state)
    for rank, found in enumerate(ranks(2, split)):
        assert gap(found, wanted) <= CLOSE, f"rank {rank}"


def messages(rank, world_size):
    model = FSDP(mlp(24, 40, 4), unit=nn.Linear)
    optimizer = LAMB(model.parameters(), sharded=True, process_group=model.sharding.group)
    model(noise(8, 24, seed=rank)).square().mean().backward()
    with comm.record() as log:
        optimizer.step()
    return [(event.op, event.payload_bytes) for event in log]


def test_a_step_on_shards_sends_16_bytes_a_tensor(ranks):
    assert ranks(2, messages) == [[("all_reduce", 4 * 16)]] * 2


def without_a_group(rank, world_size):
    model = FSDP(mlp(24, 40, 4), unit=nn.Linear)
    optimizer = LAMB(model.parameters())
    with pytest.raises(ValueError, match="LAMB is not elementwise"):
        train_once(model, optimizer)
    for zero in (ZeRO1, ZeRO2):
        for options in ({}, {"sharded": True}):
            with pytest.raises(ValueError, match=r"LAMB is not elementwise: .* depends on others, .*; use SGD"):
                zero(mlp(24, 40, 4).parameters(), LAMB, **options)


def train_once(model, optimizer):
    model(noise(8, 24)).square().mean().backward()
    optimizer.step()


def test_on_shards_without_a_group_it_is_refused(ranks):
    ranks(2, without_a_group)
