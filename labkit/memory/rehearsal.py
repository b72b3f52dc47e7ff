"""A rehearsal: one training step on tensors with shapes but no data: what would live, and when.

    real       x 8 KiB     -- matmul -> y 32 KiB     -- relu -> ..  time and memory for each number
    rehearsed  x [32, 64]  -- matmul -> y [32, 256]  -- relu -> ..  shapes: no arithmetic, no memory
    log        +32 KiB (activation) | +32 KiB (activation) | ... | gradient 3 is in | -32 KiB | ...

Every operator says what it would allocate, in backward too, and autograd keeps what it would keep:
the log has each storage's birth and death in the order of the real step. A model that fits no
machine can be rehearsed on a laptop: one on the meta device takes no memory at all.
Cost: Python's share of a step. Not seen: work space in one kernel, what an allocator rounds up.
"""

import weakref
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from labkit.amp.autocast_mode import autocast


@dataclass
class Piece:
    """A storage: bytes, and the number of the parameter whose gradient it is (None: activation)."""

    size: int
    gradient_of: int | None = None


@dataclass
class Rehearsal:
    """What one forward and backward would allocate.

    parameters, buffers: name -> fake tensor, each once; their places are their numbers.
    device: what it is meant for. backward_at: the position in the log where backward begins.
    units: for each, the root first, lists of its parameters' numbers, one a dtype, trained or not.
    log: rows (Piece, change in bytes, event); event: None, ("gradient", number), ("end", None), or
        (phase, number of the unit): "forward", "forward end", "backward", "backward end".
    """

    parameters: dict
    buffers: dict
    device: torch.device
    units: list = field(default_factory=list)
    log: list = field(default_factory=list)
    backward_at: int = 0


class Watch(TorchDispatchMode):
    """Writes every new storage, and the end of every storage, into `log`."""

    def __init__(self, log):
        super().__init__()
        self.log, self.alive = log, {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in tensors_of((args, kwargs))}
        if operator is torch.ops.aten.lift_fresh.default:
            given = set()  # its input was built where nobody could see it
        result = operator(*args, **(kwargs or {}))
        for t in tensors_of(result):
            storage = t.untyped_storage()
            if storage._cdata not in self.alive and storage._cdata not in given:
                self.born(storage)
        return result

    def born(self, storage):
        address, piece = storage._cdata, Piece(storage.nbytes())
        self.alive[address] = piece, weakref.ref(storage, lambda _: self.died(address))
        self.log.append((piece, piece.size, None))

    def died(self, address):
        piece, _ = self.alive.pop(address)
        self.log.append((piece, -piece.size, None))

    def gradient(self, number, parameter):
        """A parameter's gradient is complete: its storage has been a gradient all its life."""
        piece, _ = self.alive.get(parameter.grad.untyped_storage()._cdata, (None, None))
        if piece is not None:
            piece.gradient_of = number
        self.log.append((piece, 0, ("gradient", number)))

    def mark(self, phase, unit):
        self.log.append((None, 0, (phase, unit)))


class Step(torch.nn.Module):
    """Forward, loss and backward as one forward: parameters stay exchanged for all of it."""

    def __init__(self, module, loss, precision, at_backward):
        super().__init__()
        self.module, self.loss = module, loss
        self.precision, self.at_backward = precision, at_backward

    def forward(self, inputs, target):
        with self.precision():
            output = self.module(*inputs)
            value = total(output) if self.loss is None else self.loss(output, *target)
            del output
        self.at_backward()
        value.backward()
        return value  # the training loop keeps it, too: somebody wants to see it


def total(output):
    """A scalar that depends on every floating-point tensor in the output."""
    return sum(t.sum() for t in tensors_of(output) if t.is_floating_point())


def tensors_of(tree):
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]


