"""What a user of PyTorch's DDP would notice: unused parameters, no_sync, nested outputs, names, exceptions."""

import copy
from collections import namedtuple
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ddp_models import FORMS, NAMES, Branches, Checkpointed, Odd, data, net
from tensors import error_of, gap, grads, mean_of_ranks, noise
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labkit import comm
from labkit.ddp import DDP
from labkit.fsdp import FSDP
from labkit.horovod import DistributedOptimizer
from labkit.zero import ZeRO1, ZeRO2

# ---- construction


def differing(rank, world_size, what):
    modules = {
        "shape": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5 if rank == 1 else 6)),
        "name": nn.ModuleDict({"a": nn.Linear(2, 2), "b" if rank == 1 else "c": nn.Linear(2, 2)}),
        "dtype": nn.Linear(2, 2).to(torch.float64 if rank == 1 else torch.float32),
        "count": nn.Sequential(*[nn.Linear(2, 2) for _ in range(3 if rank == 1 else 2)]),
        "frozen": nn.Linear(2, 2).requires_grad_(rank != 1),
        "buffer": nn.BatchNorm1d(2, track_running_stats=rank != 1),
        "settings": nn.Linear(2, 2),
    }
    settings = {"bucket_cap_mb": 1 + (rank == 1)} if what == "settings" else {}
    told = error_of(ValueError, lambda: DDP(modules[what], **settings))
    x = torch.ones(1)
    dist.all_reduce(x)  # nobody is stuck in some other collective
    return told, x.item()


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("shape", "'1.weight'"),
        ("name", "'b.weight'"),
        ("dtype", "float64"),
        ("count", "'2.weight'"),
        ("frozen", "fixed"),
        ("buffer", "'running_mean'"),
        ("settings", "bucket_cap_mb=2"),
    ],
)
def test_a_model_that_differs_is_an_error_on_every_rank_that_names_it(ranks, what, named):
    told = ranks(3, differing, what=what)
    assert [x for _, x in told] == [3.0] * 3
    assert len({message for message, _ in told}) == 1
    assert named in told[0][0]
    assert "rank 0" in told[0][0]
    assert "rank 1" in told[0][0]


def refused(rank, world_size):
    sparse = nn.ModuleDict({"words": nn.Embedding(3, 2, sparse=True)})
    nothing = (nn.Linear(2, 2).requires_grad_(False), nn.ReLU())
    told = [error_of(RuntimeError, partial(DDP, module)) for module in nothing]  # as PyTorch's
    told.append(error_of(ValueError, lambda: DDP(sparse)))
    told.append(error_of(ValueError, lambda: DDP(nn.Linear(2, 2), bucket_cap_mb=-1)))
    sparse._ddp_params_and_buffers_to_ignore = ["words.weight"]
    sparse["dense"] = nn.Linear(2, 2)
    DDP(sparse)
    return told


def test_nothing_to_train_or_sparse_gradients_are_clear_errors(ranks):
    linear, relu, sparse, cap = ranks(2, refused)[0]
    assert "Linear has no parameter" in linear
    assert "ReLU has no parameter" in relu
    assert "'words'" in sparse
    assert "-1" in cap


def odd(rank, world_size, settings):
    reference, module = Odd(0), Odd(rank)
    wrapped = DDP(module, **settings)
    for (name, ours), theirs in zip(module.state_dict().items(), reference.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    expected = mean_of_ranks(reference, lambda m, r: m(1.0 + r), world_size)
    for set_to_none in (True, False):
        module.zero_grad(set_to_none=set_to_none)
        wrapped(1.0 + rank).backward()
        # Half precision; the others are checked below.
        assert gap(grads(module), expected) <= 2e-3, f"rank {rank}, {set_to_none=}"
        assert module.frozen.grad is None, f"rank {rank}, {set_to_none=}"
        assert module.channels_last.grad.stride() == module.channels_last.stride(), f"rank {rank}, {set_to_none=}"
        assert module.transposed.grad.stride() == module.transposed.stride(), f"rank {rank}, {set_to_none=}"
        for name in ("doubles", "scalar", "channels_last", "transposed", "complexes"):
            torch.testing.assert_close(getattr(module, name).grad, expected[[n for n, _ in NAMES].index(name)])


@pytest.mark.parametrize("settings", FORMS)
def test_all_kinds_of_parameters_and_buffers_are_shared_and_averaged(ranks, settings):
    ranks(3, odd, settings=settings)


def ignored(rank, world_size):
    module = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.BatchNorm1d(2)})
    nn.init.constant_(module["a"].bias, float(rank))
    nn.init.constant_(module["b"].running_mean, float(rank))
    module._ddp_params_and_buffers_to_ignore = ["a.bias", "b.running_mean"]
    module.forward = lambda x: module["b"](module["a"](x))
    wrapped = DDP(module)
    assert sum(bucket.numel for bucket in wrapped.buckets) == 4 + 2 + 2
    wrapped.eval()
    wrapped(torch.full((2, 2), float(rank))).sum().backward()
    return module["a"].bias.tolist(), module["b"].running_mean.tolist(), module["a"].bias.grad.tolist()


