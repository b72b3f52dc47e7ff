"""What several ranks hold alike is written once: each writes a part of it.

    DDP     rank 0  [w .............]        rank 0 writes  [w ......      ]
            rank 1  [w .............]        rank 1 writes  [w       ......]
    FSDP    rank 0  [w ......]               each holds something else, and writes it
    local   rank 0  [w .............]        the same elements with other values: each writes all of
    SGD     rank 1  [w'.............]        its version

Who holds which elements is told; where several hold the same ones, so are the values' hashes.
"""

import hashlib

from labkit.checkpoint.tensor_file import as_bytes

SMALLEST = 4096  # elements: less is not cut


def share_out(held, rank, n, tell):
    """{key: (Piece to write, the ranks that hold this version, or None where there is one only)}.

    held: {key: Piece}, of this rank. tell: function value -> what all n ranks say.
    """
    mine = {key: [piece.start, piece.values.numel()] for key, piece in held.items()}
    told = tell(mine)
    holding = {key: [r for r in range(n) if told[r].get(key) == mine[key]] for key in mine}
    hashes = {
        key: hashlib.sha256(as_bytes(held[key].values)).hexdigest()
        for key, ranks in holding.items()
        if len(ranks) > 1
    }
    hashes = tell(hashes)
    own = {}
    for key, piece in held.items():
        alike = [r for r in holding[key] if hashes[r].get(key) == hashes[rank].get(key)]
        numel, place = piece.values.numel(), alike.index(rank)
        size = max(-(-numel // len(alike)), SMALLEST)
        part = piece.values[place * size : (place + 1) * size]
        if part.numel() or (numel == 0 and place == 0):
            versions = alike if len(alike) < len(holding[key]) else None
            own[key] = piece._replace(values=part, start=piece.start + place * size), versions
    return own
