"""The interface of Horovod: the optimizer averages gradients, and the model is not wrapped.

    optimizer = DistributedOptimizer(SGD(model.parameters(), lr), model.named_parameters())
    broadcast_parameters(model.state_dict()); broadcast_optimizer_state(optimizer)

    compute   |-- forward --|-- backward: l3 | l2 | l1 --|  synchronize()  |- step -|
    network                       [ l3 l2 ]  [ l1 ]         ^ in step(), or before it, to clip

It uses DDP's buckets, but gradients are averages after synchronize(), not after backward(). Until
then nothing else may read or change them. GradScaler, labkit's or PyTorch's, waits for them, and so
does reading param_groups. To clip, call synchronize(), then step() within skip_synchronize().
Sent per rank and step: 2 (n-1)/n x gradient bytes, half of that with Compression.fp16.
Sergeev and Del Balso, Horovod: fast and easy distributed deep learning in TensorFlow, 2018,
section 4. Experiment(strategy="horovod") trains with it.
"""

import json
import warnings
from contextlib import contextmanager

import torch
import torch.distributed as dist

from labkit import comm
from labkit.ddp.reducer import Reducer
from labkit.pickle_support import NotPickled
from labkit.replicas import broadcast_tensors
from labkit.torch_private import in_backward
from labkit.zero.zero import refuse_copies


class Compression:
    """Formats of gradients in messages; or any class with compress(tensor) and decompress.

    compress returns (tensor, context); decompress takes both.
    """

    class none:
        """The gradients' own dtype."""

    class fp16:
        """16-bit floats: half the bytes, 10 bits of mantissa, at most 65504."""

        @staticmethod
        def compress(tensor):
            return (
                (tensor.half(), tensor.dtype)
                if tensor.is_floating_point()
                else (tensor, tensor.dtype)
            )

        @staticmethod
        def decompress(tensor, context):
            return tensor.to(context)


def compressed_average(state, bucket):
    """Average a bucket in a compressed format. A comm hook; state: (compression, group)."""
    compression, group = state
    small, context = compression.compress(bucket.buffer().div_(dist.get_world_size(group)))
    future = comm.all_reduce(small, group=group, async_op=True).get_future()
    return future.then(lambda done: compression.decompress(done.value()[0], context))


def DistributedOptimizer(
    optimizer,
    named_parameters=None,
    compression=Compression.none,
    backward_passes_per_step=1,
    process_group=None,
    bucket_cap_mb=25,
):
    """Return the optimizer, of the same class and state, that averages gradients before each step.

    backward_passes_per_step: backward passes that are summed, not averaged, before one all-reduce.
    Raises ValueError unless named_parameters names every trainable parameter exactly once, and for
    an optimizer that works on copies of the model's tensors (MasterWeights, ZeRO).
    """
    refuse_copies("DistributedOptimizer", optimizer)
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if named_parameters is None:
        named_parameters = [(f"parameter {i}", p) for i, p in enumerate(trained)]
    named = [(name, p) for name, p in named_parameters if p.requires_grad]
    names = [name for name, _ in named]
    if len(set(names)) < len(names):
        twice = max(names, key=names.count)
        raise ValueError(f"named_parameters contains {twice!r} twice: names must be unique")
    if {id(p) for p in trained} - {id(p) for _, p in named}:
        raise ValueError(
            "named_parameters lacks parameters of the optimizer: pass model.named_parameters()"
        )
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step={backward_passes_per_step} must be at least 1")
    trained_ids = {id(p) for p in trained}
    # tied parameters once
    named = list({id(p): (name, p) for name, p in named if id(p) in trained_ids}.values())
    kind = type(optimizer)
    face = object.__new__(
        type(kind.__name__, (_Distributed, kind), {"__module__": kind.__module__})
    )
    face.__dict__ = optimizer.__dict__
    face._start(named, compression, backward_passes_per_step, process_group, bucket_cap_mb)
    return face


