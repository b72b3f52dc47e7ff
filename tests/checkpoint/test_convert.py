"""Checkpoints in other people's formats: bit for bit what their own loaders have, and nothing is executed."""

import io
import json
import os
import pickle
import random
import subprocess
import sys
import warnings
import weakref
import zipfile
from itertools import pairwise

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from tensors import noise
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from labkit.checkpoint import CheckpointError, Checkpoints, reader, tensor_file
from labkit.checkpoint.dcp_folder import DcpFolder
from labkit.convert import convert, load_weights, main
from labkit.fsdp import FSDP
from labkit.trainer import make_optimizer, parallelize
from labkit.zero import ZeRO1

WIDTH = 7  # odd: shards end in the middle of parameters


class Net(nn.Module):
    """A tied matrix, statistics, one element, and names with dots."""

    def __init__(self):
        super().__init__()
        self.model = nn.ModuleDict({"first": nn.Linear(WIDTH, WIDTH), "norm": nn.BatchNorm1d(WIDTH)})
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.model["first"].weight
        self.scale = nn.Parameter(torch.ones(1))  # fully_shard takes no number
        self.register_buffer("flag", torch.tensor([True, False]))
        self.register_buffer("low", torch.randn(3).bfloat16())

    def forward(self, x):
        return self.last(self.model["norm"](self.model["first"](x)).relu()) * self.scale


def build(strategy, seed=0, dtype=None):
    """(model, optimizer)."""
    torch.manual_seed(seed)
    model = Net() if dtype is None else Net().to(dtype)
    if strategy == "plain":
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)
    model = parallelize(model, strategy, lambda part: isinstance(part, nn.BatchNorm1d))
    return model, make_optimizer(model, strategy, torch.optim.AdamW, lr=0.01)


def trained(strategy, steps=2, dtype=None):
    model, optimizer = build(strategy, dtype=dtype)
    go_on(model, optimizer, range(steps))
    return model, optimizer


