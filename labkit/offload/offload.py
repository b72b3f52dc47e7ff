"""Offload: keep optimizer states and activations in host memory or in a file until they are needed.

    device   parameters  gradients  activations of the current layer     cost: each byte crosses
    host     optimizer states   activations of the other layers          the bus twice

Optimizer states are needed in step() only: the device holds two chunks instead of all (Adam in
fp32: 8 bytes a parameter), the one that is computed and the next. Activations are needed in
backward in reverse order: each is back in time if a layer computes longer than it copies.
Recomputation copies nothing, but computes twice.
Ren et al., ZeRO-Offload: Democratizing Billion-Scale Model Training, USENIX ATC 2021, section 4;
Rajbhandari et al., ZeRO-Infinity, SC 2021, section 5 (activations and disks).
"""

import weakref
from collections import defaultdict

import torch
from torch.autograd.graph import saved_tensors_hooks

from labkit.offload.optimizer_state_shapes import expected_states
from labkit.offload.pinned_memory import Lane, is_outside, part, room
from labkit.pickle_support import NotPickled

ALIGNED = 64  # bytes: alignment of a tensor in a flat region


class Offloaded(NotPickled, torch.optim.Optimizer):
    """A torch.optim optimizer with its states off the device.

    optimizer: its update of a parameter must not depend on other parameters.
    to: "cpu" for host memory (parameters on the CPU need no copies), or a folder for a file.
    chunk_mb: MiB of states in a chunk, at least one parameter's; the device holds two chunks.
    0-d states (`step`) are not moved. param_groups, state and state_dict() are the optimizer's own,
    for schedulers, scalers and checkpoints. The buffers are allocated in the constructor, which
    raises OSError if there is no space, and ValueError if the states cannot be predicted. With
    ZeRO, offload the inner one: ZeRO1(params, InFile) with
        class InFile(Offloaded):
            def __init__(self, params, **defaults):
                super().__init__(torch.optim.AdamW(params, **defaults), to=folder)
    """

    def __init__(self, optimizer, to="cpu", chunk_mb=32):
        self.optimizer = optimizer
        self.to = to
        self.chunk_bytes = chunk_mb * 2**20
        self._places = {}  # parameter -> {name of a state: its tensor off the device}
        self._lanes = {}
        self._make_room(optimizer.param_groups)

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)
    defaults = property(lambda self: self.optimizer.defaults)

    @property
    def nbytes(self):
        """Bytes of states off the device."""
        return sum(host.nbytes for places in self._places.values() for host in places.values())

    def _make_room(self, groups):
        moving = [p for group in groups for p in group["params"] if is_outside(p.device, self.to)]
        expected = expected_states(self.optimizer, moving)
        by_device = defaultdict(list)
        for p, states in expected.items():
            for name, like in states.items():
                if like.dim():
                    by_device[p.device].append((p, name, like))
        for device, rows in by_device.items():
            starts = [0]
            for _, _, like in rows:
                starts.append(starts[-1] + -(-like.nbytes // ALIGNED) * ALIGNED)
            flat = room(starts[-1], self.to, device)
            for (p, name, like), start in zip(rows, starts[:-1], strict=True):
                self._places.setdefault(p, {})[name] = part(flat, start, like)
            self._lanes.setdefault(device, Lane(device))
        self._send(moving)

    def _send(self, parameters):
        """Copy states that are new or on the device to their buffers."""
        for p in parameters:
            for name, host in self._places.get(p, {}).items():
                value = self.state[p].get(name) if p in self.state else None
                if value is not None and value is not host:
                    self._lanes[p.device].send(value, host)
                    self.state[p][name] = host

    def _bring(self, parameters):
        """Start copying these parameters' states to the device: rows (parameter, name, coming)."""
        return [
            (p, name, self._lanes[p.device].bring(host))
            for p in parameters
            # The CPU computes on host memory and files directly; meta tensors have no data.
            if p.device.type not in ("cpu", "meta")
            for name, host in self._places.get(p, {}).items()
            if name in self.state.get(p, {})
        ]

    def step(self, closure=None):
        """Step chunk by chunk: while one is computed, the states of the next are copied.

        Returns the closure's loss.
        """
        if not self._places:
            return self.optimizer.step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        chunks = list(self._chunks())
        coming = self._bring(chunks[0][1]) if chunks else []
        for number, (group, parameters) in enumerate(chunks):
            for p, name, brought in coming:
                self.state[p][name] = self._lanes[p.device].receive(brought)
            coming = self._bring(chunks[number + 1][1]) if number + 1 < len(chunks) else []
            self._step_only(group, parameters)
            self._send(parameters)
        return loss

    def _chunks(self):
        """Yield (group, its parameters that have a gradient), chunk by chunk."""
        for group in self.param_groups:
            chunk = []
            size = 0
            for p in group["params"]:
                if p.grad is None:
                    continue
                nbytes = sum(host.nbytes for host in self._places.get(p, {}).values())
                if chunk and size + nbytes > self.chunk_bytes:
                    yield group, chunk
                    chunk, size = [], 0
                chunk.append(p)
                size += nbytes
            if chunk:
                yield group, chunk

    def _step_only(self, group, parameters):
        """Run the optimizer's step on these parameters only."""
        groups, everything = self.optimizer.param_groups, group["params"]
        self.optimizer.param_groups, group["params"] = [group], parameters
        try:
            self.optimizer.step()
        finally:
            self.optimizer.param_groups, group["params"] = groups, everything

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group):
        self.optimizer.add_param_group(param_group)
        self._make_room(self.param_groups[-1:])

    def state_dict(self):
        """Return the optimizer's state_dict. Its tensors are those off the device, not copies."""
        for lane in self._lanes.values():
            lane.finish()
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict):
        self.optimizer.load_state_dict(state_dict)
        self._send(list(self._places))