def test_ignored_parameters_and_buffers_are_left_alone(ranks):
    for rank, (bias, mean, gradient) in enumerate(ranks(2, ignored)):
        assert (bias, mean) == ([rank, rank], [rank, rank]), f"rank {rank}"
        assert gradient != [0.0, 0.0], f"rank {rank}"


# ---- buffers


def buffers_of(rank, world_size, wrap):
    torch.manual_seed(0)
    module = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    wrapped = (DDP if wrap == "ours" else DistributedDataParallel)(module)
    seen = []

    def forward(step, backward=True):
        out = wrapped(data(rank, step).float())
        if backward:
            out.sum().backward()
        seen.append([b.clone() for b in module.buffers()])

    with torch.inference_mode():
        forward(9, backward=False)
    forward(0)
    forward(1)
    with wrapped.no_sync():
        forward(2)
        forward(3)
    forward(4)
    with torch.inference_mode():
        forward(5, backward=False)
        forward(6, backward=False)
    wrapped.eval()
    with torch.no_grad():
        forward(7, backward=False)
    wrapped.train()
    forward(8)
    forward(9)
    return seen


@pytest.mark.parametrize("world_size", [2, 3])
def test_buffers_are_broadcast_when_pytorch_would(ranks, world_size):
    ours, theirs = (ranks(world_size, buffers_of, wrap=wrap) for wrap in ("ours", "torch"))
    for rank in range(world_size):
        for mine, other in zip(ours[rank], theirs[rank], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True)), f"rank {rank}"


# ---- unused parameters


def unused_is_an_error(rank, world_size, settings):
    module = Branches()
    wrapped = DDP(module, **settings)
    told = error_of(RuntimeError, lambda: wrapped(data(rank), [0, 2, 3]).sum().backward())
    module.zero_grad()
    wrapped(data(rank), range(4)).sum().backward()
    expected = mean_of_ranks(module, lambda m, r: m(data(r), range(4)).sum(), world_size)
    return told, gap(grads(module), expected)


@pytest.mark.parametrize("settings", FORMS)
def test_an_unused_parameter_is_named_and_the_next_step_works(ranks, settings):
    for rank, (told, difference) in enumerate(ranks(2, unused_is_an_error, settings=settings)):
        assert "'branches.1.weight'" in told, f"rank {rank}"
        assert "'branches.1.bias'" in told, f"rank {rank}"
        assert "find_unused_parameters" in told, f"rank {rank}"
        assert "branches.2" not in told, f"rank {rank}"
        assert difference <= 1e-15, f"rank {rank}"


def unused_on_one_rank(rank, world_size):
    """Only rank 1 leaves a branch out: it raises, and the other ranks do not wait for ever."""
    wrapped = DDP(Branches())
    out = wrapped(data(rank), range(4) if rank != 1 else [0, 2, 3]).sum()
    if rank == 1:
        return error_of(RuntimeError, out.backward)
    out.backward()
    return ""


def test_unused_on_one_rank_is_an_error_there_and_no_hang_elsewhere(ranks):
    told = ranks(3, unused_on_one_rank)
    assert [bool(message) for message in told] == [False, True, False]


PLANS = [  # by step: the branches of each rank
    [[0, 1], [0, 1], [0, 1]],
    [[0, 1], [0, 2], [2]],
    [[3], [3], [3]],
    [[0, 1, 2, 3], [0], [1]],
]


