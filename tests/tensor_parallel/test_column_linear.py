"""A column-parallel layer, against autograd's own backward of it, in which the rank waits for the sum first."""

from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from labkit import amp, comm
from labkit.amp.fp8 import fp8
from labkit.pipeline.zero_bubble_backward import backward_of_input, backward_of_weights
from labkit.recompute import checkpoint
from labkit.tensor_parallel import ColwiseParallel, Replicate, Shard, parallelize_module
from labkit.tensor_parallel.parallel_linear import ColumnLinear
from labkit.tensor_parallel.placements import Shared

SHAPE = (4, 8, 12)  # of the full input


def waits_first(layer, x):
    """The forward whose backward autograd derives: the sum, and only then the next node."""
    y = F.linear(layer.axis.move(x, layer.source, Shared()), layer.weight, layer.bias)
    return layer.redistribute(y, Shard(-1))


def layer_and_input(rank, world_size, dtype, source, shape, bias=True):
    torch.manual_seed(0)
    layer = nn.Linear(shape[-1], 8, bias=bias, dtype=dtype)
    parallelize_module(layer, None, ColwiseParallel(input_layouts=source))
    x = torch.randn(shape, dtype=dtype)
    x = x.chunk(world_size, source.dim)[rank].contiguous() if isinstance(source, Shard) else x
    return layer, x


def one_step(layer, x, forward, around, uses):
    """Outputs, gradients of input and parameters, and messages of a step."""
    layer.zero_grad()
    x = x.detach().requires_grad_(x.requires_grad)
    with comm.record() as log:
        with around():
            outputs = [forward(layer, x * (i + 1)) for i in range(uses)]
        if outputs[0].requires_grad:
            sum(y.float().pow(2).sum() for y in outputs).backward()
    gradients = [x.grad, *(p.grad for p in layer.parameters())]
    return [*outputs, *gradients], [(e.op, e.payload_bytes, e.sent_bytes) for e in log]


FORMS = {
    "plain": lambda forward, layer, x: forward(layer, x),
    "in place": lambda forward, layer, x: F.relu(forward(layer, x), inplace=True),
}
FORMS["torch's checkpoint"] = lambda forward, layer, x: torch_checkpoint(forward, layer, x, use_reentrant=False)
FORMS["labkit's checkpoint"] = lambda forward, layer, x: checkpoint(forward, layer, x)

CASES = {
    "fp32": {},
    "fp64": {"dtype": torch.float64},
    "no bias": {"bias": False},
    "one token": {"shape": (12,)},
    "four dims": {"shape": (2, 4, 4, 12)},
    "no tokens": {"shape": (0, 12)},
    "batch": {"source": Shard(0)},
    "sequence": {"source": Shard(1)},
    "channels": {"source": Shard(-1), "dtype": torch.float64},
    "autocast": {"around": partial(torch.autocast, "cpu", torch.bfloat16)},
    "labkit's autocast": {"around": partial(amp.autocast, "cpu", torch.bfloat16)},
    "autocast, sequence": {"around": partial(torch.autocast, "cpu", torch.bfloat16), "source": Shard(1)},
    "fp8": {"around": fp8},
    "no_grad": {"around": torch.no_grad},
    "frozen weight": {"frozen": ("weight",)},
    "frozen bias": {"frozen": ("bias",)},
    "frozen layer": {"frozen": ("weight", "bias")},
    "input without gradient": {"frozen": ("input",)},
    "two uses": {"uses": 2},
    "changed in place": {"form": "in place"},
    "recomputed": {"form": "torch's checkpoint"},
    "recomputed, sequence": {"form": "torch's checkpoint", "source": Shard(1)},
    "recomputed by labkit": {"form": "labkit's checkpoint"},
}


def both_orders(rank, world_size):
    """{case: whether the class and the order that waits first are equal bit for bit, and their messages}."""
    found = {}
    for name, case in CASES.items():
        case = {"dtype": torch.float32, "source": Replicate(), "shape": SHAPE} | case
        frozen, around, uses = case.pop("frozen", ()), case.pop("around", nullcontext), case.pop("uses", 1)
        form = FORMS[case.pop("form", "plain")]
        layer, x = layer_and_input(rank, world_size, **case)
        x.requires_grad_("input" not in frozen)
        for parameter, p in layer.named_parameters():
            p.requires_grad_(parameter not in frozen)
        forwards = [partial(form, forward) for forward in (ColumnLinear.forward, waits_first)]
        (ours, sent), (theirs, theirs_sent) = (one_step(layer, x, forward, around, uses) for forward in forwards)
        same = [a is b is None or (a.dtype == b.dtype and torch.equal(a, b)) for a, b in zip(ours, theirs, strict=True)]
        found[name] = all(same), sent, theirs_sent
    return found


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_bit_for_bit_what_a_rank_has_that_waits_first(ranks, world_size):
    for rank, told in enumerate(ranks(world_size, both_orders)):
        for case, (same, sent, expected) in told.items():
            assert same and sent == expected, f"rank {rank}, {case}: {sent}, not {expected}"