class _Versioned(Reducer):
    """A Reducer that records the version of each bucket's memory when the bucket is sent."""

    def _launch(self, bucket):
        super()._launch(bucket)
        bucket.version = bucket.buffer()._version

    @torch.no_grad()
    def launch_and_compare(self):
        """Call launch_rest().

        Returns the name of a gradient that was changed after sending, or None.
        """
        self.launch_rest()
        for bucket in self.buckets:
            changed = bucket.buffer()._version != bucket.version
            for slot, (p, view) in enumerate(zip(bucket.members, bucket.gradients(), strict=True)):
                if slot not in bucket.skipped and (changed or p.grad is not view):
                    return bucket.names[slot]
        return None


class _Distributed(NotPickled):
    instead = "the state_dict() of this DistributedOptimizer"

    def _start(self, named, compression, backward_passes_per_step, process_group, bucket_cap_mb):
        self._named = named
        self._settings = compression, backward_passes_per_step, process_group, bucket_cap_mb
        self.backward_passes_per_step = backward_passes_per_step
        self._reducer = _Versioned(named, self, process_group, int(bucket_cap_mb * 2**20))
        if compression is not Compression.none:
            self._reducer.use_hook((compression, process_group), compressed_average)
        self._passes = [[0] * len(bucket.members) for bucket in self._reducer.buckets]
        self._synchronized, self._should_synchronize = False, True
        self._taken = False  # averaged by take_gradients()
        self._watched = {p for _, p in named}

    def set_backward_passes_per_step(self, passes):
        """Sum this number of backward passes before one all-reduce, from the next step on."""
        compression, _, group, cap = self._settings
        self._settings = compression, passes, group, cap
        self.backward_passes_per_step = passes

    @property
    def process_group(self):
        return self._reducer.group

    def add_param_group(self, param_group):
        """Add a parameter group on all ranks. Its gradients are averaged, too."""
        if self._reducer.started or any(map(any, self._passes)):
            raise RuntimeError(
                "add_param_group() was called between backward() and step(): call it after step()"
            )
        super().add_param_group(param_group)
        added = [p for p in self.param_groups[-1]["params"] if p.requires_grad]
        first = len(self._named)
        named = [(f"parameter {first + number}", p) for number, p in enumerate(added)]
        self._reducer.detach()
        self._start([*self._named, *named], *self._settings)

    def on_gradient(self, index, slot):
        self._passes[index][slot] += 1
        passes = self._passes[index][slot]
        self._synchronized = self._taken = False
        if passes > self.backward_passes_per_step:
            raise RuntimeError(
                f"{self._reducer.buckets[index].names[slot]!r} got gradient number {passes} before "
                f"step(): backward_passes_per_step={self.backward_passes_per_step} is too small"
            )
        if passes < self.backward_passes_per_step:
            self._reducer.keep(index, slot)
        else:
            self._reducer.arrive(index, slot)

    def synchronize(self):
        """Wait until all gradients are averaged; missing ones count as zeros. Collective.

        Raises RuntimeError if a gradient was changed while it was being averaged, or belongs to a
        parameter that was unfrozen after construction.
        """
        try:
            changed = self._reducer.launch_and_compare()
            self._reducer.finish()
        finally:
            self._passes = [[0] * len(passes) for passes in self._passes]
        if changed is not None:
            raise RuntimeError(
                f"the gradient of {changed!r} was changed while it was being averaged: call "
                "synchronize() before you unscale, clip or clear gradients"
            )
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p not in self._watched:
                    raise RuntimeError(
                        f"a parameter of shape {list(p.shape)} was unfrozen after "
                        "DistributedOptimizer was constructed: unfreeze it before"
                    )
        self._synchronized = True

    def take_gradients(self):
        """Average now, unless synchronize() has, and not again in step(). Collective.

        Called by labkit's GradScaler.unscale_().
        """
        asked = self._synchronized
        if not asked:
            self.synchronize()
        self._synchronized, self._taken = asked, True

    @property
    def param_groups(self):
        """The optimizer's groups.

        Reading averages first, as PyTorch's GradScaler unscales by them.
        """
        if self._reducer.started and not in_backward():
            self.take_gradients()
        return self.__dict__["param_groups"]

    @param_groups.setter
    def param_groups(self, groups):
        self.__dict__["param_groups"] = groups

    @contextmanager
    def skip_synchronize(self):
        """`with optimizer.skip_synchronize(): optimizer.step()`, after your own synchronize()."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure=None):
        """Average gradients, then take the optimizer's step.

        A closure is averaged after each call.
        """

        def averaged():
            loss = closure()
            self.synchronize()
            return loss

        if closure is not None:
            result = super().step(averaged)
        else:
            if self._should_synchronize and not self._taken:
                if self._synchronized:
                    warnings.warn(
                        "step() after synchronize() averages again: use skip_synchronize()",
                        stacklevel=2,
                    )
                self.synchronize()
            result = super().step()
        self._synchronized = self._taken = False
        return result

    def zero_grad(self, *args, **kwargs):
        """Clear the gradients. Raises RuntimeError while they are being averaged."""
        if self._reducer.started:
            raise RuntimeError(
                "zero_grad() was called while gradients are being averaged: "
                "call step() or synchronize() first"
            )
        self._synchronized = self._taken = False
        return super().zero_grad(*args, **kwargs)


def broadcast_parameters(parameters, root_rank=0, process_group=None):
    """Overwrite tensors, a state_dict or (name, tensor) pairs, with root_rank's. Collective."""
    pairs = parameters.items() if isinstance(parameters, dict) else parameters
    broadcast_tensors(
        [t.detach() for _, t in pairs if isinstance(t, torch.Tensor)], root_rank, process_group
    )


