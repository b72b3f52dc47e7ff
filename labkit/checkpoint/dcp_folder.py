"""Reads a folder of torch.distributed.checkpoint (DCP) without executing anything in it.

    .metadata        a pickle: names, shapes, dtypes, and where each chunk of a tensor is stored
    __0_0.distcp     written by rank 0: torch.save, one tensor after the other
    __1_0.distcp

    w [4, 6]         chunk [2, 6] at [0, 0]    __0_0.distcp, 1400 bytes from 0 on
                     chunk [2, 6] at [2, 0]    __1_0.distcp, 1400 bytes from 0 on

A pickle is a program: loading it imports and calls anything it names, os.system too. Here the few
names that .metadata needs map to Record, which only stores its arguments. Any other name is refused
before it is imported. Tensors are loaded by torch.load with weights_only. Not prevented: a hostile
file may request more memory than the machine has.

Read per rank: the chunks that overlap its ranges. Extra memory: one chunk, twice.
Format: torch/distributed/checkpoint/metadata.py and filesystem.py of PyTorch 2.11 to 2.13.
"""

import pickle
from io import BytesIO
from math import prod

import torch

PLACE = "torch.distributed.checkpoint"
KNOWN = {
    f"{PLACE}.metadata.{name}"
    for name in (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    f"{PLACE}.filesystem._StorageInfo",
    "torch.serialization._get_layout",
    "pathlib.PosixPath",
    "pathlib.WindowsPath",
    "pathlib._local.PosixPath",
    "pathlib._local.WindowsPath",
}  # fmt: skip (the last: Python 3.13)


class Record:
    """A stand-in for an object of any class. It holds only the fields from the pickle."""

    def __new__(cls, *args):
        return object.__new__(cls)

    def __init__(self, *args):
        self.fields = {}

    def __setstate__(self, fields):
        self.fields = fields

    def __getitem__(self, name):
        return self.fields[name]


class Unpickler(pickle.Unpickler):
    """An unpickler that imports nothing and calls only Record and tuple."""

    def find_class(self, module, name):
        known = vars(torch).get(name) if module == "torch" else None
        if isinstance(known, torch.dtype):
            return known
        if (module, name) == ("torch", "Size"):
            return tuple
        if f"{module}.{name}" not in KNOWN:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not in the format")
        return type(name, (Record,), {})  # a new class each time: a pickle may modify it


class DcpFolder:
    """Reads ranges of the tensors of a DCP folder.

    open_file: function name -> an open file of the folder.
    shapes, dtypes: {name: of the full tensor}. objects: names of values that are not tensors.
    paths: {name: the keys that led there in the nested dict that was saved}.
    Raises FileNotFoundError without a .metadata, ValueError if anything in it is invalid.
    """

    def __init__(self, open_file):
        self.open_file = open_file
        with open_file(".metadata") as file:
            data = file.read()
        try:
            self._take(Unpickler(BytesIO(data)).load())
        except Exception as reason:  # arbitrary bytes raise any type
            raise ValueError(f"cannot read its .metadata: {reason}") from None

    def _take(self, metadata):
        places = {}
        for index, info in metadata["storage_data"].items():
            if info.fields.get("transform_descriptors"):
                raise ValueError(
                    f"{index['fqn']!r} is compressed or encrypted, which is not supported"
                )
            place = info["relative_path"], info["offset"], info["length"]
            check_place(*place)
            places[index["fqn"], index.fields.get("offset")] = place
        self.shapes = {}
        self.dtypes = {}
        self._boxes = {}
        self.objects = {}
        self.paths = metadata["planner_data"] or {}
        if not all(type(path) is tuple for path in self.paths.values()):
            raise ValueError("its planner_data does not contain the paths of names")
        for name, entry in metadata["state_dict_metadata"].items():
            if type(entry).__name__ == "BytesStorageMetadata":
                self.objects[name] = places[name, None]
                continue
            shape = check_sizes(entry["size"])
            boxes = [(chunk["offsets"], check_sizes(chunk["sizes"])) for chunk in entry["chunks"]]
            if sum(prod(sizes) for _, sizes in boxes) != prod(shape):
                raise ValueError(f"the chunks of {name!r} do not add up to its shape {list(shape)}")
            self.shapes[name], self.dtypes[name] = shape, entry["properties"].fields[0]
            self._boxes[name] = [(*box, places[name, box[0]]) for box in boxes]

    def object(self, name):
        return self._load(*self.objects[name])

    def read(self, name, start=0, stop=None):
        """Return elements start to stop of the flattened tensor."""
        shape = self.shapes[name] or (1,)
        stop = prod(shape) if stop is None else stop
        if start == stop:
            return torch.empty(0, dtype=self.dtypes[name])
        width = prod(shape[1:])
        first, last = start // width, -(-stop // width)
        # Zeros, as overlapping chunks would leave some elements uninitialized.
        rows = torch.zeros(last - first, *shape[1:], dtype=self.dtypes[name])
        missing = rows.numel()
        for offsets, sizes, place in self._boxes[name]:
            top, *sides = offsets or (0,)
            height, *widths = sizes or (1,)
            begin, end = max(top, first), min(top + height, last)
            if begin < end:
                box = self._load(*place)
                if not is_plain(box, sizes, rows.dtype):
                    raise ValueError(f"{place[0]} does not contain {name!r} at its offset")
                columns = [slice(s, s + w) for s, w in zip(sides, widths, strict=True)]
                into = rows[(slice(begin - first, end - first), *columns)]
                into.copy_(box.view(height, *widths)[begin - top : end - top])
                missing -= into.numel()
        if missing:
            raise ValueError(f"{missing} elements of {name!r} are missing from all files")
        return rows.view(-1)[start - first * width : stop - first * width]

    def _load(self, file_name, offset, length):
        with self.open_file(file_name) as file:
            file.seek(offset)
            data = BytesIO(file.read(length))
        if data.getvalue()[8:10] == b'{"':
            raise ValueError(
                f"{file_name} was written with SerializationFormat.SAFETENSORS: "
                "save with SerializationFormat.TORCH_SAVE, the default"
            )
        try:
            return torch.load(data, map_location="cpu", weights_only=True)
        except Exception:  # PyTorch's message recommends weights_only=False
            raise ValueError(
                f"cannot read {file_name} at offset {offset}: it is damaged or not a plain tensor"
            ) from None


def is_plain(value, shape, dtype):
    """Return whether value is a CPU tensor with data, of that shape and dtype."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return False
    return (value.shape, value.dtype, value.device.type) == (shape, dtype, "cpu")


def check_place(name, offset, length):
    """Raise ValueError unless the place is a byte range of a file in this folder."""
    if type(name) is not str or "/" in name or "\\" in name or name in ("", ".", ".."):
        raise ValueError(f"{name!r} is not a file of the folder")
    check_sizes((offset, length))


def check_sizes(sizes):
    if type(sizes) is not tuple or not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"{sizes!r} must be a tuple of integers >= 0")
    return sizes
