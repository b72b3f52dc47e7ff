"""A folder of torch.distributed.checkpoint (DCP), read without executing anything in it.

    .metadata        a pickle: names, shapes, dtypes, and which box of which tensor is where
    __0_0.distcp     what rank 0 wrote: torch.save, one tensor after the other
    __1_0.distcp

    w [4, 6]         box [2, 6] at [0, 0]    __0_0.distcp, 1400 bytes from 0 on
                     box [2, 6] at [2, 0]    __1_0.distcp, 1400 bytes from 0 on

A pickle is a program: to load it is to import and call whatever it names, os.system too. Here the
few names that .metadata needs stand for a Record, which keeps what it is given and does nothing;
another name is refused before it is imported. Tensors: torch.load with weights_only. Not prevented:
a hostile file may ask for more memory than there is.

Read per rank: the boxes that overlap what it asks for. Held besides: one of them, twice.
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
    """Stands for an object of any class: it is only what the pickle says of it."""

    def __new__(cls, *args):
        return object.__new__(cls)

    def __init__(self, *args):
        self.fields = {}

    def __setstate__(self, fields):
        self.fields = fields

    def __getitem__(self, name):
        return self.fields[name]


class Unpickler(pickle.Unpickler):
    """Imports nothing, and calls nothing but Record and tuple."""

    def find_class(self, module, name):
        known = vars(torch).get(name) if module == "torch" else None
        if isinstance(known, torch.dtype):
            return known
        if (module, name) == ("torch", "Size"):
            return tuple
        if f"{module}.{name}" not in KNOWN:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no such folder needs")
        return type(name, (Record,), {})  # anew: a pickle may also change what it has found


class DcpFolder:
    """To read ranges of its tensors. open_file: function name -> an open file of the folder.

    shapes, dtypes: {name: of the tensor}. objects: names of what is no tensor.
    paths: {name: the keys that led there in the nested dict that was saved}.
    FileNotFoundError where there is no .metadata, ValueError where anything in it is not as it
    should be.
    """

    def __init__(self, open_file):
        self.open_file = open_file
        with open_file(".metadata") as file:
            data = file.read()
        try:
            self._take(Unpickler(BytesIO(data)).load())
        except Exception as reason:  # whatever bytes that are no pickle lead to
            raise ValueError(f"its .metadata cannot be read: {reason}") from None

    def _take(self, metadata):
        places = {}
        for index, info in metadata["storage_data"].items():
            if info.fields.get("transform_descriptors"):
                raise ValueError(f"{index['fqn']!r} is compressed or encrypted")
            place = info["relative_path"], info["offset"], info["length"]
            check_place(*place)
            places[index["fqn"], index.fields.get("offset")] = place
        self.shapes, self.dtypes, self._boxes, self.objects = {}, {}, {}, {}
        self.paths = metadata["planner_data"] or {}
        if not all(type(path) is tuple for path in self.paths.values()):
            raise ValueError("it does not say where names stood")
        for name, entry in metadata["state_dict_metadata"].items():
            if type(entry).__name__ == "BytesStorageMetadata":
                self.objects[name] = places[name, None]
                continue
            shape = check_sizes(entry["size"])
            boxes = [(chunk["offsets"], check_sizes(chunk["sizes"])) for chunk in entry["chunks"]]
            if sum(prod(sizes) for _, sizes in boxes) != prod(shape):
                raise ValueError(f"the parts of {name!r} are not all there")
            self.shapes[name], self.dtypes[name] = shape, entry["properties"].fields[0]
            self._boxes[name] = [(*box, places[name, box[0]]) for box in boxes]

    def object(self, name):
        return self._load(*self.objects[name])

    def read(self, name, start=0, stop=None):
        """Elements start to stop of a tensor, flat."""
        shape = self.shapes[name] or (1,)
        stop = prod(shape) if stop is None else stop
        if start == stop:
            return torch.empty(0, dtype=self.dtypes[name])
        width = prod(shape[1:])
        first, last = start // width, -(-stop // width)
        # Zeros: boxes that lie over each other would leave elements as they were in memory.
        rows = torch.zeros(last - first, *shape[1:], dtype=self.dtypes[name])
        missing = rows.numel()
        for offsets, sizes, place in self._boxes[name]:
            top, *sides = offsets or (0,)
            height, *widths = sizes or (1,)
            begin, end = max(top, first), min(top + height, last)
            if begin < end:
                box = self._load(*place)
                if not is_plain(box, sizes, rows.dtype):
                    raise ValueError(f"{place[0]} has something else where {name!r} should be")
                beside = [slice(s, s + w) for s, w in zip(sides, widths, strict=True)]
                into = rows[(slice(begin - first, end - first), *beside)]
                into.copy_(box.view(height, *widths)[begin - top : end - top])
                missing -= into.numel()
        if missing:
            raise ValueError(f"{name!r}: {missing} of its elements are in no file")
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
        except Exception:  # PyTorch's own words would tell to switch weights_only off
            raise ValueError(
                f"{file_name} cannot be read at {offset}: it is damaged, or no plain tensor"
            ) from None


def is_plain(value, shape, dtype):
    """A tensor with data, of that shape and dtype."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return False
    return (value.shape, value.dtype, value.device.type) == (shape, dtype, "cpu")


def check_place(name, offset, length):
    """ValueError where it is not a part of a file in this very folder."""
    if type(name) is not str or "/" in name or "\\" in name or name in ("", ".", ".."):
        raise ValueError(f"{name!r} is not a file of the folder")
    check_sizes((offset, length))


def check_sizes(sizes):
    if type(sizes) is not tuple or not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"{sizes!r} are not sizes")
    return sizes
