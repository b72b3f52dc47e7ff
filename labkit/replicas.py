"""Check that all ranks hold the same model with the same values, or say where they differ.

    rank 0   w  b  running_mean      1. all_gather a hash of names, shapes, dtypes: same? (32 bytes)
    rank 1   w' b' running_mean'     2. broadcast, many tensors as the bytes of one message:

             [ w ........ | b .. | running_mean .. ]  --->  all ranks        whatever their dtypes

Sent per rank: (n-1)/n x the tensors' bytes. Held besides: one chunk of at most 25 MiB (or one
larger tensor). Without step 1 a model that differs ends as a hang or as a crash of the backend,
which names nobody.
Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020,
section 3.1.
"""

import hashlib
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import nn

from labkit import comm

CHUNK_BYTES = 25 * 2**20
ALIGNMENT = 16  # bytes: a view as another dtype must begin at a multiple of its element size


class Replicas:
    """The copies of one module on the ranks of a group.

    Leaves alone what module._ddp_params_and_buffers_to_ignore names; the buffers unless `buffers`.
    """

    def __init__(self, module, group=None, buffers=True):
        self.module, self.group = module, group
        self._ignored = frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._has_buffers = buffers and any(True for _ in module.buffers())
        self._packed = []
        self._trainable = [(name, p, p.requires_grad) for name, p in self.parameters()]

    def parameters(self):
        """[(name, parameter)], tied ones once."""
        return [
            (name, p) for name, p in self.module.named_parameters() if name not in self._ignored
        ]

    def buffers(self):
        """[(name, buffer)] as they are now: modules may replace their buffers."""
        if not self._has_buffers:  # going through all modules costs time, every step
            return []
        return [(name, b) for name, b in self.module.named_buffers() if name not in self._ignored]

    def check(self, settings="", device=None):
        """Collective. Raises ValueError, on every rank, where modules (or settings, a text) differ.

        RuntimeError, as PyTorch's DDP, where there is nothing to train. device: of the messages;
        None: where the first parameter is, which must then not be on the meta device.
        """
        parameters, buffers = self.parameters(), self.buffers()
        lines = [f"settings {settings}"]
        for name, t in parameters + buffers:
            dtype, trainable = (
                str(t.dtype).removeprefix("torch."),
                "trainable" if t.requires_grad else "fixed",
            )
            lines.append(
                f"{name!r} {dtype} {list(t.shape)} {trainable}, strides {list(t.stride())}"
            )
        check_agreement(
            lines, self.group, device or (parameters[0][1].device if parameters else "cpu")
        )
        for name, t in parameters + buffers:  # of the same strides on all ranks: all raise
            if any(size > 1 and not step for size, step in zip(t.shape, t.stride(), strict=True)):
                raise ValueError(
                    f"{name!r} was made with expand(): several of its elements lie in one place, "
                    "where no message can write them: take its clone()"
                )
        if not any(p.requires_grad for _, p in parameters):
            raise RuntimeError(
                f"{type(self.module).__name__} has no parameter that requires a gradient"
            )
        for name, part in self.module.named_modules():
            makes_sparse = isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse
            if makes_sparse and f"{name}.weight".removeprefix(".") not in self._ignored:
                raise ValueError(
                    f"{name!r} makes sparse gradients, which fit in no bucket: set sparse=False"
                )

    def check_trainable(self, may_freeze):
        """Raise RuntimeError where a parameter was unfrozen since, or frozen, unless may_freeze."""
        for name, p, trainable in self._trainable:
            if p.requires_grad != trainable and not (trainable and may_freeze):
                raise RuntimeError(
                    f"{name!r} was {'frozen' if trainable else 'unfrozen'} "
                    "after DDP was constructed: set requires_grad first, then construct DDP"
                )

    def frozen(self):
        """Whether all that was trainable is frozen now."""
        return not any(p.requires_grad for _, p, trainable in self._trainable if trainable)

    def become(self, src):
        """Take all values of rank src of the group. Collective."""
        broadcast_tensors([t for _, t in self.parameters() + self.buffers()], src, self.group)

    def share_buffers(self, src):
        """Take the buffers of rank src of the group. Collective. Keeps the message's memory."""
        self._packed = broadcast_tensors(
            [b for _, b in self.buffers()], src, self.group, self._packed
        )


def check_ranks(name, group=None):
    """RuntimeError where no ranks have met, ValueError on a rank outside the group. name: whose."""
    if not dist.is_initialized():
        raise RuntimeError(f"{name} needs ranks: call torch.distributed.init_process_group first")
    if dist.get_rank(group) < 0:
        raise ValueError(
            f"this rank is not in process_group: construct {name} on the group's ranks only"
        )