def rehearse(
    module,
    input,
    loss=None,
    target=None,
    dtype=None,
    low=None,
    device=None,
    units=(),
    checkpoint=None,
):
    """The Rehearsal of one forward and backward of `module`, which is not computed with or changed.

    input: a tensor or a tuple of them, one rank's batch; target: as `loss` takes it; both: also on
    the meta device. loss: function (output, target), or (output) without a target, -> scalar; None:
    the sum of the output. dtype: of floating-point parameters, buffers, inputs; None: as they are.
    low: what autocast computes in, or None. device: by default the module's; one that is not here
    is rehearsed on the CPU. units: [Unit] of labkit.fsdp.wrap_policy, the root first. checkpoint:
    function (function, *args) that runs a unit and recomputes it in backward.
    """
    inputs = input if isinstance(input, tuple | list) else (input,)
    target = () if target is None else target
    targets = target if isinstance(target, tuple | list) else (target,)
    named = dict(module.named_parameters())
    own = next((p.device for p in named.values() if not p.is_meta), "cpu")
    device = torch.device(device or own)
    here = device if device.type != "cuda" or torch.cuda.is_available() else torch.device("cpu")
    precision = nullcontext
    if low is not None:
        precision = partial(autocast, here.type, low)
        precision()  # the first one asks the device whether it can: here, where tensors are real
    with FakeTensorMode(allow_non_fake_inputs=True), ExitStack() as undo:

        def fake(t):
            kind = dtype if dtype is not None and t.is_floating_point() else t.dtype
            return torch.empty_strided(
                t.shape, t.stride(), dtype=kind, device=here, requires_grad=t.requires_grad
            )

        parameters = {name: fake(p) for name, p in named.items()}
        done = Rehearsal(parameters, {name: fake(b) for name, b in module.named_buffers()}, device)
        watch = Watch([])
        for number, p in enumerate(parameters.values()):
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(
                    lambda p, number=number: watch.gradient(number, p)
                )
        numbers = {p: number for number, p in enumerate(named.values())}
        for number, unit in enumerate(units):
            done.units.append(members(unit, numbers))
            mark_unit(undo, watch, number, unit.module, checkpoint if number else None)

        def at_backward():
            done.backward_at = len(watch.log)

        step = Step(module, loss, precision, at_backward)
        tensors = {f"module.{name}": t for name, t in (parameters | done.buffers).items()}
        arguments = tree_map_only(torch.Tensor, fake, (tuple(inputs), tuple(targets)))
        with watch:
            held = torch.func.functional_call(step, tensors, arguments)
        watch.log.append((None, 0, ("end", None)))
        done.log = list(watch.log)  # what is freed from here on was not freed in the step
        del held
    return done


def members(unit, numbers):
    """Numbers of the unit's own parameters, in lists of one dtype, all of them trained or none."""
    kinds = {}
    for p in unit.own_parameters():
        kinds.setdefault((p.dtype, p.requires_grad), []).append(numbers[p])
    return list(kinds.values())


def mark_unit(undo, watch, number, module, checkpoint):
    """Write into the log when a unit's forward begins and ends, and when its backward does."""

    def before(_, args, kwargs):
        inputs = []

        def own(t):
            if t.requires_grad:
                t = t.view_as(t)  # the unit's own node: t may have uses whose gradients come later
                inputs.append(t)
            return t

        watch.mark("forward", number)
        args, kwargs = tree_map_only(torch.Tensor, own, (args, kwargs))
        if inputs:
            register_multi_grad_hook(inputs, lambda _: watch.mark("backward end", number))
        return args, kwargs

    def after(_, args, output):
        for t in tensors_of(output):
            if t.grad_fn is not None:
                t.register_hook(lambda gradient: watch.mark("backward", number))
        watch.mark("forward end", number)

    undo.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
    undo.callback(module.register_forward_hook(after).remove)
    if checkpoint is not None:
        plain, had = module.forward, "forward" in module.__dict__
        module.forward = lambda *args, **kwargs: checkpoint(plain, *args, **kwargs)
        if had:
            undo.callback(module.__dict__.__setitem__, "forward", plain)
        else:
            undo.callback(delattr, module, "forward")


def rehearse_optimizer(tensors, optimizer):
    """(bytes of states, [bytes of temporaries, at each change]) of a step of optimizer(parameters).

    tensors: (shape, dtype, device) of each parameter with a gradient. It is the second step, with
    states.
    """
    with FakeTensorMode():
        parameters = []
        for shape, dtype, device in tensors:
            p = torch.empty(shape, dtype=dtype, device=device, requires_grad=True)
            p.grad = torch.empty_like(p)
            parameters.append(p)
        if not parameters:
            return 0, []
        made = optimizer(parameters)
        made.step()
        states = tensors_of(list(made.state.values()))
        held = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in states}
        watch = Watch([])
        with watch:
            made.step()
        return sum(held.values()), list(accumulate(change for _, change, _ in watch.log))
