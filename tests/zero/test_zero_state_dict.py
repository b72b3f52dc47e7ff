"""State dicts of ZeRO: whole, those of the unsharded optimizer, on every rank; from and to any number of ranks."""

import threading
from unittest import mock

import pytest
import torch
from ddp_models import Odd
from oracle_models import SHARD, batch, build
from tensors import error_of

from labkit import comm, models
from labkit.offload import Offloaded
from labkit.offload.pinned_memory import Lane
from labkit.zero import ZeRO1, ZeRO2


def grouped(model):
    """Two named groups; a scheduler's option among the first's."""
    named = list(model.named_parameters())
    return [
        {"params": [pair for pair in named if pair[1].dim() > 1], "decayed": True},
        {"params": [pair for pair in named if pair[1].dim() <= 1], "weight_decay": 0.0},
    ]


def steps(model, optimizer, ranks, world_size, first, count):
    """Train `count` steps on the shards of `ranks`."""
    for step in range(first, first + count):
        inputs, targets = (t.split(SHARD) for t in batch("gpt", torch.float64, step, world_size))
        optimizer.zero_grad()
        for rank in ranks:
            (models.loss("gpt")(model(inputs[rank]), targets[rank]) / len(ranks)).backward()
        optimizer.step()


def plain(kind, count=2, world_size=6, ranks=range(6)):
    """The oracle: a whole model and its whole optimizer after some steps on whole batches."""
    model = build("gpt", torch.float64, seed=0)
    optimizer = getattr(torch.optim, kind)(grouped(model), lr=0.01)
    steps(model, optimizer, ranks, world_size, 0, count)
    return model, optimizer


def gap(ours, theirs):
    """The largest difference of two state dicts; everything but rounding must be the same."""
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    worst = 0.0
    for i, entries in theirs["state"].items():
        assert list(ours["state"][i]) == list(entries), f"parameter {i}"
        for key, value in entries.items():
            mine = ours["state"][i][key]
            assert (mine.shape, mine.dtype) == (value.shape, value.dtype), f"parameter {i}, {key}"
            worst = max(worst, float((mine.double() - value.double()).abs().max()))
    return worst


def saved(rank, world_size, zero, cap):
    model = build("gpt", torch.float64, seed=rank)
    optimizer = zero(grouped(model), torch.optim.AdamW, lr=0.01, bucket_cap_mb=cap)
    assert optimizer.state_dict()["state"] == {}  # as torch's, before the first step
    share = 6 // world_size
    mine = range(rank * share, (rank + 1) * share)
    steps(model, optimizer, mine, 6, 0, 2)
    return optimizer.state_dict(), model.state_dict()


def resumed(rank, world_size, zero, state, weights):
    model = build("gpt", torch.float64, seed=rank)
    model.load_state_dict(weights)
    optimizer = zero(grouped(model), torch.optim.AdamW, lr=5.0, bucket_cap_mb=0.003)
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.01 and optimizer.param_groups[0]["decayed"]
    again = optimizer.state_dict()
    share = 6 // world_size
    steps(model, optimizer, range(rank * share, (rank + 1) * share), 6, 2, 2)
    return again, {name: t.clone() for name, t in model.state_dict().items()}


@pytest.mark.parametrize(
    ("zero", "other", "n", "m"), [(ZeRO1, ZeRO2, 2, 3), (ZeRO2, ZeRO1, 3, 2), (ZeRO2, ZeRO2, 1, 2)]
)
def test_training_goes_on_on_another_number_of_ranks(ranks, zero, other, n, m):
    told = ranks(n, saved, zero=zero, cap=0.005)
    model, optimizer = plain("AdamW")
    state, weights = told[0]
    for rank, (theirs, _) in enumerate(told):
        assert gap(theirs, state) == 0.0, f"rank {rank}"  # the same on every rank
    assert gap(state, optimizer.state_dict()) <= 1e-12
    steps(model, optimizer, range(6), 6, 2, 2)
    for rank, (again, final) in enumerate(ranks(m, resumed, zero=other, state=state, weights=weights)):
        assert gap(again, state) == 0.0, f"rank {rank}"  # nothing was lost or rounded on the way
        assert max(float((final[name] - t).abs().max()) for name, t in model.state_dict().items()) <= 1e-12, (
            f"rank {rank}"
        )