class offload_activations:
    """`with offload: loss = model(x)`: keep tensors saved for backward off the device.

    to: "cpu" for host memory (tensors on the CPU stay), or a folder, for mapped files there.
    Parameters and tensors of less than min_bytes bytes stay. Use one object for all steps: it
    reuses buffers. nbytes: bytes of all buffers, used and free.
    """

    def __init__(self, to="cpu", min_bytes=2**16):
        self.to = to
        self.min_bytes = min_bytes
        self._free = defaultdict(list)  # bytes -> unused regions
        self._lanes = {}
        self._last = None  # the tensor sent last: backward needs its predecessor next
        self.nbytes = 0  # of all regions, used and free

    def __enter__(self):
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception):
        self._hooks.__exit__(*exception)
        self._last = None

    def _pack(self, tensor):
        base = tensor if tensor._base is None else tensor._base
        tensor = tensor.detach()  # a node that saves its own output would be a reference cycle
        if tensor.nbytes < self.min_bytes or not is_outside(tensor.device, self.to):
            return tensor
        if (
            isinstance(base, torch.nn.Parameter)
            or tensor.nbytes > tensor.untyped_storage().nbytes()
        ):
            return tensor  # held anyway, or an expanded tensor, which needs little memory
        lane = self._lanes.get(tensor.device) or self._lanes.setdefault(
            tensor.device, Lane(tensor.device)
        )
        away = Away(tensor, self._region(tensor), lane, self._last)
        weakref.finalize(away, self._free[tensor.nbytes].append, away.region).atexit = False
        self._last = weakref.ref(away)
        return away

    def _region(self, tensor):
        free = self._free[tensor.nbytes]
        if free:
            return free.pop()
        region = room(tensor.nbytes, self.to, tensor.device)
        self.nbytes += region.nbytes
        return region

    def _unpack(self, saved):
        return saved.bring() if isinstance(saved, Away) else saved


class Away:
    """One saved tensor off the device. previous: weak reference to the one sent before."""

    def __init__(self, tensor, region, lane, previous):
        self.region, self.lane, self.previous = region, lane, previous
        self.host, self.coming = part(region, 0, tensor), None
        lane.send(tensor, self.host)

    def start(self):
        if self.coming is None:
            self.coming = self.lane.bring(self.host)

    def bring(self):
        """Return the tensor on its device; on CUDA, start to copy the previous one back, too."""
        self.start()
        coming, self.coming = self.coming, None
        previous = self.previous() if self.previous is not None else None
        if previous is not None and self.lane.stream is not None:
            previous.start()
        return self.lane.receive(coming)
