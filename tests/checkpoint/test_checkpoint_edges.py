"""Checkpoints at their edges: odd optimizers and states, ranks that fail alone, folders that others have touched."""

import gc
import math
import operator
import os
import shutil
import sys
import time

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from tensors import noise
from test_checkpoint import WIDTH, flip
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from labkit.amp.master_weights import MasterWeights
from labkit.checkpoint import CheckpointError, Checkpoints, metadata
from labkit.checkpoint.convert_sources import opened
from labkit.checkpoint.rng_state import RandomState
from labkit.checkpoint.sharded_parts import unwrapped
from labkit.compression import OneBitAdam, OneBitLamb
from labkit.ddp import DDP
from labkit.fsdp import FSDP
from labkit.lamb import LAMB
from labkit.local_sgd import DiLoCo, LocalSGD
from labkit.mesh import Mesh
from labkit.moe import MoE
from labkit.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from labkit.trainer import make_optimizer, parallelize
from labkit.zero import ZeRO1, ZeRO2


class Net(nn.Module):
    """Rows that do not split evenly, statistics, one element; with odd: a number, nothing, a frozen one."""

    def __init__(self, odd=False):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, 5), nn.BatchNorm1d(5), nn.Linear(5, WIDTH)
        self.one = nn.Parameter(torch.ones(() if odd else 1))
        self.empty = nn.Parameter(torch.empty(0, 3)) if odd else None
        self.last.bias.requires_grad_(not odd)

    def forward(self, x):
        out = self.last(self.norm(self.first(x)).relu()) * self.one
        return out if self.empty is None else out + self.empty.sum()


