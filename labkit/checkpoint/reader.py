"""Reads any range of any tensor of a checkpoint, from all files that hold parts of it.

    manifest   w1, [4, 6]:  elements 0-12 in rank-0.safetensors, 12-24 in rank-1.safetensors
    read(w1, 8, 20)                   [8 ...... 12)           [12 ........ 20)

Read per rank: the requested ranges and the headers.
"""

import json
from contextlib import ExitStack
from math import prod

import torch

from labkit.checkpoint import state_json, tensor_file


class Reader:
    """Reads a checkpoint for one rank. A context manager, which closes the files at its end."""

    def __init__(self, store, folder, manifest, rank, world_size):
        self.store = store
        self.folder = folder
        self.manifest = manifest
        self.rank = rank
        self.alike = manifest["world_size"] == world_size  # saved by as many ranks as load
        self._files = {}
        self._open = ExitStack()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._open.close()

    def of(self, name):
        """Return the saved part of one entry of the state, as Saved."""
        return Saved(self, name)

    def file(self, name):
        """Return (open file, its header)."""
        if name not in self._files:
            file = self._open.enter_context(self.store.open(f"{self.folder}/{name}"))
            self._files[name] = file, tensor_file.read_header(file)
        return self._files[name]


class Saved:
    """One entry of a saved state. shapes, dtypes: {name: of the full tensor}."""

    def __init__(self, reader, name):
        self.reader, self.prefix = reader, f"{name}:"
        index = reader.manifest["index"]
        self.entries = {
            key.removeprefix(self.prefix): entry
            for key, entry in index.items()
            if key.startswith(self.prefix)
        }
        self.shapes = {key: entry["shape"] for key, entry in self.entries.items()}
        codes = {key: entry["dtype"] for key, entry in self.entries.items()}
        self.dtypes = {key: tensor_file.DTYPES[code] for key, code in codes.items()}
        texts = reader.manifest["plain"].get(name)
        self.there = texts is not None
        self.by_rank = self.there and len(texts["texts"]) > 1
        if self.there:
            number = texts["of"][reader.rank if reader.alike else 0]
            self.plain = json.loads(texts["texts"][number])

    @property
    def text(self):
        """The saved state without its tensors."""
        return state_json.join(self.plain, lambda path: None)

    @property
    def foreign(self):
        """Names of per-rank state, if the checkpoint was saved by another number of ranks."""
        per_rank = [key for key, entry in self.entries.items() if entry["by_rank"]]
        return [] if self.reader.alike else per_rank + ["numbers"] * self.by_rank

    def read(self, key, start=0, stop=None):
        """Return elements start to stop of the flattened full tensor.

        Per-rank state (BatchNorm's statistics, residuals): this rank's own, or rank 0's if the
        number of ranks has changed.
        """
        entry, dtype = self.entries[key], self.dtypes[key]
        stop = prod(entry["shape"]) if stop is None else stop
        out = torch.empty(stop - start, dtype=dtype)
        missing = stop - start
        rank = self.reader.rank if self.reader.alike else 0
        for file_name, first, last, ranks in entry["parts"]:
            begin, end = max(first, start), min(last, stop)
            if begin < end and (ranks is None or rank in ranks):
                file, header = self.reader.file(file_name)
                held, shape, offset = header.get(f"{self.prefix}{key}@{first}", (None, (), 0))
                if held != dtype or prod(shape) != last - first:
                    raise ValueError(f"{file_name} does not contain {key!r} at its offset")
                part = out[begin - start : end - start]
                tensor_file.read_range(file, dtype, offset, begin - first, part)
                missing -= end - begin
        if missing:
            raise ValueError(f"{missing} elements of {key!r} are missing from all files")
        return out