def go_on(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        inputs = noise(6, WIDTH, seed=step)
        model(inputs.to(next(model.parameters()).dtype)).square().mean().backward()
        optimizer.step()


def weights(model):
    """The whole state dict, by the module's own names. Collective."""
    values = getattr(model, "full_state_dict", model.state_dict)()
    values = {name: v.full_tensor() if hasattr(v, "full_tensor") else v.clone() for name, v in values.items()}
    return {name.removeprefix("module."): value.cpu() for name, value in values.items()}


def same(found, wanted):
    return sorted(found) == sorted(wanted) and all(
        found[n].dtype == wanted[n].dtype and found[n].shape == wanted[n].shape and torch.equal(found[n], wanted[n])
        for n in wanted
    )


def stock(model, optimizer):
    """What PyTorch saves of them, with names for the optimizer's states."""
    found, states = get_state_dict(model, optimizer)
    return {"model": found, "optimizer": states}


# ---- ours into theirs


def saves(rank, world_size, folder, strategy):
    model, optimizer = trained(strategy)
    checkpoints = Checkpoints(folder)
    checkpoints.save(2, {"model": model, "optimizer": optimizer})
    checkpoints.close()
    return weights(model)


def stock_loads(rank, world_size, folder, strategy):
    """With dcp.load, and nothing of labkit but the wrapper around PyTorch's own."""
    model, optimizer = trained(strategy, steps=1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    state = stock(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return weights(model), whole_states(model, optimizer), optimizer.param_groups[0]["lr"]


def whole_states(model, optimizer):
    return get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))[1]["state"]


@pytest.mark.parametrize(
    ("saving", "by", "loading", "into"),
    [(2, "fsdp", 3, "torch_fsdp"), (3, "zero2", 2, "torch_fsdp"), (1, "ddp_bucketed", 1, "torch_fsdp"),
     (2, "torch_fsdp", 1, "torch_ddp"), (2, "ddp_bucketed", 2, "torch_ddp")],
)  # fmt: skip
def test_stock_pytorch_reads_what_we_have_saved(ranks, tmp_path, saving, by, loading, into):
    expected = ranks(saving, saves, folder=str(tmp_path / "ours"), strategy=by)[0]
    words = convert(tmp_path / "ours", tmp_path / "folder")
    assert words == f"{tmp_path / 'folder'}: model and optimizer, 30 tensors; step 2"
    plain, optimizer = build("plain")
    checkpoints = Checkpoints(tmp_path / "ours")
    assert checkpoints.load({"model": plain, "optimizer": optimizer}) == 2
    checkpoints.close()
    wanted = whole_states(plain, optimizer)
    for rank, (values, states, lr) in enumerate(
        ranks(loading, stock_loads, folder=str(tmp_path / "folder"), strategy=into)
    ):
        assert same(values, expected) and lr == 0.01, f"rank {rank}"
        assert set(states) == set(wanted) and all(same(states[name], wanted[name]) for name in wanted), f"rank {rank}"


@pytest.mark.parametrize(("saving", "by"), [(2, "fsdp"), (1, "plain"), (3, "torch_fsdp"), (2, "zero1")])
def test_one_file_that_safetensors_and_the_module_take(ranks, tmp_path, saving, by):
    expected = ranks(saving, saves, folder=str(tmp_path / "ours"), strategy=by)[0]
    convert(tmp_path / "ours", tmp_path / "one.safetensors")
    found = safetensors.torch.load_file(tmp_path / "one.safetensors")
    assert same(found, expected)
    plain, _ = build("plain", seed=5)
    assert plain.load_state_dict(found).missing_keys == []
    load_weights(plain, tmp_path / "one.safetensors")
    assert same(plain.state_dict(), expected)


def test_a_number_and_its_states_stay_numbers(tmp_path):
    """Ours have a number's states as one element, PyTorch's as numbers."""

    def build(seed):
        model = nn.Linear(2, 2)
        model.scale = nn.Parameter(torch.tensor(float(seed)))
        optimizer = torch.optim.AdamW(model.parameters())
        (model(torch.ones(2)) * model.scale * (seed + 1)).sum().backward()
        optimizer.step()
        return model, optimizer

    first, second = build(0), build(1)
    checkpoints = Checkpoints(tmp_path / "ours")
    checkpoints.save(1, dict(zip(("model", "optimizer"), first, strict=True)))
    checkpoints.close()
    convert(tmp_path / "ours", tmp_path / "folder")
    state = stock(*second)
    dcp.load(state, checkpoint_id=tmp_path / "folder", no_dist=True)
    wanted = stock(*first)
    assert same(state["model"], wanted["model"])
    for name, states in wanted["optimizer"]["state"].items():
        assert same(state["optimizer"]["state"][name], states)


# ---- theirs into ours


def stock_saves(rank, world_size, folder, strategy, form):
    model, optimizer = trained(strategy)
    state = stock(model, optimizer) if form == "nested" else model.state_dict()
    dcp.save(state | {"step": 7} if form == "more" else state, checkpoint_id=folder)
    return weights(model)


def loads(rank, world_size, source, strategy):
    model, _ = build(strategy, seed=5)
    load_weights(model, source)
    return weights(model)


INTO = ("plain", "ddp_bucketed", "torch_ddp", "fsdp", "torch_fsdp", "zero2")


@pytest.mark.parametrize(
    ("saving", "by", "form"),
    [(2, "torch_fsdp", "nested"), (3, "torch_fsdp", "flat"), (1, "plain", "more"), (2, "torch_ddp", "module")],
)
def test_what_stock_pytorch_has_saved_is_read_by_all(ranks, tmp_path, saving, by, form):
    folder = str(tmp_path / "folder")
    expected = ranks(saving, stock_saves, folder=folder, strategy=by, form=form)[0]
    for loading, into in zip((1, 2, 3, 2, 3, 2), INTO, strict=True):
        for rank, found in enumerate(ranks(loading, loads, source=folder, strategy=into)):
            assert same(found, expected), f"rank {rank}, {into}"
    if form == "nested":  # and on, into the two other formats
        convert(folder, tmp_path / "one.safetensors")
        assert same(safetensors.torch.load_file(tmp_path / "one.safetensors"), expected)
        convert(folder, tmp_path / "ours", to="checkpoint")
        model, _ = build("plain", seed=5)
        checkpoints = Checkpoints(tmp_path / "ours")
        assert checkpoints.load({"model": model}) == 0 and same(model.state_dict(), expected)
        checkpoints.close()


def test_one_file_into_all(ranks, tmp_path):
    model, _ = trained("plain")
    safetensors.torch.save_model(model, str(tmp_path / "one.safetensors"))  # leaves one of the tied names out
    assert len(safetensors.torch.load_file(tmp_path / "one.safetensors")) == len(model.state_dict()) - 1
    for loading, into in zip((1, 2, 1, 3, 2, 2), INTO, strict=True):
        for rank, found in enumerate(ranks(loading, loads, source=str(tmp_path / "one.safetensors"), strategy=into)):
            assert same(found, model.state_dict()), f"rank {rank}, {into}"


def cut_by_columns(rank, world_size, folder):
    mesh = init_device_mesh("cpu", (world_size,))
    whole = torch.arange(5 * 7 * 3.0).reshape(5, 7, 3)
    state = {f"dim{dim}": distribute_tensor(whole, mesh, [Shard(dim)]) for dim in range(3)}
    dcp.save(state, checkpoint_id=folder)


def test_boxes_of_any_dimension_and_any_range_of_them(ranks, tmp_path):
    ranks(3, cut_by_columns, folder=str(tmp_path))
    folder = DcpFolder(lambda name: open(tmp_path / name, "rb"))
    whole, chance = torch.arange(5 * 7 * 3.0), random.Random(0)
    for dim in range(3):
        assert torch.equal(folder.read(f"dim{dim}"), whole)
        for _ in range(40):
            start, stop = sorted(chance.randrange(106) for _ in range(2))
            assert torch.equal(folder.read(f"dim{dim}", start, stop), whole[start:stop])


# ---- with the optimizer's states


def stock_goes_on(rank, world_size, folder, strategy):
    """(weights when it was saved, after three steps more)."""
    model, optimizer = trained(strategy, dtype=torch.float64)
    optimizer.param_groups[0]["lr"] = 0.02  # as a schedule does
    dcp.save(stock(model, optimizer), checkpoint_id=folder)
    was = weights(model)
    go_on(model, optimizer, range(2, 5))
    return was, weights(model)


def ours_goes_on(rank, world_size, folder, strategy, way):
    """The same, in another strategy: from the folder, or from our own checkpoint made of it."""
    model, optimizer = build(strategy, seed=5, dtype=torch.float64)
    if way == "load":
        load_weights(model, folder, optimizer)
    else:
        checkpoints = Checkpoints(folder)
        assert checkpoints.load({"model": model, "optimizer": optimizer}) == 0
        checkpoints.close()
    was = weights(model)
    go_on(model, optimizer, range(2, 5))
    return was, weights(model)


def near(found, wanted, tolerance):
    return sorted(found) == sorted(wanted) and all(
        torch.allclose(found[n], wanted[n], rtol=0, atol=tolerance) for n in wanted
    )


@pytest.mark.slow
@pytest.mark.parametrize(("by", "saving"), [("torch_ddp", 2), ("torch_fsdp", 2), ("plain", 1)])
def test_training_goes_on_from_what_stock_pytorch_has_saved(ranks, tmp_path, by, saving):
    folder, ours = str(tmp_path / "folder"), str(tmp_path / "ours")
    was, after = ranks(saving, stock_goes_on, folder=folder, strategy=by)[0]
    assert convert(folder, ours, to="checkpoint").endswith("model and optimizer, 30 tensors, as step 0")
    ways = [(2, "ddp_bucketed", 0), (1, "plain", 0), (2, "zero1", 0), (2, "torch_ddp", 0), (2, "torch_fsdp", 0)]
    # A bias before a BatchNorm has no gradient but what rounding leaves, which AdamW divides by 1e-8.
    ways += [(3, "zero2", 1e-9), (2, "fsdp", 0), (3, "torch_fsdp", 1e-9)]
    for loading, into, tolerance in ways:
        for way in ("load", "checkpoint"):
            arguments = {"folder": folder if way == "load" else ours, "strategy": into, "way": way}
            for rank, (loaded, found) in enumerate(ranks(loading, ours_goes_on, **arguments)):
                assert same(loaded, was), f"rank {rank}, {way}, {into}"
                assert near(found, after, tolerance), f"rank {rank}, {way}, {into}"


def test_there_and_back_no_state_has_changed(tmp_path):
    """And a number's states are numbers there, one element here."""
    model, optimizer = trained("plain")
    model.number = nn.Parameter(torch.tensor(2.0))
    optimizer.add_param_group({"params": [model.number], "lr": 0.5, "betas": (0.5, 0.75)})
    (model.number * 3).backward()
    optimizer.step()
    dcp.save(stock(model, optimizer), checkpoint_id=tmp_path / "folder", no_dist=True)
    convert(tmp_path / "folder", tmp_path / "ours", to="checkpoint")
    convert(tmp_path / "ours", tmp_path / "back")
    for source, load in (("folder", load_weights), ("back", load_weights), ("ours", None)):
        other, _ = build("plain", seed=5)
        other.number = nn.Parameter(torch.tensor(0.0))
        first = [p for p in other.parameters() if p is not other.number]
        steps = torch.optim.AdamW([{"params": first}, {"params": [other.number]}])
        if load:
            load(other, tmp_path / source, steps)
        else:
            checkpoints = Checkpoints(tmp_path / source)
            checkpoints.load({"model": other, "optimizer": steps})
            checkpoints.close()
        assert same(other.state_dict(), model.state_dict())
        found, wanted = steps.state_dict(), optimizer.state_dict()
        assert found["param_groups"] == wanted["param_groups"]
        assert all(same(found["state"][i], wanted["state"][i]) for i in wanted["state"]), source


def number(seed):
    """A model with a scalar and a matrix; its parameters equal the seed."""
    model = nn.Linear(3, 3)
    model.number = nn.Parameter(torch.tensor(0.0))
    for p in model.parameters():
        nn.init.constant_(p, seed)
    return model


def number_goes_on(model, optimizer):
    (model(torch.ones(3)).square().sum() * model.number).backward()
    optimizer.step()
    optimizer.zero_grad()
    return [p.tolist() for p in model.parameters()]


def takes_a_number(rank, world_size, folder):
    model = number(5)
    optimizer = ZeRO1(model.parameters(), torch.optim.AdamW, lr=0.1)
    load_weights(model, folder, optimizer)
    return number_goes_on(model, optimizer)


def test_shards_take_the_states_of_a_number(ranks, tmp_path):
    model = number(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    number_goes_on(model, optimizer)
    dcp.save(stock(model, optimizer), checkpoint_id=tmp_path, no_dist=True)
    wanted = number_goes_on(model, optimizer)
    assert ranks(2, takes_a_number, folder=str(tmp_path)) == [wanted, wanted]


class Scaled(torch.optim.SGD):
    def state_dict(self):
        return super().state_dict() | {"scale": 3}


def test_an_optimizer_that_does_not_fit_is_refused_and_nothing_changes(tmp_path):
    model, optimizer = trained("plain")
    whole = stock(model, optimizer)
    dcp.save(whole, checkpoint_id=tmp_path / "named", no_dist=True)
    by_number = {"model": whole["model"], "optimizer": optimizer.state_dict()}
    dcp.save(by_number, checkpoint_id=tmp_path / "numbers", no_dist=True)
    dcp.save({"model": whole["model"]}, checkpoint_id=tmp_path / "none", no_dist=True)
    other, _ = build("plain", seed=5)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    some = torch.optim.AdamW([*other.parameters()][:2])
    refused = [
        ("named", some, "its parameters differ: .*model.last.bias"),
        ("named", Scaled(other.parameters(), lr=0.1), "cannot load into Scaled: it keeps extra state"),
        ("none", some, "it contains no optimizer next to the model"),
        ("numbers", some, "its optimizer states are not named after parameters"),
    ]
    for folder, taking, words in refused:
        with pytest.raises(CheckpointError, match=words):
            load_weights(other, tmp_path / folder, taking)
        assert same(other.state_dict(), before) and not taking.state
    words = convert(tmp_path / "numbers", tmp_path / "one.safetensors")
    assert words.endswith("; without the optimizer: its optimizer states are not named after parameters")


# ---- other layouts of a DCP folder


def two_groups(model):
    return torch.optim.AdamW([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.5}])


def layouts():
    """(model, optimizer, {name: (what PyTorch's users save of them, what convert says is left out)})."""
    model = nn.Linear(3, 2)
    optimizer = two_groups(model)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    found, states = get_state_dict(model, optimizer)
    flat = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))[1]
    rest = {"lr_scheduler": {"last_epoch": 3}, "train_state": {"step": torch.tensor(3)}}
    return model, optimizer, {
        "recipe": ({"app": {"model": found, "optim": states}}, ""),
        "recipe and more": (
            {"app": {"model": found, "optim": states, "step": 3}, **rest}, "app.step, lr_scheduler, train_state"
        ),
        "torchtitan": ({**found, "optimizer": flat, **rest}, "lr_scheduler, train_state"),
        "flattened": ({"model": found, "optimizer": flat, "step": torch.tensor(3)}, "step"),
        "another name": ({"network": found}, ""),
        "another name, with its optimizer": ({"network": found, "optimizer": states}, ""),
    }  # fmt: skip


