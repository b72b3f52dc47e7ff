"""FSDP(offload=folder): shards, gradients and states in unnamed files train the same bits and leave nothing behind."""

import errno
import os
import re
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from labkit import models
from labkit.fsdp import FSDP
from labkit.fsdp.flat_param import room
from labkit.memory.memory_tracker import MemoryTracker
from labkit.models.gpt import Block
from labkit.offload import Offloaded

MIB = 2**20


def gpt(seed=0):
    torch.manual_seed(seed)
    return models.build("gpt", "tiny", vocab=31, context=16)


def tokens(rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    whole = torch.randint(31, (4, 9), generator=generator)
    return whole[:, :-1], whole[:, 1:]


def step(model, optimizer, rank, number):
    """Two micro-batches, of which the first keeps its gradients, and clipping."""
    optimizer.zero_grad()
    for micro in range(2):
        inputs, targets = tokens(rank, 2 * number + micro)
        loss = models.loss("gpt")
        if micro == 0:
            with model.no_sync():
                loss(model(inputs), targets).backward()
        else:
            loss(model(inputs), targets).backward()
            loss(model(inputs), targets).backward()  # adds to the gradients in the file
    model.clip_grad_norm_(0.1)
    optimizer.step()


def made(rank, offload, **settings):
    model = FSDP(gpt(rank), Block, offload=offload, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, Offloaded(optimizer, to=offload) if model.sharding.folder else optimizer


def mapped(tensor):
    return tensor.untyped_storage().filename is not None


def same(ours, theirs):
    return list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)


def trained(rank, world_size, folder, settings):
    found = {}
    for offload in (False, True, folder):
        model, optimizer = made(rank, offload, **settings)
        for number in range(3):
            step(model, optimizer, rank, number)
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        found[offload] = model.full_state_dict(), grads, optimizer.state_dict()["state"]
    for name, p in model.named_parameters():
        if p.numel():
            states = [value for value in optimizer.state[p].values() if value.dim()]
            assert all(mapped(t) for t in (p, p.grad, *states)), f"rank {rank}, {name}"
    assert os.listdir(folder) == [], f"rank {rank}"  # the files have no names
    for other in (False, True):
        (weights, grads, states), theirs = found[folder], found[other]
        assert same(weights, theirs[0]) and same(grads, theirs[1]), f"rank {rank}, offload={other}"
        assert all(same(states[number], state) for number, state in theirs[2].items()), f"rank {rank}, offload={other}"


SETTINGS = {
    "full": {},
    "grad_op": {"shard": "grad_op"},
    "small ones persist": {"persistence_threshold": 99},
    "bf16": {"param_dtype": torch.bfloat16},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_shards_in_files_train_the_same_bits(ranks, tmp_path, world_size, settings):
    ranks(world_size, trained, folder=str(tmp_path), settings=settings)


def moved_and_loaded(rank, world_size, folder):
    model, optimizer = made(rank, folder)
    step(model, optimizer, rank, 0)
    own = {name: value.clone() for name, value in model.state_dict().items()}
    whole = model.full_state_dict()
    other, _ = made(rank + 9, folder)
    other.load_state_dict(own)
    assert same(other.full_state_dict(), whole), f"rank {rank}"
    plain, _ = made(rank + 9, False)
    plain.load_full_state_dict(whole)
    assert same(plain.full_state_dict(), whole), f"rank {rank}"
    other.load_full_state_dict(plain.full_state_dict())
    assert all(mapped(p) for p in other.parameters() if p.numel()), f"rank {rank}"
    other.double()
    assert all(mapped(p) and p.dtype == torch.float64 for p in other.parameters() if p.numel()), f"rank {rank}"
    assert same(other.full_state_dict(), {name: value.double() for name, value in whole.items()}), f"rank {rank}"


def test_state_dicts_go_from_files_to_memory_and_back(ranks, tmp_path):
    ranks(2, moved_and_loaded, folder=str(tmp_path))


# ---- what is held


def anonymous(tensor):
    """Bytes of the mapping that holds a tensor that no file backs, as Linux counts them."""
    for mapping in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        first, last = (int(end, 16) for end in mapping.split(maxsplit=1)[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return int(re.search(r"^Anonymous:\s+(\d+) kB", mapping, re.MULTILINE).group(1)) * 1024
    raise LookupError(f"no mapping holds {tensor.data_ptr():#x}")


def wide():
    return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))


def held(rank, world_size, folder, in_files):
    model = FSDP(wide(), nn.Linear, offload=folder if in_files else True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    size = sum(flat.shard.nbytes for flat in model.flats)
    assert size == 16 * MIB, f"rank {rank}"
    with MemoryTracker(model) as tracker:
        pass
    assert tracker.peak_total == (0 if in_files else 2 * size), f"rank {rank}"
    for p in model.parameters():
        assert (anonymous(p) == 0) is in_files, f"rank {rank}"
        assert (anonymous(p.grad) == 0) is in_files, f"rank {rank}"


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="needs Linux")
@pytest.mark.parametrize("in_files", [True, False])
def test_shards_and_gradients_are_not_in_anonymous_memory(ranks, tmp_path, in_files):
    ranks(2, held, folder=str(tmp_path), in_files=in_files)


def killed(folder):
    """Train in a process of its own, which kills itself with its files open."""
    model = gpt()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    model = FSDP(model, Block, offload=folder)
    model(tokens(0, 0)[0]).sum().backward()
    assert all(mapped(p) for p in model.parameters())
    os.kill(os.getpid(), signal.SIGKILL)


def test_nothing_is_left_after_a_kill(tmp_path):
    process = torch.multiprocessing.get_context("spawn").Process(target=killed, args=(str(tmp_path),))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


# ---- errors


def refused(rank, world_size, folder):
    """The folder of rank 1 is full: both ranks say so, in one line."""
    import labkit.fsdp.flat_param as module

    def full(nbytes, to, device):
        if rank == 1:
            raise OSError(errno.ENOSPC, f"cannot offload {nbytes:,} bytes to {to}: No space left on device")
        return room(nbytes, to, device)

    with pytest.raises(OSError, match=r"cannot offload to the folder .*/missing: No such file or directory"):
        FSDP(gpt(), Block, offload=f"{folder}/missing")
    module.room = full
    try:
        with pytest.raises(OSError if rank == 1 else ValueError, match=r"cannot offload [\d,]+ bytes .*No space left"):
            FSDP(gpt(), Block, offload=folder)
    finally:
        module.room = room
    assert os.listdir(folder) == []


def test_a_folder_that_is_full_or_missing_is_said_on_all_ranks(ranks, tmp_path):
    ranks(2, refused, folder=str(tmp_path))