def find_unused(rank, world_size, settings, set_to_none):
    module = Branches()
    wrapped = DDP(module, **settings, find_unused_parameters=True)
    worst = 0.0
    for step, plan in enumerate(PLANS):
        module.zero_grad(set_to_none=set_to_none)
        before = grads(module)
        wrapped(data(rank, step), plan[rank]).sum().backward()
        plan = plan[:world_size]
        expected = mean_of_ranks(module, lambda m, r: m(data(r, step), plan[r]).sum(), world_size)  # noqa: B023
        anywhere = {i for branches in plan for i in branches}
        expected = [g if i // 2 in anywhere else old for i, (g, old) in enumerate(zip(expected, before, strict=True))]
        worst = max(worst, gap(grads(module), expected))
    return worst


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("settings", FORMS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_control_flow_may_differ_between_steps_and_ranks(ranks, world_size, settings, set_to_none):
    told = ranks(world_size, find_unused, settings=settings, set_to_none=set_to_none)
    assert max(told) <= 1e-14


def untouched(rank, world_size, settings):
    """A gradient left from before, of a parameter that nobody uses now, stays as it is to the last bit."""
    module = Branches()
    wrapped = DDP(module, **settings, find_unused_parameters=True)
    wrapped(data(rank), range(4)).sum().backward()
    kept = [p.grad.clone() for p in module.branches[1].parameters()]
    for _ in range(3):
        wrapped(data(rank), [0, 3]).sum().backward()
    return all(torch.equal(p.grad, g) for p, g in zip(module.branches[1].parameters(), kept, strict=True))


@pytest.mark.parametrize("settings", FORMS)
def test_what_no_rank_uses_keeps_its_gradient_bitwise(ranks, settings):
    assert ranks(3, untouched, settings=settings) == [True] * 3  # 1/3 would round


def unused_after_no_sync(rank, world_size):
    """Used in no_sync only, and on one rank only: still part of the average."""
    module = Branches()
    wrapped = DDP(module, find_unused_parameters=True)
    with wrapped.no_sync():
        wrapped(data(rank), [0, 1] if rank == 0 else [0]).sum().backward()
    wrapped(data(rank, 1), [2]).sum().backward()

    def loss(m, r):
        return m(data(r), [0, 1] if r == 0 else [0]).sum() + m(data(r, 1), [2]).sum()

    expected = mean_of_ranks(module, loss, world_size)
    return gap(grads(module), expected)


def test_what_was_used_in_no_sync_only_is_averaged(ranks):
    assert max(ranks(2, unused_after_no_sync)) <= 1e-15


class Dropped(torch.autograd.Function):
    """x, and an undefined gradient for w: the hooks of w run, and w.grad is None."""

    @staticmethod
    def forward(ctx, x, w, dropped):
        ctx.dropped = dropped
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return gradient * w, None if ctx.dropped else (gradient * x).sum(0), None


class Undefined(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.scale = net(), nn.Parameter(torch.ones(4).double())

    def forward(self, x, dropped):
        return Dropped.apply(self.net(x), self.scale, dropped)


def undefined(rank, world_size, wrap, settings, find, everywhere):
    module = Undefined()
    wrapped = (DDP if wrap == "ours" else DistributedDataParallel)(module, find_unused_parameters=find, **settings)
    told = []
    for step, set_to_none in enumerate([True, True, False]):
        module.zero_grad(set_to_none)
        with wrapped.no_sync():
            wrapped(data(rank, 9), True).sum().backward()
        wrapped(data(rank, step), everywhere or rank == 0).sum().backward()
        told.append(grads(module))
    return told


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("find", [False, True])
@pytest.mark.parametrize("settings", FORMS)
def test_an_undefined_gradient_counts_as_pytorch_counts_it(ranks, settings, find, everywhere):
    """As zero; with find_unused_parameters as unused, so that .grad stays None where no rank has one."""
    arguments = {"find": find, "everywhere": everywhere}
    ours = ranks(2, undefined, wrap="ours", settings=settings, **arguments)
    theirs = ranks(2, undefined, wrap="torch", settings={}, **arguments)
    for rank, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert max(map(gap, mine, other)) == 0.0, f"rank {rank}"  # two ranks: how sums are grouped cannot matter
        assert (mine[0][0] is None) == (find and everywhere), f"rank {rank}"  # of self.scale


def early_launch(rank, world_size):
    """With unused parameters known in advance, full buckets still leave during backward."""
    module = Branches()
    wrapped = DDP(module, bucket_cap_mb=0, find_unused_parameters=True)
    module.branches[0].bias.register_hook(lambda _: launched.append(len(log)))
    launched = []
    out = wrapped(module.branches[0](data(rank)), [1, 2])
    with comm.record() as log:
        out.sum().backward()
    return launched[0]


def test_unused_parameters_do_not_hold_back_the_others(ranks):
    # branch 3 is unused and first in line: 2 + 2 + 2 messages leave before branch 0 has its gradient
    assert ranks(2, early_launch) == [6, 6]


# ---- forward: arguments, outputs, hooks

Pair = namedtuple("Pair", "first second")


@dataclass
class Report:
    value: torch.Tensor
    note: str


class Nested(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.kind = nn.Linear(4, 4).double(), nn.Linear(4, 4).double(), kind

    def forward(self, x):
        a, b = self.one(x), self.two(x)
        return {
            "tensor": a + b,
            "dict": {"a": a, "more": {"b": b, "n": 3, "none": None}},
            "list": [a, [b], "text"],
            "namedtuple": Pair(a, (b,)),
            "dataclass": Report(torch.stack([a, b]), "note"),
        }[self.kind]


def total(output):
    if isinstance(output, torch.Tensor):
        return output.square().sum()
    if isinstance(output, Report):
        return total(output.value)
    values = output.values() if isinstance(output, dict) else output
    return sum(total(item) for item in values if not isinstance(item, str | int | None))


def nested(rank, world_size, kind):
    module = Nested(kind)
    wrapped = DDP(module)
    output = wrapped(data(rank))
    assert type(output) is type(module(data(rank)))
    total(output).backward()
    return gap(grads(module), mean_of_ranks(module, lambda m, r: total(m(data(r))), world_size))


@pytest.mark.parametrize("kind", ["tensor", "dict", "list", "namedtuple", "dataclass"])
def test_outputs_may_be_nested(ranks, kind):
    assert max(ranks(2, nested, kind=kind)) <= 1e-14


def half_used(rank, world_size, find):
    module = Nested("dict")
    wrapped = DDP(module, find_unused_parameters=find)
    loss = wrapped(data(rank))["a"].sum()
    if not find:
        return error_of(RuntimeError, loss.backward)
    loss.backward()
    assert all(p.grad is None for p in module.two.parameters())
    return gap(grads(module.one), mean_of_ranks(module, lambda m, r: m(data(r))["a"].sum(), world_size)[:2])


def test_an_output_unused_in_the_loss(ranks):
    assert max(ranks(2, half_used, find=True)) <= 1e-15
    for rank, told in enumerate(ranks(2, half_used, find=False)):
        assert "'two.weight'" in told, f"rank {rank}"


class Echo(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, *args, **kwargs):
        self.seen = (args, kwargs)
        return self.weight * 1


def echo(rank, world_size):
    wrapped = DDP(Echo())
    box, x = object(), torch.ones(2)
    wrapped(box, x, key=x, other=[box])
    (first, second), kwargs = wrapped.module.seen
    return first is box and second is x and kwargs["key"] is x and kwargs["other"][0] is box


def test_arguments_reach_the_module_untouched(ranks):
    assert ranks(2, echo) == [True, True]


def user_hooks(rank, world_size):
    module, calls = net(), []
    module.register_forward_pre_hook(lambda m, args: calls.append("pre"))
    module.register_forward_hook(lambda m, args, out: out * 2)
    module.register_full_backward_hook(lambda m, gi, go: calls.append("backward"))
    module[0].weight.register_hook(lambda g: g * 3)
    module[2].weight.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))
    wrapped = DDP(module)
    wrapped.register_forward_hook(lambda m, args, out: out + 0)
    wrapped(data(rank)).sum().backward()
    plain = net()
    expected = mean_of_ranks(plain, lambda m, r: 2 * m(data(r)).sum(), world_size)
    expected[0] *= 3
    return sorted(calls), gap(grads(module), expected)


def test_user_hooks_run_as_ever(ranks):
    for rank, (calls, difference) in enumerate(ranks(2, user_hooks)):
        assert calls == ["accumulated", "backward", "pre"], f"rank {rank}"
        assert difference <= 1e-15, f"rank {rank}"


# ---- backward


def several_times(rank, world_size, settings):
    module = net()
    used = nn.ModuleDict({"net": module})
    used.forward = lambda x: module(module(module(x)))
    wrapped = DDP(used, **settings)
    wrapped(data(rank)).sum().backward()
    return gap(grads(module), mean_of_ranks(module, lambda m, r: m(m(m(data(r)))).sum(), world_size))


@pytest.mark.parametrize("settings", FORMS)
def test_a_parameter_used_several_times(ranks, settings):
    assert max(ranks(2, several_times, settings=settings)) <= 1e-14


def two_forwards(rank, world_size, settings):
    module = nn.Sequential(nn.BatchNorm1d(4), net()).double()
    wrapped = DDP(module, **settings)
    (wrapped(data(rank)).sum() * wrapped(data(rank, 1)).sum()).backward()
    expected = mean_of_ranks(module, lambda m, r: m(data(r)).sum() * m(data(r, 1)).sum(), world_size)
    return gap(grads(module), expected)


@pytest.mark.parametrize("settings", FORMS)
def test_one_backward_through_two_forwards(ranks, settings):
    assert max(ranks(2, two_forwards, settings=settings)) <= 1e-13


def two_backwards(rank, world_size, settings):
    module = net()
    wrapped = DDP(module, **settings)
    out = wrapped(data(rank))
    out.sum().backward(retain_graph=True)
    out.square().sum().backward()
    expected = mean_of_ranks(module, lambda m, r: m(data(r)).sum() + m(data(r)).square().sum(), world_size)
    return gap(grads(module), expected)


@pytest.mark.parametrize("settings", FORMS)
def test_two_backwards_through_one_forward_are_both_averaged(ranks, settings):
    assert max(ranks(3, two_backwards, settings=settings)) <= 1e-14


def gradient_penalty(model, x):
    x = x.clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    return out.sum() + (slope.norm(dim=1) - 1).square().sum()


def double_backward(rank, world_size, settings):
    module = net()
    wrapped = DDP(module, **settings)
    with comm.record() as log:
        gradient_penalty(wrapped, data(rank)).backward()
    assert len(log) == len(wrapped.buckets)
    expected = mean_of_ranks(module, lambda m, r: gradient_penalty(m, data(r)), world_size)
    worst = gap(grads(module), expected)
    module.zero_grad()
    wrapped(data(rank)).square().sum().backward(create_graph=True)
    assert not any(p.grad.requires_grad for p in module.parameters())
    return max(worst, gap(grads(module), mean_of_ranks(module, lambda m, r: m(data(r)).square().sum(), world_size)))


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("settings", FORMS)
def test_gradient_penalty_and_create_graph(ranks, settings):
    assert max(ranks(2, double_backward, settings=settings)) <= 1e-13


def checkpointed(rank, world_size, settings, reentrant, shared, find):
    module = Checkpointed(reentrant, shared)
    wrapped = DDP(module, **settings, find_unused_parameters=find)
    for _ in range(2):
        module.zero_grad()
        with comm.record() as log:
            wrapped(data(rank)).sum().backward()
    told = gap(grads(module), mean_of_ranks(module, lambda m, r: m(data(r)).sum(), world_size))
    assert len(log) == len(wrapped.buckets) + find + 0
    return told


@pytest.mark.parametrize("find", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("settings", FORMS)
def test_activation_checkpointing(ranks, settings, reentrant, find):
    arguments = {"settings": settings, "reentrant": reentrant, "shared": False, "find": find}
    assert max(ranks(2, checkpointed, **arguments)) <= 1e-14


def shared_in_reentrant(rank, world_size):
    naive = checkpointed(rank, world_size, {"bucket_cap_mb": 0, "overlap": False}, True, True, False)
    told = error_of(RuntimeError, lambda: checkpointed(rank, world_size, {}, True, True, False))
    return naive, told


def test_reentrant_checkpointing_of_a_shared_part_works_naively_and_is_named_otherwise(ranks):
    for rank, (naive, told) in enumerate(ranks(2, shared_in_reentrant)):
        assert naive <= 1e-14, f"rank {rank}"
        assert "use_reentrant=False" in told, f"rank {rank}"
        assert "'parts.0.2.bias'" in told, f"rank {rank}"


def sparse_on_the_way(rank, world_size):
    class Lookup(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.ones(5, 2))

        def forward(self, i):
            return nn.functional.embedding(i, self.table, sparse=True)

    return error_of(TypeError, lambda: DDP(Lookup())(torch.tensor([1])).sum().backward())


def test_a_sparse_gradient_is_named(ranks):
    for rank, told in enumerate(ranks(2, sparse_on_the_way)):
        assert "'table'" in told, f"rank {rank}"


class Fails(nn.Module):
    """A network whose forward or backward raises on request."""

    def __init__(self):
        super().__init__()
        self.net, self.fail = net(), None

    def forward(self, x):
        if self.fail == "forward":
            raise KeyError("forward")
        x = self.net[1](self.net[0](x))
        if self.fail == "backward":
            x.register_hook(self.explode)
        return self.net[2](x)

    def explode(self, gradient):
        raise KeyError("backward")


def failing(rank, world_size, settings, where, everybody, set_to_none):
    module = Fails()
    wrapped = DDP(module, **settings)
    for step, fail in enumerate([None, where, where, None]):
        module.zero_grad(set_to_none)
        module.fail = fail if everybody or rank == 1 else None
        try:
            wrapped(data(rank, step)).sum().backward()
        except KeyError as error:
            assert error.args == (fail,), f"rank {rank}, step {step}"
            assert module.fail, f"rank {rank}, step {step}"
    return gap(grads(module), mean_of_ranks(module, lambda m, r: m(data(r, 3)).sum(), world_size))


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(("where", "everybody"), [("forward", True), ("backward", True), ("backward", False)])
@pytest.mark.parametrize("settings", FORMS)
def test_after_an_exception_the_next_step_works(ranks, settings, where, everybody, set_to_none):
    arguments = {"settings": settings, "where": where, "everybody": everybody, "set_to_none": set_to_none}
    assert max(ranks(2, failing, **arguments)) <= 1e-15


# ---- no_sync


def accumulated(rank, world_size, settings, set_to_none):
    module = net()
    wrapped = DDP(module, **settings)
    worst = 0.0
    for number in range(2):
        module.zero_grad(set_to_none=set_to_none)
        with comm.record() as log, wrapped.no_sync():
            for step in range(2):
                wrapped(data(rank, step)).sum().backward()
        assert log == [], f"rank {rank}, round {number}"
        local = copy.deepcopy(module)
        local.zero_grad()
        sum(local(data(rank, step)).sum() for step in range(2)).backward()
        worst = max(worst, gap(grads(module), grads(local)))
        wrapped(data(rank, 2)).sum().backward()
        expected = mean_of_ranks(module, lambda m, r: sum(m(data(r, step)).sum() for step in range(3)), world_size)
        worst = max(worst, gap(grads(module), expected))
    return worst


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("settings", FORMS)
def test_no_sync_accumulates_and_the_next_backward_averages_the_sum(ranks, settings, set_to_none):
    assert max(ranks(2, accumulated, settings=settings, set_to_none=set_to_none)) <= 1e-14


def no_sync_around(rank, world_size, wrap, part):
    module = net()
    wrapped = (DDP if wrap == "ours" else DistributedDataParallel)(module)
    wrapped(data(rank)).sum().backward()
    module.zero_grad()
    if part == "forward":
        with wrapped.no_sync():
            out = wrapped(data(rank)).sum()
        out.backward()
    else:
        out = wrapped(data(rank)).sum()
        with wrapped.no_sync():
            out.backward()
    return grads(module)


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_the_forward_decides_as_in_pytorch(ranks, part):
    ours, theirs = (ranks(2, no_sync_around, wrap=wrap, part=part) for wrap in ("ours", "torch"))
    assert max(map(gap, ours, theirs)) == 0.0
    averaged = gap(ours[0], ours[1]) == 0.0
    assert averaged == (part == "backward")


# ---- the wrapper itself


def names(rank, world_size):
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    wrapped = DDP(module)
    assert list(wrapped.state_dict()) == list(module.state_dict())
    for what in ("named_parameters", "named_buffers", "named_modules"):
        assert [n for n, _ in getattr(wrapped, what)()] == [n for n, _ in getattr(module, what)()], (
            f"rank {rank}, {what}"
        )
    assert wrapped.get_parameter("0.weight") is module[0].weight
    assert len(list(wrapped.parameters())) == 4
    other = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    nn.init.constant_(other[0].weight, 7.0)
    theirs = DistributedDataParallel(other).state_dict()
    assert "module.0.weight" in theirs
    wrapped.load_state_dict(theirs)
    assert torch.equal(module[0].weight, other[0].weight)
    wrapped.load_state_dict(other.state_dict())
    assert "0.weight" in error_of(RuntimeError, lambda: wrapped.load_state_dict({}))
    assert wrapped.load_state_dict({"x": torch.ones(1)}, strict=False).unexpected_keys == ["x"]
    assert "assign" in error_of(ValueError, lambda: wrapped.load_state_dict(other.state_dict(), assign=True))
    # inside another module
    parent, plain = (nn.ModuleDict({"body": m, "head": nn.Linear(2, 2)}) for m in (DDP(module), module))
    assert list(parent.state_dict()) == list(plain.state_dict())
    nn.init.constant_(module[0].weight, 1.0)
    saved = {name: t.clone() for name, t in plain.state_dict().items()}
    nn.init.constant_(module[0].weight, 2.0)
    parent.load_state_dict(saved)
    assert module[0].weight.unique().tolist() == [1.0]
    # a module with a child called "module"
    inner = nn.ModuleDict({"module": nn.Linear(2, 2), "other": nn.Linear(2, 2)})
    DDP(inner).load_state_dict(DDP(inner).state_dict())
    nn.ModuleDict({"body": DDP(inner)}).load_state_dict(nn.ModuleDict({"body": inner}).state_dict())


def test_names_stay_the_modules_own(ranks):
    ranks(2, names)


def modes(rank, world_size, settings):
    module = net().float()
    wrapped = DDP(module, **settings)
    assert not wrapped.eval().module.training
    assert wrapped.train().module[0].training
    wrapped(data(rank).float()).sum().backward()
    assert wrapped.to(torch.float64) is wrapped
    worst = 0.0
    for set_to_none in (False, True):
        module.zero_grad(set_to_none=set_to_none)
        wrapped(data(rank)).sum().backward()
        worst = max(worst, gap(grads(module), mean_of_ranks(module, lambda m, r: m(data(r)).sum(), world_size)))
    assert {bucket.dtype for bucket in wrapped.buckets} == {torch.float64}
    return worst


@pytest.mark.parametrize("settings", FORMS)
def test_train_eval_and_to(ranks, settings):
    assert max(ranks(2, modes, settings=settings)) <= 1e-15


def copies(rank, world_size):
    group = dist.new_group([0, 1])
    module = net()
    wrapped = DDP(module, process_group=group)
    twin = copy.deepcopy(wrapped)
    assert twin.process_group is group
    twin(data(rank)).sum().backward()
    assert all(p.grad is None for p in module.parameters())
    expected = mean_of_ranks(module, lambda m, r: m(data(r)).sum(), world_size)
    worst = gap(grads(twin), expected)
    del wrapped, twin
    hooks = [len(p._post_accumulate_grad_hooks or ()) for p in module.parameters()]
    again = DDP(module)
    with comm.record() as log:
        again(data(rank)).sum().backward()
    assert len(log) == 1
    return max(worst, gap(grads(module), expected)), hooks


def test_copies_are_independent_and_a_dropped_wrapper_leaves_nothing(ranks):
    for rank, (worst, hooks) in enumerate(ranks(2, copies)):
        assert worst <= 1e-15, f"rank {rank}"
        assert hooks == [0, 0, 0, 0], f"rank {rank}"


def freezing(rank, world_size, find):
    module = net()
    module[2].bias.requires_grad_(False)
    wrapped = DDP(module, find_unused_parameters=find)
    module[2].bias.requires_grad_(True)
    unfrozen = error_of(RuntimeError, lambda: wrapped(data(rank)))
    module[2].bias.requires_grad_(False)
    module[0].bias.requires_grad_(False)
    if not find:
        return unfrozen, error_of(RuntimeError, lambda: wrapped(data(rank)))
    wrapped(data(rank)).sum().backward()
    assert module[0].bias.grad is None
    return unfrozen, "'0.bias' frozen"


@pytest.mark.parametrize("find", [False, True])
def test_requires_grad_changed_afterwards_is_named(ranks, find):
    for rank, (unfrozen, frozen) in enumerate(ranks(2, freezing, find=find)):
        assert "'2.bias'" in unfrozen, f"rank {rank}"
        assert "unfrozen" in unfrozen, f"rank {rank}"
        assert "'0.bias'" in frozen, f"rank {rank}"
        assert "frozen" in frozen, f"rank {rank}"


def subgroup(rank, world_size):
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = groups[rank % 2]
    told = error_of(ValueError, lambda: DDP(net(), process_group=groups[1 - rank % 2]))
    assert "not in process_group" in told
    module = net(seed=rank)
    wrapped = DDP(module, process_group=mine)
    wrapped(data(rank)).sum().backward()
    reference = net(seed=rank % 2)
    for r in (rank % 2, rank % 2 + 2):
        (reference(data(r)).sum() / 2).backward()
    return gap(grads(module), grads(reference))


def test_a_group_that_is_not_the_whole_world(ranks):
    assert max(ranks(4, subgroup)) <= 1e-15


# ---- in the place of PyTorch's


def with_keywords(rank, world_size):
    """The same keywords for both: weights after a step. Then what ours refuses."""
    cpu, trained = torch.device("cpu"), []
    for wrap in (torch.nn.parallel.DistributedDataParallel, DDP):
        torch.manual_seed(rank)
        wrapped = wrap(
            nn.Linear(3, 2), None, None, 0, True, True, dist.group.WORLD, None, False,
            check_reduction=False, gradient_as_bucket_view=True, static_graph=False, mixed_precision=None,
        )  # fmt: skip
        wrapped(torch.full((4, 3), 1.0 + rank)).sum().backward()
        trained.append([p.grad.tolist() for p in wrapped.parameters()] + [p.tolist() for p in wrapped.parameters()])
    DDP(nn.Linear(3, 2), [cpu], cpu)
    module = nn.Linear(3, 2)
    alone = [p.detach().clone() for p in module.parameters()]
    DDP(module, init_sync=False)
    assert all(map(torch.equal, alone, module.parameters()))
    told = [
        error_of(ValueError, lambda: DDP(nn.Linear(3, 2), device_ids=[0])),
        error_of(ValueError, lambda: DDP(nn.Linear(3, 2), device_ids=["cpu", "cpu"])),
        error_of(TypeError, lambda: DDP(nn.Linear(3, 2), dist.group.WORLD)),
        error_of(ValueError, lambda: DDP(nn.Linear(3, 2), dim=1)),
        error_of(TypeError, lambda: DDP(nn.Linear(3, 2), mixed_precision=object())),
        error_of(TypeError, lambda: DDP(nn.Linear(3, 2), bucket_size=3)),
    ]
    return trained, told


def test_keywords_of_pytorch_s(ranks):
    for rank, ((theirs, ours), told) in enumerate(ranks(2, with_keywords)):
        assert ours == theirs, f"rank {rank}"
        words = (
            "which is cpu",
            "which is cpu",
            "a list of one device",
            "leave it 0",
            "labkit.amp",
            "no argument 'bucket",
        )
        assert all(word in one and "\n" not in one for word, one in zip(words, told, strict=True)), f"rank {rank}"


def adversarial(rank, world_size, wrap):
    """A generator and a discriminator take turns; the one that does not learn is frozen meanwhile."""
    torch.manual_seed(0)
    maker, judge = (nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, size)).double() for size in (3, 1))
    both = [wrap(maker), wrap(judge)]
    steps = [torch.optim.SGD(module.parameters(), lr=0.1) for module in both]
    for step in range(6):
        learns = step % 2
        both[1 - learns].requires_grad_(False)
        steps[learns].zero_grad()
        rows = noise(4, 3, seed=step, dtype=torch.float64)
        mine = rows if world_size == 1 else rows[rank::world_size]
        loss = both[1](both[0](mine)).square().mean() * (1 if learns else -1)
        loss.backward()
        steps[learns].step()
        both[1 - learns].requires_grad_(True)
    return [p.detach().clone() for module in both for p in module.parameters()]


def adversarial_both(rank, world_size):
    theirs = adversarial(rank, world_size, torch.nn.parallel.DistributedDataParallel)
    return theirs, adversarial(rank, world_size, DDP)


def test_a_discriminator_frozen_between_steps(ranks):
    alone = adversarial(0, 1, lambda module: module)
    for rank, (theirs, ours) in enumerate(ranks(2, adversarial_both)):
        for one, other, third in zip(theirs, ours, alone, strict=True):
            assert torch.allclose(one, other, atol=1e-15) and torch.allclose(other, third, atol=1e-14), f"rank {rank}"


class Expanded(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1).expand(4) if kind == "parameter" else torch.ones(4))
        if kind == "buffer":
            self.register_buffer("mask", torch.ones(1).expand(2, 3))


