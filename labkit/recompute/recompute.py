"""Activation checkpointing: keep a block's inputs only, and run its forward again in backward.

    forward    x0 -> [block 1] -> x1 -> [block 2] -> x2 -> loss      kept: x0, x1, nothing inside
    backward                            [block 2 again] its backward     x1, its activations freed
                     [block 1 again] its backward                        x0, its activations freed

Held, for L blocks with inputs of c bytes and activations of a bytes: L c + a instead of L a.
Time: one more forward, at most 4/3 of a step, as backward takes about two forwards. It is less,
because the second run ends with the last tensor needed. Sent: nothing. keep="matmul" also holds the
results of matrix products.
How: in forward, each tensor that autograd would save is replaced by an empty placeholder. The first
placeholder that backward reads runs the function again, which fills all of them. The graph stays an
ordinary one: every gradient arrives once, and DDP and FSDP need no change.
Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016, section 4.1; Korthikanti et al.,
Reducing Activation Recomputation in Large Transformer Models, MLSys 2023, section 5 (what to keep).
"""

import itertools
import weakref
from contextlib import nullcontext
from functools import partial

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten

from labkit.fsdp.wrap_policy import as_policy
from labkit.recompute.rng_and_autocast import Surroundings
from labkit.recompute.selective_checkpoint import Keep, Reuse, choose_policy


def checkpoint(function, *args, use_reentrant=False, preserve_rng_state=True, keep=None, **kwargs):
    """Call function(*args, **kwargs) without keeping its activations; backward recomputes them.

    Interface of torch.utils.checkpoint.checkpoint, but use_reentrant=True raises ValueError.
    Arguments and results may be anything; tensors nested in the arguments are inputs and are kept.
    preserve_rng_state=False: do not save the random state; dropout then gives wrong gradients.
    keep: "matmul" holds the results of matrix products, convolutions and attention; or a function
        operator (of torch.ops.aten) -> bool that selects the results to hold.
    function must do the same both times; its side effects (BatchNorm's statistics) happen twice.
    Raises RuntimeError in forward if a held result was changed in place; in backward if the second
    run saves other tensors, or an input was changed in place. Raises ValueError for another keep.
    """
    if use_reentrant:
        raise ValueError(
            "labkit's checkpoint does not support use_reentrant=True: pass use_reentrant=False"
        )
    policy = choose_policy(keep)
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    return Call(function, args, kwargs, preserve_rng_state, policy).run()


def checkpoint_every(module, unit, k=1, **options):
    """Checkpoint every k-th unit of module, the first, the (k+1)-th, ...; returns those units.

    unit: a class, a tuple of classes, or a function module -> bool. options: checkpoint's.
    Call it before DDP or FSDP, as only a unit's own forward runs again. Raises ValueError if
    nothing matches, k < 1, or a unit is checkpointed already.
    """
    if k < 1:
        raise ValueError(f"k={k} must be at least 1")
    choose_policy(options.get("keep"))
    matches = as_policy(unit)
    units = [part for part in module.modules() if matches(part)]
    if not units:
        classes = sorted({type(part).__name__ for part in module.modules()})
        raise ValueError(f"no module matches unit={unit}: choose among {', '.join(classes)}")
    for part in units[::k]:
        if getattr(part.forward, "func", None) is checkpoint:
            raise ValueError(f"{type(part).__name__} is checkpointed already: call this once")
        part.forward = partial(checkpoint, part.forward, **options)
    return units[::k]


