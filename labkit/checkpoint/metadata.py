"""The manifest of a checkpoint: which elements of which whole are in which file, and its SHA-256.

    {"step": 30, "world_size": 2, "metrics": {"loss": 1.9},
     "files": [{"name": "rank-0.safetensors", "bytes": 4096, "sha256": ...}, ...],
     "plain": {"optimizer": what is no tensor, by rank where ranks differ}, ...},
     "index": {"model:w1": F32, [4, 6], elements 0-12 in rank 0's, 12-24 in rank 1's}, ...}}

Written last, it makes the files a checkpoint; it begins with its own SHA-256. That tells of damage,
not of intent: a manifest may come from a stranger. So names stay in its folder, parts fit their
files and cover each tensor exactly once, and nothing longer than what it declares is read.
"""

import hashlib
import json
from math import prod

from labkit.checkpoint import tensor_file

NAME, FORMAT = "manifest.json", 1
LONGEST = 2**30  # bytes of a manifest; more is none


def facts(file, pieces, plain):
    """What one rank has written. pieces: {key: (Piece, ranks that have this version, or None)}."""
    parts = {}
    for key, (piece, ranks) in pieces.items():
        code, stop = tensor_file.CODES[piece.values.dtype], piece.start + piece.values.numel()
        parts[key] = [code, piece.shape, piece.start, stop, ranks]
    texts = {name: json.dumps(value) for name, value in plain.items()}
    return {"file": file, "parts": parts, "plain": texts}


def merge(told, **about):
    """The manifest, of the facts of all ranks.

    ValueError where they do not make wholes: nobody could load that.
    """
    index, plain = {}, {}
    for rank, one in enumerate(told):
        for key, (dtype, shape, start, stop, ranks) in one["parts"].items():
            new = {"dtype": dtype, "shape": shape, "by_rank": False, "parts": []}
            entry = index.setdefault(key, new)
            if entry["shape"] != shape or entry["dtype"] != dtype:
                before = f"{entry['dtype']} {entry['shape']} on ranks before it"
                raise ValueError(f"{key!r} is {dtype} {shape} on rank {rank}, and {before}")
            entry["by_rank"] |= ranks is not None
            entry["parts"].append([one["file"]["name"], start, stop, ranks])
        for name, text in one["plain"].items():
            texts = plain.setdefault(name, {"texts": [], "of": [0] * len(told)})
            if text not in texts["texts"]:
                texts["texts"].append(text)
            texts["of"][rank] = texts["texts"].index(text)
    files = [one["file"] for one in told]
    found = {"format": FORMAT, **about, "files": files, "plain": plain, "index": index}
    check(found)
    return found


def check(manifest):
    """ValueError, KeyError, TypeError where a reader would go wrong, or elsewhere."""
    room, lineage = {}, manifest.get("lineage", [])
    for step, serial in [*lineage, (manifest["step"], manifest.get("serial", 0))]:
        whole_number(step)
        whole_number(serial)
    for file in manifest["files"]:
        name = file["name"]
        if type(name) is not str or name in ("", ".", "..", NAME) or {"/", "\\"} & set(name):
            raise ValueError(f"{name!r} is no file of its folder")
        room[name] = whole_number(file["bytes"])
    for key, entry in manifest["index"].items():
        numel = prod(map(whole_number, entry["shape"]))
        width = tensor_file.DTYPES[entry["dtype"]].itemsize
        for name, start, stop, _ in entry["parts"]:
            if name not in room:
                raise ValueError(f"a part of {key!r} is in {name!r}, which it does not list")
            room[name] -= (whole_number(stop) - whole_number(start)) * width
        for rank in range(manifest["world_size"]) if entry["by_rank"] else [None]:
            check_tiles(key, entry["parts"], rank, numel)
    if too_full := [name for name, left in room.items() if left < 0]:
        raise ValueError(f"{too_full[0]} is too short for its parts")


def check_tiles(key, parts, rank, numel):
    """ValueError where the parts do not cover each element once. rank: its own; None: all."""
    own = [(start, stop) for _, start, stop, of in parts if rank is None or not of or rank in of]
    end = 0
    for start, stop in sorted(own):
        if start != end or stop < start:
            raise ValueError(f"the parts of {key!r} overlap, or leave elements out")
        end = stop
    if end != numel and (own or rank is None):  # of what each rank has for itself, some have none
        raise ValueError(f"{key!r} has {numel} elements, and its parts {end}")


def whole_number(value):
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no size")
    return value


def write(store, folder, manifest):
    text = json.dumps(manifest)
    signed = f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}".encode()
    store.write(f"{folder}/{NAME}", lambda file: file.write(signed))


def read(store, folder):
    """(manifest, "") or (None, why there is none)."""
    try:
        with store.open(f"{folder}/{NAME}") as file:
            digest, _, text = file.read(LONGEST).partition(b"\n")
    except FileNotFoundError:
        return None, "it has no manifest: saving it was interrupted"
    except Exception as reason:  # a URL's file system raises what it likes
        return None, f"its manifest cannot be read: {reason}"
    if hashlib.sha256(text).hexdigest().encode() != digest:
        return None, "its manifest is damaged"
    try:
        manifest = json.loads(text)
        if manifest["format"] != FORMAT:
            return None, f"it is of format {manifest['format']}, this is {FORMAT}"
        check(manifest)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as reason:
        return None, f"its manifest is not right: {reason}"
    return manifest, ""


def checked(store, folder, rank=0, n=1):
    """(manifest, "") or (None, why not): of n ranks that share the files out, this one's."""
    found, why = read(store, folder)
    for file in found["files"][rank::n] if found else []:
        why = why or damage(store, folder, file)
    return (None, why) if why else (found, "")


def files(store, folder):
    """The names of the files that it lists; of none, where it cannot be read."""
    found, _ = read(store, folder)
    return [file["name"] for file in found["files"]] if found else []


def damage(store, folder, file):
    """Why a file is not the one of the manifest, in words; "" if it is."""
    name = file["name"]
    try:
        size = store.size(f"{folder}/{name}")
        if size == file["bytes"]:
            with store.open(f"{folder}/{name}") as opened:
                digest, size = tensor_file.hash_of(opened, size + 1)
    except FileNotFoundError:
        return f"{name} is missing"
    except Exception as reason:  # a URL's file system raises what it likes
        return f"{name} cannot be read: {reason}"
    if size != file["bytes"]:
        return f"{name} has {size} bytes, not {file['bytes']}"
    return "" if digest == file["sha256"] else f"{name} is damaged: its SHA-256 differs"