def expanded(rank, world_size, wrap, kind):
    return error_of(ValueError, lambda: wrap(Expanded(kind)))


@pytest.mark.parametrize("wrap", [DDP, FSDP])
@pytest.mark.parametrize(("kind", "name"), [("parameter", "weight"), ("buffer", "mask")])
def test_elements_that_lie_in_one_place_are_refused_on_all_ranks(ranks, wrap, kind, name):
    told = f"'{name}' was made with expand(), so its elements share memory"
    for rank, one in enumerate(ranks(2, expanded, wrap=wrap, kind=kind)):
        assert one.startswith(told), f"rank {rank}"


class Conjugated(nn.Module):
    """Its gradient is a conjugate that nobody has computed yet: a view with a mark."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j, 0.5j], dtype=torch.complex128))

    def forward(self, rank):
        factor = torch.tensor([1 + 1j, 2 - 1j, 1j], dtype=torch.complex128) * (rank + 1)
        return (self.weight.conj() * factor).real.sum()


def conjugated(rank, world_size, whose):
    model = Conjugated()
    wanted = mean_of_ranks(model, lambda module, rank: module(rank), world_size)[0]
    alone = Conjugated()
    alone(0).backward()
    assert alone.weight.grad.is_conj()
    options = {"lr": 0.5}
    if whose in ("ZeRO1", "ZeRO2"):
        optimizer = {"ZeRO1": ZeRO1, "ZeRO2": ZeRO2}[whose](model.parameters(), torch.optim.SGD, **options)
    elif whose == "Horovod":
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), **options), model.named_parameters())
    else:
        model = {"DDP": DDP, "FSDP": FSDP}[whose](model)
        optimizer = torch.optim.SGD(model.parameters(), **options)
    model(rank).backward()
    optimizer.step()
    state = model.full_state_dict() if whose == "FSDP" else model.state_dict()
    return next(iter(state.values())), Conjugated().weight.detach() - 0.5 * wanted


@pytest.mark.parametrize("whose", ["DDP", "ZeRO1", "ZeRO2", "FSDP", "Horovod"])
def test_a_gradient_that_is_a_conjugate_view(ranks, whose):
    for rank, (found, wanted) in enumerate(ranks(2, conjugated, whose=whose)):
        assert torch.equal(found, wanted.resolve_conj()), f"rank {rank}"
