"""A safetensors file: a header gives the byte range of each tensor. Reading executes nothing.

    [n: 8 bytes][{"w": {"dtype": "F32", "shape": [4, 6], "data_offsets": [0, 96]}, ...}][bytes]

Written as a stream and hashed on the way, so no data is copied; read by ranges of elements. XXH3
(https://xxhash.com) finds damage as SHA-256 does, and costs less than copying the bytes.
Format: safetensors, https://huggingface.co/docs/safetensors; its own library reads and writes it.
"""

import hashlib
import json
from itertools import chain
from math import prod

import torch

try:
    from xxhash import xxh3_128
except ImportError:  # a node where nothing can be installed
    HASHES = {"sha256": hashlib.sha256}
else:
    HASHES = {"xxh3_128": xxh3_128, "sha256": hashlib.sha256}

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "C64": torch.complex64,
}  # fmt: skip
CODES = {dtype: code for code, dtype in DTYPES.items()}
LONGEST_HEADER = 100 * 2**20  # bytes
CHUNK = 2**20  # bytes; hashed and written while they are in the cache
HASH = next(iter(HASHES))  # of new files; older checkpoints have SHA-256
INDEX = "model.safetensors.index.json"


def write(file, tensors, read=None):
    """Write {name: CPU tensor} to an open binary file. Returns (size in bytes, hash of kind HASH).

    read: function name -> tensor, called when the tensor is written; `tensors` then need no data.
    Raises ValueError for a dtype that the format does not support.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header, end = {}, 0
    for name, tensor in ordered:
        if tensor.dtype not in CODES:
            raise ValueError(f"{name!r} is {tensor.dtype}, which safetensors does not support")
        offsets = [end, end := end + tensor.nbytes]
        shape = list(tensor.shape)
        header[name] = {"dtype": CODES[tensor.dtype], "shape": shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    head = [len(text).to_bytes(8, "little"), text]
    data = (chunks(read(name) if read else tensor) for name, tensor in ordered)
    digest = HASHES[HASH]()
    for part in chain(head, chain.from_iterable(data)):
        digest.update(part)
        file.write(part)
    return 8 + len(text) + end, digest.hexdigest()


def as_bytes(tensor):
    """Return the memory of a contiguous CPU tensor as bytes."""
    return memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def hash_of(file, most=None, kind=HASH):
    """Return (hash, bytes read) of an open file from its position on.

    most: number of bytes to read. kind: of HASHES.
    """
    digest, size = HASHES[kind](), 0
    while chunk := file.read(CHUNK if most is None else min(CHUNK, most - size)):
        digest.update(chunk)
        size += len(chunk)
    return digest.hexdigest(), size


def chunks(tensor):
    memory = as_bytes(tensor)
    return [memory[start : start + CHUNK] for start in range(0, len(memory), CHUNK)]


def read_header(file):
    """Return {name: (dtype, shape, offset of its bytes)}. ValueError if the file is invalid."""
    size = int.from_bytes(file.read(8), "little")
    if size > LONGEST_HEADER:
        raise ValueError(
            f"not a safetensors file: a header of {size} bytes exceeds {LONGEST_HEADER}"
        )
    try:
        header = json.loads(file.read(size))
        found = {}
        for name, entry in header.items():
            if name != "__metadata__":
                dtype, shape = DTYPES[entry["dtype"]], entry["shape"]
                begin, end = entry["data_offsets"]
                sizes = [begin, *shape]
                if not all(type(size) is int and size >= 0 for size in sizes):
                    raise ValueError(name)
                if end - begin != prod(shape) * dtype.itemsize:
                    raise ValueError(name)
                found[name] = dtype, shape, 8 + size + begin
        check_room(file, found, 8 + size)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a safetensors file: {error!r} in its header") from None
    return found


def check_room(file, found, begin):
    """Raise ValueError if tensors overlap or exceed the file."""
    end = begin
    for name, (dtype, shape, start) in sorted(found.items(), key=lambda item: item[1][2]):
        if start < end:
            raise ValueError(f"{name} overlaps another tensor")
        end = start + prod(shape) * dtype.itemsize
    if end > file.seek(0, 2):
        raise ValueError("the file ends before its tensors do")


def read(file):
    """Read a complete file as {name: tensor}."""
    found = {}
    for name, (dtype, shape, begin) in read_header(file).items():
        found[name] = torch.empty(shape, dtype=dtype)
        read_range(file, dtype, begin, 0, found[name])
    return found


def read_range(file, dtype, begin, start, out):
    """Fill `out`, [k], with elements start to start + k of the tensor at byte `begin`."""
    file.seek(begin + start * dtype.itemsize)
    memory = as_bytes(out)
    if file.readinto(memory) != len(memory):
        raise ValueError("the file ends before its tensors do")


class TensorFile:
    """Reads ranges of the tensors of a file. file: open, binary.

    shapes, dtypes: {name: of the tensor}. objects: names of values that are not tensors; empty.
    """

    def __init__(self, file):
        self.file, self.objects = file, ()
        self._header = read_header(file)
        self.shapes = {name: tuple(shape) for name, (_, shape, _) in self._header.items()}
        self.dtypes = {name: dtype for name, (dtype, _, _) in self._header.items()}

    def read(self, name, start=0, stop=None):
        """Return elements start to stop of a flattened tensor."""
        dtype, shape, begin = self._header[name]
        out = torch.empty((prod(shape) if stop is None else stop) - start, dtype=dtype)
        read_range(self.file, dtype, begin, start, out)
        return out


class TensorFiles:
    """The files of a folder in Hugging Face's layout, read as one TensorFile.

        model.safetensors.index.json     {"weight_map": {"w1": "model-00001-of-00002.safetensors",
                                                         "w2": "model-00002-of-00002.safetensors"}}

    open_file: function name -> an open file of the folder. ValueError if the index or a file is
    invalid.
    """

    def __init__(self, open_file):
        self.objects = ()
        with open_file(INDEX) as file:
            self._file_of = check_index(file.read())
        names = sorted(set(self._file_of.values()))
        self._files = {name: TensorFile(open_file(name)) for name in names}
        for name, place in self._file_of.items():
            if name not in self._files[place].shapes:
                raise ValueError(f"{place} does not contain {name!r}, although the index says so")
        of = self._file_of.items()
        self.shapes = {name: self._files[place].shapes[name] for name, place in of}
        self.dtypes = {name: self._files[place].dtypes[name] for name, place in of}

    def read(self, name, start=0, stop=None):
        """Return elements start to stop of a flattened tensor."""
        return self._files[self._file_of[name]].read(name, start, stop)

    def close(self):
        for one in self._files.values():
            one.file.close()


def check_index(data):
    """Return {name of a tensor: its file}. ValueError if the bytes are not an index."""
    try:
        places = json.loads(data)["weight_map"]
        named = list(places.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{INDEX} is not an index of tensors: {error!r}") from None
    for place in named:
        if type(place) is not str or not place.endswith(".safetensors") or set(place) & {*"/\\"}:
            raise ValueError(f"{INDEX} names {place!r}, which is not a file of its folder")
    return places
