"""Checks that all ranks hold the same model with the same values, or says where they differ.

    rank 0   w  b  running_mean      1. all_gather a hash of names, shapes, dtypes (40 bytes)
    rank 1   w' b' running_mean'     2. broadcast, many tensors as the bytes of one message:

             [ w ........ | b .. | running_mean .. ]  --->  all ranks        for any dtypes

Sent per rank: (n-1)/n x the tensors' bytes. Extra memory: one chunk of at most 25 MiB (or one
larger tensor). Without step 1, different models would cause a hang or a crash of the backend
without naming a rank.
Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020,
section 3.1.
"""

import hashlib
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import nn

from labkit import comm
from labkit.torch_private import foreach_copy

CHUNK_BYTES = 25 * 2**20
ALIGNMENT = 16  # bytes: a view as another dtype must begin at a multiple of its element size


class Replicas:
    """The replicas of one module on the ranks of a group.

    Excludes names in module._ddp_params_and_buffers_to_ignore, and buffers if buffers=False.
    """

    def __init__(self, module, group=None, buffers=True):
        self.module = module
        self.group = group
        self._ignored = frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._has_buffers = buffers and any(True for _ in module.buffers())
        self._packed = []
        self._trainable = [(name, p, p.requires_grad) for name, p in self.parameters()]

    def parameters(self):
        """Return [(name, parameter)], tied ones once."""
        return [
            (name, p) for name, p in self.module.named_parameters() if name not in self._ignored
        ]

    def buffers(self):
        """Return the current [(name, buffer)]: modules may replace their buffers."""
        if not self._has_buffers:  # iterating over all modules costs time in every step
            return []
        return [(name, b) for name, b in self.module.named_buffers() if name not in self._ignored]

    def check(self, settings="", device=None):
        """Raise ValueError on every rank if modules (or settings, a text) differ. Collective.

        Raises RuntimeError, like PyTorch's DDP, if nothing is trainable. device: of the messages;
        None: the first parameter's, which must then not be the meta device.
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
        for name, t in parameters + buffers:  # strides are equal on all ranks: all raise
            if any(size > 1 and not step for size, step in zip(t.shape, t.stride(), strict=True)):
                raise ValueError(
                    f"{name!r} was made with expand(), so its elements share memory: "
                    "use its clone()"
                )
        if not any(p.requires_grad for _, p in parameters):
            raise RuntimeError(
                f"{type(self.module).__name__} has no parameter that requires a gradient"
            )
        for name, part in self.module.named_modules():
            makes_sparse = isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse
            if makes_sparse and f"{name}.weight".removeprefix(".") not in self._ignored:
                raise ValueError(
                    f"{name!r} has sparse gradients, which buckets do not support: set sparse=False"
                )

    def check_trainable(self, may_freeze):
        """Raise RuntimeError if a parameter was unfrozen since, or frozen unless may_freeze."""
        for name, p, trainable in self._trainable:
            if p.requires_grad != trainable and not (trainable and may_freeze):
                raise RuntimeError(
                    f"{name!r} was {'frozen' if trainable else 'unfrozen'} "
                    "after DDP was constructed: set requires_grad before"
                )

    def frozen(self):
        """Return whether all trainable parameters are frozen now."""
        return not any(p.requires_grad for _, p, trainable in self._trainable if trainable)

    def become(self, src):
        """Overwrite all values with those of rank src of the group. Collective."""
        broadcast_tensors([t for _, t in self.parameters() + self.buffers()], src, self.group)

    def share_buffers(self, src):
        """Overwrite the buffers with those of rank src. Collective. Reuses the message's memory."""
        self._packed = broadcast_tensors(
            [b for _, b in self.buffers()], src, self.group, self._packed
        )


