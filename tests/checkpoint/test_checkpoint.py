"""Checkpoints: a resumed run is bitwise equal to an uninterrupted one, and damaged files are found."""

import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from io import BytesIO
from pathlib import Path

import fsspec
import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from pool import forked
from torch import nn
from torch.utils.data import TensorDataset

from labkit import compression, convert
from labkit.checkpoint import CheckpointError, Checkpoints, metadata, state_json, tensor_file
from labkit.checkpoint.convert_sources import opened
from labkit.checkpoint.rng_state import RandomState
from labkit.checkpoint.storage import Store
from labkit.fsdp import FSDP
from labkit.ideas.checkpoint import load_shards, save_shards
from labkit.learning_rate import warmup
from labkit.sampler import Batches
from labkit.trainer import Trainer, make_optimizer, mixed_precision, parallelize

WIDTH = 13  # odd: shards end in the middle of parameters


class Net(nn.Module):
    """With all that decides a step: dropout, buffers that differ by rank, a tied matrix, a number."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.3)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.last.weight = self.first.weight

    def forward(self, x):
        x = self.drop(torch.relu(self.norm(self.first(x))))
        return self.last(torch.relu(self.second(x))) * self.scale


def dataset(samples=64):
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(*(torch.randn(samples, WIDTH, generator=generator) for _ in range(2)))


class Training:
    """All of a training, and its state. seed: of the weights, which loading is to replace."""

    def __init__(self, strategy, rank, world_size, seed=0, precision="fp32", hook=None, optimizer="AdamW", batch=12):
        torch.manual_seed(seed)
        hook = hook and compression.build(hook)
        self.model = parallelize(Net(), strategy, tied_apart if "fsdp" in strategy else nn.Linear, 0.0005, hook)
        kind = getattr(torch.optim, optimizer)
        options = {"lr": 0.05, **({"momentum": 0.9} if optimizer == "SGD" else {})}
        self.optimizer = make_optimizer(self.model, strategy, kind, 0.0005, 3, **options)
        schedule = warmup(getattr(self.optimizer, "inner", self.optimizer), 8)
        low = mixed_precision(precision, torch.device("cpu"))
        if precision == "fp16":
            low["scaler"]._growth_interval = 3
        self.trainer = Trainer(
            self.model, self.optimizer, nn.functional.mse_loss, 1, schedule, compressor=hook, clip=0.5, **low
        )
        self.batches = Batches(dataset(), batch // world_size, world_size, rank)
        torch.manual_seed(100 * seed + rank)
        names = ("model", "optimizer", "schedule", "scaler", "compressor")
        self.state = {name: getattr(self.trainer, name) for name in names if getattr(self.trainer, name) is not None}
        self.state |= {"batches": self.batches, "random": RandomState()}

    def run(self, steps):
        return [self.trainer.train_step(*next(self.batches)).item() for _ in range(steps)]


def tied_apart(module):
    """What FSDP may gather alone: what shares no parameter."""
    return isinstance(module, nn.BatchNorm1d)


def weights(model):
    whole = getattr(model, "full_state_dict", model.state_dict)()
    return {name.removeprefix("module."): value.clone() for name, value in whole.items()}


# ---- the idea


def idea(rank, world_size, folder):
    for step in (5, 10):
        save_shards(folder, step, {"w": torch.full([3], float(step + rank))})
    step, tensors = load_shards(folder)
    assert step == 10 and tensors["w"].tolist() == [10.0 + rank] * 3
    dist.barrier()
    if rank == 0:
        flip(Path(folder, "step-000000010", "rank-1.bin"), 8 * 300)
    dist.barrier()
    step, tensors = load_shards(folder)
    assert step == 5 and tensors["w"].tolist() == [5.0 + rank] * 3
    dist.barrier()
    if rank == 0:
        Path(folder, "step-000000005", "manifest.json").unlink()
    dist.barrier()
    assert load_shards(folder) is None


def flip(path, bit):
    data = bytearray(path.read_bytes())
    bit %= 8 * len(data)
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def test_the_idea_takes_the_latest_that_is_whole(ranks, tmp_path):
    ranks(2, idea, folder=str(tmp_path))


# ---- a resumed run equals an uninterrupted one


def resumes(rank, world_size, folder, settings):
    settings = {**settings, "rank": rank, "world_size": world_size}
    unbroken = Training(**settings)
    checkpoints = Checkpoints(folder)
    unbroken.run(4)
    checkpoints.save(4, unbroken.state)
    expected = unbroken.run(5)  # while it is written
    checkpoints.wait()
    wanted = weights(unbroken.model)
    again = Training(**settings, seed=7)
    assert checkpoints.load(again.state) == 4
    assert again.run(5) == expected
    found = weights(again.model)
    assert list(found) == list(wanted) and all(torch.equal(found[name], wanted[name]) for name in wanted)
    checkpoints.close()


SETTINGS = [
    *({"strategy": s} for s in ("ddp_naive", "ddp_overlapped", "ddp_bucketed", "torch_ddp", "zero1", "zero2")),
    *({"strategy": s} for s in ("fsdp", "fsdp_grad_op", "fsdp_offload", "fsdp_nvme", "local_sgd", "diloco")),
    *({"strategy": "horovod"} | more for more in ({}, {"precision": "fp16"}, {"optimizer": "SGD"})),
    *({"strategy": s, "precision": "fp16"} for s in ("ddp_bucketed", "zero1", "zero2", "fsdp", "local_sgd")),
    *({"strategy": s, "optimizer": "SGD"} for s in ("ddp_bucketed", "zero2", "fsdp")),
    *({"strategy": "ddp_bucketed", "hook": h} for h in ("topk", "powersgd", "onebit", "randomk", "quantize8", "dgc")),
    {"strategy": "ddp_bucketed", "hook": "topk", "precision": "fp16"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(s.values()))
def test_a_run_goes_on_bit_for_bit(ranks, tmp_path, settings):
    ranks(2, resumes, folder=str(tmp_path), settings=settings)


def test_alone_without_a_process_group(tmp_path):
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"model": model, "optimizer": optimizer})
    other = nn.Linear(3, 3)
    states = torch.optim.AdamW(other.parameters())
    assert checkpoints.load({"model": other, "optimizer": states}) == 1
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(states.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])
    checkpoints.close()


def large(rank, world_size, folder):
    """Enough elements for a cut among the ranks, which small ones are spared."""
    torch.manual_seed(0)
    model, other = nn.Linear(200, 100), nn.Linear(200, 100)
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, {"model": model})
    assert checkpoints.load({"model": other}) == 1
    assert torch.equal(other.weight, model.weight) and torch.equal(other.bias, model.bias)
    sizes = [path.stat().st_size for path in Path(folder).glob("*/*.safetensors")]
    assert len(sizes) == world_size and max(sizes) < 4 * 20_000 / world_size + 2000
    checkpoints.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_alone_or_cut_among_ranks_it_is_whole(ranks, tmp_path, world_size):
    ranks(world_size, large, folder=str(tmp_path))


def test_a_file_is_there_whole_or_not_at_all(tmp_path):
    store = Store(tmp_path)
    store.write("step/one", lambda file: file.write(b"old"))

    def breaks(file):
        file.write(b"new")
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        store.write("step/one", breaks)
    assert (tmp_path / "step" / "one").read_bytes() == b"old"
    assert [path.name for path in (tmp_path / "step").iterdir()] == ["one"]


# ---- other ranks, another strategy


def write(rank, world_size, folder, strategy):
    training = Training(strategy, rank, world_size)
    training.run(3)
    checkpoints = Checkpoints(folder)
    checkpoints.save(3, training.state)
    checkpoints.close()
    return weights(training.model), whole_states(training), training.run(3)


def whole_states(training):
    """{name: {key: whole state}}, by every strategy's own way to put them together."""
    optimizer, model = training.optimizer, training.model
    if isinstance(model, FSDP):
        found = {}
        held = {id(p): name for name, p in model.named_parameters()}
        everyone = [None] * dist.get_world_size()
        mine = {held[id(p)]: {k: v.clone() for k, v in s.items()} for p, s in optimizer.state.items()}
        dist.all_gather_object(everyone, mine)
        for name in mine:
            found[name] = {
                key: torch.cat([one[name][key] for one in everyone]) if mine[name][key].dim() else mine[name][key]
                for key in mine[name]
            }
        return found
    state = optimizer.state_dict()["state"]
    names = [name.removeprefix("module.") for name, _ in model.named_parameters()]
    return {names[i]: {key: value.flatten().clone() for key, value in one.items()} for i, one in state.items()}