def build(kind, world_size, seed=0):
    """(model, optimizer)."""
    torch.manual_seed(seed)
    adamw = torch.optim.AdamW
    if kind in ("torch_fsdp", "ddp_bucketed", "fsdp", "zero1"):
        model = parallelize(Net(), kind)
        return model, make_optimizer(model, kind, adamw, lr=0.01)
    if kind in ("odd_ddp", "odd_fsdp", "odd_zero"):
        model = Net(odd=True)
        model = {"odd_ddp": DDP, "odd_fsdp": FSDP}.get(kind, lambda model: model)(model)
        return model, (ZeRO2 if kind == "odd_zero" else lambda p, c, **o: c(p, **o))(model.parameters(), adamw, lr=0.01)
    if kind.startswith(("channels_last", "contiguous_format")):
        layers = nn.Unflatten(1, (WIDTH, 1, 1)), nn.Conv2d(WIDTH, 4, 3, padding=1), nn.Flatten()
        memory_format = getattr(torch, kind.split()[0])
        model = parallelize(nn.Sequential(*layers).to(memory_format=memory_format), kind.split()[1], nn.Conv2d)
        return model, make_optimizer(model, kind.split()[1], adamw, lr=0.01)
    if kind.startswith("tensor_lr"):
        model = parallelize(Net(), kind.split()[1])
        options = {"lr": torch.tensor(0.01 + seed), "betas": (torch.tensor(0.8), torch.tensor(0.9)), "foreach": False}
        return model, make_optimizer(model, kind.split()[1], adamw, **options)
    if kind == "hybrid":
        mesh = Mesh({"replica": 2, "shard": world_size // 2})
        model = FSDP(Net(), unit=nn.Linear, mesh=mesh, shard="hybrid")
        return model, adamw(model.parameters(), lr=0.01)
    if kind == "replicate":
        model = FSDP(Net(), unit=nn.Linear, root="replicate")
        return model, adamw(model.parameters(), lr=0.01)
    if kind == "groups":
        model = Net()
        parameters = list(model.parameters())
        groups = [{"params": parameters[:3], "lr": 0.1}, {"params": parameters[3:], "lr": 0.2}]
        return model, ZeRO1(groups, adamw)
    if kind == "masters":
        model = DDP(Net().bfloat16())
        return model, MasterWeights(model.parameters(), adamw, lr=0.01)
    if kind == "lamb":
        model = FSDP(Net(), unit=nn.Linear)
        return model, LAMB(model.parameters(), lr=0.01, sharded=True)
    if kind in ("onebit", "onebit_lamb"):
        model = DDP(Net())
        optimizer = (OneBitAdam if kind == "onebit" else OneBitLamb)(model.parameters(), lr=0.001, warmup=2)
        model.register_comm_hook(None, optimizer.hook)
        return model, optimizer
    model = Net()
    inner = adamw(model.parameters(), lr=0.01)
    return model, {"local": LocalSGD, "diloco": DiLoCo, "plain": lambda inner, _: inner}[kind](inner, 2)


def run(model, optimizer, steps, rank):
    losses, dtype = [], next(model.parameters()).dtype
    for step in steps:
        x = noise(6, WIDTH, seed=1000 * step + rank)
        optimizer.zero_grad()
        loss = model(x.to(dtype)).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def resumes(rank, world_size, folder, kind, before):
    model, optimizer = build(kind, world_size)
    checkpoints = Checkpoints(folder)
    run(model, optimizer, range(before), rank)
    checkpoints.save(before, {"model": model, "optimizer": optimizer})
    expected = run(model, optimizer, range(before, before + 4), rank)
    model, optimizer = build(kind, world_size, seed=9)
    run(model, optimizer, range(50, 52), rank)  # what loading is to replace
    assert checkpoints.load({"model": model, "optimizer": optimizer}) == before
    assert run(model, optimizer, range(before, before + 4), rank) == expected
    checkpoints.close()


KINDS = ("torch_fsdp", "odd_ddp", "odd_fsdp", "odd_zero", "hybrid", "replicate", "groups", "masters", "onebit")
KINDS += ("onebit_lamb", "lamb")
KINDS += ("channels_last zero1", "channels_last zero2", "channels_last fsdp")
KINDS += ("tensor_lr ddp_bucketed", "tensor_lr fsdp", "tensor_lr zero1")


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_odd_ones_go_on_bit_for_bit(ranks, tmp_path, kind, before):
    ranks(4 if kind in ("hybrid", "torch_fsdp") else 2, resumes, folder=str(tmp_path), kind=kind, before=before)


def whole(rank, world_size, folder, kind, save):
    model, optimizer = build(kind, world_size, seed=0 if save else 9)
    checkpoints = Checkpoints(folder)
    if save:
        run(model, optimizer, range(3), rank)
        checkpoints.save(3, {"model": model, "optimizer": optimizer})
    else:
        assert checkpoints.load({"model": model, "optimizer": optimizer}) == 3
    checkpoints.close()
    values = getattr(model, "full_state_dict", model.state_dict)()
    values = {name: v.full_tensor() if hasattr(v, "full_tensor") else v.clone() for name, v in values.items()}
    run(model, optimizer, range(3, 5), rank)
    return {name.removeprefix("module."): value for name, value in values.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saving", "by", "loading", "into"),
    [(2, "torch_fsdp", 4, "fsdp"), (4, "torch_fsdp", 1, "ddp_bucketed"), (3, "zero1", 4, "torch_fsdp"),
     (4, "torch_fsdp", 2, "torch_fsdp"), (4, "hybrid", 2, "torch_fsdp"), (2, "odd_ddp", 3, "odd_fsdp"),
     (3, "odd_fsdp", 2, "odd_zero"), (2, "masters", 3, "masters"), (2, "channels_last zero1", 3, "channels_last zero1"),
     (2, "tensor_lr fsdp", 3, "zero1"), (2, "zero1", 3, "tensor_lr ddp_bucketed"), (2, "lamb", 3, "lamb")],
)  # fmt: skip
def test_odd_ones_on_other_ranks(ranks, tmp_path, saving, by, loading, into):
    old = ranks(saving, whole, folder=str(tmp_path), kind=by, save=True)[0]
    for rank, new in enumerate(ranks(loading, whole, folder=str(tmp_path), kind=into, save=False)):
        assert all(torch.equal(new[name], old[name]) for name in old), f"rank {rank}"


def elements_in_another_order(rank, n, folder):
    for saved, now in (
        ("channels_last zero1", "contiguous_format zero1"),
        ("contiguous_format zero1", "channels_last zero1"),
    ):
        whole(rank, n, f"{folder}/{saved}", saved, save=True)
        with pytest.raises(CheckpointError, match="optimizer: it was saved from "):
            whole(rank, n, f"{folder}/{saved}", now, save=False)


def test_elements_that_lie_in_another_order_are_refused(ranks, tmp_path):
    ranks(2, elements_in_another_order, folder=str(tmp_path))


def test_a_learning_rate_is_of_the_kind_that_the_optimizer_has_now(tmp_path):
    checkpoints, model = Checkpoints(tmp_path), nn.Linear(3, 3)
    for saved, now in ((torch.tensor(0.25), 0.5), (0.25, torch.tensor(0.5)), (torch.tensor(0.25), torch.tensor(0.5))):
        checkpoints.save(1, {"optimizer": torch.optim.SGD(model.parameters(), lr=saved, momentum=0.9)})
        optimizer = torch.optim.SGD(model.parameters(), lr=now)
        assert checkpoints.load({"optimizer": optimizer}) == 1
        group = optimizer.param_groups[0]
        assert group["lr"] == 0.25 and type(group["lr"]) is type(now) and group["momentum"] == 0.9
    checkpoints.close()


def averages(rank, world_size):
    """An average of shards is that of the whole model, as PyTorch's AveragedModel has it in one process."""
    torch.manual_seed(0)
    alone, model = Pair().double(), Pair().double()
    model.load_state_dict(alone.state_dict())
    model = FSDP(model)
    with pytest.raises(TypeError, match=r"FSDP cannot be copied or pickled, .* To average weights, clone the shards"):
        AveragedModel(model)
    wanted = AveragedModel(alone, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    wanted.update_parameters(alone)
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(3):
        step_of(alone, rank)
        wanted.update_parameters(alone)
        step_of(model, rank)
        for name, p in model.named_parameters():
            average[name].lerp_(p.detach(), 1 - 0.9)
    model.load_state_dict(model.state_dict() | average)
    found = model.full_state_dict()
    for name, value in wanted.module.state_dict().items():
        assert torch.allclose(found[name], value, rtol=0, atol=1e-12)


def test_an_average_of_shards_is_the_average_of_the_weights(ranks):
    ranks(2, averages)


def another(rank, world_size, folder, saved, loaded):
    model, optimizer = build(saved, world_size)
    checkpoints = Checkpoints(folder)
    run(model, optimizer, range(2), rank)
    checkpoints.save(2, {"model": model, "optimizer": optimizer})
    model, optimizer = build(loaded, world_size)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"optimizer: it was saved from .*, not from "):
        checkpoints.load({"model": model, "optimizer": optimizer})
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    checkpoints.close()


@pytest.mark.parametrize("saved", ["plain", "masters", "local", "diloco"])
@pytest.mark.parametrize("loaded", ["plain", "masters", "local", "diloco"])
def test_another_kind_of_optimizer_is_refused_before_anything_changes(ranks, tmp_path, saved, loaded):
    if saved != loaded:
        ranks(2, another, folder=str(tmp_path), saved=saved, loaded=loaded)


def test_an_optimizer_that_keeps_lists_and_numbers(tmp_path):
    def steps(optimizer, count):
        def closure():
            optimizer.zero_grad()
            loss = model(torch.ones(3)).square().sum()
            loss.backward()
            return loss

        return [optimizer.step(closure).item() for _ in range(count)]

    model = nn.Linear(3, 3)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01)
    steps(optimizer, 2)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(2, {"model": model, "optimizer": optimizer})
    expected = steps(optimizer, 3)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01)
    assert checkpoints.load({"model": model, "optimizer": optimizer}) == 2
    assert steps(optimizer, 3) == expected
    checkpoints.close()


