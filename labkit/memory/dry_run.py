"""A dry run: the lab's own code as one rank of n, without other ranks and without data.

    rank 5 of 1,024     DDP(gpt) --> all_reduce [tensor without data] --> PyTorch's fake group
                                                                          returns at once
    result: every message in its order, with its group and bytes; the peak of memory by kind

Nothing is computed and nothing is sent, so one process on a laptop can be any rank of any number.
The real classes run, so the counts are those of the code and not of a formula. A dry run costs the
Python time of a step, and memory only for messages without data of the model (hashes, names).
memory_estimate.py counts the memory of a step in the same way.

Not counted: time; effects of values (the expert that gets a token, a loss that overflows); work
space inside kernels; memory of a backend. Attention is the kernel of the CPU. Pipeline stages find
the shapes of their messages in their first step, with a forward of all stages.
"""

import weakref
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_leaves

from labkit import comm, gloo_workarounds
from labkit.amp.autocast_lists import TABLES
from labkit.amp.autocast_mode import autocast
from labkit.fsdp import flat_param
from labkit.gloo_workarounds import FAKE_GLOO
from labkit.memory.memory_tracker import MemoryTracker, storages_of
from labkit.offload import offload
from labkit.torch_private import another_world, register_fake_backends

FAKE = "labkit_fake"  # with FAKE_GLOO, comm and FSDP also allocate the buffers that gloo needs
ATTENTION = F.scaled_dot_product_attention
OPTIONS = ("attn_mask", "dropout_p", "is_causal")  # of ATTENTION, after query, key and value


@contextmanager
def fake_ranks(rank, ranks, device="cuda"):
    """Make this process rank `rank` of `ranks` fake ranks in the block. Yields a FakeDevice.

    device: "cuda" or "cpu", the type of device that the meta device stands for. On "cpu", messages
        take the memory that they take on gloo.
    If the process is a rank already, its own groups are hidden in the block and restored after it.
    Raises ValueError unless 0 <= rank < ranks.
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} is not one of {ranks}: take 0 to {ranks - 1}")
    register_fake_backends(FAKE, FAKE_GLOO)
    backend = FAKE_GLOO if device == "cpu" else FAKE
    with (
        another_world(backend, rank, ranks),
        patch.multiple(gloo_workarounds, peers=one_peer, on_loopback=lambda: False),
        no_data(device) as fake,
    ):
        yield fake


def one_peer(rank, n):
    """Return the next rank, in place of all others: a dry run sends each message once."""
    return [(rank + 1) % n][: n - 1]


@contextmanager
def no_data(device="cuda"):
    """In the block, the meta device stands for `device`, "cuda" or "cpu". Yields a FakeDevice."""
    fake = FakeDevice(device)
    host = fake.host if device != "cpu" else SameMemory
    with (
        patch.multiple(flat_param, to_host=host.copy, to_device=host.copy_back, room=fake.room),
        patch.object(offload, "room", fake.room),
        patch.object(F, "scaled_dot_product_attention", fake.attention),
        fake,
    ):
        yield fake


class FakeDevice(TorchFunctionMode):
    """The meta device in place of `type`, "cuda" or "cpu"; for "cuda" with separate host memory.

    Attention is the fused kernel of the CPU if PyTorch may use one, because the meta device's own
    keeps the attention weights. FSDP's copies to the host are tensors without data in a Host, and
    so are files of offloaded tensors.
    """

    def __init__(self, type):
        super().__init__()
        self.type, self.host, self.files = type, Host(), Host()

    def tracker(self, module=None, optimizer=None):
        """Return a MemoryTracker of the tensors on this device."""
        return DeviceTracker(self, module, optimizer)

    def room(self, nbytes, to, device):
        """Return a flat uint8 tensor that stands for a file; see pinned_memory.room."""
        flat = torch.empty(nbytes, dtype=torch.uint8, device="meta")
        self.files.add(flat.untyped_storage())
        return flat

    def autocast(self, dtype):
        """Return an autocast to dtype by the rules of `type`."""
        return FakeAutocast(self.type, dtype)

    def attention(self, *args, **kwargs):
        """Call scaled_dot_product_attention in this mode.

        Enters the mode again in functions such as multi_head_attention_forward, which disable it.
        """
        active = self in _get_current_function_mode_stack()
        with nullcontext() if active else self:
            return ATTENTION(*args, **kwargs)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        options = kwargs or {}
        if function is ATTENTION and len(args) >= 3 and args[0].is_meta:
            named = options | dict(zip(OPTIONS, args[3:], strict=False))
            given = {n: v for n, v in named.items() if isinstance(v, torch.Tensor) or v}
            fused = torch.backends.cuda.flash_sdp_enabled()  # also of the CPU's kernel
            if fused and given.keys() <= {"is_causal", "scale"}:
                kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
                return kernel(*args[:3], **given)[0]
        return function(*args, **options)


class Host:
    """Storages of tensors without data that stand for host memory."""

    def __init__(self):
        self._storages = {}  # address of the storage -> (weak reference, bytes)

    @property
    def nbytes(self):
        """Bytes of all storages that are alive."""
        return sum(size for _, size in self._storages.values())

    def add(self, storage):
        """Count a storage as host memory until it is freed."""
        address = storage._cdata
        reference = weakref.ref(storage, lambda _: self._storages.pop(address, None))
        self._storages[address] = reference, storage.nbytes()

    def owns(self, storage):
        return storage._cdata in self._storages

    def copy(self, tensor):
        """Return a host tensor of this tensor's shape and dtype."""
        seed = torch.empty(0, device="meta")
        self.add(seed.untyped_storage())
        copy = seed.new_empty(
            tensor.shape, dtype=tensor.dtype
        )  # made from a host tensor, so that a DeviceTracker attributes it to the host
        self.add(copy.untyped_storage())
        return copy

    def copy_back(self, tensor, device):
        """Return a tensor on the device of this host tensor's shape and dtype."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


class SameMemory:
    """The Host for a CPU, whose memory is the device's own: nothing is copied."""

    @staticmethod
    def copy(tensor):
        return tensor

    @staticmethod
    def copy_back(tensor, device):
        return tensor


