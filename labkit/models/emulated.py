"""Emulated compute: a part of a model sleeps for the time that its arithmetic would take.

    forward    | sleep: block 0 | sleep: block 1 |        output = input
    backward                                     | sleep: block 1 | sleep: block 0 |
    gradients, real tensors                                       ^ of block 1     ^ of block 0

Everything else is real. Sleeping ranks do not compete for the processor, so a laptop with two cores
shows the overlap, bubbles and scaling of a machine with one processor per rank. Numbers and
pictures made with it are labelled with `PROVENANCE`.

Time per step: the sum over the units of forward_ms + backward_ms, plus everything outside them.
"""

import types
from functools import partial
from time import sleep

import torch

PROVENANCE = "emulated"


def emulate(module, unit, forward_ms, backward_ms=None, weights_ms=0.0, arithmetic=False):
    """Let the parts of `module` that match `unit` sleep instead of computing. Returns the module.

    unit: a class, a tuple of classes, or a function module -> bool; of nested matches the outer one
        counts. It must map one floating-point tensor to one of the same shape, as
        `labkit.models.unit(name)` does.
    forward_ms, backward_ms: milliseconds per call of a unit; backward_ms=None is 2 x forward_ms.
    weights_ms: the part of backward_ms for the gradients of weights, in a separate autograd node,
        so that a pipeline can delay it. 0: one sleep for both.
    arithmetic: a unit sleeps and then computes as usual: for units that send messages. Its own work
        adds to the times.

    A unit then returns its input and passes the gradient of its output on. A parameter's gradient
    is the parameter times the sum of the output's gradient at the last dimension's first index. It
    has the real shape and dtype, is reproducible, and is linear in the output's gradient, so the
    average over ranks is what one process would compute.

    Raises ValueError if nothing matches or a time is negative.
    """
    backward_ms = 2 * forward_ms if backward_ms is None else backward_ms
    if forward_ms < 0 or backward_ms < 0 or not 0 <= weights_ms <= backward_ms:
        raise ValueError(
            "forward_ms, backward_ms must be at least 0 and weights_ms between 0 and backward_ms, "
            f"got forward_ms={forward_ms}, backward_ms={backward_ms}, weights_ms={weights_ms}"
        )
    is_unit = (lambda part: isinstance(part, unit)) if isinstance(unit, type | tuple) else unit
    units = [part for part in module.modules() if is_unit(part)]  # nested units are never called
    if not units:
        classes = sorted({type(part).__name__ for part in module.modules()})
        raise ValueError(
            f"no part of the model matches unit {unit}: it consists of {', '.join(classes)}"
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
    # an input without gradient has no node, so the weights get all the time
    late = part.emulated_weights_seconds
    if not x.requires_grad:
        late += part.emulated_seconds[1]
    weight = Weights.apply(late, *part.parameters())
    # the node of the weights is older, so backward runs it after the input's node
    return Meet.apply(Sleep.apply(x, part.emulated_seconds), weight)


def sleep_before(seconds, part, inputs):
    x, *others = inputs
    return Sleep.apply(x, seconds), *others


class Weights(torch.autograd.Function):
    """A zero that represents all weights: its backward sleeps, and makes their gradients."""

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
    """The node where input and weights meet; its backward takes no time."""

    @staticmethod
    def forward(ctx, x, weight):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, gradient.select(-1, 0).sum()


class Sleep(torch.autograd.Function):
    """An identity that sleeps in forward and backward, and makes the parameters' gradients."""

    @staticmethod
    def forward(ctx, x, seconds, *parameters):
        ctx.save_for_backward(*parameters)
        ctx.seconds = seconds
        sleep(seconds[0])  # releases the interpreter, so that communication threads continue
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
