"""A file of tensors: a header says where each one's bytes lie, and nothing in it is executed.

    [n: 8 bytes][{"w": {"dtype": "F32", "shape": [4, 6], "data_offsets": [0, 96]}, ...}][bytes]

Written as a stream and hashed on the way, so nothing is held twice; read by ranges of elements.
Format: safetensors, https://huggingface.co/docs/safetensors; its own library reads and writes it.
"""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from math import prod

import torch

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "C64": torch.complex64,
}  # fmt: skip
CODES = {dtype: code for code, dtype in DTYPES.items()}
LONGEST_HEADER = 100 * 2**20  # bytes; more is no header
CHUNK = 16 * 2**20
INDEX = "model.safetensors.index.json"


def write(file, tensors, read=None):
    """Write {name: CPU tensor} to an open binary file; returns (bytes written, their SHA-256).

    read: function name -> the tensor, called when its turn has come; `tensors` then need no data.
    ValueError for a dtype that the format does not have.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header, end = {}, 0
    for name, tensor in ordered:
        if tensor.dtype not in CODES:
            raise ValueError(f"{name!r} is {tensor.dtype}: a file of tensors cannot hold that")
        offsets = [end, end := end + tensor.nbytes]
        shape = list(tensor.shape)
        header[name] = {"dtype": CODES[tensor.dtype], "shape": shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest, size = hashlib.sha256(), 8 + len(text) + end
    # Both hash and file let go of the interpreter's lock: the one works while the other waits.
    with ThreadPoolExecutor(1) as hasher:
        head = [len(text).to_bytes(8, "little"), text]
        data = (chunks(read(name) if read else tensor) for name, tensor in ordered)
        for part in chain(head, chain.from_iterable(data)):
            hashed = hasher.submit(digest.update, part)
            file.write(part)
            hashed.result()
    return size, digest.hexdigest()


def as_bytes(tensor):
    """The memory of a contiguous CPU tensor, as bytes."""
    return memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def hash_of(file, most=None):
    """(SHA-256, bytes) of an open file, from where it stands; of at most so many bytes."""
    digest, size = hashlib.sha256(), 0
    while chunk := file.read(CHUNK if most is None else min(CHUNK, most - size)):
        digest.update(chunk)
        size += len(chunk)
    return digest.hexdigest(), size


def chunks(tensor):
    memory = as_bytes(tensor)
    return [memory[start : start + CHUNK] for start in range(0, len(memory), CHUNK)]


def read_header(file):
    """{name: (dtype, shape, where its bytes begin)}; ValueError where this is no such file."""
    size = int.from_bytes(file.read(8), "little")
    if size > LONGEST_HEADER:
        raise ValueError("not a file of tensors: its header cannot be that long")
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
        raise ValueError(f"not a file of tensors: {error!r} in its header") from None
    return found


def check_room(file, found, begin):
    """ValueError where tensors lie over each other, or beyond the end of the file."""
    end = begin
    for name, (dtype, shape, start) in sorted(found.items(), key=lambda item: item[1][2]):
        if start < end:
            raise ValueError(f"{name} lies over another tensor")
        end = start + prod(shape) * dtype.itemsize
    if end > file.seek(0, 2):
        raise ValueError("the file ends before its tensors do")


def read(file):
    """{name: tensor}: all of a file."""
    found = {}
    for name, (dtype, shape, begin) in read_header(file).items():
        found[name] = torch.empty(shape, dtype=dtype)
        read_range(file, dtype, begin, 0, found[name])
    return found


def read_range(file, dtype, begin, start, out):
    """Fill `out`, [k], with elements start to start + k of the tensor whose bytes begin there."""
    file.seek(begin + start * dtype.itemsize)
    memory = as_bytes(out)
    if file.readinto(memory) != len(memory):
        raise ValueError("the file ends before its tensors do")


class TensorFile:
    """A file of tensors to read ranges from. file: open, binary.

    shapes, dtypes: {name: of the tensor}. objects: names of what is no tensor; there are none.
    """

    def __init__(self, file):
        self.file, self.objects = file, ()
        self._header = read_header(file)
        self.shapes = {name: tuple(shape) for name, (_, shape, _) in self._header.items()}
        self.dtypes = {name: dtype for name, (dtype, _, _) in self._header.items()}

    def read(self, name, start=0, stop=None):
        """Elements start to stop of a tensor, flat."""
        dtype, shape, begin = self._header[name]
        out = torch.empty((prod(shape) if stop is None else stop) - start, dtype=dtype)
        read_range(self.file, dtype, begin, start, out)
        return out


class TensorFiles:
    """The files of a folder in Hugging Face's layout, as one TensorFile.

        model.safetensors.index.json     {"weight_map": {"w1": "model-00001-of-00002.safetensors",
                                                         "w2": "model-00002-of-00002.safetensors"}}

    open_file: function name -> an open file of the folder. ValueError where the index or a file is
    not as it should be.
    """

    def __init__(self, open_file):
        self.objects = ()
        with open_file(INDEX) as file:
            self._file_of = check_index(file.read())
        names = sorted(set(self._file_of.values()))
        self._files = {name: TensorFile(open_file(name)) for name in names}
        for name, place in self._file_of.items():
            if name not in self._files[place].shapes:
                raise ValueError(f"{place} has no {name!r}, which the index places there")
        of = self._file_of.items()
        self.shapes = {name: self._files[place].shapes[name] for name, place in of}
        self.dtypes = {name: self._files[place].dtypes[name] for name, place in of}

    def read(self, name, start=0, stop=None):
        """Elements start to stop of a tensor, flat."""
        return self._files[self._file_of[name]].read(name, start, stop)

    def close(self):
        for one in self._files.values():
            one.file.close()


def check_index(data):
    """{name of a tensor: its file}; ValueError where the bytes are not such an index."""
    try:
        places = json.loads(data)["weight_map"]
        named = list(places.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{INDEX} is no index of tensors: {error!r}") from None
    for place in named:
        if type(place) is not str or not place.endswith(".safetensors") or set(place) & {*"/\\"}:
            raise ValueError(f"{INDEX} names what is not a file of the folder: {place!r}")
    return places
