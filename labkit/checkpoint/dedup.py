"""Writes replicated tensors once: each replica writes a part.

    DDP     rank 0  [w .............]        rank 0 writes  [w ......      ]
            rank 1  [w .............]        rank 1 writes  [w       ......]
    FSDP    rank 0  [w ......]               ranks hold different elements: each writes its own
    local   rank 0  [w .............]        the same elements with different values: each rank
    SGD     rank 1  [w'.............]        writes its version

Ranks exchange the ranges they hold, and the hashes of ranges that several ranks hold. So each rank
copies only the part that it writes.
"""

from math import prod

from labkit.checkpoint.dtensor_ranges import Piece
from labkit.checkpoint.tensor_file import HASH, HASHES, as_bytes

SMALLEST = 4096  # elements; smaller tensors are written by one rank
CHUNK = 2**22  # elements that are copied from a GPU at a time


def facts(pieces, parts=(), alone=False):
    """Return {key: [start, stop, hash]} of this rank's pieces, {key: Piece}.

    The hash is None for parts of tensors, except for the keys in `parts`: usually one rank has it.
    alone: whether there is only one rank, so that nothing needs a hash.
    """
    found = {}
    for key, (values, start, shape) in pieces.items():
        hashed = not alone and (key in parts or values.numel() == prod(shape))
        found[key] = [start, start + values.numel(), hash_of_values(values) if hashed else None]
    return found


def replicated_parts(facts_of_ranks):
    """Return the keys of parts without a hash that several ranks hold, as in hybrid sharding."""
    seen = set()
    found = set()
    for facts in facts_of_ranks:
        parts = {(key, start, stop) for key, (start, stop, hashed) in facts.items() if not hashed}
        found |= {key for key, _, _ in parts & seen}
        seen |= parts
    return found


def share_out(pieces, rank, facts_of_ranks):
    """Return {key: (Piece to write, ranks that hold this version, or None if all ranks agree)}.

    pieces: {key: Piece} of this rank. facts_of_ranks: the results of facts(), by rank.
    """
    own = facts_of_ranks[rank]
    to_write = {}
    for key, (values, start, shape) in pieces.items():
        of_ranks = [facts.get(key) for facts in facts_of_ranks]
        holding = [r for r, one in enumerate(of_ranks) if one and one[:2] == own[key][:2]]
        replicas = [r for r in holding if of_ranks[r] == own[key]]
        numel = values.numel()
        index = replicas.index(rank)
        size = max(-(-numel // len(replicas)), SMALLEST)
        part = values[index * size : (index + 1) * size]
        if part.numel() or (numel == 0 and index == 0):
            version = replicas if len(replicas) < len(holding) else None
            to_write[key] = Piece(part, start + index * size, shape), version
    return to_write


def hash_of_values(values):
    """Return the hash of a tensor's bytes. values: [k], on any device."""
    digest = HASHES[HASH]()
    for part in values.split(CHUNK) if values.is_cuda else (values,):
        digest.update(as_bytes(part.cpu()))
    return digest.hexdigest()
