"""Emulated compute: a part of a model sleeps for as long as its arithmetic would take.

    forward    | sleep: block 0 | sleep: block 1 |        output = input
    backward                                     | sleep: block 1 | sleep: block 0 |
    gradients, real tensors                                       ^ of block 1     ^ of block 0

All the rest stays real. Ranks that sleep do not fight for the processor, so a laptop with two cores
shows the overlap, the bubbles and the scaling of a machine with a processor per rank. Every number
and picture made so is labelled with `PROVENANCE`.

Time per step: the sum over the units of forward_ms + backward_ms, and whatever is outside them.
"""

import types
from functools import partial
from time import sleep

import torch

PROVENANCE = "emulated"


def emulate(module, unit, forward_ms, backward_ms=None, weights_ms=0.0, arithmetic=False):
    """Let the parts of `module` that match `unit` sleep, not compute. Returns the changed module.

    unit: a class, a tuple of classes, or a function module -> bool; of nested matches the outer one
        counts. It must map one floating-point tensor to one of the same shape, as what
        `labkit.models.unit(name)` gives does.
    forward_ms, backward_ms: milliseconds a call of a unit; backward_ms=None is twice forward_ms.
    weights_ms: those of backward_ms that go into the weights' gradients, in a node of autograd of
        their own: a pipeline may put them off. 0: one sleep for all.
    arithmetic: a unit sleeps, and then does what it always does: for units that send messages. Its
        own work comes on top of the times.

    A unit then returns its input and passes the gradient of its output on. A parameter's gradient
    is the parameter times the sum of the output's gradient at the last dimension's first index: of
    real shape and dtype, the same in every run, and linear in the output's gradient, so that
    averaging over ranks gives what one process would compute.

    Raises ValueError when nothing matches or a time is negative.
    """
    backward_ms = 2 * forward_ms if backward_ms is None else backward_ms
    if forward_ms < 0 or backward_ms < 0 or not 0 <= weights_ms <= backward_ms:
        raise ValueError(
            "times must not be negative, nor a part longer than the whole, "
            f"got forward_ms={forward_ms}, backward_ms={backward_ms}, weights_ms={weights_ms}"
        )
    is_unit = (lambda part: isinstance(part, unit)) if isinstance(unit, type | tuple) else unit
    units = [part for part in module.modules() if is_unit(part)]  # inside another: never called
    if not units:
        classes = sorted({type(part).__name__ for part in module.modules()})
        raise ValueError(
            f"no part of the model matches unit {unit}; it consists of {', '.join(classes)}"
        )
    for part in units:
        if arithmetic:
            seconds = forward_ms / 1000, backward_ms / 1000
            part.register_forward_pre_hook(partial(sleep_before, seconds))
            continue
        part.emulated_seconds = (forward_ms / 1000, (backward_ms - weights_ms) / 1000)
        part.emulated_weights_seconds = weights_ms / 1000
        part.forward = types.MethodType(sleeping_forward, part)  # deepcopy rebinds a method
    return module


def sleeping_forward(part, x):
    if not part.emulated_weights_seconds:
        return Sleep.apply(x, part.emulated_seconds, *part.parameters())
    # an input that wants no gradient has no node: all the time is the weights'
    late = part.emulated_weights_seconds
    if not x.requires_grad:
        late += part.emulated_seconds[1]
    weight = Weights.apply(late, *part.parameters())
    # the weights' node is the older one: backward comes to it after the input's
    return Meet.apply(Sleep.apply(x, part.emulated_seconds), weight)


def sleep_before(seconds, part, inputs):
    x, *others = inputs
    return Sleep.apply(x, seconds), *others


class Weights(torch.autograd.Function):
    """A zero that stands for all weights: its backward sleeps, and makes their gradients."""

    @staticmethod
    def forward(ctx, seconds, *parameters):
        ctx.save_for_backward(*parameters)
        ctx.seconds = seconds
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx, factor):
        sleep(ctx.seconds)
        return None, *[p * factor.to(p.dtype) for p in ctx.saved_tensors]


class Meet(torch.autograd.Function):
    """Where input and weights meet: its backward takes no time."""

    @staticmethod
    def forward(ctx, x, weight):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, gradient.select(-1, 0).sum()


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds, *parameters):
        ctx.save_for_backward(*parameters)
        ctx.seconds = seconds
        sleep(seconds[0])  # releases the interpreter: the threads that send and receive go on
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        sleep(ctx.seconds[1])
        factor = gradient.select(-1, 0).sum()
        needed = ctx.needs_input_grad[2:]
        gradients = [
            p * factor.to(p.dtype) if need else None
            for p, need in zip(ctx.saved_tensors, needed, strict=True)
        ]
        return gradient, None, *gradients