def check_ranks(name, group=None):
    """Raise RuntimeError without a process group, ValueError outside the group.

    name: the caller's.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            f"{name} needs a process group: call torch.distributed.init_process_group first"
        )
    if dist.get_rank(group) < 0:
        raise ValueError(
            f"this rank is not in process_group: construct {name} on the group's ranks only"
        )


def check_memory(named, who):
    """Raise ValueError if two parameters share memory: as shards they would become separate."""
    places = {}
    for name, p in named:
        if p.numel() and not p.is_meta:
            other, first = places.setdefault((p.device, p.data_ptr()), (name, p))
            if first is not p:
                raise ValueError(
                    f"{other!r} and {name!r} are two parameters that share memory, which {who} "
                    "does not support: use one parameter for both (b.weight = a.weight)"
                )


def check_agreement(lines, group=None, device="cpu"):
    """Raise ValueError on every rank if the lines differ between ranks. Collective.

    lines: list of str, not empty. The message shows the first different line of both ranks.
    """
    text = "\n".join(lines).encode()
    everyone = gather_bytes(text, group, device)
    if all(other == text for other in everyone):
        return
    texts = [other.decode().split("\n") for other in everyone]
    for rank, theirs in enumerate(texts):
        for first, other in zip_longest(texts[0], theirs, fillvalue="nothing"):
            if first != other:
                raise ValueError(
                    f"the model differs between ranks: rank 0 has {first}, rank {rank} has {other}"
                )


def gather_bytes(payload, group=None, device="cpu"):
    """Gather the payloads, bytes of any length, of all ranks. Collective.

    Sent per rank: 40 bytes, the payload's length and its SHA-256. Only if ranks differ in them, the
    payloads follow.
    """
    own = len(payload).to_bytes(8, "big") + hashlib.sha256(payload).digest()
    heads = _gather_equal(own, len(own), group, device)
    if all(head == own for head in heads):
        return [payload for _ in heads]
    sizes = [int.from_bytes(head[:8], "big") for head in heads]
    everyone = _gather_equal(payload, max(sizes), group, device)
    return [theirs[:size] for theirs, size in zip(everyone, sizes, strict=True)]


def _gather_equal(payload, size, group, device):
    world_size = dist.get_world_size(group)
    device = "cpu" if torch.device(device).type == "meta" else device
    own = torch.frombuffer(bytearray(payload.ljust(size, b"\0")), dtype=torch.uint8).to(device)
    gathered = torch.empty(world_size * size, dtype=torch.uint8, device=device)
    comm.all_gather(gathered, own, group)
    return [part.numpy().tobytes() for part in gathered.cpu().split(size)]


class Packed:
    """A buffer for several tensors, of any dtypes on one device, in one message."""

    def __init__(self, tensors):
        starts, end = [], 0
        for t in tensors:
            starts.append(end)
            end += -(-t.nbytes // ALIGNMENT) * ALIGNMENT
        with torch.inference_mode(False):  # training may use buffers that an evaluation has created
            self.bytes = torch.zeros(end, dtype=torch.uint8, device=tensors[0].device)
            self.pieces = [
                self.bytes[start : start + t.nbytes].view(t.dtype).view(t.shape)
                for start, t in zip(starts, tensors, strict=True)
            ]
        self.kind = kind(tensors)

    def broadcast(self, tensors, src, group):
        sending = dist.get_rank(group) == src
        # Through .data: like BatchNorm's update of its statistics, this must not count as an
        # in-place change of a tensor that an earlier forward has saved for backward.
        tensors = [t.data for t in tensors]
        if sending:
            foreach_copy(self.pieces, tensors)
        comm.broadcast(self.bytes, src, group)
        if not sending:
            foreach_copy(tensors, self.pieces)


def kind(tensors):
    return [(t.shape, t.dtype, t.device) for t in tensors]


def broadcast_tensors(tensors, src=0, group=None, packed=()):
    """Overwrite the tensors with those of rank src. They need the same order on all ranks.

    Tensors may have any shapes, dtypes and devices. Returns the list of Packed buffers: pass it as
    `packed` when similar tensors are sent again.
    """
    chunks = list(_chunks(tensors))
    if [p.kind for p in packed] != [kind(chunk) for chunk in chunks]:
        packed = map(Packed, chunks)  # lazily: only one chunk is held at a time
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
