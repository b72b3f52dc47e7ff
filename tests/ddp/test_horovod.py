"""The Horovod-style optimizer: the same training as DDP, and the guards that Horovod's users know."""

import copy

import pytest
import torch
from tensors import gap, mlp, noise
from torch import nn

from labkit import comm
from labkit.amp import GradScaler, MasterWeights
from labkit.ddp import DDP
from labkit.fsdp import FSDP
from labkit.horovod import Compression, DistributedOptimizer, broadcast_optimizer_state, broadcast_parameters
from labkit.local_sgd import LocalSGD
from labkit.trainer import Trainer
from labkit.zero import ZeRO1


def build(seed=0):
    model = mlp(4, 8, 8, 4, seed=seed).double()
    model[0].bias.requires_grad_(False)
    model[4].weight.data.mul_(0.5)
    return model


def data(rank, step):
    return noise(3, 4, seed=10 * step + rank).double()


def sgd(model):
    return torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1, momentum=0.9)


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def with_ddp(rank, passes, clip):
    model = DDP(build())
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        with model.no_sync():
            for micro in range(passes - 1):
                model(data(rank, 10 * step + micro)).square().sum().backward()
        model(data(rank, 10 * step + passes - 1)).square().sum().backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return weights(model)


def with_horovod(rank, passes, clip, closure, **settings):
    model = build(seed=rank)
    broadcast_parameters(model.state_dict())
    optimizer = DistributedOptimizer(sgd(model), model.named_parameters(), backward_passes_per_step=passes, **settings)
    assert isinstance(optimizer, torch.optim.SGD)
    for step in range(4):

        def gradients(step=step):
            optimizer.zero_grad()
            for micro in range(passes):
                loss = model(data(rank, 10 * step + micro)).square().sum()
                loss.backward()
            return loss

        if closure:
            assert optimizer.step(gradients) > 0, f"rank {rank}, step {step}"
            continue
        gradients()
        if clip:
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
    return weights(model)


def same(rank, world_size, passes, clip, closure, settings):
    return gap(with_ddp(rank, passes, clip), with_horovod(rank, passes, clip, closure, **settings))


@pytest.mark.parametrize("settings", [{}, {"bucket_cap_mb": 0}], ids=str)
@pytest.mark.parametrize(
    ("passes", "clip", "closure"), [(1, False, False), (3, False, False), (2, True, False), (1, False, True)]
)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_it_trains_what_ddp_trains(ranks, world_size, passes, clip, closure, settings):
    arguments = {"passes": passes, "clip": clip, "closure": closure, "settings": settings}
    assert max(ranks(world_size, same, **arguments)) <= 1e-14


def half(rank, world_size):
    model, plain = build(), build()
    optimizer = DistributedOptimizer(sgd(model), compression=Compression.fp16)
    with comm.record() as log:
        model(data(rank, 0)).square().mean().backward()
        optimizer.synchronize()
    DDP(plain)(data(rank, 0)).square().mean().backward()
    trained = [(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True) if p.requires_grad]
    worst = max(float((p.grad - q.grad).abs().max()) for p, q in trained)
    return worst, sum(event.payload_bytes for event in log), sum(p.numel() for p, _ in trained)


def test_fp16_sends_two_bytes_an_element(ranks):
    for rank, (worst, payload, elements) in enumerate(ranks(2, half)):
        assert 0 < worst < 1e-3, f"rank {rank}"
        assert payload == 2 * elements, f"rank {rank}"


class Doubled:
    """A compression of one's own, whose context matters."""

    @staticmethod
    def compress(tensor):
        return tensor * 2, 2

    @staticmethod
    def decompress(tensor, context):
        return tensor / context


def test_a_compression_of_ones_own(ranks):
    arguments = {"passes": 1, "clip": False, "closure": False, "settings": {"compression": Doubled}}
    assert ranks(2, same, **arguments) == [0.0, 0.0]


def overlaps(rank, world_size):
    model = build()
    optimizer = DistributedOptimizer(sgd(model), model.named_parameters(), bucket_cap_mb=0)
    with comm.record() as log:
        model(data(rank, 0)).sum().backward()
        sent = len(log)
        optimizer.step()
    return sent, len(log)