class DeviceTracker(MemoryTracker):
    """A MemoryTracker of the meta device that leaves out the storages of the host and of files.

    An operator whose inputs are all there creates tensors on the host.
    """

    def __init__(self, fake, module=None, optimizer=None):
        super().__init__(module, optimizer, "meta")
        self.host, self.files = fake.host, fake.files
        self._same_memory = fake.type == "cpu"

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if not self._same_memory and self.host.nbytes + self.files.nbytes:
            given = list(storages_of(tree_leaves((args, kwargs))))
            if given and all(map(self._is_away, given)):
                result = operator(*args, **(kwargs or {}))
                for storage in storages_of(tree_leaves(result)):
                    if not self.files.owns(storage):
                        self.host.add(storage)
                return result
        return super().__torch_dispatch__(operator, types, args, kwargs)

    def _is_away(self, storage):
        return self.host.owns(storage) or self.files.owns(storage)

    def _count(self, storage):
        return None if self._is_away(storage) else super()._count(storage)


class FakeAutocast(autocast):
    """labkit.amp.autocast for tensors on the meta device, by the table of another device."""

    def __init__(self, device_type, dtype):
        super().__init__("cpu", dtype)
        self.device_type, self._rules = "meta", TABLES[device_type]


@dataclass(frozen=True)
class DryRun:
    """The messages and memory of one rank.

    events: [labkit.comm.Event], in order; their times mean nothing. peak: {kind: bytes} at the
    moment of the largest total. result: the job's return value.
    """

    events: list
    peak: dict
    result: object

    @property
    def sent_bytes(self):
        """Total bytes that this rank sends."""
        return sum(event.sent_bytes for event in self.events)

    def totals(self):
        """Return {(operation, group size): (number of messages, bytes sent)}."""
        found = {}
        for event in self.events:
            key = event.op, event.group_size
            messages, sent = found.get(key, (0, 0))
            found[key] = messages + 1, sent + event.sent_bytes
        return found


def dry_run(job, ranks, rank=0, **arguments):
    """Call job(device="meta", **arguments) as rank `rank` of `ranks`. Return a DryRun.

    job: a function that builds a model on the device, wraps it and trains steps, as under torchrun.
        It gets its rank from torch.distributed.
    Raises ValueError unless 0 <= rank < ranks.
    """
    with ExitStack() as stack:
        fake = stack.enter_context(fake_ranks(rank, ranks))
        events = stack.enter_context(comm.record())
        tracker = stack.enter_context(fake.tracker())
        result = job(device="meta", **arguments)
    return DryRun(events, tracker.peak, result)