def broadcast_optimizer_state(optimizer, root_rank=0, process_group=None):
    """Copy root_rank's optimizer state to every rank, even if a rank has none yet. Collective.

    For when only root_rank has loaded a checkpoint. Values that are not tensors are sent as JSON:
    numbers, strings, None, lists, tuples, dicts. Raises TypeError for others.
    """
    is_root = dist.get_rank(process_group) == root_rank
    device = optimizer.param_groups[0]["params"][0].device
    tensors = []
    text = torch.frombuffer(
        bytearray(json.dumps(_encode(optimizer.state_dict(), tensors)).encode()), dtype=torch.uint8
    )
    size = torch.tensor(len(text), device=device)
    broadcast_tensors([size], root_rank, process_group)
    sent = text.to(device) if is_root else torch.zeros(int(size), dtype=torch.uint8, device=device)
    broadcast_tensors([sent], root_rank, process_group)
    if is_root:
        broadcast_tensors([t.to(device) for t in tensors], root_rank, process_group)
    else:
        received = []
        state = _decode(json.loads(bytes(sent.tolist())), received, device)
        broadcast_tensors(received, root_rank, process_group)
        optimizer.load_state_dict(state)


def _encode(value, tensors):
    """Convert a value to JSON, with tensors as {"tensor": [dtype, shape]}; collect the tensors."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if isinstance(value, dict):
        return {"dict": [[_encode(k, tensors), _encode(v, tensors)] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_encode(item, tensors) for item in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"cannot send optimizer state of type {type(value).__name__}")


def _decode(coded, tensors, device):
    if not isinstance(coded, dict):
        return coded
    [(kind, content)] = coded.items()
    if kind == "tensor":
        dtype, shape = content
        tensors.append(torch.zeros(shape, dtype=getattr(torch, dtype), device=device))
        return tensors[-1]
    if kind == "dict":
        return {_decode(k, tensors, device): _decode(v, tensors, device) for k, v in content}
    items = [_decode(item, tensors, device) for item in content]
    return tuple(items) if kind == "tuple" else items