def test_two_models_with_the_same_names_and_one_optimizer(tmp_path):
    def pair():
        return nn.Linear(3, 3), nn.Linear(3, 3)

    one, two = pair()
    optimizer = torch.optim.AdamW([*one.parameters(), *two.parameters()])
    (one(torch.ones(3)).sum() + two(torch.ones(3)).square().sum()).backward()
    optimizer.step()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"one": one, "two": two, "optimizer": optimizer})
    first, second = pair()
    again = torch.optim.AdamW([*first.parameters(), *second.parameters()])
    checkpoints.load({"one": first, "two": second, "optimizer": again})
    for new, old in ((first, one), (second, two)):
        assert torch.equal(again.state[new.weight]["exp_avg"], optimizer.state[old.weight]["exp_avg"])
    checkpoints.close()


class Held:
    """Any state. bad: raise in place of giving it."""

    def __init__(self, state=None, bad=False):
        self.state, self.bad = state, bad

    def state_dict(self):
        if self.bad:
            raise RuntimeError("no state today")
        return self.state

    def load_state_dict(self, state):
        self.state = state


def uneven(rank, world_size, folder):
    state = {"buffer": torch.arange(3 + rank), f"of {rank}": torch.ones(1)}
    state |= {"seldom": torch.full([2], float(rank))} if rank else {}
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, {"held": Held(state)})
    held = Held()
    assert checkpoints.load({"held": held}) == 1
    assert held.state.keys() == state.keys() and all(torch.equal(held.state[key], state[key]) for key in state)
    checkpoints.close()


