"""The manifest of a checkpoint: which elements of each tensor are in which file, and its hash.

    {"step": 30, "world_size": 2, "metrics": {"loss": 1.9},
     "files": [{"name": "rank-0.safetensors", "bytes": 4096, "xxh3_128": ...}, ...],
     "plain": {"optimizer": values that are not tensors, by rank where ranks differ}, ...},
     "index": {"model:w1": F32, [4, 6], elements 0-12 in rank 0's, 12-24 in rank 1's}, ...}}

The manifest is written last and makes the checkpoint valid. It begins with its own SHA-256, which
detects damage but not intent: a manifest may come from a stranger. So names must stay in its
folder, parts must fit their files and cover each tensor exactly once, and no read exceeds the
declared length.
"""

import hashlib
import json
from math import prod

from labkit.checkpoint import tensor_file

NAME = "manifest.json"
FORMAT = 2
OLDER = (1,)  # always has the SHA-256 of each file
LONGEST = 2**30  # bytes; a longer file is not a manifest


def facts(file, pieces, plain):
    """Describe one rank's file. pieces: {key: (Piece, ranks that hold this version, or None)}."""
    parts = {}
    for key, (piece, ranks) in pieces.items():
        code, stop = tensor_file.CODES[piece.values.dtype], piece.start + piece.values.numel()
        parts[key] = [code, piece.shape, piece.start, stop, ranks]
    texts = {name: json.dumps(value) for name, value in plain.items()}
    return {"file": file, "parts": parts, "plain": texts}


def merge(facts_of_ranks, **about):
    """Merge the facts of all ranks into the manifest.

    Raises ValueError if the parts do not form complete tensors, as nobody could load them.
    """
    index, plain = {}, {}
    for rank, one in enumerate(facts_of_ranks):
        for key, (dtype, shape, start, stop, ranks) in one["parts"].items():
            new = {"dtype": dtype, "shape": shape, "by_rank": False, "parts": []}
            entry = index.setdefault(key, new)
            if entry["shape"] != shape or entry["dtype"] != dtype:
                before = f"{entry['dtype']} {entry['shape']}"
                raise ValueError(
                    f"{key!r} is {dtype} {shape} on rank {rank}, but {before} on lower ranks"
                )
            entry["by_rank"] |= ranks is not None
            entry["parts"].append([one["file"]["name"], start, stop, ranks])
        for name, text in one["plain"].items():
            texts = plain.setdefault(name, {"texts": [], "of": [0] * len(facts_of_ranks)})
            if text not in texts["texts"]:
                texts["texts"].append(text)
            texts["of"][rank] = texts["texts"].index(text)
    files = [one["file"] for one in facts_of_ranks]
    manifest = {"format": FORMAT, **about, "files": files, "plain": plain, "index": index}
    check(manifest)
    return manifest


def check(manifest):
    """Raise ValueError, KeyError or TypeError if a reader would fail or read outside the files."""
    room = {}  # {file: bytes that no part uses}
    lineage = manifest.get("lineage", [])
    for step, serial in [*lineage, (manifest["step"], manifest.get("serial", 0))]:
        whole_number(step)
        whole_number(serial)
    for file in manifest["files"]:
        name = file["name"]
        if type(name) is not str or name in ("", ".", "..", NAME) or {"/", "\\"} & set(name):
            raise ValueError(f"{name!r} is not the name of a file in its folder")
        room[name] = whole_number(file["bytes"])
        hash_kind(file)
    for key, entry in manifest["index"].items():
        numel = prod(map(whole_number, entry["shape"]))
        width = tensor_file.DTYPES[entry["dtype"]].itemsize
        for name, start, stop, _ in entry["parts"]:
            if name not in room:
                raise ValueError(
                    f"a part of {key!r} is in {name!r}, which is not in its list of files"
                )
            room[name] -= (whole_number(stop) - whole_number(start)) * width
        for rank in range(manifest["world_size"]) if entry["by_rank"] else [None]:
            check_tiles(key, entry["parts"], rank, numel)
    if too_full := [name for name, left in room.items() if left < 0]:
        raise ValueError(f"{too_full[0]} is shorter than its parts")


def check_tiles(key, parts, rank, numel):
    """Raise ValueError unless the parts cover each element once. rank: whose parts; None: all."""
    spans = [(start, stop) for _, start, stop, of in parts if rank is None or not of or rank in of]
    end = 0
    for start, stop in sorted(spans):
        if start != end or stop < start:
            raise ValueError(f"the parts of {key!r} overlap or have gaps")
        end = stop
    if end != numel and (spans or rank is None):  # some ranks may have no per-rank state
        raise ValueError(f"{key!r} has {numel} elements, but its parts have {end}")


def hash_kind(file):
    """Return which of HASHES a file's entry has. ValueError if it has none."""
    kinds = [kind for kind in tensor_file.HASHES if kind in file]
    if not kinds:
        raise ValueError(f"{file['name']!r} has none of the hashes {', '.join(tensor_file.HASHES)}")
    return kinds[0]


def whole_number(value):
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} must be an integer >= 0")
    return value


def write(store, folder, manifest):
    """Write the manifest of a folder, durably. Return its SHA-256."""
    text = json.dumps(manifest)
    digest = hashlib.sha256(text.encode()).hexdigest()
    store.write(f"{folder}/{NAME}", lambda file: file.write(f"{digest}\n{text}".encode()))
    return digest


def read(store, folder, written=("", None)):
    """Return (manifest, "") or (None, reason).

    written: (SHA-256, manifest) of what this run wrote there. The same text is not parsed again.
    """
    try:
        with store.open(f"{folder}/{NAME}") as file:
            digest, _, text = file.read(LONGEST).partition(b"\n")
    except FileNotFoundError:
        return None, "it has no manifest: saving was interrupted"
    except Exception as reason:  # fsspec file systems raise any type
        return None, f"cannot read its manifest: {reason}"
    if hashlib.sha256(text).hexdigest().encode() != digest:
        return None, "its manifest is damaged"
    if digest.decode() == written[0]:
        return written[1], ""
    try:
        manifest = json.loads(text)
        if manifest["format"] not in (FORMAT, *OLDER):
            return None, f"its format is {manifest['format']}, but this version reads {FORMAT}"
        check(manifest)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as reason:
        return None, f"its manifest is invalid: {reason}"
    return manifest, ""


def checked(store, folder, rank=0, n=1):
    """Return (manifest, "") or (None, reason). Of n ranks, each checks a part of the files."""
    manifest, why = read(store, folder)
    for file in manifest["files"][rank::n] if manifest else []:
        why = why or damage(store, folder, file)
    return (None, why) if why else (manifest, "")


def files(store, folder):
    """Return the file names of the manifest; none if it cannot be read."""
    manifest, _ = read(store, folder)
    return [file["name"] for file in manifest["files"]] if manifest else []


def damage(store, folder, file):
    """Return why a file differs from the manifest, or ""."""
    name = file["name"]
    kind = hash_kind(file)
    try:
        size = store.size(f"{folder}/{name}")
        if size == file["bytes"]:
            with store.open(f"{folder}/{name}") as opened:
                digest, size = tensor_file.hash_of(opened, size + 1, kind)
    except FileNotFoundError:
        return f"{name} is missing"
    except Exception as reason:  # fsspec file systems raise any type
        return f"cannot read {name}: {reason}"
    if size != file["bytes"]:
        return f"{name} has {size} bytes instead of {file['bytes']}"
    return "" if digest == file[kind] else f"{name} is damaged: its hash differs"