def check_memory(named, who):
    """ValueError where two parameters lie in one memory: as shards each would have its own."""
    places = {}
    for name, p in named:
        if p.numel() and not p.is_meta:
            other, first = places.setdefault((p.device, p.data_ptr()), (name, p))
            if first is not p:
                raise ValueError(
                    f"{other!r} and {name!r} are two parameters in one memory, which {who} would "
                    "cut apart: let both names have one parameter (b.weight = a.weight)"
                )


def check_agreement(lines, group=None, device="cpu"):
    """Compare this rank's lines (list of str, not empty) with every other rank's. Collective.

    Raises ValueError on every rank with the first line that differs, as both ranks have it.
    """
    text = "\n".join(lines).encode()
    hashes = _gather_equal(hashlib.sha256(text).digest(), 32, group, device)
    if all(other == hashes[0] for other in hashes):
        return
    texts = [text.decode().split("\n") for text in gather_bytes(text, group, device)]
    for rank, theirs in enumerate(texts):
        for first, other in zip_longest(texts[0], theirs, fillvalue="nothing"):
            if first != other:
                raise ValueError(
                    f"the model differs between ranks: rank 0 has {first}, rank {rank} has {other}"
                )


def gather_bytes(payload, group=None, device="cpu"):
    """The payloads, bytes of any length, of all ranks. Collective."""
    sizes = [
        int.from_bytes(size, "big")
        for size in _gather_equal(len(payload).to_bytes(8, "big"), 8, group, device)
    ]
    if not any(sizes):
        return [b"" for _ in sizes]
    everyone = _gather_equal(payload, max(sizes), group, device)
    return [theirs[:size] for theirs, size in zip(everyone, sizes, strict=True)]


def _gather_equal(payload, size, group, device):
    world_size = dist.get_world_size(group)
    device = "cpu" if torch.device(device).type == "meta" else device
    mine = torch.frombuffer(bytearray(payload.ljust(size, b"\0")), dtype=torch.uint8).to(device)
    everyone = torch.empty(world_size * size, dtype=torch.uint8, device=device)
    comm.all_gather(everyone, mine, group)
    return [bytes(part.tolist()) for part in everyone.cpu().split(size)]


class Packed:
    """Room for several tensors, of any dtypes but on one device, in one message."""

    def __init__(self, tensors):
        starts, end = [], 0
        for t in tensors:
            starts.append(end)
            end += -(-t.nbytes // ALIGNMENT) * ALIGNMENT
        with torch.inference_mode(False):  # an evaluation may come first, and training use these
            self.bytes = torch.zeros(end, dtype=torch.uint8, device=tensors[0].device)
            self.pieces = [
                self.bytes[start : start + t.nbytes].view(t.dtype).view(t.shape)
                for start, t in zip(starts, tensors, strict=True)
            ]
        self.kind = kind(tensors)

    def broadcast(self, tensors, src, group):
        sending = dist.get_rank(group) == src
        # Through .data: like BatchNorm's own update of its statistics, this must not count as an
        # in-place change of a tensor that some earlier forward has saved for its backward.
        tensors = [t.data for t in tensors]
        if sending:
            torch._foreach_copy_(self.pieces, tensors)
        comm.broadcast(self.bytes, src, group)
        if not sending:
            torch._foreach_copy_(tensors, self.pieces)


def kind(tensors):
    return [(t.shape, t.dtype, t.device) for t in tensors]


def broadcast_tensors(tensors, src=0, group=None, packed=()):
    """Overwrite the tensors (any shapes, dtypes, devices; in one order on all ranks) by rank src's.

    Returns the list of Packed that was used: give it as `packed` when similar tensors are sent.
    """
    chunks = list(_chunks(tensors))
    if [p.kind for p in packed] != [kind(chunk) for chunk in chunks]:
        packed = map(Packed, chunks)  # one after the other: a single chunk is held at a time
    held = []
    for p, chunk in zip(packed, chunks, strict=True):
        p.broadcast(chunk, src, group)
        held = [p] if len(chunks) == 1 else []
    return held


def _chunks(tensors):
    chunk, size = [], 0
    for t in tensors:
        if t.numel() == 0:
            continue
        if chunk and (size + t.nbytes > CHUNK_BYTES or t.device != chunk[0].device):
            yield chunk
            chunk, size = [], 0
        chunk.append(t)
        size += t.nbytes
    if chunk:
        yield chunk