def test_ranks_may_hold_tensors_of_other_shapes_and_places(ranks, tmp_path):
    ranks(3, uneven, folder=str(tmp_path))


def test_two_tensors_at_one_path_are_told(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(TypeError, match="two tensors of the state have the same path a/b"):
        checkpoints.save(1, {"held": Held({"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}})})
    checkpoints.close()


def randomness(rank, world_size, folder, save):
    torch.manual_seed(5)
    checkpoints = Checkpoints(folder)
    if save:
        checkpoints.save(1, {"random": RandomState()})
    else:
        checkpoints.load({"random": RandomState()})
    checkpoints.close()
    return torch.rand(1).item()


def test_one_rank_s_randomness_becomes_a_stream_for_each(ranks, tmp_path):
    ranks(1, randomness, folder=str(tmp_path), save=True)
    first, second = ranks(2, randomness, folder=str(tmp_path), save=False)
    assert first != second


# ---- a rank that fails alone


def one_fails(rank, world_size, folder):
    model, checkpoints = nn.Linear(3, 3), Checkpoints(folder)
    checkpoints.save(1, {"model": model})
    expected, words = (RuntimeError, "no state today") if rank else (CheckpointError, "rank 1: no state today")
    with pytest.raises(expected, match=words):
        checkpoints.save(2, {"model": model, "held": Held({}, bad=rank == 1)})
        checkpoints.wait()
    checkpoints.save(3, {"model": model})
    assert checkpoints.steps() == [1, 3]
    checkpoints.close()


def fails_first(rank, world_size, folder):
    """Its state comes before a model whose columns all ranks put together."""
    checkpoints = Checkpoints(folder)
    expected, words = (RuntimeError, "no state today") if rank else (CheckpointError, "rank 1: no state today")
    with pytest.raises(expected, match=words):
        checkpoints.save(2, {"held": Held({}, bad=rank == 1), "model": split(Pair())})
    checkpoints.save(3, {"model": split(Pair())})
    assert checkpoints.steps() == [3]
    checkpoints.close()


def test_a_rank_that_fails_leaves_nobody_waiting_in_what_comes_next(ranks, tmp_path):
    ranks(2, fails_first, folder=str(tmp_path))


def test_a_state_that_one_rank_cannot_give_is_told_to_all(ranks, tmp_path):
    ranks(2, one_fails, folder=str(tmp_path))


# ---- sharded parts inside wrappers and containers


class Around(nn.Module):
    """A module of one's own around a model."""

    def __init__(self, net):
        super().__init__()
        self.net, self.offset = net, nn.Parameter(torch.full([WIDTH], 0.5), requires_grad=False)

    def forward(self, x):
        return self.net(x + self.offset)


class Pair(nn.Module):
    """Two layers that can be split among ranks, by rows and by columns."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH)

    def forward(self, x):
        return self.last(self.first(x).relu())


def split(net, group=None):
    return parallelize_module(net, group, {"first": ColwiseParallel(), "last": RowwiseParallel()})


def recomputed(net):
    net.first = checkpoint_wrapper(net.first)
    return net


def compiled_inside(net):
    net.first = torch.compile(net.first, backend="eager")
    return net


def split_and_sharded(net):
    mesh = Mesh({"dp": 2, "tp": 2})
    return FSDP(split(net, mesh.group("tp")), process_group=mesh.group("dp"))


WRAPPED = {  # what to make of a Pair: (ranks, a module)
    "compiled fsdp": (2, lambda net: torch.compile(FSDP(net), backend="eager")),
    "ddp of compiled": (2, lambda net: DDP(torch.compile(net, backend="eager"))),
    "torch ddp of compiled": (2, lambda net: nn.parallel.DistributedDataParallel(torch.compile(net, backend="eager"))),
    "container": (2, lambda net: Around(FSDP(net))),
    "containers": (2, lambda net: nn.ModuleDict({"one": Around(Around(FSDP(net, unit=nn.Linear)))})),
    "recomputed": (2, lambda net: FSDP(recomputed(net), unit=nn.Linear)),
    "compiled inside": (2, lambda net: FSDP(compiled_inside(net))),
    "split": (2, split),
    "split in a container": (2, lambda net: Around(split(net))),
    "split and sharded": (4, split_and_sharded),
}


def plain_names(values):
    """The names of a Pair, whatever is around it."""
    words = "one", "net", "module", "_orig_mod", "_checkpoint_wrapped_module"
    return {".".join(part for part in name.split(".") if part not in words): v for name, v in values.items()}


def step_of(model, rank):
    """A step that every rank takes with the same input: all agree with one process."""
    model = model["one"] if isinstance(model, nn.ModuleDict) else unwrapped(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    x = noise(5, WIDTH, seed=1, dtype=torch.float64)
    model(x).square().mean().backward()
    optimizer.step()
    return optimizer


def saves_wrapped(rank, world_size, folder, kind):
    torch.manual_seed(0)
    model = WRAPPED[kind][1](Pair().double())
    optimizer = step_of(model, rank)
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, {"model": model, "optimizer": optimizer})
    checkpoints.wait()
    before = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    states = [{key: v.clone() for key, v in one.items()} for one in optimizer.state.values()]
    again = step_of(model, rank)
    assert checkpoints.load({"model": model, "optimizer": again}) == 1
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    for new, old in zip(again.state.values(), states, strict=True):
        assert all(torch.equal(new[key], old[key]) for key in old)
    checkpoints.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", WRAPPED)
def test_a_sharded_part_is_found_wherever_it_is(ranks, tmp_path, kind):
    """The run continues, and one process reads from the files the full model that one process would have trained."""
    ranks(WRAPPED[kind][0], saves_wrapped, folder=str(tmp_path), kind=kind)
    torch.manual_seed(0)
    alone = Pair().double()
    for _ in range({"container": 1, "containers": 2, "split in a container": 1}.get(kind, 0)):
        alone = Around(alone)
    optimizer = step_of(alone, 0)
    wanted = {f"model {name}": value for name, value in plain_names(alone.state_dict()).items()}
    for name, p in alone.named_parameters():
        if p in optimizer.state:
            wanted |= {f"optimizer {plain(name)}/{key}": value for key, value in optimizer.state[p].items()}
    with opened(str(tmp_path)) as source:
        parts = {"model": source.model, "optimizer": source.optimizer}
        found = {
            f"{kind} {plain(name.removeprefix('model.'))}": part.read(name).view(part.shapes[name])
            for kind, part in parts.items()
            for name in part.shapes
        }
        assert not source.model.foreign
    assert found.keys() == wanted.keys()
    assert all(torch.allclose(found[name], wanted[name], rtol=0, atol=1e-12) for name in wanted)


def plain(name):
    return next(iter(plain_names({name: None})))


def experts(group=None):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 4), MoE(4, experts=4, expert=lambda: nn.Linear(4, 4), group=group)).double()


def mixture(rank, world_size, folder, save):
    model = experts(dist.group.WORLD)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    checkpoints = Checkpoints(folder)
    if save:
        model(torch.ones(6, WIDTH, dtype=torch.float64)).square().sum().backward()
        optimizer.step()
        checkpoints.save(1, {"model": model, "optimizer": optimizer})
    else:
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
    assert checkpoints.load({"model": model, "optimizer": optimizer}) == 1
    checkpoints.close()
    names = {p: name for name, p in model.named_parameters()}
    return model.state_dict(), {names[p]: state["exp_avg"] for p, state in optimizer.state.items()}


def test_experts_that_ranks_share_out_are_saved_by_all_and_loaded_by_others(ranks, tmp_path):
    saved, loaded = {}, {}
    for found, save in ((saved, True), (loaded, False)):
        for values, states in ranks(2 if save else 4, mixture, folder=str(tmp_path), save=save):
            found |= values | {f"{name}/exp_avg": state for name, state in states.items()}
    assert saved.keys() == loaded.keys() and len(experts().state_dict()) < len(saved)
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    alone, checkpoints = experts(), Checkpoints(tmp_path)
    optimizer = torch.optim.AdamW(alone.parameters())
    assert checkpoints.load({"model": alone, "optimizer": optimizer}) == 1
    assert all(torch.equal(value, saved[name]) for name, value in alone.state_dict().items())
    checkpoints.close()


def compiled_and_plain(rank, world_size, folder):
    """Names are the same with and without torch.compile, both ways."""
    one, two = Pair(), Pair()
    checkpoints = Checkpoints(folder)
    for saved, loaded in ((torch.compile(one, backend="eager"), two), (one, torch.compile(two, backend="eager"))):
        nn.init.normal_(one.first.weight)
        checkpoints.save(1, {"model": saved, "optimizer": torch.optim.SGD(saved.parameters(), momentum=0.9)})
        optimizer = torch.optim.SGD(loaded.parameters(), momentum=0.9)
        assert checkpoints.load({"model": loaded, "optimizer": optimizer}) == 1
        assert torch.equal(one.first.weight, two.first.weight)
    checkpoints.close()


def test_a_compiled_model_and_a_plain_one_load_each_other(ranks, tmp_path):
    ranks(2, compiled_and_plain, folder=str(tmp_path))


class Renaming(nn.Module):
    """Its state dict has another name for its weight, as PyTorch's FusionEmbeddingWithHook has."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, 4)
        self._register_state_dict_hook(lambda module, state, *_: state.update(weight=state.pop("inner.weight")))

    def forward(self, x):
        return self.inner(x)


def renamed(rank, world_size, folder):
    checkpoints = Checkpoints(folder)
    with pytest.raises(ValueError, match=r"a state_dict hook renamed 'weight' of a sharded model"):
        checkpoints.save(1, {"model": FSDP(Renaming())})
    assert checkpoints.steps() == []
    checkpoints.close()


def test_a_hook_that_renames_a_shard_is_refused_when_saving(ranks, tmp_path):
    ranks(2, renamed, folder=str(tmp_path))


def other_shapes(rank, world_size, folder):
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, {"model": nn.Linear(3, 3 + rank)})
    words = r"step 1 was not saved: .*'model:weight' is F32 \[4, 3\] on rank 1, but F32 \[3, 3\] on lower ranks"
    with pytest.raises(CheckpointError, match=words):
        checkpoints.wait()
    assert checkpoints.load({"model": nn.Linear(3, 3 + rank)}) is None
    checkpoints.close()


def test_shapes_that_ranks_do_not_agree_on_are_refused_when_saving(ranks, tmp_path):
    ranks(2, other_shapes, folder=str(tmp_path))


def test_a_part_whose_rest_is_nowhere_is_refused_when_saving():
    file = {"name": "rank-0.safetensors", "bytes": 24, "sha256": ""}
    parts = {"model:w": ["F32", [2, 3], 0, 4, None]}
    with pytest.raises(ValueError, match="'model:w' has 6 elements, but its parts have 4"):
        metadata.merge([{"file": file, "parts": parts, "plain": {}}], step=1, world_size=1, metrics={})


class Extra(nn.Linear):
    """Its extra state grows, as Transformer Engine's does."""

    def __init__(self, extra):
        super().__init__(3, 3)
        self.extra = extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: nn.Sequential(m), lambda m: torch.compile(m, backend="eager")])
@pytest.mark.parametrize("fresh", [None, torch.empty(0, dtype=torch.uint8), torch.ones(9), {"a": 1}])
@pytest.mark.parametrize("saved", [None, torch.arange(7, dtype=torch.uint8), {"b": [2, "c"]}])
def test_an_extra_state_may_be_another_than_the_model_has_now(tmp_path, wrap, fresh, saved):
    checkpoints, model, other = Checkpoints(tmp_path), Extra(saved), Extra(fresh)
    checkpoints.save(1, {"model": wrap(model)})
    assert checkpoints.load({"model": wrap(other)}) == 1
    assert torch.equal(other.weight, model.weight)
    same = torch.equal if isinstance(saved, torch.Tensor) else operator.eq
    assert same(other.extra, saved)
    checkpoints.close()


# ---- which ones stay


def test_a_metric_may_be_a_tensor_and_is_never_nan(tmp_path):
    model, checkpoints = nn.Linear(2, 2), Checkpoints(tmp_path, keep=1, best=(max, "accuracy"))
    for step, accuracy in ((1, math.nan), (2, torch.tensor(3.0)), (3, 1.0), (4, math.nan)):
        checkpoints.save(step, {"model": model}, accuracy=accuracy)
    assert checkpoints.steps() == [2, 4]
    checkpoints.close()


def test_a_damaged_one_takes_nobody_s_place(tmp_path):
    model, checkpoints = nn.Linear(3, 3), Checkpoints(tmp_path, keep=2)
    for step in (10, 20, 30):
        checkpoints.save(step, {"model": model})
    checkpoints.wait()
    flip(tmp_path / "step-000000030" / "rank-0.safetensors", -1)
    assert checkpoints.load({"model": model}) == 20
    checkpoints.save(25, {"model": model})
    assert checkpoints.steps() == [20, 25, 30]
    checkpoints.save(30, {"model": model})  # and now it is a whole one
    assert checkpoints.steps() == [25, 30]
    assert checkpoints.load({"model": model}) == 30
    checkpoints.close()


def test_what_cannot_be_read_today_is_not_removed(tmp_path, monkeypatch):
    model, checkpoints = nn.Linear(3, 3), Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, {"model": model})
    checkpoints.wait()
    opened = checkpoints.store.open

    def fails(name):
        if name == "step-000000002/manifest.json":
            raise OSError("too many open files")
        return opened(name)

    monkeypatch.setattr(checkpoints.store, "open", fails)
    checkpoints.save(3, {"model": model})
    checkpoints.wait()
    monkeypatch.undo()
    assert checkpoints.steps() == [1, 2, 3]
    checkpoints.close()


def test_names_of_others_are_left_alone(tmp_path):
    model, checkpoints = nn.Linear(3, 3), Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, {"model": model})
    checkpoints.wait()
    shutil.copytree(tmp_path / "step-000000001", tmp_path / "step-000000001-good")
    (tmp_path / "step-notes.txt").touch()
    checkpoints.save(2, {"model": model})
    assert checkpoints.load({"model": model}) == 2
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [
        "step-000000001-good", "step-000000002", "step-notes.txt"
    ]  # fmt: skip
    checkpoints.close()