@pytest.mark.parametrize("name", layouts()[2])
def test_a_model_and_its_optimizer_are_found_in_other_layouts(tmp_path, name):
    model, optimizer, all_of_them = layouts()
    state, left = all_of_them[name]
    dcp.save(state, checkpoint_id=tmp_path / "folder", no_dist=True)
    there = "optim" in str(state)
    words = convert(tmp_path / "folder", tmp_path / "one.safetensors")
    assert same(safetensors.torch.load_file(tmp_path / "one.safetensors"), model.state_dict())
    names = sorted(["optimizer"] * there + left.split(", ") * bool(left))
    assert sorted(words.partition("left out: ")[2].split(", ") if names else []) == names
    convert(tmp_path / "folder", tmp_path / "ours", to="checkpoint")
    for source in ("folder", "ours"):
        other = nn.Linear(3, 2)
        again = two_groups(other)
        if source == "folder":
            load_weights(other, tmp_path / source, again if there else None)
        else:
            checkpoints = Checkpoints(tmp_path / source)
            assert checkpoints.load({"model": other} | ({"optimizer": again} if there else {})) == 0
            checkpoints.close()
        assert same(other.state_dict(), model.state_dict())
        if there:
            assert again.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
            for i, states in optimizer.state_dict()["state"].items():
                assert same(again.state_dict()["state"][i], states)