def test_gradients_leave_during_backward(ranks):
    assert ranks(2, overlaps) == [(5, 5), (5, 5)]


def guards(rank, world_size):
    model = build()
    optimizer = DistributedOptimizer(sgd(model), model.named_parameters())
    model(data(rank, 0)).sum().backward()
    with pytest.raises(RuntimeError, match="zero_grad"):
        optimizer.zero_grad()
    with pytest.raises(
        RuntimeError, match=r"'4.bias' got gradient number 2 .* backward_passes_per_step=1 is too small"
    ):
        model(data(rank, 0)).sum().backward()
    with pytest.raises(RuntimeError, match=r"'4.bias' was changed while it was being averaged"):
        optimizer.synchronize()
    optimizer.zero_grad()
    model(data(rank, 0)).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with pytest.raises(RuntimeError, match="was changed while it was being averaged: call synchronize"):
        optimizer.step()
    model.zero_grad()
    model(data(rank, 0)).sum().backward()
    model.zero_grad()
    with pytest.raises(RuntimeError, match="was changed while it was being averaged"):
        optimizer.step()
    model(data(rank, 0)).sum().backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()
    optimizer.zero_grad()
    return True


def test_the_guards(ranks):
    assert ranks(2, guards) == [True, True]


def scaled_steps(model, optimizer, rank, scaler, clip=None):
    """Of six steps the third overflows, on rank 0 alone."""
    for step in range(6):
        optimizer.zero_grad()
        loss = model(data(rank, step)).square().sum() * (torch.inf if step == 2 and rank == 0 else 1.0)
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
    return weights(model), scaler.get_scale()


def with_scalers(rank, world_size, clip, settings):
    model = DDP(build())
    wanted = scaled_steps(model, sgd(model), rank, GradScaler("cpu", 1024.0), clip)
    assert wanted[1] == 512.0
    for scaler_class in (GradScaler, torch.amp.GradScaler):
        model = build()
        optimizer = DistributedOptimizer(sgd(model), model.named_parameters(), **settings)
        found = scaled_steps(model, optimizer, rank, scaler_class("cpu", init_scale=1024.0), clip)
        assert found[1] == wanted[1] and gap(found[0], wanted[0]) == 0.0, scaler_class


@pytest.mark.parametrize("settings", [{}, {"bucket_cap_mb": 0}], ids=str)
@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_scaler_waits_for_the_averages(ranks, clip, settings):
    ranks(2, with_scalers, clip=clip, settings=settings)


def by_trainers(rank, world_size, accumulation):
    """The clip waits for the averages without a scaler, too; and averages for all micro-batches."""
    model, twin = build(), DDP(build())
    optimizer, how = DistributedOptimizer(sgd(model), model.named_parameters()), {"clip": 0.1}
    how["accumulation"] = accumulation
    trainers = [
        Trainer(model, optimizer, nn.functional.mse_loss, **how),
        Trainer(twin, sgd(twin), nn.functional.mse_loss, **how),
    ]
    for step in range(3):
        for trainer in trainers:
            trainer.train_step(data(rank, step), data(rank, step + 10))
    assert gap(weights(model), weights(twin)) == 0.0
    assert trainers[0].gradient_norm == trainers[1].gradient_norm > 0.1
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert optimizer.backward_passes_per_step == accumulation


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_trainer_clips_the_averages(ranks, accumulation):
    ranks(2, by_trainers, accumulation=accumulation)