def against_one_process(rank, world_size):
    torch.manual_seed(0)
    full = nn.Linear(12, 8).double()
    layer, x = layer_and_input(rank, world_size, torch.float64, Shard(1), SHAPE)
    with torch.no_grad():
        full.weight.copy_(torch.arange(96).view(8, 12).sin())
        layer.weight.copy_(full.weight.chunk(world_size)[rank])
    y, whole = layer(x.requires_grad_()), torch.cat(all_parts(x.detach(), world_size), 1).requires_grad_()
    y.pow(3).sum().backward()
    with torch.no_grad():
        full.bias.copy_(torch.cat(all_parts(layer.bias.detach(), world_size)))
    full(whole).pow(3).sum().backward()
    expected = whole.grad.chunk(world_size, 1)[rank], *(p.grad.chunk(world_size)[rank] for p in full.parameters())
    found = x.grad, *(p.grad for p in layer.parameters())
    return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))


def all_parts(x, n):
    parts = x.new_empty(n, *x.shape)
    comm.all_gather(parts, x)
    return tuple(parts)


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_gradients_of_one_process(ranks, world_size):
    assert max(ranks(world_size, against_one_process)) < 1e-12


class Products(TorchDispatchMode):
    """Appends "product" to a list for each product of matrices."""

    def __init__(self, order):
        super().__init__()
        self.order = order

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.mm.default:
            self.order.append("product")
        return function(*args, **(kwargs or {}))


class Order(list):
    """A log that also appends to a list when a message starts, and when the rank begins to wait for it."""

    def __init__(self, order):
        super().__init__()
        self.order = order

    def append(self, event):
        self.order.append(event.op)
        return lambda state: self.order.append("wait") if state == "awaited" else None


def order_of_backward(rank, world_size, source):
    layer, x = layer_and_input(rank, world_size, torch.float32, source, SHAPE)
    found = []
    for forward in (ColumnLinear.forward, waits_first):
        y = forward(layer, x.requires_grad_())
        order = []
        with Products(order), comm.record(Order(order), timed=False):
            y.sum().backward()
        found.append(order)
    return found


@pytest.mark.parametrize(("source", "op"), [(Replicate(), "all_reduce"), (Shard(1), "reduce_scatter")])
def test_the_weight_gradient_is_computed_before_the_rank_waits(ranks, source, op):
    expected = [["product", op, "product", "wait"], ["product", "product", op, "wait"]]
    assert ranks(2, order_of_backward, source=source) == [expected] * 2


def late(rank, world_size):
    """Whether the gradient is complete if the message takes its time."""
    layer, x = layer_and_input(rank, world_size, torch.float32, Replicate(), SHAPE)
    grads = []
    for delayed in (False, True):
        x = x.detach().requires_grad_()
        y = layer(x)
        with patch.object(comm, "all_reduce", Late) if delayed else nullcontext():
            y.square().sum().backward()
        grads.append(x.grad)
    return torch.equal(*grads)


class Late:
    """An all-reduce that begins when the rank waits for it."""

    def __init__(self, tensor, group=None, async_op=False):
        self.wait = partial(all_reduce, tensor, group=group)


all_reduce = comm.all_reduce


def test_a_late_message_is_waited_for(ranks):
    assert all(ranks(2, late))


def in_two_parts(rank, world_size):
    """Backward of the input and then of the weights: the gradients, and messages of each part."""
    layer, x = layer_and_input(rank, world_size, torch.float64, Replicate(), SHAPE)
    layer(x.requires_grad_()).sum().backward()
    whole = [x.grad, *(p.grad for p in layer.parameters())]
    layer.zero_grad()
    with comm.record() as log:
        of_x, later = backward_of_input(layer(x), x, torch.ones(*SHAPE[:-1], 8 // world_size, dtype=torch.float64))
        first = len(log)
        backward_of_weights(later)
    parts = [of_x, *(p.grad for p in layer.parameters())]
    return all(map(torch.equal, whole, parts)), first, len(log)


def test_backward_in_two_parts_sends_once(ranks):
    assert ranks(2, in_two_parts) == [(True, 1, 1)] * 2


def twice(rank, world_size):
    layer, x = layer_and_input(rank, world_size, torch.float32, Replicate(), SHAPE)
    (slope,) = torch.autograd.grad(layer(x.requires_grad_()).square().sum(), x, create_graph=True)
    try:
        slope.sum().backward()
    except RuntimeError as error:
        return str(error)


def test_there_is_no_second_derivative(ranks):
    assert all("once_differentiable" in told for told in ranks(2, twice))