def test_of_two_models_none_is_taken_for_the_model(tmp_path):
    one = nn.Linear(3, 2).state_dict()
    for name, state in (("a", {"gan": {"model": one}, "critic": {"model": one}}), ("b", {"gan": one, "critic": one})):
        dcp.save(state, checkpoint_id=tmp_path / name, no_dist=True)
        with pytest.raises(ValueError, match=r"cannot find the model among critic.*, gan.*: save it as"):
            convert(tmp_path / name, tmp_path / "one.safetensors")


def test_what_is_beside_in_our_own_checkpoint_is_said(tmp_path):
    checkpoints = Checkpoints(tmp_path / "ours")
    model, optimizer = trained("plain")
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    checkpoints.save(1, {"model": model, "optimizer": optimizer, "schedule": schedule})
    checkpoints.close()
    assert convert(tmp_path / "ours", tmp_path / "dcp").endswith("; step 1; left out: schedule")


# ---- Hugging Face's folders


def shards(model, folder, files=2):
    """The folder that save_pretrained() of a large model writes."""
    folder.mkdir()
    names = [f"model-{i + 1:05d}-of-{files:05d}.safetensors" for i in range(files)]
    state = model.state_dict()
    places = {name: names[i % files] for i, name in enumerate(state)}
    for file in names:
        safetensors.torch.save_file({n: state[n] for n in state if places[n] == file}, folder / file)
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def loads_shards(rank, world_size, source):
    model = FSDP(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)))
    load_weights(model, source)
    return model.full_state_dict()


