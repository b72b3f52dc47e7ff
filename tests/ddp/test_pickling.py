"""torch.save, pickle and deepcopy of every wrapper and optimizer: a round trip, or one line that says what to save."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from ddp_models import FORMS, data, net
from tensors import error_of, gap, grads, mean_of_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from labkit import comm
from labkit.amp import GradScaler, MasterWeights
from labkit.ddp import DDP
from labkit.fsdp import FSDP
from labkit.horovod import DistributedOptimizer
from labkit.local_sgd import DiLoCo, LocalSGD
from labkit.offload import Offloaded
from labkit.trainer import Trainer
from labkit.zero import ZeRO1, ZeRO2


def by_torch_save(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # our own bytes, of a moment ago


def by_pickle(thing):
    return pickle.loads(pickle.dumps(thing))


WAYS = [by_torch_save, by_pickle, copy.deepcopy]


def ddp_again(rank, world_size, way, wrap, settings):
    module = nn.Sequential(nn.BatchNorm1d(4), *net()).double()
    wrapped = (DDP if wrap == "ours" else DistributedDataParallel)(module, **settings)
    wrapped(data(rank)).sum().backward()
    with comm.record() as log:
        twin = way(wrapped)
    assert log == []
    module.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(module.state_dict().values(), twin.state_dict().values(), strict=True))
    for step in (1, 2):
        twin.zero_grad()
        twin(data(rank, step)).sum().backward()
    assert all(p.grad is None for p in module.parameters())
    worst = gap(grads(twin), mean_of_ranks(twin.module, lambda m, r: m(data(r, 2)).sum(), world_size))
    wrapped(data(rank, 3)).sum().backward()
    return max(worst, gap(grads(module), mean_of_ranks(module, lambda m, r: m(data(r, 3)).sum(), world_size)))


@pytest.mark.parametrize("settings", [*FORMS, pytest.param({"static_graph": True}, id="static")])
@pytest.mark.parametrize("way", WAYS)
def test_a_ddp_model_comes_back_and_averages(ranks, way, settings):
    assert max(ranks(2, ddp_again, way=way, wrap="ours", settings=settings)) <= 1e-14


@pytest.mark.parametrize("way", [by_torch_save, by_pickle])
def test_so_does_pytorchs(ranks, way):
    assert max(ranks(2, ddp_again, way=way, wrap="torch", settings={})) <= 1e-14


def settings_and_hook(rank, world_size):
    given = {"bucket_cap_mb": 0, "overlap": False, "broadcast_buffers": False, "find_unused_parameters": True}
    wrapped = DDP(net(), process_group=dist.group.WORLD, **given, static_graph=True)
    wrapped.register_comm_hook(None, fp16_compress_hook)
    twin = by_pickle(wrapped)
    for name, value in (given | {"static_graph": True}).items():
        assert getattr(twin, name) == value, name
    twin.register_comm_hook(None, fp16_compress_hook)  # there is none: as PyTorch's, it comes back without
    own = dist.new_group(list(range(world_size)))
    with pytest.raises(RuntimeError) as theirs:
        pickle.dumps(DistributedDataParallel(net(), process_group=own))
    ours = error_of(RuntimeError, lambda: pickle.dumps(DDP(net(), process_group=own)))
    return str(theirs.value), ours


def test_settings_come_back_and_a_group_of_ones_own_is_refused_as_by_pytorch(ranks):
    for rank, (theirs, ours) in enumerate(ranks(2, settings_and_hook)):
        assert "default process group" in ours.replace("\n", " ") and "group" in theirs, f"rank {rank}"
        assert ours.count("\n") == 0, f"rank {rank}"


def refused(rank, world_size, folder):
    model = net().half().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    things = {
        "FSDP": (FSDP(net()), "full_state_dict()"),
        "ZeRO1": (ZeRO1(net().parameters(), torch.optim.SGD), "state_dict() (collective, whole)"),
        "ZeRO2": (ZeRO2(net().parameters(), torch.optim.SGD), "state_dict() (collective, whole)"),
        "SGD": (DistributedOptimizer(optimizer), "state_dict() of this DistributedOptimizer"),
        "MasterWeights": (MasterWeights(net().half().parameters(), torch.optim.SGD), "state_dict()"),
        "Offloaded": (Offloaded(torch.optim.SGD(net().parameters(), momentum=0.9), folder), "state_dict()"),
    }
    for name, (thing, instead) in things.items():
        for way in WAYS:
            told = error_of(TypeError, lambda: way(thing))  # noqa: B023
            assert told.startswith(f"{name} cannot be copied or pickled, as it "), f"rank {rank}, {name}: {told}"
            assert instead in told and "\n" not in told, f"rank {rank}, {name}: {told}"


def test_what_cannot_be_pickled_says_what_to_save(ranks, tmp_path):
    ranks(2, refused, folder=str(tmp_path))


def steps(model, optimizer, rank, first, count):
    for step in range(first, first + count):
        optimizer.zero_grad()
        model(data(rank, step)).square().sum().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def local_again(rank, world_size, way, kind):
    model = net()
    optimizer = kind(torch.optim.AdamW(model.parameters(), lr=0.01), every=3)
    steps(model, optimizer, rank, 0, 4)
    twin_model, twin = way((model, optimizer))  # together: the optimizer's parameters are the model's
    worst = gap(steps(model, optimizer, rank, 4, 3), steps(twin_model, twin, rank, 4, 3))
    own = dist.new_group(list(range(world_size)))
    alone = kind(torch.optim.SGD(net().parameters()), every=3, process_group=own)
    assert "default process group" in error_of(RuntimeError, lambda: way(alone))
    way(kind(torch.optim.SGD(net().parameters()), every=3, process_group=dist.group.WORLD))
    return worst


@pytest.mark.parametrize("kind", [LocalSGD, DiLoCo])
@pytest.mark.parametrize("way", WAYS)
def test_local_sgd_goes_on_where_it_was(ranks, way, kind):
    assert ranks(2, local_again, way=way, kind=kind) == [0.0, 0.0]


def scaler_again(rank, world_size, way):
    scaler = GradScaler("cpu", 8.0, process_group=dist.group.WORLD)
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p])
    scaler.scale(p.sum()).backward()
    scaler.unscale_(optimizer)
    assert "call update() first" in error_of(RuntimeError, lambda: way(scaler))
    scaler.update()
    twin = way(scaler)
    assert twin.state_dict() == scaler.state_dict() and twin.get_scale() == 8.0
    way(GradScaler(enabled=False))
    own = dist.new_group(list(range(world_size)))
    assert "default process group" in error_of(RuntimeError, lambda: way(GradScaler("cpu", process_group=own)))
    trainer = way(Trainer(DDP(net()), None, None))
    return isinstance(trainer.model, DDP) and not trainer.scaler.is_enabled()


@pytest.mark.parametrize("way", WAYS)
def test_a_scaler_between_steps_and_a_trainer(ranks, way):
    assert ranks(2, scaler_again, way=way) == [True, True]