@pytest.mark.parametrize("moment", ["rank-0.safetensors", "manifest.json"])
def test_a_step_that_is_saved_again_is_never_missing(tmp_path, monkeypatch, moment):
    model, checkpoints = nn.Linear(3, 3), Checkpoints(tmp_path, keep=1)

    def save(value):
        nn.init.constant_(model.weight, value)
        checkpoints.save(1, {"model": model})
        checkpoints.wait()

    def found():
        nn.init.zeros_(model.weight)
        assert checkpoints.load({"model": model}) == 1
        assert len(list((tmp_path / "step-000000001").iterdir())) == 2 or moment == "manifest.json"
        return model.weight[0, 0].item()

    save(1.0)
    write = checkpoints.store.write

    def fails(name, fill, **how):
        if name.endswith(moment):
            raise OSError("killed here")
        return write(name, fill, **how)

    monkeypatch.setattr(checkpoints.store, "write", fails)
    with pytest.raises(CheckpointError, match="killed here"):
        save(2.0)
    monkeypatch.undo()
    assert found() == 1.0
    for value in (3.0, 4.0):
        save(value)
        assert found() == value
    checkpoints.close()


# ---- what is left over


def open_and_close(rank, world_size, folder):
    def left():
        gc.collect()
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def times(count):
        for number in range(count):
            checkpoints = Checkpoints(f"{folder}/{number}")
            checkpoints.save(1, {"model": nn.Linear(3, 3)})
            checkpoints.close()
        dist.barrier()

    times(2)
    before = left()
    times(10)
    deadline = time.monotonic() + 60
    while any(map(operator.gt, left(), (count + 2 for count in before))) and time.monotonic() < deadline:
        time.sleep(0.05)  # a thread that was joined may stay in the list for a moment
    assert all(new <= old + 2 for old, new in zip(before, left(), strict=True)), before


def closed_late(rank, world_size, folder):
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, {"model": nn.Linear(3, 3)})
    checkpoints.wait()
    dist.destroy_process_group()
    checkpoints.close()


def test_close_may_come_after_the_end_of_all_groups(tmp_path):
    pool = Pool(2, [path for path in sys.path if path])
    try:
        pool.run(closed_late, folder=str(tmp_path))
    finally:
        pool.close()


@pytest.mark.slow
def test_close_leaves_neither_files_nor_threads(ranks, tmp_path):
    ranks(2, open_and_close, folder=str(tmp_path))
