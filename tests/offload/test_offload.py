"""Offload against keeping everything on the device: the same bits, and the bytes are elsewhere."""

import errno
import os
from contextlib import nullcontext

import pytest
import torch

from labkit import models
from labkit.memory.memory_tracker import MemoryTracker
from labkit.models.gpt import Block
from labkit.offload import Offloaded, offload_activations
from labkit.offload.pinned_memory import room
from labkit.recompute import checkpoint_every

OPTIMIZERS = {
    "SGD": {"lr": 0.1},
    "SGD with momentum": {"lr": 0.1, "momentum": 0.9},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "Adafactor": {},
    "Adagrad": {},
    "Adadelta": {},
    "Adamax": {},
    "ASGD": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"centered": True, "momentum": 0.5},
    "Rprop": {},
}


def gpt():
    torch.manual_seed(0)
    return models.build("gpt", "tiny", vocab=64, context=16, dropout=0.1)


def optimizer(model, name, **changes):
    """Two groups, of which one trains more slowly, and a frozen parameter."""
    first, *rest = model.parameters()
    rest[3].requires_grad_(False)
    slow = {"params": [first], "lr": 1e-3}
    return getattr(torch.optim, name.split()[0])([slow, {"params": rest}], **OPTIMIZERS[name] | changes)


def train(model, optimizer, steps=3, offload=None, first=0):
    for number in range(first, first + steps):
        torch.manual_seed(number)
        tokens = torch.randint(64, (4, 17))
        optimizer.zero_grad()
        if offload is None:
            loss = models.loss("gpt")(model(tokens[:, :-1]), tokens[:, 1:])
        else:
            with offload:
                loss = models.loss("gpt")(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_in_a_file_train_the_same_model(name, tmp_path):
    model = gpt()
    expected = train(model, optimizer(model, name))
    model = gpt()
    offloaded = Offloaded(optimizer(model, name), tmp_path, chunk_mb=0.01)
    assert torch.equal(train(model, offloaded), expected)
    states = [value for state in offloaded.state.values() for value in state.values()]
    assert all(value.untyped_storage().filename for value in states if isinstance(value, torch.Tensor) and value.dim())
    assert list(tmp_path.iterdir()) == []  # the file has no name


def test_activations_in_files_give_the_same_gradients(tmp_path):
    model = gpt()
    expected = train(model, optimizer(model, "AdamW"))
    model = gpt()
    offload = offload_activations(tmp_path, min_bytes=1024)
    assert torch.equal(train(model, optimizer(model, "AdamW"), offload=offload), expected)
    assert list(tmp_path.iterdir()) == []


def test_what_is_in_a_file_is_not_in_memory(tmp_path):
    model = gpt()
    offloaded = Offloaded(optimizer(model, "AdamW"), tmp_path)
    train(model, offloaded, steps=1)
    with MemoryTracker(model, offloaded) as tracker:
        train(model, offloaded, steps=1)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert tracker.peak["optimizer_states"] == 4 * len(trained)  # `step`, one number each
    assert offloaded.nbytes == sum(2 * p.nbytes for p in trained)


def states_match(ours, theirs):
    ours, theirs = ours.state_dict(), theirs.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for number, state in theirs["state"].items():
        assert state.keys() == ours["state"][number].keys()
        assert all(torch.equal(torch.as_tensor(value), ours["state"][number][name]) for name, value in state.items())


def test_only_one_chunk_of_states_is_in_memory_even_in_the_first_step(tmp_path):
    model = gpt()
    offloaded = Offloaded(torch.optim.AdamW(model.parameters()), tmp_path, chunk_mb=0)
    with MemoryTracker(model, offloaded) as tracker:
        train(model, offloaded, steps=1)
    largest = max(2 * p.nbytes for p in model.parameters())
    steps = 4 * len(list(model.parameters()))
    most = max(sizes["optimizer_states"] for _, sizes in tracker.samples)
    assert most <= largest + steps


def test_on_the_cpu_host_memory_is_no_other_place(tmp_path):
    model = gpt()
    plain = torch.optim.LBFGS(model.parameters())  # would not do for a file
    assert Offloaded(plain, "cpu").nbytes == 0
    offload = offload_activations("cpu", min_bytes=0)
    expected = train(gpt(), torch.optim.SGD(model.parameters()))
    assert torch.equal(train(model, torch.optim.SGD(model.parameters(), lr=0.0), offload=offload), expected)
    assert offload.nbytes == 0


def test_state_dicts_go_from_one_to_the_other_and_back(tmp_path):
    plain_model, model = gpt(), gpt()
    plain, offloaded = optimizer(plain_model, "AdamW"), Offloaded(optimizer(model, "AdamW"), tmp_path)
    train(plain_model, plain)
    train(model, offloaded)
    states_match(offloaded, plain)
    torch.save(offloaded.state_dict(), tmp_path / "state.pt")
    fresh, fresh_plain = Offloaded(optimizer(model, "AdamW"), tmp_path), optimizer(plain_model, "AdamW")
    for loading in (fresh, fresh_plain):  # each from its own copy: torch's load_state_dict shares `step` with the dict
        loading.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    states = [state["exp_avg"] for state in fresh.state.values()]
    assert all(state.untyped_storage().filename for state in states)
    assert torch.equal(train(model, fresh, first=3), train(plain_model, fresh_plain, first=3))


def test_one_that_has_stepped_already_goes_on(tmp_path):
    model = gpt()
    expected = train(model, optimizer(model, "Adam"), steps=4)
    model = gpt()
    started = optimizer(model, "Adam")
    train(model, started, steps=2)
    offloaded = Offloaded(started, tmp_path)
    assert offloaded.nbytes == sum(3 * p.nbytes for p in model.parameters() if p.requires_grad)
    assert torch.equal(train(model, offloaded, steps=2, first=2), expected)


def test_schedules_closures_and_new_groups(tmp_path):
    def run(wrap):
        model, late = gpt(), torch.nn.Parameter(torch.ones(5))
        made = wrap(optimizer(model, "AdamW"))
        schedule = torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.5)
        for number in range(3):
            torch.manual_seed(number)
            tokens = torch.randint(64, (4, 16))

            def closure(tokens=tokens):
                made.zero_grad()
                loss = model(tokens).square().mean() + late.square().sum()
                loss.backward()
                return loss

            loss = made.step(closure)
            schedule.step()
            if number == 0:
                made.add_param_group({"params": [late], "lr": 0.1})
        return [loss.item(), late.tolist(), *(p.detach().clone() for p in model.parameters())]

    ours, plain = run(lambda made: Offloaded(made, tmp_path)), run(lambda made: made)
    assert ours[:2] == plain[:2]
    assert all(torch.equal(a, b) for a, b in zip(ours[2:], plain[2:], strict=True))