class Call:
    """One call of a checkpointed function, with the inputs to repeat it and its placeholders."""

    def __init__(self, function, args, kwargs, preserve_rng_state, policy):
        self.function, self.args, self.kwargs, self.policy = function, args, kwargs, policy
        leaves = tree_flatten((args, kwargs))[0]
        self.surroundings = Surroundings(
            [t for t in leaves if isinstance(t, torch.Tensor)], preserve_rng_state
        )
        self.places = []  # in the order of saving; weak references, as autograd owns the places
        self.kept = None

    def run(self):
        """Run the function the first time and return its result."""
        args, kwargs = self.args, self.kwargs
        del self.args, self.kwargs
        self.inputs = Held((args, kwargs))
        keep = Keep(self.policy, self.surroundings) if self.policy else nullcontext()
        with saved_tensors_hooks(self.reserve, self.fetch), keep:
            result = self.function(*args, **kwargs)
        if self.policy:
            self.kept = Held(keep.finish())
        return result

    def reserve(self, tensor):
        """Replace a tensor that autograd saves by a placeholder."""
        if is_parameter(tensor):
            return tensor
        place = Place(tensor)
        self.places.append(weakref.ref(place))
        return place

    def fetch(self, place):
        """Return the tensor of a placeholder for backward."""
        if not isinstance(place, Place):
            return place
        if place.tensor is None:
            self.run_again()
        return place.take()

    def run_again(self):
        """Run the function again to fill all places still referenced; stop after the last of them.

        Raises RuntimeError if the function saves fewer or other tensors than in forward.
        """
        places = [reference() for reference in self.places]
        last = max(number for number, place in enumerate(places) if place is not None)
        numbers = itertools.count()

        def fill(tensor):
            if is_parameter(tensor):
                return tensor
            tensor = tensor.detach()  # a node that saves its own output would be a reference cycle
            number = next(numbers)
            if number <= last and places[number] is not None:
                places[number].fill(tensor, number)
            if number == last:
                raise Enough
            return tensor

        args, kwargs = self.inputs.get()
        reuse = Reuse(self.policy, self.kept.get()) if self.policy else nullcontext()
        try:
            with (
                self.surroundings.again(),
                torch.enable_grad(),
                saved_tensors_hooks(fill, lambda tensor: tensor),
                reuse,
            ):
                self.function(*args, **kwargs)
        except Enough:
            return
        raise RuntimeError(
            f"the checkpointed function saved {last + 1} tensors in forward, "
            f"but {next(numbers)} when it ran again: it must do the same both times"
        )


class Enough(BaseException):
    """Ends the second run when all tensors are filled.

    Not an Exception, so that `except Exception` in the function does not catch it.
    """


class Place:
    """A placeholder for one saved tensor, with its expected shape, dtype and device."""

    __slots__ = ("__weakref__", "looks", "tensor", "version")

    def __init__(self, tensor):
        self.looks = appearance(tensor)
        self.tensor = None

    def fill(self, tensor, number):
        if appearance(tensor) != self.looks:
            raise RuntimeError(
                f"the checkpointed function saved a tensor {self.looks} as number {number} "
                f"in forward, but {appearance(tensor)} when it ran again: "
                "it must do the same both times"
            )
        self.tensor, self.version = tensor, tensor._version

    def take(self):
        """Return the tensor and clear the place: a second backward runs the function again.

        Raises RuntimeError if the function changed the tensor in place after it was saved.
        """
        tensor, self.tensor = self.tensor, None
        if tensor._version != self.version:
            raise RuntimeError(
                f"a tensor {self.looks} that backward needs was changed in place "
                "by the checkpointed function"
            )
        return tensor


def appearance(tensor):
    """Return (shape, dtype, device)."""
    return tuple(tensor.shape), tensor.dtype, tensor.device


def is_parameter(tensor):
    """Return whether this is a parameter, or a view of one such as weight.t(): in memory anyway."""
    return isinstance(tensor if tensor._base is None else tensor._base, torch.nn.Parameter)


class Held:
    """Nested values whose tensors are saved by autograd, through the hooks of outer checkpoints.

    get() returns the values. It raises RuntimeError if a tensor was changed in place.
    """

    def __init__(self, values):
        self.leaves, self.structure = tree_flatten(values)
        self.numbers = [
            number for number, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)
        ]
        tensors = [self.leaves[number] for number in self.numbers]
        for number in self.numbers:
            self.leaves[number] = None
        # Keep the result: torch 2.11 frees the saved tensors of a node that only grad_fn refers to.
        self.result = Hold.apply(torch.empty(0, requires_grad=True), *tensors)

    def get(self):
        leaves = list(self.leaves)
        for number, tensor in zip(self.numbers, self.result.grad_fn.saved_tensors, strict=True):
            leaves[number] = tensor
        return tree_unflatten(leaves, self.structure)


class Hold(torch.autograd.Function):
    """A node that only holds tensors. `anchor` requires a gradient, so that the node exists."""

    @staticmethod
    def forward(ctx, anchor, *tensors):
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("Hold has no backward")