def test_a_folder_of_several_files_and_their_index(ranks, tmp_path):
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    source = shards(model, tmp_path / "hf")
    for rank, found in enumerate(ranks(2, loads_shards, source=str(source))):
        assert same(found, model.state_dict()), f"rank {rank}"
    convert(source, tmp_path / "one.safetensors")
    assert same(safetensors.torch.load_file(tmp_path / "one.safetensors"), model.state_dict())


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ("no JSON", "is not an index of tensors"),
        ('{"weight_map": {"0.weight": "../model.safetensors"}}', "which is not a file of its folder"),
        ('{"weight_map": {"0.weight": 3}}', "which is not a file of its folder"),
        ('{"weight_map": {"other": "model-00001-of-00002.safetensors"}}', "does not contain 'other'"),
        ('{"weight_map": {"0.weight": "lost.safetensors"}}', "lost.safetensors"),
    ],
)
def test_an_index_that_leads_elsewhere(tmp_path, index, words):
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    source = shards(model, tmp_path / "hf")
    (source / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=words):
        load_weights(model, source)


# ---- names of which some are missing


def loads_some(rank, world_size, source):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    keys = load_weights(FSDP(net) if world_size > 1 else net, source, strict=False)
    wanted = plain.load_state_dict(safetensors.torch.load_file(source), strict=False)
    assert (keys.missing_keys, keys.unexpected_keys) == (wanted.missing_keys, wanted.unexpected_keys)
    found = net.state_dict()
    whole = plain.state_dict()
    begin = [0] if world_size == 1 else None
    assert begin is None or same(found, whole)
    return keys.missing_keys, {name: value.flatten() for name, value in found.items()}, whole


def test_fine_tuning_from_weights_that_have_another_head(ranks, tmp_path):
    source = tmp_path / "one.safetensors"
    body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).state_dict()
    safetensors.torch.save_file(body | {"old_head.weight": torch.ones(3)}, source)
    for world_size in (1, 2):
        told = ranks(world_size, loads_some, source=str(source))
        whole = told[0][2]
        for name in whole:
            assert torch.equal(torch.cat([found[name] for _, found, _ in told]), whole[name].flatten())
        assert told[0][0] == ["2.weight", "2.bias"]
    with pytest.raises(
        CheckpointError, match=r"it does not contain '2.weight'.*the model does not contain 'old_head.weight'"
    ):
        load_weights(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)), source)
    with pytest.raises(CheckpointError, match=r"'0.weight' has shape .* in it, .* in the model"):
        load_weights(nn.Sequential(nn.Linear(5, 4)), source, strict=False)
    with pytest.raises(CheckpointError, match="no name of a tensor in it matches the model"):
        load_weights(nn.ModuleDict({"other": nn.Linear(5, 4)}), source, strict=False)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_names_of_a_compiled_model_go_into_a_plain_one_and_back(tmp_path, prefix):
    model, plain = nn.Sequential(nn.Linear(3, 3)), nn.Sequential(nn.Linear(3, 3))
    state = {f"{prefix}{name}": value for name, value in model.state_dict().items()}
    safetensors.torch.save_file(state, tmp_path / "compiled.safetensors")
    load_weights(plain, tmp_path / "compiled.safetensors")
    assert same(plain.state_dict(), model.state_dict())
    safetensors.torch.save_file(nn.Sequential(nn.Linear(3, 3)).state_dict(), tmp_path / "plain.safetensors")
    load_weights(torch.compile(model, backend="eager"), tmp_path / "plain.safetensors")
    assert same(model.state_dict(), safetensors.torch.load_file(tmp_path / "plain.safetensors"))


# ---- every dtype and shape


