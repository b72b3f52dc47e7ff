"""Track memory by kind: every live storage, counted once, exact, the same on CPU and GPU.

    bytes |            ______ <- peak
          |         __|  a   |__                parameters        held all the time
          |      __|  activations __            gradients         appear during backward
          |   __|____________|_gradients|___    activations       grow in forward, fall in backward
          |  |  parameters              |st|    optimizer_states  appear in the first step
          +--+------------+-------------+--+-> time
             forward       backward       step

Views share a storage, so the tracker counts storages, not tensors. A dispatch mode sees every
operator, also in backward, and so every new storage; a weak reference reports when one is freed.
The tracker keeps one list of (moment, storage, change in bytes), and everything else is a sum over
it. The kind of a storage is often known only later (a temporary of backward becomes `p.grad`), so a
kind applies to the storage's full lifetime.

Not counted: work space inside kernels, and rounding by the allocator; on CUDA see `cuda_peak`.
"""

import time
import weakref
from contextlib import ExitStack
from itertools import accumulate

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook as after_any_step
from torch.optim.optimizer import register_optimizer_step_pre_hook as before_any_step
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

# If a storage has two kinds, the first here counts: a bucket with `p.grad` views is gradients.
KINDS = ("parameters", "gradients", "optimizer_states", "buffers", "communication", "activations")

COLLECTIVES = {"c10d", "_c10d_functional", "symm_mem"}


class Storage:
    """A storage: its current bytes, its kind, and a weak reference that reports its release."""

    __slots__ = ("kind", "marked", "reference", "size")

    def __init__(self, reference):
        self.reference = reference
        self.size = 0
        self.kind = "activations"
        self.marked = False


