"""Checkpoints: each rank writes its own file; the manifest, written last, makes them valid.

    rank 0   write rank-0.part, fsync, rename -> rank-0.bin ---\\
    rank 1   write rank-1.part, fsync, rename -> rank-1.bin ----+-- all hashes --> manifest.json

A run that is killed at any moment leaves the previous checkpoint valid: a file has its final name
only when all of it is on the disk, and a step without a manifest does not count. A flipped bit
changes the SHA-256, and the step is skipped by all ranks. labkit.checkpoint also stores which
elements of a tensor each file holds, so that 3 ranks can load what 4 ranks have saved.
Pillai et al., All File Systems Are Not Created Equal, OSDI 2014 (write, fsync, rename).
"""

import hashlib
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

from labkit import comm


def write_whole(path, data):
    """Write the file under another name, and rename it when all of it is on the disk."""
    part = path.with_suffix(".part")
    with open(part, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def to_bytes(tensors):
    """Return a line of JSON with dtypes and shapes, then the elements of all tensors."""
    index = {
        name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()
    }
    flat = [t.detach().cpu().contiguous().flatten().view(torch.uint8) for t in tensors.values()]
    return json.dumps(index).encode() + b"\n" + b"".join(bytes(t.numpy()) for t in flat)


def from_bytes(data):
    """Return the tensors, {name: tensor}, from the bytes of to_bytes()."""
    head, _, elements = data.partition(b"\n")
    elements, tensors = bytearray(elements), {}
    for name, (dtype, shape) in json.loads(head).items():
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        if tensor.nbytes:
            tensor.view(-1).view(torch.uint8)[:] = torch.frombuffer(elements, dtype=torch.uint8)[
                : tensor.nbytes
            ]
            del elements[: tensor.nbytes]
        tensors[name] = tensor
    return tensors


def save_shards(folder, step, tensors, group=None):
    """Save this rank's tensors, {name: tensor}, as its part of the checkpoint of a step."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    place = Path(folder, f"step-{step:09d}")
    place.mkdir(parents=True, exist_ok=True)
    data = to_bytes(tensors)
    write_whole(place / f"rank-{rank}.bin", data)
    digest = torch.tensor(list(hashlib.sha256(data).digest()), device=comm.device(group))
    digests = digest.new_empty(n * len(digest))
    comm.all_gather(digests, digest, group)  # when it returns, all files are written
    if rank == 0:
        listed = [bytes(part.tolist()).hex() for part in digests.cpu().split(len(digest))]
        write_whole(place / "manifest.json", json.dumps(listed).encode())
    comm.barrier(group)


def load_shards(folder, group=None):
    """Load the latest valid checkpoint: (step, {name: tensor}), or None if there is none.

    All ranks skip a step if the file of any is damaged. ValueError: another number of ranks.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    for manifest in sorted(Path(folder).glob("step-*/manifest.json"), reverse=True):
        hashes = json.loads(manifest.read_bytes())
        if len(hashes) != n:  # labkit.checkpoint.Checkpoints loads it on any number of ranks
            raise ValueError(f"{manifest.parent} was saved by {len(hashes)} ranks, not {n}")
        file = manifest.parent / f"rank-{rank}.bin"
        data = file.read_bytes() if file.exists() else b""
        is_bad = hashlib.sha256(data).hexdigest() != hashes[rank]
        damaged = torch.tensor(int(is_bad), device=comm.device(group))
        comm.all_reduce(damaged, group=group)
        if not damaged:
            return int(manifest.parent.name.removeprefix("step-")), from_bytes(data)
    return None