def added(rank, world_size):
    model, twin = build(), DDP(build())
    optimizer = DistributedOptimizer(torch.optim.SGD(model[2:].parameters(), 0.1), model[2:].named_parameters())
    plain = torch.optim.SGD(twin.module[2:].parameters(), 0.1)
    for each, part in ((optimizer, model), (plain, twin.module)):
        each.add_param_group({"params": part[0].parameters(), "lr": 0.2})
    for step in range(3):
        for each, part in ((optimizer, model), (plain, twin)):
            each.zero_grad()
            part(data(rank, step)).square().sum().backward()
            if part is model:
                with pytest.raises(RuntimeError, match=r"between backward\(\) and step\(\)"):
                    each.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
            each.step()
    assert gap(weights(model), weights(twin)) <= 1e-15
    model[0].bias.requires_grad_(True)
    model(data(rank, 0)).sum().backward()
    with pytest.raises(RuntimeError, match=r"shape \[8\] was unfrozen after"):
        optimizer.step()


def test_an_added_group_is_averaged(ranks):
    ranks(2, added)


def bad_arguments(rank, world_size):
    model = build()
    named = list(model.named_parameters())
    with pytest.raises(ValueError, match=r"named_parameters contains '0.weight' twice"):
        DistributedOptimizer(sgd(model), [*named, named[0]])
    with pytest.raises(ValueError, match="named_parameters lacks parameters"):
        DistributedOptimizer(sgd(model), named[:-1])
    with pytest.raises(ValueError, match="backward_passes_per_step=0 must be at least 1"):
        DistributedOptimizer(sgd(model), named, backward_passes_per_step=0)
    for wrong, kind in (
        (MasterWeights(model.parameters(), torch.optim.SGD), "MasterWeights"),
        (ZeRO1(build().parameters(), torch.optim.SGD), "ZeRO1"),
        (torch.optim.SGD(FSDP(build()).parameters()), "an optimizer of FSDP's shards"),
    ):
        with pytest.raises(ValueError, match=f"DistributedOptimizer cannot wrap {kind}"):
            DistributedOptimizer(wrong)
        with pytest.raises(ValueError, match=f"LocalSGD cannot wrap {kind}"):
            LocalSGD(wrong)


def test_bad_arguments_are_clear_errors(ranks):
    ranks(1, bad_arguments)


def unused(rank, world_size):
    model = build()
    optimizer = DistributedOptimizer(sgd(model), model.named_parameters())
    (model if rank == 0 else model[2:])(data(rank, 0) if rank == 0 else data(rank, 0).repeat(1, 2)).sum().backward()
    optimizer.synchronize()
    twin = build()
    (twin(data(0, 0)).sum() / 2).backward()
    (twin[2:](data(1, 0).repeat(1, 2)).sum() / 2).backward()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    return max(float((p.grad - q.grad).abs().max()) for p, q in pairs if p.requires_grad)


def test_a_parameter_that_is_unused_on_one_rank_counts_as_zero(ranks):
    assert max(ranks(2, unused)) <= 1e-15


def scheduled(rank, world_size):
    model = build()
    optimizer = DistributedOptimizer(sgd(model), model.named_parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model(data(rank, 0)).sum().backward()
    optimizer.step()
    scheduler.step()
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    return optimizer.param_groups[0]["lr"]


@pytest.mark.filterwarnings("error")
def test_schedulers_and_state_dicts_see_the_optimizer_they_know(ranks):
    assert ranks(2, scheduled) == [0.05, 0.05]


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.8, 0.9)),
    "plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
}


def resumed(rank, world_size, name, root):
    model = build(seed=rank)
    optimizer = OPTIMIZERS[name](model.parameters())
    if rank == root:  # only one rank has a past
        for step in range(3):
            model(data(rank, step)).sum().backward()
            optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.025
    broadcast_parameters(model.named_parameters(), root_rank=root)
    broadcast_optimizer_state(optimizer, root_rank=root)
    optimizer.zero_grad()
    model(data(0, 9)).sum().backward()
    optimizer.step()
    return weights(model), optimizer.param_groups[0]["lr"], optimizer.param_groups[0].get("betas")


@pytest.mark.parametrize("root", [0, 1])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_reaches_ranks_that_have_none(ranks, name, root):
    (ours, lr, betas), (theirs, other_lr, other_betas) = ranks(2, resumed, name=name, root=root)
    assert gap(ours, theirs) == 0.0
    assert lr == other_lr == 0.025
    assert betas == other_betas
    assert betas is None or isinstance(other_betas, tuple)
