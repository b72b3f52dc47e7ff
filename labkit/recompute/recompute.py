"""Activation checkpointing: a block's forward runs again in backward: what it computed is not kept.

    forward    x0 -> [block 1] -> x1 -> [block 2] -> x2 -> loss      kept: x0, x1, nothing inside
    backward                            [block 2 again] its backward     x1 and its activations go
                     [block 1 again] its backward                        x0 and its activations go

Held, for L blocks with inputs of c bytes and activations of a bytes: L c + a, where it was L a.
Time: one more forward to a forward and a backward of about two, so at most 4/3; less, as the second
run ends with the last tensor needed. Sent: nothing. keep="matmul" holds the matrix products too.
How: in forward autograd hands us each tensor that it would save, and gets an empty place for it.
The first place that backward looks into has the function run again, and fills them all. The graph
stays an ordinary one: every gradient arrives once, and DDP and FSDP notice nothing.
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
    """function(*args, **kwargs), whose activations are not kept but computed again in backward.

    Protocol of torch.utils.checkpoint.checkpoint with use_reentrant=False; True is a ValueError.
    Arguments and results may be anything; tensors in nests of them are inputs: these are kept.
    preserve_rng_state=False: no copy of the random state; dropout then gives wrong gradients.
    keep: "matmul" holds the results of matrix products, convolutions and attention; or a function
        operator (of torch.ops.aten) -> bool that says which results to hold.
    function must do the same both times; what it changes elsewhere (BatchNorm's statistics) it
    changes twice. RuntimeError in backward: other tensors are saved, or an input was changed.
    """
    if use_reentrant:
        raise ValueError(
            "labkit's checkpoint has one backward: leave use_reentrant out, "
            "or pass use_reentrant=False"
        )
    policy = choose_policy(keep)
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    return Call(function, args, kwargs, preserve_rng_state, policy).run()


def checkpoint_every(module, unit, k=1, **options):
    """Checkpoint every k-th unit of module from now on, the first, the (k+1)-th ...; returns those.

    unit: a class, a tuple of classes, or a function module -> bool. options: checkpoint's.
    Call it before DDP or FSDP: only a unit's own forward runs again. Raises ValueError where
    nothing matches, k is no positive number, or a unit is checkpointed already.
    """
    if k < 1:
        raise ValueError(f"every k-th unit is checkpointed: k={k} must be at least 1")
    choose_policy(options.get("keep"))
    matches = as_policy(unit)
    units = [part for part in module.modules() if matches(part)]
    if not units:
        classes = sorted({type(part).__name__ for part in module.modules()})
        raise ValueError(
            f"no part of the model matches unit {unit}; it consists of {', '.join(classes)}"
        )
    for part in units[::k]:
        if getattr(part.forward, "func", None) is checkpoint:
            raise ValueError(f"this {type(part).__name__} is checkpointed already")
        part.forward = partial(checkpoint, part.forward, **options)
    return units[::k]


class Call:
    """One call of a checkpointed function: how to run it again, and the places of what it saves."""

    def __init__(self, function, args, kwargs, preserve_rng_state, policy):
        self.function, self.args, self.kwargs, self.policy = function, args, kwargs, policy
        leaves = tree_flatten((args, kwargs))[0]
        self.surroundings = Surroundings(
            [t for t in leaves if isinstance(t, torch.Tensor)], preserve_rng_state
        )
        self.places = []  # in the order of saving; weak: a place is autograd's, and goes with it
        self.kept = None

    def run(self):
        """The first time: returns the function's result."""
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
        """Autograd saves a tensor: note only what it looks like."""
        if is_parameter(tensor):
            return tensor
        place = Place(tensor)
        self.places.append(weakref.ref(place))
        return place

    def fetch(self, place):
        """Backward needs a tensor."""
        if not isinstance(place, Place):
            return place
        if place.tensor is None:
            self.run_again()
        return place.take()

    def run_again(self):
        """Fill all places that are still wanted, and stop with the last of them."""
        places = [reference() for reference in self.places]
        last = max(number for number, place in enumerate(places) if place is not None)
        numbers = itertools.count()

        def fill(tensor):
            if is_parameter(tensor):
                return tensor
            tensor = tensor.detach()  # a node that saves its own output would stay alive
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
            f"and {next(numbers)} when it ran again: it must do the same both times"
        )


class Enough(BaseException):
    """Ends the second run once backward has all it needs. No Exception, so that none catches it."""


class Place:
    """Where one saved tensor will be, and what it must look like."""

    __slots__ = ("__weakref__", "looks", "tensor", "version")

    def __init__(self, tensor):
        self.looks = appearance(tensor)
        self.tensor = None

    def fill(self, tensor, number):
        if appearance(tensor) != self.looks:
            raise RuntimeError(
                f"the checkpointed function saved a tensor {self.looks} as number {number} "
                f"in forward, and {appearance(tensor)} when it ran again: "
                "it must do the same both times"
            )
        self.tensor, self.version = tensor, tensor._version

    def take(self):
        """The tensor, once: a second backward through the same graph has the function run again."""
        tensor, self.tensor = self.tensor, None
        if tensor._version != self.version:
            raise RuntimeError(
                f"a tensor {self.looks} that backward needs was changed in place "
                "by the checkpointed function"
            )
        return tensor


def appearance(tensor):
    return tuple(tensor.shape), tensor.dtype, tensor.device


def as_it_is(tensor):
    return tensor


def is_parameter(tensor):
    """Whether this is a parameter, or a view of one such as weight.t(): held anyway."""
    return isinstance(tensor if tensor._base is None else tensor._base, torch.nn.Parameter)


class Held:
    """Values whose tensors autograd holds: it notices changes, and checkpoints around us apply."""

    def __init__(self, values):
        self.leaves, self.structure = tree_flatten(values)
        self.numbers = [
            number for number, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)
        ]
        tensors = [self.leaves[number] for number in self.numbers]
        for number in self.numbers:
            self.leaves[number] = None
        # Its result keeps the node alive: torch 2.11 frees what a grad_fn alone has saved.
        self.result = Hold.apply(torch.empty(0, requires_grad=True), *tensors)

    def get(self):
        leaves = list(self.leaves)
        for number, tensor in zip(self.numbers, self.result.grad_fn.saved_tensors, strict=True):
            leaves[number] = tensor
        return tree_unflatten(leaves, self.structure)


class Hold(torch.autograd.Function):
    """A node that only holds tensors. `anchor` wants a gradient, so that there is a node at all."""

    @staticmethod
    def forward(ctx, anchor, *tensors):
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("nothing leads here")