class MemoryTracker(TorchDispatchMode):
    """A context manager that counts live tensor bytes by kind. Entering it again starts from zero.

        with MemoryTracker(model, optimizer) as memory:
            loss(model(x), y).backward()
            optimizer.step()
        memory.peak      {"parameters": 1024, ..., "activations": 4096}: bytes at the largest total

    module, optimizer: their parameters, gradients, buffers and states count from the start.
    device: count only this type ("cuda" excludes batches of a loader on the host).
    start: time.perf_counter() at the last entry.

    For tensors created inside, neither is needed: parameters are found when an operator uses them,
    gradients when they are accumulated, optimizer states when any torch optimizer steps, and
    communication when a collective uses it. Everything else created inside is activations. Tensors
    created before, such as the input batch, do not count.
    """

    def __init__(self, module=None, optimizer=None, device=None):
        super().__init__()
        self._module = module
        self._first_optimizer = optimizer
        self.device = torch.device(device).type if device is not None else None
        self._watched = None

    def __enter__(self):
        self._storages = {}  # address of the storage -> Storage, live ones only
        self._log = []  # (moment, Storage, change in bytes); append is atomic, for threads
        self._parameters = WeakIdKeyDictionary()
        self._optimizers = WeakIdKeyDictionary()
        self._watched = ExitStack()
        self.start = time.perf_counter()
        if self._first_optimizer is not None:
            self._optimizers[self._first_optimizer] = True
        self._scan()
        self._held_before = len(self._log)
        self._watched.callback(before_any_step(self._before_step).remove)
        self._watched.callback(after_any_step(lambda *_: self._scan()).remove)
        self._watch_storage_resize()
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
        return super().__enter__()

    def __exit__(self, *exception):
        super().__exit__(*exception)
        self._scan()
        self._watched.close()
        self._watched = None

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor runs operators on its local shard, which are counted
        inputs = tree_leaves((args, kwargs))
        result = operator(*args, **(kwargs or {}))
        outputs = tree_leaves(result)
        # torch.tensor(...) makes a storage without an operator and passes it to lift_fresh.
        unseen = operator is torch.ops.aten.lift_fresh.default
        given = set() if unseen else {storage._cdata for storage in storages_of(inputs)}
        for storage in storages_of(outputs):
            if storage._cdata in self._storages or storage._cdata not in given:
                self._count(storage)
        for tensor in inputs:
            if isinstance(tensor, torch.nn.Parameter):
                self._watch_parameter(tensor)
        if operator.namespace in COLLECTIVES:
            self._learn([*inputs, *outputs], "communication")
        return result

    def mark(self, tensor, kind):
        """Set the kind of `tensor`, one of KINDS; it counts from now on."""
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r} must be one of {', '.join(KINDS)}")
        for storage in storages_of([tensor]):
            if known := self._count(storage):
                known.kind = kind
                known.marked = True

    @property
    def current(self):
        """Live bytes by kind: now in the block, at its end after it."""
        self._scan()
        return self._totals(len(self._log))

    @property
    def peak(self):
        """Bytes by kind at the moment of the largest total."""
        self._scan()
        return self._totals(self._peak()[1])

    @property
    def peak_total(self):
        """The largest total of live bytes."""
        return self._peak()[0]

    @property
    def cuda_peak(self):
        """torch.cuda.max_memory_allocated() since entry, with work space; None without CUDA."""
        return torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None

    @property
    def samples(self):
        """[(seconds since entry, bytes by kind)], at entry and after every change."""
        self._scan()
        totals = dict.fromkeys(KINDS, 0)
        samples = [] if self._held_before else [(0.0, dict(totals))]
        for position, (moment, storage, change) in enumerate(self._log, start=1):
            totals[storage.kind] += change
            if position >= self._held_before:
                samples.append((moment - self.start, dict(totals)))
        return samples

    def _totals(self, length):
        totals = dict.fromkeys(KINDS, 0)
        for _, storage, change in self._log[:length]:
            totals[storage.kind] += change
        return totals

    def _peak(self):
        """Return the largest total, and the number of log entries up to it."""
        totals = accumulate((change for _, _, change in self._log), initial=0)
        length, peak = max(enumerate(totals), key=lambda pair: pair[1])
        return peak, length

    def _count(self, storage):
        """Count a storage or its new size; return None on an excluded device."""
        kind = storage.device.type
        if kind != self.device if self.device else kind == "meta":
            return None
        address = storage._cdata
        known = self._storages.get(address)
        if known is None and storage.filename is not None:
            return None  # mapped from a file, so the system may drop its pages
        if known is None:
            reference = weakref.ref(storage, lambda _: self._freed(address))
            known = self._storages[address] = Storage(reference)
        if change := storage.nbytes() - known.size:
            known.size += change
            self._log.append((time.perf_counter(), known, change))
        return known

    def _freed(self, address):
        known = self._storages.pop(address)
        if self._watched is not None and known.size:
            self._log.append((time.perf_counter(), known, -known.size))

    def _learn(self, tensors, kind):
        for storage in storages_of(tensors):
            known = self._count(storage)
            if known and not known.marked and KINDS.index(kind) < KINDS.index(known.kind):
                known.kind = kind

    def _scan(self):
        """Update kinds from what module and optimizers hold now; does nothing after exit."""
        if self._watched is None:
            return
        if self._module is not None:
            for parameter in self._module.parameters():
                self._watch_parameter(parameter)
            self._learn(self._module.buffers(), "buffers")
        for optimizer in list(self._optimizers):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self._watch_parameter(parameter)
            # An optimizer's state may refer to gradients or weights, which keep their kind.
            self._learn(tree_leaves(list(optimizer.state.values())), "optimizer_states")
        for parameter in list(self._parameters):
            self._learn([parameter.grad], "gradients")

    def _watch_parameter(self, parameter):
        self._learn([parameter], "parameters")
        if parameter not in self._parameters:
            self._parameters[parameter] = True
            self._learn([parameter.grad], "gradients")
            if parameter.requires_grad and parameter.is_leaf:
                hook = parameter.register_post_accumulate_grad_hook(self._accumulated)
                self._watched.callback(hook.remove)

    def _accumulated(self, parameter):
        self._learn([parameter.grad], "gradients")

    def _before_step(self, optimizer, args, kwargs):
        self._optimizers[optimizer] = True
        self._scan()  # FSDP sets the gradients of its shards without accumulation

    def _watch_storage_resize(self):
        """Wrap storage.resize_, no operator, with which FSDP frees and refills parameters."""
        original = torch.UntypedStorage.resize_

        def resize_(storage, size):
            result = original(storage, size)
            if storage._cdata in self._storages:
                self._count(storage)
            return result

        torch.UntypedStorage.resize_ = resize_
        self._watched.callback(setattr, torch.UntypedStorage, "resize_", original)


def storages_of(values):
    """Yield the storages of all tensors among `values`; for a DTensor, those of its local shard."""
    for value in values:
        if isinstance(value, torch.UntypedStorage):
            yield value
        elif isinstance(value, torch.Tensor):
            if hasattr(value, "__tensor_flatten__"):
                names, _ = value.__tensor_flatten__()
                yield from storages_of(getattr(value, name) for name in names)
            elif value.layout is torch.strided:
                yield value.untyped_storage()