def test_a_step_that_fails_leaves_the_groups_whole(tmp_path):
    model = gpt()
    offloaded = Offloaded(torch.optim.AdamW(model.parameters()), tmp_path)
    first = next(model.parameters())
    train(model, offloaded, steps=1)
    first.grad = torch.ones_like(first)
    offloaded.optimizer.step = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        offloaded.step()
    assert len(offloaded.param_groups[0]["params"]) == len(list(model.parameters()))


# ---- activations


def test_activations_leave_memory_and_only_the_layer_at_work_comes_back(tmp_path):
    def measured(offload):
        model = gpt()
        with MemoryTracker(model) as tracker:
            with offload:
                loss = model(torch.zeros(4, 16, dtype=torch.int64)).sum()
            held = tracker.current["activations"]
            loss.backward()
        return held, max(sizes["activations"] for _, sizes in tracker.samples)

    held, most = measured(nullcontext())
    offload = offload_activations(tmp_path, min_bytes=0)
    away_held, away_most = measured(offload)
    assert away_held < held / 20  # the loss, integers for the embeddings
    assert away_most < most / 2
    assert held - away_held <= offload.nbytes  # views are offloaded separately: maybe one storage twice


def test_its_room_is_used_again_step_after_step(tmp_path):
    model, offload = gpt(), offload_activations(tmp_path, min_bytes=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizes = []
    for first in range(4):
        train(model, optimizer, steps=1, offload=offload, first=first)
        sizes.append(offload.nbytes)
    assert len(set(sizes)) == 1
    free = sum(region.nbytes for regions in offload._free.values() for region in regions)
    assert free == offload.nbytes
    with offload:
        model(torch.zeros(4, 16, dtype=torch.int64))  # no backward: the graph is freed, and its buffer, too
    assert sum(region.nbytes for regions in offload._free.values() for region in regions) == offload.nbytes


def test_parameters_repeated_numbers_and_small_tensors_stay(tmp_path):
    linear = torch.nn.Linear(64, 64)
    x, row = torch.randn(32, 64, requires_grad=True), torch.randn(64, requires_grad=True)
    offload = offload_activations(tmp_path, min_bytes=4096)
    with offload:
        y = linear(x)  # saves x, and the weight
        z = y * row.expand(32, 64)  # saves y, and 64 numbers 32 times
        z = z + row * row.detach()  # saves 64 numbers
    assert offload.nbytes == x.nbytes + y.nbytes
    z.sum().backward()


def test_backward_twice_and_gradients_of_gradients(tmp_path):
    offload = offload_activations(tmp_path, min_bytes=0)

    def function(x):
        with offload:
            return x.sin() * x.exp()

    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    y = function(x).sum()
    first = torch.autograd.grad(y, x, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(y, x)[0])
    assert torch.autograd.gradgradcheck(function, x)


def test_inputs_of_recomputed_blocks_are_offloaded_too(tmp_path):
    def measured(offload):
        model = gpt()
        checkpoint_every(model, Block, keep="matmul")
        with MemoryTracker(model) as tracker:
            with offload:
                loss = model(torch.zeros(4, 16, dtype=torch.int64)).square().sum()
            held = tracker.current["activations"]
            loss.backward()
        return held, [p.grad for p in model.parameters()]

    held, gradients = measured(nullcontext())
    away, found = measured(offload_activations(tmp_path, min_bytes=0))
    assert all(torch.equal(a, b) for a, b in zip(found, gradients, strict=True))
    assert away < held / 20


# ---- with what shards


def zero_or_fsdp(rank, world_size, kind, folder):
    from labkit.fsdp import FSDP
    from labkit.zero import ZeRO1

    class InFile(Offloaded):
        def __init__(self, params, **defaults):
            super().__init__(torch.optim.AdamW(params, **defaults), to=folder)

    results, held = [], []
    for offloaded in (False, True):
        model = gpt()
        if kind == "zero":
            made = ZeRO1(model.parameters(), InFile if offloaded else torch.optim.AdamW, lr=1e-3)
        else:
            model = FSDP(model, unit=Block)
            made = (InFile if offloaded else torch.optim.AdamW)(model.parameters(), lr=1e-3)
        train(model, made, steps=2)
        with MemoryTracker(model, made) as tracker:
            results.append(train(model, made, steps=1, first=2))
        held.append(tracker.peak["optimizer_states"])
    return torch.equal(*results), held


@pytest.mark.parametrize("kind", ["zero", "fsdp"])
def test_shards_of_states_in_a_file(ranks, kind, tmp_path):
    for rank, (same, (kept, away)) in enumerate(ranks(2, zero_or_fsdp, kind=kind, folder=str(tmp_path))):
        assert same, f"rank {rank}"
        assert away < kept / 20, f"rank {rank}"  # `step` of each piece
    assert list(tmp_path.iterdir()) == []


# ---- errors


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no file system in memory")
def test_a_full_disk_is_told_in_one_line_and_nothing_is_left():
    disk = os.statvfs("/dev/shm")
    too_much = disk.f_blocks * disk.f_frsize + 2**20  # a file system in memory refuses at once, and takes nothing
    before = set(os.listdir("/dev/shm"))
    with pytest.raises(
        OSError, match=r"^\[Errno 28\] cannot offload [\d,]+ bytes to /dev/shm: No space left on device; "
    ):
        room(too_much, "/dev/shm", torch.device("cpu"))
    assert set(os.listdir("/dev/shm")) == before


def test_a_full_disk_stops_offloading_before_anything_is_trained(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    model = gpt()
    with pytest.raises(OSError, match="No space left on device; choose another folder"):
        Offloaded(torch.optim.AdamW(model.parameters()), tmp_path)
    plain = torch.optim.AdamW(model.parameters())
    offload = offload_activations(tmp_path, min_bytes=0)
    with pytest.raises(OSError, match="No space left on device"):
        train(model, plain, offload=offload)
    train(model, plain)  # autograd saves as ever
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_and_an_optimizer_that_cannot_be_told(tmp_path):
    model = gpt()
    with pytest.raises(OSError, match=r"cannot offload to the folder .*nowhere: No such file or directory"):
        Offloaded(torch.optim.AdamW(model.parameters()), tmp_path / "nowhere")
    with pytest.raises(ValueError, match="cannot predict the states of LBFGS"):
        Offloaded(torch.optim.LBFGS(model.parameters()), tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("to", ["cpu", "folder"])
def test_the_same_on_cuda(to, tmp_path):
    to = tmp_path if to == "folder" else to
    for name in ("AdamW", "SGD with momentum", "Adafactor"):
        model = gpt().cuda()
        plain = optimizer(model, name)
        expected = train_on_cuda(model, plain, nullcontext())
        model = gpt().cuda()
        offloaded = Offloaded(optimizer(model, name), to, chunk_mb=0.01)
        assert torch.equal(train_on_cuda(model, offloaded, offload_activations(to, min_bytes=0)), expected)
        states = [value for state in offloaded.state.values() for value in state.values() if torch.is_tensor(value)]
        assert all(value.device.type == "cpu" for value in states if value.dim())


def train_on_cuda(model, optimizer, offload):
    for number in range(5):
        torch.manual_seed(number)
        tokens = torch.randint(64, (4, 17), device="cuda")
        with offload:
            loss = models.loss("gpt")(model(tokens[:, :-1]), tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])