def read(rank, world_size, folder, strategy):
    training = Training(strategy, rank, world_size, seed=9)
    checkpoints = Checkpoints(folder)
    assert checkpoints.load(training.state) == 3
    checkpoints.close()
    return weights(training.model), whole_states(training), training.run(3)


WAYS = [
    (4, "fsdp", 2, "fsdp"), (4, "fsdp", 3, "zero1"), (2, "zero2", 4, "fsdp"), (1, "ddp_bucketed", 4, "fsdp"),
    (4, "zero1", 3, "ddp_bucketed"), (2, "ddp_bucketed", 3, "torch_ddp"), (3, "torch_ddp", 2, "zero2"),
    (2, "fsdp_grad_op", 1, "ddp_bucketed"), (2, "horovod", 3, "fsdp"), (3, "zero1", 2, "horovod"),
]  # fmt: skip


@pytest.mark.parametrize(("saving", "by", "loading", "into"), WAYS)
def test_other_ranks_and_another_strategy_have_the_same_bits(ranks, tmp_path, saving, by, loading, into):
    old = ranks(saving, write, folder=str(tmp_path), strategy=by)
    new = ranks(loading, read, folder=str(tmp_path), strategy=into)
    for rank, (values, states, _) in enumerate(new):
        assert all(torch.equal(values[name], old[0][0][name]) for name in old[0][0]), f"rank {rank}"
        assert set(states) == set(old[0][1]), f"rank {rank}"
        for name, kept in states.items():
            assert all(torch.equal(kept[key].flatten(), old[0][1][name][key].flatten()) for key in kept), (
                f"rank {rank}, {name}"
            )