class Odd(nn.Module):
    """A tensor of each dtype that safetensors has, and of odd shapes."""

    def __init__(self, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for code, dtype in tensor_file.DTYPES.items():
            data = torch.randint(0, 2, (3, 8 * dtype.itemsize), dtype=torch.uint8, generator=generator)
            self.register_buffer(code, data.view(dtype))
        for shape in ((), (0,), (4, 0, 2), (1,), (1, 1, 1), (3, 1, 2)):
            self.register_buffer(f"s{'x'.join(map(str, shape))}", torch.randn(shape, generator=generator))


def raw(model):
    return {name: (v.dtype, v.shape, bytes(tensor_file.as_bytes(v))) for name, v in model.state_dict().items()}


def test_every_dtype_and_shape_goes_round(tmp_path):
    checkpoints = Checkpoints(tmp_path / "ours")
    checkpoints.save(1, {"model": Odd()})
    checkpoints.close()
    way = [tmp_path / "ours", tmp_path / "a.safetensors", tmp_path / "b", tmp_path / "c.safetensors"]
    for source, target in pairwise(way):
        convert(source, target)
        other = Odd(seed=1)
        load_weights(other, target)
        assert raw(other) == raw(Odd())
    assert way[1].read_bytes() == way[3].read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {"model": Odd(seed=1).state_dict()}
        dcp.load(state, checkpoint_id=way[2], no_dist=True)
    assert {n: (v.dtype, v.shape, bytes(tensor_file.as_bytes(v))) for n, v in state["model"].items()} == raw(Odd())


def test_a_dtype_that_one_format_has_and_another_has_not(tmp_path):
    dcp.save({"z": torch.zeros(2, dtype=torch.complex128)}, checkpoint_id=tmp_path / "folder", no_dist=True)
    with pytest.raises(ValueError, match=r"'z' is torch.complex128, which safetensors does not support"):
        convert(tmp_path / "folder", tmp_path / "one.safetensors")
    assert not list(tmp_path.glob("one*"))


def test_values_take_the_dtype_of_the_model(tmp_path):
    safetensors.torch.save_file({"weight": torch.tensor([[1.5]]), "bias": torch.zeros(1)}, tmp_path / "a.safetensors")
    model = nn.Linear(1, 1).bfloat16()
    load_weights(model, tmp_path / "a.safetensors")
    assert model.weight.dtype == torch.bfloat16 and model.weight.item() == 1.5


class Extra(nn.Linear):
    def get_extra_state(self):
        return self.scale

    def set_extra_state(self, state):
        self.scale = state


def test_what_a_module_keeps_besides_tensors_goes_along(tmp_path):
    first, second = Extra(2, 2), Extra(2, 2)
    first.scale, second.scale = 3, 4
    checkpoints = Checkpoints(tmp_path / "ours")
    checkpoints.save(1, {"model": first})
    checkpoints.close()
    convert(tmp_path / "ours", tmp_path / "folder")
    assert convert(tmp_path / "folder", tmp_path / "a.safetensors").endswith("2 tensors, without _extra_state")
    load_weights(second, tmp_path / "folder")
    assert second.scale == 3 and torch.equal(second.weight, first.weight)


# ---- what is read and held


def reads(rank, world_size, source):
    counted, read_range = [], tensor_file.read_range

    def counts(file, dtype, begin, start, out):
        counted.append(out.nbytes)
        read_range(file, dtype, begin, start, out)

    tensor_file.read_range = counts
    try:
        model = parallelize(nn.Sequential(nn.Linear(300, 100)), "fsdp", nn.Linear)
        load_weights(model, source)
    finally:
        tensor_file.read_range = read_range
    return sum(counted)


def test_a_rank_of_fsdp_reads_its_own_ranges_only(ranks, tmp_path):
    safetensors.torch.save_file(nn.Sequential(nn.Linear(300, 100)).state_dict(), tmp_path / "one.safetensors")
    read = ranks(2, reads, source=str(tmp_path / "one.safetensors"))
    assert sum(read) == 4 * 30_100 and max(read) <= 4 * 15_064


@pytest.mark.parametrize("target", ["one.safetensors", "folder"])
def test_one_tensor_is_held_at_a_time(tmp_path, monkeypatch, target):
    checkpoints = Checkpoints(tmp_path / "ours")
    checkpoints.save(1, {"model": nn.Sequential(*[nn.Linear(9, 9) for _ in range(10)])})
    checkpoints.close()
    held, most, read = weakref.WeakSet(), [], reader.Saved.read

    def counts(self, *arguments):
        found = read(self, *arguments)
        held.add(found.untyped_storage())
        most.append(len(held))
        return found

    monkeypatch.setattr(reader.Saved, "read", counts)
    convert(tmp_path / "ours", tmp_path / target)
    assert len(most) == 20 and max(most) <= 3


# ---- nothing is executed


class Runs:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def evil(flag):
    """Programs in a pickle that would make a file."""
    make = f"open({str(flag)!r}, 'w').close()"
    yield "os.system", pickle.dumps(Runs(os.system, f"touch {flag}"))
    yield "builtins.exec", pickle.dumps(Runs(exec, make), 2)
    yield "builtins.eval", pickle.dumps({"storage_data": Runs(eval, make)})
    yield "getattr", pickle.dumps(Runs(getattr, "", "upper"))
    yield "subprocess", pickle.dumps(Runs(subprocess.call, ["touch", str(flag)]))
    yield "torch.load", pickle.dumps(Runs(torch.load, str(flag)))
    yield "pathlib", b"\x80\x04\x8c\x07pathlib\x8c\x0fPosixPath.touch\x93\x8c\x01x\x85R."
    yield "torch.Size", b"\x80\x04\x8c\x05torch\x8c\x0eSize.__class__\x93\x8c\x01x\x85R."
    yield "torch.onnx", b"\x80\x04\x8c\x05torch\x8c\x04onnx\x93."
    metadata = "torch.distributed.checkpoint.metadata"
    yield "Metadata.__init__", b"c" + f"{metadata}\nMetadata.__init__\n".encode() + b"."
    yield "builtins", b"c__builtin__\neval\n(S'" + make.replace("'", '"').encode() + b"'\ntR."
    yield "persistent", b"\x80\x04\x8c\x01xQ."
    yield "inst", b"(S'touch " + str(flag).encode() + b"'\nios\nsystem\n."


def folder_of_one(path):
    dcp.save({"weight": torch.ones(3, 3), "bias": torch.zeros(3)}, checkpoint_id=path, no_dist=True)
    return path


def test_a_program_in_the_metadata_is_not_run(tmp_path):
    flag = tmp_path / "flag"
    folder = folder_of_one(tmp_path / "folder")
    tried = 0
    for name, data in evil(flag):
        (folder / ".metadata").write_bytes(data)
        with pytest.raises(CheckpointError, match=r"was not loaded: rank 0: cannot read its \.metadata: ") as told:
            load_weights(nn.Linear(3, 3), folder)
        assert not flag.exists(), name
        assert "\n" not in str(told.value)
        tried += 1
    assert tried == 13
    (folder / ".metadata").write_bytes(pickle.dumps(Runs(os.system, f"touch {flag}")))
    with pytest.raises(CheckpointError, match=r"it names posix\.system, which is not in the format"):
        load_weights(nn.Linear(3, 3), folder)
    # It is a program: what loads any pickle, as dcp.load does, runs it.
    pickle.loads((folder / ".metadata").read_bytes())
    assert flag.exists()


def test_a_program_among_the_tensors_is_not_run(tmp_path):
    flag = tmp_path / "flag"
    for protocol in (2, 4):
        for kind in ("legacy", "zip"):
            folder = folder_of_one(tmp_path / f"{kind}{protocol}")
            data = pickle.dumps(Runs(os.system, f"touch {flag}"), protocol)
            if kind == "zip":
                packed = io.BytesIO()
                torch.save(torch.ones(3, 3), packed)
                other = io.BytesIO()
                with zipfile.ZipFile(packed) as old, zipfile.ZipFile(other, "w") as new:
                    for name in old.namelist():
                        new.writestr(name, data if name.endswith("data.pkl") else old.read(name))
                data = other.getvalue()
            length = (folder / "__0_0.distcp").stat().st_size
            (folder / "__0_0.distcp").write_bytes(data.ljust(length, b"\0"))
            with pytest.raises(CheckpointError, match=r"was not loaded: rank 0: cannot read __0_0\.distcp at"):
                load_weights(nn.Linear(3, 3), folder)
            assert not flag.exists()


def rewritten(folder, change):
    """The metadata as PyTorch reads it, changed, and written again."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def path_outside(metadata):
    for info in metadata.storage_data.values():
        info.relative_path = "../secret"


def sizes_below_zero(metadata):
    metadata.state_dict_metadata["weight"].size = (-3, -3)


def a_part_missing(metadata):
    metadata.state_dict_metadata["weight"].chunks.clear()


def others_place(metadata):
    first, second = metadata.storage_data
    metadata.storage_data[first] = metadata.storage_data[second]


def transformed(metadata):
    for info in metadata.storage_data.values():
        info.transform_descriptors = ["zstd"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (path_outside, r"'\.\./secret' is not a file of the folder"),
        (sizes_below_zero, r"\(-3, -3\) must be a tuple of integers"),
        (a_part_missing, "the chunks of 'weight' do not add up"),
        (others_place, "__0_0.distcp does not contain 'weight'"),
        (transformed, "is compressed or encrypted"),
        (lambda metadata: metadata.storage_data.clear(), r"cannot read its \.metadata"),
    ],
    ids=lambda value: getattr(value, "__name__", "words"),
)
def test_metadata_that_leads_elsewhere(tmp_path, change, words):
    folder = folder_of_one(tmp_path / "folder")
    (tmp_path / "secret").write_bytes((folder / "__0_0.distcp").read_bytes())
    rewritten(folder, change)
    model = nn.Linear(3, 3)
    before = model.weight.clone()
    with pytest.raises(CheckpointError, match=words):
        load_weights(model, folder)
    assert torch.equal(model.weight, before)


def test_a_folder_that_python_3_13_has_written(tmp_path):
    """Its paths are pickled as pathlib._local's."""
    folder, model = folder_of_one(tmp_path / "folder"), nn.Linear(3, 3)
    data = pickle.dumps(pickle.loads((folder / ".metadata").read_bytes()), 2)
    assert data.count(b"cpathlib\nPosixPath\n") == 1
    (folder / ".metadata").write_bytes(data.replace(b"cpathlib\n", b"cpathlib._local\n"))
    load_weights(model, folder)
    assert torch.equal(model.weight, torch.ones(3, 3))


def test_tensors_in_safetensors_inside_a_dcp_folder_are_named(tmp_path):
    writer = dcp.FileSystemWriter(tmp_path, serialization_format=dcp.filesystem.SerializationFormat.SAFETENSORS)
    dcp.save(nn.Linear(3, 3).state_dict(), storage_writer=writer, no_dist=True)
    with pytest.raises(CheckpointError, match=r"was written with SerializationFormat.SAFETENSORS: save with") as told:
        load_weights(nn.Linear(3, 3), tmp_path)
    assert "weights_only" not in str(told.value)


def test_damage_ends_as_one_error(tmp_path):
    """Flipped bits, lost ends: an error of one kind, or other values, for neither format has a hash."""
    folder, chance, refused = folder_of_one(tmp_path / "folder"), random.Random(0), 0
    safetensors.torch.save_file(nn.Linear(3, 3).state_dict(), tmp_path / "one.safetensors")
    places = [(folder / ".metadata", folder), (folder / "__0_0.distcp", folder)]
    places += [(tmp_path / "one.safetensors", tmp_path / "one.safetensors")]
    for trial in range(600):
        path, source = places[trial % 3]
        whole = path.read_bytes()
        data = bytearray(whole)
        if trial % 4:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        else:
            del data[chance.randrange(len(data)) :]
        path.write_bytes(data)
        try:
            load_weights(nn.Linear(3, 3), source)
        except CheckpointError as error:
            assert f"{source} was not loaded: rank 0: " in str(error)
            refused += 1
        path.write_bytes(whole)
    assert refused > 300


# ---- what is refused, in one line


def refused(*arguments):
    """What the command says."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert isinstance(ended.value.code, str) and "\n" not in ended.value.code
    return ended.value.code


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    checkpoints = Checkpoints(tmp_path / "ours")
    for step in (3, 5):
        checkpoints.save(step, {"model": nn.Linear(3, 3), "optimizer": nn.Linear(1, 1)})
    checkpoints.close()
    ours, one = tmp_path / "ours", tmp_path / "one.safetensors"
    assert refused(ours, one, "--step", 4) == f"labkit.convert: {ours}: it has no step 4; choose one of 3, 5"
    assert "a folder of torch.distributed.checkpoint with .metadata" in refused(tmp_path, one)
    assert "a folder of torch.distributed.checkpoint with .metadata" in refused(tmp_path / "nowhere", one)
    assert not (tmp_path / "nowhere").exists()
    assert "No such file" in refused(tmp_path / "no.safetensors", tmp_path / "folder")
    main([str(ours), str(one), "--step", "3"])
    assert capsys.readouterr().out == f"{one}: model, 2 tensors; step 3; left out: optimizer\n"
    assert "step=1 needs a directory of labkit checkpoints" in refused(one, tmp_path / "folder", "--step", 1)
    main([str(one), str(tmp_path / "folder")])
    assert "already has a checkpoint" in refused(one, tmp_path / "folder")
    assert "must be on a local disk" in refused(one, "s3://bucket/folder")
    assert "has a checkpoint of step 5: choose another directory" in refused(one, ours, "--to", "checkpoint")
    flip = ours / "step-000000005" / "rank-0.safetensors"
    flip.write_bytes(flip.read_bytes()[:-1] + b"x")
    assert "step 5: rank-0.safetensors is damaged" in refused(ours, one, "--step", 5)
    capsys.readouterr()
    main([str(ours), str(one)])
    assert capsys.readouterr().out.endswith("; step 3; left out: optimizer\n")
    checkpoints = Checkpoints(tmp_path / "other")
    checkpoints.save(1, {"network": nn.Linear(3, 3)})
    checkpoints.close()
    assert "step 1 has no 'model'; it has network" in refused(tmp_path / "other", one)


@pytest.mark.slow
def test_as_a_program(tmp_path):
    checkpoints = Checkpoints(tmp_path / "ours")
    checkpoints.save(3, {"model": nn.Linear(3, 3)})
    checkpoints.close()
    command = [sys.executable, "-m", "labkit.convert", str(tmp_path / "ours"), str(tmp_path / "folder")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and done.stderr == ""
    again = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert again.returncode == 1 and again.stderr.count("\n") == 1


def other_models(rank, world_size, source):
    model = FSDP(nn.Linear(3, 2))
    before = model.state_dict()["weight"].clone()
    with pytest.raises(CheckpointError, match=r"'weight' has shape \(3, 3\) in it, \[2, 3\] in the model"):
        load_weights(model, source)
    assert torch.equal(model.state_dict()["weight"], before)
    with pytest.raises(CheckpointError, match=r"it does not contain '0\.weight'.*the model does not contain 'weight'"):
        load_weights(nn.Sequential(nn.Linear(3, 3)), source)
    # Only one rank cannot read it: all ranks raise, and none waits.
    with pytest.raises(CheckpointError, match=r"was not loaded: rank 1: unknown format"):
        load_weights(nn.Linear(3, 3), source if rank == 0 else f"{source}-not-here")


def test_another_model_is_refused_by_name_on_all_ranks(ranks, tmp_path):
    ranks(2, other_models, source=str(folder_of_one(tmp_path / "folder")))


def test_our_own_directories_have_their_own_loader(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, {"model": nn.Linear(3, 3)})
    checkpoints.close()
    with pytest.raises(CheckpointError, match=r"a directory of labkit checkpoints: load it with labkit.checkpoint"):
        load_weights(nn.Linear(3, 3), tmp_path)


def test_behind_a_url(tmp_path):
    checkpoints = Checkpoints("memory://convert/ours")
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    checkpoints.save(3, {"model": first})
    checkpoints.close()
    convert("memory://convert/ours", "memory://convert/one.safetensors")
    load_weights(second, "memory://convert/one.safetensors")
    assert torch.equal(second.weight, first.weight)
    convert("memory://convert/one.safetensors", tmp_path / "folder")
    fs = Checkpoints("memory://convert/other").store.fs
    for path in (tmp_path / "folder").iterdir():
        fs.pipe(f"/convert/folder/{path.name}", path.read_bytes())
    third = nn.Linear(3, 3)
    load_weights(third, "memory://convert/folder")
    assert torch.equal(third.weight, first.weight)


def differs(rank, world_size, folder):
    model = nn.BatchNorm1d(3)
    model.running_mean.fill_(rank)
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, {"model": model})
    checkpoints.close()


def test_what_ranks_do_not_have_alike_is_rank_0s_and_said(ranks, tmp_path):
    ranks(2, differs, folder=str(tmp_path / "ours"))
    words = convert(tmp_path / "ours", tmp_path / "one.safetensors")
    assert words.endswith("model, 5 tensors; step 1; per-rank state of rank 0: running_mean")
    assert safetensors.torch.load_file(tmp_path / "one.safetensors")["running_mean"].tolist() == [0, 0, 0]
