"""A dry run: the lab's own code as one rank of n, without other ranks and without data.

    rank 5 of 1,024     DDP(gpt) --> all_reduce [tensor without data] --> PyTorch's fake group
                                                                          returns at once
    result: every message in its order, with its group and bytes; the peak of memory by kind

Nothing is computed and nothing is sent, so one process on a laptop can be any rank of any number.
The real classes run, so the counts are those of the code and not of a formula. A dry run takes the
time of Python in a step, and the memory of messages that hold no numbers of the model (hashes,
names). The memory of a step is counted in the same way, see memory_estimate.py.

Not counted: time; what depends on values (which expert gets a token, a loss that overflows); work
space inside kernels; what a backend holds for itself. Attention is the kernel of the CPU. Pipeline
stages find the shapes of their messages in their first step, with a forward of all stages.
"""

import weakref
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_leaves

from labkit import comm
from labkit.amp.autocast_lists import TABLES
from labkit.amp.autocast_mode import autocast
from labkit.fsdp import flat_param
from labkit.gloo_workarounds import FAKE_GLOO
from labkit.memory.memory_tracker import MemoryTracker, storages_of
from labkit.torch_private import another_world, register_fake_backends

FAKE = "labkit_fake"  # under the name FAKE_GLOO, comm and FSDP hold the buffers that gloo needs
ATTENTION = F.scaled_dot_product_attention
OPTIONS = ("attn_mask", "dropout_p", "is_causal")  # of ATTENTION, after query, key and value


@contextmanager
def fake_ranks(rank, ranks, device="cuda"):
    """Inside, this process is rank `rank` of `ranks` ranks that do not exist. Yields a FakeDevice.

    device: "cuda" or "cpu", the type of device that the meta device stands for. On "cpu", messages
    take the memory that they take on gloo.
    A process that is a rank already keeps its own groups, and has them back afterwards.
    Raises ValueError if rank is not one of ranks.
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} is not one of {ranks}: take 0 to {ranks - 1}")
    register_fake_backends(FAKE, FAKE_GLOO)
    backend = FAKE_GLOO if device == "cpu" else FAKE
    with another_world(backend, rank, ranks), no_data(device) as fake:
        yield fake


@contextmanager
def no_data(device="cuda"):
    """Inside, the meta device stands for `device`, "cuda" or "cpu". Yields a FakeDevice."""
    fake = FakeDevice(device)
    host = fake.host if device != "cpu" else SameMemory
    with (
        patch.multiple(flat_param, to_host=host.copy, to_device=host.copy_back),
        patch.object(F, "scaled_dot_product_attention", fake.attention),
        fake,
    ):
        yield fake


class FakeDevice(TorchFunctionMode):
    """The meta device, computing as `type` does, with a host beside it if that is "cuda".

    Attention is the fused kernel of the CPU, where PyTorch may use one: the meta device's keeps the
    weights. What FSDP copies to the host is a tensor without data that belongs to the host.
    """

    def __init__(self, type):
        super().__init__()
        self.type, self.host = type, Host()

    def tracker(self, module=None, optimizer=None):
        """A MemoryTracker of the tensors on this device."""
        return DeviceTracker(self.host, module, optimizer)

    def autocast(self, dtype):
        return FakeAutocast(self.type, dtype)

    def attention(self, *args, **kwargs):
        """PyTorch's; also inside a function such as multi_head_attention_forward, without modes."""
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
        return sum(size for _, size in self._storages.values())

    def add(self, storage):
        address = storage._cdata
        reference = weakref.ref(storage, lambda _: self._storages.pop(address, None))
        self._storages[address] = reference, storage.nbytes()

    def owns(self, storage):
        return storage._cdata in self._storages

    def copy(self, tensor):
        """A tensor of the host like this one."""
        seed = torch.empty(0, device="meta")
        self.add(seed.untyped_storage())
        copy = seed.new_empty(
            tensor.shape, dtype=tensor.dtype
        )  # so that a tracker sees whose it is
        self.add(copy.untyped_storage())
        return copy

    def copy_back(self, tensor, device):
        """A tensor of the device like this one of the host."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


class SameMemory:
    """The host of a CPU, which is the device itself."""

    @staticmethod
    def copy(tensor):
        return tensor

    @staticmethod
    def copy_back(tensor, device):
        return tensor


class DeviceTracker(MemoryTracker):
    """A MemoryTracker of the meta device that leaves out the host's storages.

    An operator whose tensors are all on the host makes tensors on the host.
    """

    def __init__(self, host, module=None, optimizer=None):
        super().__init__(module, optimizer, "meta")
        self.host = host

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if self.host.nbytes:
            given = list(storages_of(tree_leaves((args, kwargs))))
            if given and all(map(self.host.owns, given)):
                result = operator(*args, **(kwargs or {}))
                for storage in storages_of(tree_leaves(result)):
                    self.host.add(storage)
                return result
        return super().__torch_dispatch__(operator, types, args, kwargs)

    def _count(self, storage):
        return None if self.host.owns(storage) else super()._count(storage)


class FakeAutocast(autocast):
    """labkit.amp.autocast for tensors on the meta device, by the table of another device."""

    def __init__(self, device_type, dtype):
        super().__init__("cpu", dtype)
        self.device_type, self._rules = "meta", TABLES[device_type]


@dataclass(frozen=True)
class DryRun:
    """What one rank does.

    events: [labkit.comm.Event], in order, without times. peak: {kind: bytes} at the moment when
    most is alive. result: what the job returned.
    """

    events: list
    peak: dict
    result: object

    @property
    def sent_bytes(self):
        """Bytes that this rank sends in all."""
        return sum(event.sent_bytes for event in self.events)

    def totals(self):
        """{(operation, size of its group): (messages, bytes sent)}."""
        found = {}
        for event in self.events:
            key = event.op, event.group_size
            messages, sent = found.get(key, (0, 0))
            found[key] = messages + 1, sent + event.sent_bytes
        return found


def dry_run(job, ranks, rank=0, **arguments):
    """Call job(device="meta", **arguments) as rank `rank` of `ranks`; returns a DryRun.

    job: builds a model on the device, wraps it and steps, as it would under torchrun. It finds its
        rank by torch.distributed.
    Raises ValueError if rank is not one of ranks.
    """
    with ExitStack() as stack:
        fake = stack.enter_context(fake_ranks(rank, ranks))
        events = stack.enter_context(comm.record())
        tracker = stack.enter_context(fake.tracker())
        result = job(device="meta", **arguments)
    return DryRun(events, tracker.peak, result)