def test_it_loads_into_the_plain_optimizer_and_from_it(ranks):
    whole, optimizer = plain("AdamW")
    state, weights = ranks(2, saved, zero=ZeRO1, cap=25)[0]
    model = build("gpt", torch.float64, seed=1)
    model.load_state_dict(weights)
    other = torch.optim.AdamW(grouped(model), lr=1.0)
    other.load_state_dict(state)
    from_plain = ranks(2, resumed, zero=ZeRO1, state=optimizer.state_dict(), weights=whole.state_dict())
    for trained, with_it in ((whole, optimizer), (model, other)):
        steps(trained, with_it, range(6), 6, 2, 2)
    finals = {f"rank {rank}": told for rank, (_, told) in enumerate(from_plain)}
    for where, final in {"plain": model.state_dict(), **finals}.items():
        assert max(float((final[name] - t).abs().max()) for name, t in whole.state_dict().items()) <= 1e-12, where


def loading_sends_nothing(rank, world_size, state):
    model = build("gpt", torch.float64, seed=rank)
    optimizer = ZeRO1(grouped(model), torch.optim.AdamW, lr=0.01)
    with comm.record() as log:
        optimizer.load_state_dict(state)
    assert log == []
    held = [t for entries in optimizer.state.values() for t in entries.values() if t.dim()]
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in held)  # no view that keeps the whole state alive


def test_loading_sends_nothing_and_keeps_nothing_whole(ranks):
    ranks(2, loading_sends_nothing, state=plain("AdamW")[1].state_dict())


def strided(rank, world_size):
    """Parameters that are transposed, channels-last, empty, 0-dimensional, of four dtypes; fewer elements than n."""
    module, reference = Odd(0), Odd(0)
    ours = ZeRO2(module.parameters(), torch.optim.Adam, lr=0.01)
    theirs = torch.optim.Adam(reference.parameters(), lr=0.01)
    for _ in range(2):
        for m, optimizer in ((module, ours), (reference, theirs)):
            optimizer.zero_grad()
            m(1.0).backward()
            optimizer.step()
    mine, whole = ours.state_dict(), theirs.state_dict()
    empty = [i for i, p in enumerate(reference.parameters()) if p.numel() == 0]
    assert mine["state"].keys() == whole["state"].keys() - empty
    for i, entries in mine["state"].items():
        for key, value in entries.items():
            torch.testing.assert_close(value, whole["state"][i][key])
    ours.load_state_dict(whole)
    ours.zero_grad()
    module(1.0).backward()
    ours.step()
    again = ours.state_dict()
    assert all(entries["step"] == 3 for entries in again["state"].values())


@pytest.mark.parametrize("world_size", [2, 4])
def test_states_of_all_kinds_of_parameters(ranks, world_size):
    ranks(world_size, strided)


def mismatched(rank, world_size, state):
    model = build("mlp", torch.float64, seed=0)
    optimizer = ZeRO1(model.parameters(), torch.optim.AdamW)
    groups = error_of(ValueError, lambda: optimizer.load_state_dict(state))
    other = build("mlp", torch.float64, seed=0, sizes=(8, 32, 16, 10))
    wide = torch.optim.AdamW(other.parameters())
    other(torch.ones(1, 8).double()).sum().backward()
    wide.step()
    return groups, error_of(ValueError, lambda: optimizer.load_state_dict(wide.state_dict()))


def test_a_state_dict_of_another_model_is_told_apart(ranks):
    told = ranks(2, mismatched, state=plain("AdamW")[1].state_dict())
    assert told[0] == told[1]  # on every rank, whichever holds the parameter
    for rank, (groups, shapes) in enumerate(told):
        assert "groups of [" in groups, f"rank {rank}"
        assert "'parameter 3' has shape [32], its 'exp_avg' in the state dict [16]" in shapes, f"rank {rank}"


class Late(Lane):
    """As CUDA's: a copy to the host is complete some time after it was sent."""

    def __init__(self, device):
        super().__init__(device)
        self.under_way = []

    def send(self, tensor, host):
        copy = threading.Timer(0.3, host.copy_, [tensor.clone()])
        copy.start()
        self.under_way.append(copy)

    def finish(self):
        for copy in self.under_way:
            copy.join()


def offloaded(rank, world_size, folder):
    class InFile(Offloaded):
        def __init__(self, params, **defaults):
            super().__init__(torch.optim.AdamW(params, **defaults), to=folder)

    told = []
    with mock.patch("labkit.offload.offload.Lane", Late):
        for optimizer_class in (InFile, torch.optim.AdamW):
            model = build("mlp", torch.float64, seed=0)
            optimizer = ZeRO1(model.parameters(), optimizer_class, lr=0.01)
            model(torch.ones(1, 8).double()).sum().backward()
            optimizer.step()
            told.append(optimizer.state_dict())
    return gap(*told)


def test_states_on_their_way_out_of_the_device_are_waited_for(ranks, tmp_path):
    assert ranks(2, offloaded, folder=str(tmp_path)) == [0.0, 0.0]
