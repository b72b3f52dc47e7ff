"""Writes replicated tensors once: each replica writes a part.

    DDP     rank 0  [w .............]        rank 0 writes  [w ......      ]
            rank 1  [w .............]        rank 1 writes  [w       ......]
    FSDP    rank 0  [w ......]               ranks hold different elements: each writes its own
    local   rank 0  [w .............]        the same elements with different values: each rank
    SGD     rank 1  [w'.............]        writes its version

Ranks exchange the ranges they hold, and the hashes of ranges that several ranks hold. So each rank
copies only the part that it writes.
"""

from labkit.checkpoint.tensor_file import HASH, HASHES, as_bytes

SMALLEST = 4096  # elements; smaller tensors are written by one rank
CHUNK = 2**22  # elements that are copied from a GPU at a time


def share_out(held, rank, n, tell):
    """Return {key: (Piece to write, ranks that hold this version, or None if all ranks agree)}.

    held: {key: Piece} of this rank. tell: gathers a value from all n ranks, as a list.
    """
    spans = {key: [piece.start, piece.values.numel()] for key, piece in held.items()}
    spans_of = tell(spans)
    holding = {key: [r for r in range(n) if spans_of[r].get(key) == spans[key]] for key in spans}
    hashes = {
        key: hash_of_values(held[key].values)
        for key, ranks in holding.items()
        if len(ranks) > 1
    }
    hashes = tell(hashes)
    to_write = {}
    for key, piece in held.items():
        replicas = [r for r in holding[key] if hashes[r].get(key) == hashes[rank].get(key)]
        numel = piece.values.numel()
        index = replicas.index(rank)
        size = max(-(-numel // len(replicas)), SMALLEST)
        part = piece.values[index * size : (index + 1) * size]
        if part.numel() or (numel == 0 and index == 0):
            version = replicas if len(replicas) < len(holding[key]) else None
            to_write[key] = piece._replace(values=part, start=piece.start + index * size), version
    return to_write


def hash_of_values(values):
    """Return the hash of a tensor's bytes. values: [k], on any device."""
    digest = HASHES[HASH]()
    for part in values.split(CHUNK):
        digest.update(as_bytes(part.cpu()))
    return digest.hexdigest()