def plain_run(rank, world_size, folder, save):
    """Without dropout and BatchNorm, whose means depend on who has which samples."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).double()
    model = parallelize(model, "fsdp", nn.Linear)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trainer = Trainer(model, optimizer, nn.functional.mse_loss)
    batches = Batches(dataset(), 12 // world_size, world_size, rank)
    state = {"model": model, "optimizer": optimizer, "batches": batches}
    checkpoints = Checkpoints(folder)
    losses = []
    for step in range(12):
        if step == 3 and save:
            checkpoints.save(step, state)
        if step == 3 and not save:
            checkpoints.load(state)
        if step >= 3 or save:
            x, y = next(batches)
            loss = trainer.train_step(x.double(), y.double())
            dist.all_reduce(loss)
            losses.append(loss.item() / world_size)
    checkpoints.close()
    return losses[-9:]


@pytest.mark.slow
def test_the_loss_goes_on_with_another_number_of_ranks(ranks, tmp_path):
    """Over the end of an epoch: the same samples in each step, so the same mean."""
    expected = ranks(4, plain_run, folder=str(tmp_path), save=True)[0]
    for world_size in (1, 2, 3):
        found = ranks(world_size, plain_run, folder=str(tmp_path), save=False)[0]
        assert found == pytest.approx(expected, abs=1e-12)


# ---- what is refused


def other_model(rank, world_size, folder):
    checkpoints = Checkpoints(folder)
    training = Training("ddp_bucketed", rank, world_size)
    checkpoints.save(1, training.state)
    other = nn.Linear(WIDTH, 2)
    before = other.weight.clone()
    with pytest.raises(
        CheckpointError, match=r"model: it does not contain 'weight'.*the model does not contain 'first.weight'"
    ):
        checkpoints.load({"model": other})
    assert torch.equal(other.weight, before)
    sgd = torch.optim.SGD(training.model.parameters())
    with pytest.raises(CheckpointError, match="it was saved from AdamW, not from SGD"):
        checkpoints.load({"model": training.model, "optimizer": sgd})
    fewer = torch.optim.AdamW([training.model.module.scale])
    with pytest.raises(CheckpointError, match=r"its parameters differ: model\.first\.bias"):
        checkpoints.load({"model": training.model, "optimizer": fewer})
    with pytest.raises(CheckpointError, match="it does not contain 'another'"):
        checkpoints.load({"another": training.model})
    data = Batches(dataset(48), 4, world_size, rank, seed=3)
    with pytest.raises(CheckpointError, match="batches: samples was 64 when saved, but is 48 now; batches: seed was 0"):
        checkpoints.load({"batches": data})
    with pytest.raises(CheckpointError, match=r"another run writes checkpoints into"):
        Checkpoints(folder)
    checkpoints.close()
    Checkpoints(folder).close()


def test_another_model_optimizer_or_data_is_refused_by_name(ranks, tmp_path):
    ranks(2, other_model, folder=str(tmp_path))


def saves(rank, world_size, folder, settings):
    training = Training(**settings, rank=rank, world_size=world_size)
    training.run(2)
    checkpoints = Checkpoints(folder)
    checkpoints.save(2, training.state)
    checkpoints.close()


def refused(rank, world_size, folder, settings, words):
    training = Training(**settings, rank=rank, world_size=world_size)
    with pytest.raises(CheckpointError, match=words):
        Checkpoints(folder).load(training.state)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"strategy": "local_sgd"}, "is per-rank state"),
        ({"strategy": "ddp_bucketed", "hook": "topk"}, "compressor: .* is per-rank state"),
    ],
    ids=["local_sgd", "topk"],
)
def test_what_each_rank_has_for_itself_is_not_for_others(ranks, tmp_path, settings, words):
    ranks(2, saves, folder=str(tmp_path), settings=settings)
    ranks(3, refused, folder=str(tmp_path), settings=settings, words=words)


@pytest.mark.parametrize("where", ["file/below", "/proc/no"])
def test_a_directory_that_cannot_be_written(tmp_path, where):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write to"):
        Checkpoints(tmp_path / where)


def test_a_url_that_nothing_here_understands():
    with pytest.raises(CheckpointError, match="cannot write to unknown://runs"):
        Checkpoints("unknown://runs")


def test_s3_without_s3fs_names_the_command_that_installs_it(monkeypatch, tmp_path):
    monkeypatch.setattr("labkit.checkpoint.storage.find_spec", lambda name: None)
    line = f"s3fs is not installed: {sys.executable} -m pip install s3fs=={fsspec.__version__}"
    with pytest.raises(CheckpointError) as refused:
        Checkpoints("s3://runs")
    assert str(refused.value) == f"cannot write to s3://runs: {line}"
    with pytest.raises(SystemExit) as ended:
        convert.main(["s3://runs", str(tmp_path / "one.safetensors")])
    assert str(ended.value) == f"labkit.convert: s3://runs: {line}"


def test_what_is_neither_tensor_nor_number_is_named(tmp_path):
    class Odd:
        def state_dict(self):
            return {"list": [1, {"it": object()}]}

    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(TypeError, match=r"cannot save list/1/it of type object: use tensors"):
        checkpoints.save(1, {"odd": Odd()})
    checkpoints.close()


# ---- which ones stay


def test_the_last_by_number_and_the_best_stay(tmp_path):
    model = nn.Linear(2, 2)
    with_best = Checkpoints(tmp_path, keep=2, best=(min, "loss"))
    for step, loss in ((9, 3.0), (10, 1.0), (99, 2.0), (100, 4.0), (1000, 5.0)):
        with_best.save(step, {"model": model}, loss=loss)
    with_best.wait()
    assert with_best.steps() == [10, 100, 1000]
    with_best.save(50, {"model": model}, loss=6.0)  # gone back: a branch, on which 10 is the best
    assert with_best.steps() == [10, 50]
    assert with_best.load({"model": model}) == 50
    with_best.close()
    assert not list(tmp_path.glob("**/*.part"))


def runs(folder, saves, load=None, **options):
    """One run: it loads a step, or none, and saves; returns the steps that are there."""
    model, checkpoints = nn.Linear(2, 2), Checkpoints(folder, **options)
    if load is not None:
        assert checkpoints.load({"model": model}, step=load) == load
    for step in saves:
        nn.init.constant_(model.weight, step)
        checkpoints.save(step, {"model": model})
    there = checkpoints.steps()
    checkpoints.close()
    return there


def latest(folder):
    """(step, the weight in it) of what the next start takes."""
    model, checkpoints = nn.Linear(2, 2), Checkpoints(folder)
    step = checkpoints.load({"model": model})
    checkpoints.close()
    return step, model.weight[0, 0].item()


def test_a_new_branch_is_what_the_next_start_takes(tmp_path):
    assert runs(tmp_path, [8, 9, 10]) == [8, 9, 10]
    assert latest(tmp_path) == (10, 10)
    assert runs(tmp_path, [9], load=8) == [8, 9, 10]
    assert latest(tmp_path) == (9, 9)
    assert runs(tmp_path, [12], load=8, keep=2) == [8, 12]  # 8 before 10 and 9, which are others'
    assert latest(tmp_path) == (12, 12)
    with opened(str(tmp_path)) as source:
        assert source.about == "step 12"


def test_a_shorter_run_in_the_same_folder_keeps_its_own(tmp_path):
    runs(tmp_path, [8, 9, 10])
    assert runs(tmp_path, [1]) == [1, 9, 10]
    assert latest(tmp_path) == (1, 1)
    assert runs(tmp_path, [1, 2, 3]) == [1, 2, 3]
    assert latest(tmp_path) == (3, 3)


def test_a_run_that_goes_on_in_turns_has_one_lineage(tmp_path):
    runs(tmp_path, [1, 2], keep=9)
    for step in (3, 4, 5):
        runs(tmp_path, [step], load=step - 1, keep=9)
    runs(tmp_path, [100], keep=9)  # another
    assert runs(tmp_path, [6], load=5, keep=6) == [1, 2, 3, 4, 5, 6]


def test_the_best_of_each_branch_stays(tmp_path):
    model, checkpoints = nn.Linear(2, 2), Checkpoints(tmp_path, keep=1, best=(min, "loss"))
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
        checkpoints.save(step, {"model": model}, loss=loss)
    assert checkpoints.load({"model": model}, step=2) == 2 and checkpoints.steps() == [2, 3]
    checkpoints.close()
    checkpoints = Checkpoints(tmp_path, keep=1, best=(min, "loss"))
    for step, loss in ((4, 5.0), (5, 6.0)):
        checkpoints.save(step, {"model": model}, loss=loss)
    assert checkpoints.steps() == [2, 4, 5]
    checkpoints.close()


def test_checkpoints_without_a_serial_number_go_by_their_step(tmp_path):
    """As they were written before there was one."""
    runs(tmp_path, [8, 10])
    store = Store(tmp_path)
    for step in (8, 10):
        found, _ = metadata.read(store, f"step-{step:09d}")
        old = {key: value for key, value in found.items() if key not in ("serial", "lineage")}
        metadata.write(store, f"step-{step:09d}", old)
    assert latest(tmp_path) == (10, 10)
    assert runs(tmp_path, [9], load=8, keep=2) == [8, 9]
    assert latest(tmp_path) == (9, 9)


def test_a_manifest_that_this_run_wrote_is_not_parsed_again_unless_it_has_changed(tmp_path, monkeypatch):
    parsed = []
    monkeypatch.setattr(metadata, "check", lambda manifest, check=metadata.check: parsed.append(check(manifest)))
    checkpoints = Checkpoints(tmp_path, keep=2)
    state = {"model": nn.Linear(4, 1)}
    for step in (1, 2, 3):
        checkpoints.save(step, state)
        checkpoints.wait()
        assert len(parsed) == step  # the new one
    flip(tmp_path / "step-000000003" / "manifest.json", 200)
    for step in (4, 5):
        checkpoints.save(step, state)
        checkpoints.wait()
    assert checkpoints.steps() == [4, 5] and (tmp_path / "step-000000003").exists()  # damaged: not removed
    checkpoints.close()


# ---- damage


def one(folder, values=40):
    model = nn.Linear(values, 1)
    checkpoints = Checkpoints(folder)
    for step in (1, 2):
        with torch.no_grad():
            model.weight.fill_(step)
        checkpoints.save(step, {"model": model})
    checkpoints.wait()
    return model, checkpoints


@pytest.mark.slow
def test_a_thousand_flips_and_truncations_are_all_found(tmp_path, capsys):
    model, checkpoints = one(tmp_path)
    folder, chance = tmp_path / "step-000000002", random.Random(0)
    files = {path: path.read_bytes() for path in folder.iterdir()}
    assert len(files) == 2
    for trial in range(1000):
        path = chance.choice(list(files))
        if trial % 4:
            flip(path, chance.randrange(8 * len(files[path])))
        else:
            path.write_bytes(files[path][: chance.randrange(len(files[path]))])
        assert checkpoints.load({"model": model}) == 1
        assert model.weight[0, 0] == 1
        assert "skipped the checkpoint of step 2: " in capsys.readouterr().out
        path.write_bytes(files[path])
    assert checkpoints.load({"model": model}) == 2 and model.weight[0, 0] == 2
    checkpoints.close()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "rank-0.safetensors").unlink(), "rank-0.safetensors is missing"),
        (lambda f: (f / "manifest.json").unlink(), "it has no manifest: saving was interrupted"),
        (lambda f: shutil.copy(f.parent / "step-000000001" / "rank-0.safetensors", f), "its hash differs"),
        (lambda f: flip(f / "manifest.json", 4000), "its manifest is damaged"),
    ],
)
def test_what_is_passed_over_is_said(tmp_path, capsys, damage, words):
    model, checkpoints = one(tmp_path)
    damage(tmp_path / "step-000000002")
    assert checkpoints.load({"model": model}) == 1
    assert words in capsys.readouterr().out
    checkpoints.close()


def test_another_format_is_passed_over(tmp_path, capsys):
    model, checkpoints = one(tmp_path)
    found, _ = metadata.read(checkpoints.store, "step-000000002")
    metadata.write(checkpoints.store, "step-000000002", found | {"format": 9})
    assert checkpoints.load({"model": model}) == 1
    assert "its format is 9, but this version reads 2" in capsys.readouterr().out
    checkpoints.close()


def test_a_checkpoint_of_an_older_version_is_checked_and_loaded(tmp_path, capsys):
    model, checkpoints = one(tmp_path)
    place = tmp_path / "step-000000002"
    found, _ = metadata.read(checkpoints.store, "step-000000002")
    file = found["files"][0]
    del file["xxh3_128"]
    file["sha256"] = hashlib.sha256((place / file["name"]).read_bytes()).hexdigest()
    metadata.write(checkpoints.store, "step-000000002", found | {"format": 1})
    assert checkpoints.load({"model": model}) == 2 and model.weight[0, 0] == 2
    flip(place / file["name"], -1)
    assert checkpoints.load({"model": model}) == 1
    assert "is damaged: its hash differs" in capsys.readouterr().out
    checkpoints.close()


WITHOUT_XXHASH = """
import sys
sys.modules["xxhash"] = None
import torch
from labkit.checkpoint import Checkpoints, metadata
model = torch.nn.Linear(3, 3)
checkpoints = Checkpoints(sys.argv[1])
checkpoints.save(1, {"model": model})
checkpoints.wait()
assert "sha256" in metadata.read(checkpoints.store, "step-000000001")[0]["files"][0]
assert checkpoints.load({"model": model}) == 1
"""


def test_without_xxhash_files_have_their_sha256(tmp_path):
    subprocess.run([sys.executable, "-c", WITHOUT_XXHASH, str(tmp_path)], check=True, timeout=120)
    other = Checkpoints(tmp_path)  # which has xxhash, and loads it, too
    assert other.load({"model": nn.Linear(3, 3)}) == 1
    other.close()


# ---- host memory


def staged(rank, world_size, folder, differs):
    model = nn.Linear(100, 1000)
    with torch.no_grad():
        model.weight.fill_(1 + rank * differs)
        model.bias.fill_(3)
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, {"model": model})
    checkpoints.wait()
    held = sum(copy.nbytes for copy in checkpoints._host.values())
    model.weight.detach().fill_(0)
    assert checkpoints.load({"model": model}) == 1
    assert torch.equal(model.weight, torch.full_like(model.weight, 1 + rank * differs))
    checkpoints.close()
    return held


def test_a_rank_copies_only_what_it_writes(ranks, tmp_path):
    weights_of_each, biases = 4 * 100_000 // 2, 4 * 1000  # one rank writes a small tensor
    assert ranks(2, staged, folder=str(tmp_path), differs=0) == [weights_of_each + biases, weights_of_each]


def test_a_rank_with_other_values_writes_all_of_them(ranks, tmp_path):
    held = ranks(3, staged, folder=str(tmp_path), differs=1)
    assert held == [4 * 100_000 + 4 * 1000, 4 * 100_000, 4 * 100_000]


# ---- faults


def one_disk_is_full(rank, world_size, folder):
    import resource

    checkpoints = Checkpoints(folder)
    model = FSDP(nn.Linear(100, 100))
    checkpoints.save(1, {"model": model})
    checkpoints.wait()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    checkpoints.save(2, {"model": model})
    try:
        with pytest.raises(CheckpointError, match=r"step 2 was not saved: rank 1: .*File too large"):
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert checkpoints.steps() == [1]
    checkpoints.save(3, {"model": model})
    checkpoints.wait()
    assert checkpoints.steps() == [1, 3]
    assert checkpoints.load({"model": model}) == 3
    checkpoints.close()


def test_a_rank_that_cannot_write_is_named_by_all(ranks, tmp_path):
    ranks(2, one_disk_is_full, folder=str(tmp_path))


def test_a_disk_that_is_really_full(tmp_path):
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", tmp_path]).returncode:
        pytest.skip("a file system of its own needs root")
    try:
        checkpoints = Checkpoints(tmp_path)
        checkpoints.save(1, {"model": nn.Linear(100, 200)})  # 80 kB
        checkpoints.wait()
        checkpoints.save(2, {"model": nn.Linear(100, 1000)})
        with pytest.raises(CheckpointError, match=r"step 2 was not saved: .*No space left"):
            checkpoints.wait()
        checkpoints.save(3, {"model": nn.Linear(100, 200)})
        checkpoints.wait()
        assert checkpoints.steps() == [1, 3]
        checkpoints.close()
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def saves_until_killed(folder, connection):
    model = nn.Linear(2000, 500)
    checkpoints = Checkpoints(folder, keep=2)
    first = step = checkpoints.load({"model": model}) or 0
    while True:
        step += 1
        with torch.no_grad():
            model.weight.fill_(step)
        checkpoints.save(step, {"model": model})
        if step == first + 1:
            checkpoints.wait()
            connection.send("saved")


@pytest.mark.slow
def test_killed_at_any_moment_the_latest_is_whole(tmp_path):
    chance, last = random.Random(0), 0
    for _ in range(5):
        ours, theirs = multiprocessing.Pipe()
        process = forked(saves_until_killed, tmp_path, theirs)
        theirs.close()
        assert ours.recv() == "saved"  # EOFError if it has ended
        time.sleep(chance.uniform(0.0, 0.5))
        process.kill()
        process.join()
        model = nn.Linear(2000, 500)
        checkpoints = Checkpoints(tmp_path, keep=2)
        step = checkpoints.load({"model": model}) or 0
        checkpoints.close()
        assert step > last and bool((model.weight == step).all())
        last = step


# ---- storage, files, texts


def test_a_directory_behind_a_url():
    model = nn.Linear(5, 5)
    checkpoints = Checkpoints("memory://runs/one", keep=1)
    for step in (1, 2):
        checkpoints.save(step, {"model": model})
    checkpoints.wait()
    assert checkpoints.steps() == [2]
    other = nn.Linear(5, 5)
    assert checkpoints.load({"model": other}) == 2 and torch.equal(other.weight, model.weight)
    fs = fsspec.filesystem("memory")
    data = bytearray(fs.cat("/runs/one/step-000000002/rank-0.safetensors"))
    data[-1] ^= 1
    fs.pipe("/runs/one/step-000000002/rank-0.safetensors", bytes(data))
    assert checkpoints.load({"model": other}) is None
    checkpoints.close()


DTYPES = sorted(tensor_file.CODES, key=str)


def test_a_file_of_tensors_is_one_of_safetensors(tmp_path):
    tensors = {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in DTYPES}
    tensors |= {"number": torch.tensor(0.1), "empty": torch.empty(0, 4), "turned": torch.randn(3, 5).T}
    with open(tmp_path / "ours", "wb") as file:
        size, digest = tensor_file.write(file, tensors)
    assert size == (tmp_path / "ours").stat().st_size
    with open(tmp_path / "ours", "rb") as file:
        assert tensor_file.hash_of(file) == (digest, size)
    theirs = safetensors.torch.load_file(tmp_path / "ours")
    safetensors.torch.save_file(theirs, tmp_path / "theirs", {"note": "one"})
    with open(tmp_path / "theirs", "rb") as file:
        again = tensor_file.read(file)
    for found in (theirs, again):
        assert set(found) == set(tensors)
        for name, tensor in tensors.items():
            assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
            assert tensor_file.as_bytes(found[name]) == tensor_file.as_bytes(tensor)


def test_a_dtype_without_a_code_is_named():
    with pytest.raises(ValueError, match=r"'z' is torch.complex128"):
        tensor_file.write(BytesIO(), {"z": torch.zeros(1, dtype=torch.complex128)})


@pytest.mark.parametrize("data", [b"", b"\xff" * 20, b"\2\0\0\0\0\0\0\0[]", b'\x0e\0\0\0\0\0\0\0{"a": {"b": 1}}'])
def test_another_file_is_not_taken_for_one_of_tensors(data):
    with pytest.raises(ValueError, match="not a safetensors file"):
        tensor_file.read(BytesIO(data))


def test_a_file_that_ends_early_is_no_file_of_tensors():
    file = BytesIO()
    tensor_file.write(file, {"a": torch.ones(10)})
    with pytest.raises(ValueError, match="ends before"):
        tensor_file.read(BytesIO(file.getvalue()[:-1]))


def test_a_state_comes_back_from_its_text():
    state = {"a": [1, (0.1, None, "x")], 0: {"t": torch.ones(2), "inf": float("inf")}, "empty": {}, True: False}
    text, tensors = state_json.split(state)
    again = state_json.join(json.loads(json.dumps(text)), tensors.get)
    assert torch.equal(again[0].pop("t"), state[0].pop("t")) and again == state
    assert [type(key) for key in again] == [type(key) for key in state]


# ---- randomness, batches


def draws():
    return torch.rand(1).item(), np.random.rand(), random.random()


def test_random_numbers_go_on():
    state = json.loads(json.dumps(RandomState().state_dict()))
    expected = draws()
    draws()
    RandomState().load_state_dict(state)
    assert draws() == expected
    seen = []
    for rank in (0, 1, 1):
        RandomState().load_of_other_ranks(state, rank)
        seen.append(draws())
    assert seen[1] == seen[2] and seen[0] != seen[1] and expected not in seen


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 2), (2, 3), (3, 1)])
def test_each_sample_of_an_epoch_is_seen_once_whoever_goes_on(before, after):
    data = TensorDataset(torch.arange(100), torch.arange(100))

    def taken(world_size, steps, state=None):
        ranks = [Batches(data, 12 // world_size, world_size, rank, seed=5) for rank in range(world_size)]
        for batches in ranks:
            if state:
                batches.load_state_dict(state)
        seen = [sorted(i for one in ranks for i in next(one)[0].tolist()) for _ in range(steps)]
        return seen, ranks[0].state_dict()

    whole, _ = taken(before, 20)
    first, state = taken(before, 3)
    rest, _ = taken(after, 17, json.loads(json.dumps(state)))
    assert first + rest == whole
    epoch = [i for step in whole[:8] for i in step]
    assert len(set(epoch)) == len(epoch) == 96 and whole[8] != whole[0]


def test_batches_draw_nothing_from_the_global_generator():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    batches = Batches(dataset(), 16, 2, 0)
    for _ in range(5):
        next(batches)
    assert torch.equal(torch.rand(1), expected)


def test_batches_that_cannot_be():
    with pytest.raises(ValueError, match="has 64 samples, fewer than one batch of 130"):
        Batches(dataset(), 65, 2, 0)
    batches = Batches(dataset(), 4, 3, 0)
    with pytest.raises(ValueError, match="taken=16 samples must be divisible by 3 ranks"):
        batches.load_state_dict(Batches(dataset(), 4, 4, 0).state_dict() | {"taken": 16})
