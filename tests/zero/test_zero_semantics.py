"""What a user of ZeRO would notice: accumulation, unused parameters, clipping, schedulers, exceptions, clear errors."""

import pytest
import torch
from ddp_models import NAMES, Odd, data, net
from tensors import error_of, gap, mean_of_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from labkit import comm
from labkit.ddp import DDP
from labkit.zero import ZeRO1, ZeRO2

BOTH = pytest.mark.parametrize("zero", [ZeRO1, ZeRO2])
CAP = 32 * 8 / 2**20  # one matrix of `net` a bucket, and the biases


def make(zero, module, optimizer_class=torch.optim.SGD, **options):
    options = {"bucket_cap_mb": CAP, **({} if optimizer_class is not torch.optim.SGD else {"lr": 0.1}), **options}
    return zero(module.parameters(), optimizer_class, **options)


def averages(optimizer):
    """This rank's pieces of the mean gradient and, with them, (bucket, slot) to find the whole by."""
    return [
        (bucket, slot, piece.grad)
        for bucket in optimizer.buckets
        for slot, piece in enumerate(bucket.pieces)
        if piece is not None
    ]


def off(optimizer, module, expected):
    """How far the pieces' gradients are from the same parts of whole ones; None counts as zero."""
    whole = dict(zip(module.parameters(), expected, strict=True))
    worst = 0.0
    for bucket, slot, mine in averages(optimizer):
        p = bucket.members[slot]
        theirs = torch.zeros_like(p) if whole[p] is None else whole[p]
        start, stop = bucket.layout.ranges(bucket.rank)[slot]
        worst = max(worst, float((mine - bucket.in_memory_order(slot, theirs)[start:stop]).abs().max()))
    return worst


def accumulated(rank, world_size, zero, how):
    module = net(seed=rank)
    optimizer = make(zero, module)
    expected = [0.0] * 4

    def backward(step):
        module(data(rank, step)).square().sum().backward()
        new = mean_of_ranks(module, lambda m, r: m(data(r, step)).square().sum(), world_size)
        expected[:] = [a + b for a, b in zip(expected, new, strict=True)]

    for number in range(2):
        optimizer.zero_grad()
        expected[:] = [0.0] * 4
        for kind in how:
            if kind == "local":
                with optimizer.no_sync():
                    backward(len(kind))
            else:
                backward(len(kind))
        assert off(optimizer, module, expected) <= 1e-12, f"rank {rank}, round {number}"
        assert all((p.grad is None) == (zero is ZeRO2) for p in module.parameters()), f"rank {rank}, round {number}"
        optimizer.step()


@BOTH
@pytest.mark.parametrize("how", ["local,local,mean", "mean,mean,mean", "mean,local,mean", "local,mean,mean"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_add_up_however_they_are_averaged(ranks, world_size, zero, how):
    ranks(world_size, accumulated, zero=zero, how=how.split(","))


def cleared(rank, world_size, zero):
    module = net(seed=rank)
    optimizer = make(zero, module)
    expected = mean_of_ranks(module, lambda m, r: m(data(r)).square().sum(), world_size)
    for set_to_none in (True, False, True):
        module(data(rank)).square().sum().backward()
        assert off(optimizer, module, expected) <= 1e-12, f"rank {rank}, {set_to_none=}"
        optimizer.zero_grad(set_to_none)
        assert all(p.grad is None or not p.grad.any() for p in module.parameters()), f"rank {rank}, {set_to_none=}"
        assert all((g is None) == set_to_none or not g.any() for _, _, g in averages(optimizer)), (
            f"rank {rank}, {set_to_none=}"
        )


@BOTH
def test_zero_grad_forgets_in_both_ways(ranks, zero):
    ranks(2, cleared, zero=zero)


class Branches(nn.Module):
    """Rank 0 uses `left`, others `right`; nobody uses `never`."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.left, self.right, self.never = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(3))

    def forward(self, x, rank):
        return (self.right if rank else self.left)(x).square().sum()


def unused(rank, world_size, zero):
    module = Branches(rank)
    optimizer = make(zero, module, weight_decay=0.5)
    before = module.never.weight.detach().clone()
    for step in range(2):
        optimizer.zero_grad()
        module(data(rank), rank).backward()
        expected = mean_of_ranks(module, lambda m, r: m(data(r), r), world_size)
        assert off(optimizer, module, expected) <= 1e-12, f"rank {rank}, step {step}"
        assert module.never.weight.grad is None, f"rank {rank}, step {step}"
        optimizer.step()
    # As a gradient of zero: only the weight decay moves it.
    torch.testing.assert_close(module.never.weight, before * (1 - 0.1 * 0.5) ** 2)


@BOTH
def test_a_parameter_without_a_gradient_counts_as_zero(ranks, zero):
    ranks(2, unused, zero=zero)


def odd(rank, world_size, zero):
    module, reference = Odd(rank), Odd(0)
    optimizer = zero(module.named_parameters(), torch.optim.SGD, lr=0.01)
    strides = [p.stride() for p in reference.parameters()]
    for (name, ours), theirs in zip(module.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs), name  # frozen, empty and scalar ones, too
    assert [p.stride() for p in module.parameters()] == strides
    assert len({bucket.dtype for bucket in optimizer.buckets}) == 4
    plain = torch.optim.SGD(reference.parameters(), lr=0.01)
    for _ in range(2):
        expected = mean_of_ranks(reference, lambda m, r: m(1.0 + r), world_size)
        for p, g in zip(reference.parameters(), expected, strict=True):
            p.grad = g
        plain.step()
        optimizer.zero_grad()
        module(1.0 + rank).backward()
        optimizer.step()
    for (name, _), ours, theirs in zip(NAMES, module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name, **({"rtol": 0, "atol": 5e-3} if name == "halves" else {}))


@BOTH
@pytest.mark.parametrize("world_size", [1, 3])
def test_all_kinds_of_parameters(ranks, world_size, zero):
    ranks(world_size, odd, zero=zero)


def clipped(rank, world_size, zero, norm_type, max_norm):
    module, reference = net(rank), net(0)
    optimizer = make(zero, module)
    module(data(rank)).square().sum().backward()
    expected = mean_of_ranks(reference, lambda m, r: m(data(r)).square().sum(), world_size)
    for p, g in zip(reference.parameters(), expected, strict=True):
        p.grad = g
    told = optimizer.clip_grad_norm_(max_norm, norm_type)
    norm = nn.utils.clip_grad_norm_(reference.parameters(), max_norm, norm_type)
    assert abs(told - norm) <= 1e-12 * norm
    assert off(optimizer, module, [p.grad for p in reference.parameters()]) <= 1e-12
    optimizer.step()


@BOTH
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("world_size", [2, 4])
def test_clipping_is_by_the_norm_over_all_ranks(ranks, world_size, zero, norm_type, max_norm):
    ranks(world_size, clipped, zero=zero, norm_type=norm_type, max_norm=max_norm)


def scheduled(rank, world_size, zero):
    module, plain = net(rank), net(0)
    ours = make(zero, module, torch.optim.AdamW)
    theirs = torch.optim.AdamW(plain.parameters())
    schedules = [torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=6) for o in (ours, theirs)]
    for step in range(5):
        ours.zero_grad()

        def closure(step=step):
            loss = module(data(rank, step)).square().sum()
            loss.backward()
            return loss

        assert ours.step(closure) > 0, f"rank {rank}, step {step}"
        expected = mean_of_ranks(plain, lambda m, r, step=step: m(data(r, step)).square().sum(), world_size)
        for p, g in zip(plain.parameters(), expected, strict=True):
            p.grad = g
        theirs.step()
        for schedule in schedules:
            schedule.step()
        assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"], f"rank {rank}, step {step}"
    return max(float((p - q).abs().max()) for p, q in zip(module.parameters(), plain.parameters(), strict=True))


@BOTH
def test_schedulers_and_closures_work_on_it(ranks, zero):
    assert max(ranks(2, scheduled, zero=zero)) <= 1e-12


def under_ddp(rank, world_size, zero, overlap):
    module, plain = net(rank), net(0)
    ddp = DDP(module, overlap=overlap)
    optimizer = make(zero, module)
    for step in range(3):
        optimizer.zero_grad()
        if step == 2:  # accumulation, averaged by the DDP at its end
            with ddp.no_sync(), optimizer.no_sync():
                ddp(data(rank, 9)).square().sum().backward()
        ddp(data(rank, step)).square().sum().backward()
        expected = mean_of_ranks(
            plain,
            lambda m, r, s=step: sum(m(data(r, k)).square().sum() for k in ([s, 9] if s == 2 else [s])),
            world_size,
        )
        assert off(optimizer, module, expected) <= 1e-12, f"rank {rank}, step {step}"
        optimizer.step()
        with torch.no_grad():
            for p, g in zip(plain.parameters(), expected, strict=True):
                p.sub_(0.1 * g)
    return max(float((p - q).abs().max()) for p, q in zip(module.parameters(), plain.parameters(), strict=True))


@BOTH
@pytest.mark.parametrize("overlap", [True, False])
def test_under_our_ddp_the_mean_of_equal_values_is_taken(ranks, zero, overlap):
    assert max(ranks(2, under_ddp, zero=zero, overlap=overlap)) <= 1e-12


class Checkpointed(nn.Module):
    def __init__(self, seed, use_reentrant):
        super().__init__()
        self.first, self.second, self.use_reentrant = net(seed), net(seed + 1), use_reentrant

    def forward(self, x):
        for part in (self.first, self.second):
            x = part(x) if self.use_reentrant is None else checkpoint(part, x, use_reentrant=self.use_reentrant)
        return x


def recomputed(rank, world_size, zero, use_reentrant, cap):
    module = Checkpointed(rank, use_reentrant)
    optimizer = make(zero, module, bucket_cap_mb=cap)
    whole = Checkpointed(0, None)
    whole.load_state_dict(module.state_dict())
    expected = mean_of_ranks(whole, lambda m, r: m(data(r)).square().sum(), world_size)
    for number in range(2):
        optimizer.zero_grad()
        with comm.record() as log:
            module(data(rank).requires_grad_()).square().sum().backward()
        assert off(optimizer, module, expected) <= 1e-12, f"rank {rank}, backward {number}"
        # The end of an inner backward is not the end.
        assert len(log) == len(optimizer.buckets), f"rank {rank}, backward {number}"


@BOTH
@pytest.mark.parametrize("cap", [0, 25])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_backwards_inside_a_backward(ranks, zero, use_reentrant, cap):
    ranks(2, recomputed, zero=zero, use_reentrant=use_reentrant, cap=cap)


class Bomb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("half-way")


def half_way(rank, world_size, zero, victims):
    module = net(rank)
    optimizer = make(zero, module)

    def loss(x, bomb=False):
        x = module[1](module[0](x))
        return module[2](Bomb.apply(x) if bomb else x).square().sum()

    failing = rank in victims
    if failing:
        error_of(ArithmeticError, loss(data(rank), bomb=True).backward)
        if len(victims) == world_size:  # else the others wait for us already
            assert "zero_grad()" in error_of(RuntimeError, loss(data(rank)).backward)
    else:
        loss(data(rank)).backward()
    optimizer.zero_grad()
    expected = mean_of_ranks(module, lambda m, r: m(data(r)).square().sum(), world_size)
    loss(data(rank)).backward()
    assert off(optimizer, module, expected) <= 1e-12
    optimizer.step()


@BOTH
@pytest.mark.parametrize("victims", [[0, 1], [1]])
def test_a_backward_that_raises_leaves_the_next_one_whole(ranks, zero, victims):
    ranks(2, half_way, zero=zero, victims=victims)


def stale(rank, world_size, zero):
    module = net(rank)
    optimizer = make(zero, module)
    later = module(data(rank)).square().sum()
    module(data(rank)).square().sum().backward()
    optimizer.step()
    return error_of(RuntimeError, later.backward)


@BOTH
def test_weights_that_a_step_has_changed_are_not_used_for_an_older_forward(ranks, zero):
    assert "modified by an inplace operation" in ranks(2, stale, zero=zero)[0]


def refused(rank, world_size):
    told = {}
    module = net(rank)
    for kind, cls, options in (
        ("LBFGS", torch.optim.LBFGS, {}),
        ("Adafactor", torch.optim.Adafactor, {}),
        ("Muon", torch.optim.Muon, {}),
        ("SparseAdam", torch.optim.SparseAdam, {}),
        ("own", PerTensor, {"lr": 0.0}),
    ):
        told[kind] = error_of(ValueError, lambda c=cls, o=options: ZeRO1(module.parameters(), c, **o))
    told["lr"] = error_of(ValueError, lambda: make(ZeRO1, module, lr=-1.0))
    told["frozen"] = error_of(ValueError, lambda: make(ZeRO1, nn.Linear(2, 2).requires_grad_(False)))
    told["cap"] = error_of(ValueError, lambda: make(ZeRO1, module, bucket_cap_mb=-1))
    told["differs"] = error_of(ValueError, lambda: make(ZeRO1, nn.Linear(2, 2 + rank)))
    told["options"] = error_of(ValueError, lambda: make(ZeRO1, module, lr=0.1 * (1 + rank)))
    optimizer = make(ZeRO1, module)
    told["twice"] = error_of(ValueError, lambda: make(ZeRO1, module))
    told["group"] = error_of(RuntimeError, lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]}))
    return told


class PerTensor(torch.optim.SGD):
    """A class that no list of names knows: it scales by the norm of the whole tensor, as LARS does."""

    def step(self):
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(group["lr"] * p.grad / p.grad.norm())


def test_what_cannot_be_is_one_clear_line(ranks):
    told = ranks(2, refused)[0]
    for kind in ("LBFGS", "Adafactor", "Muon", "SparseAdam"):
        assert told[kind].startswith(f"{kind} is not elementwise"), told[kind]
    assert "PerTensor is not elementwise" in told["own"]  # also with a learning rate of 0
    assert "Invalid learning rate" in told["lr"]  # the class's own words
    assert "no parameter requires a gradient" in told["frozen"]
    assert "-1" in told["cap"]
    assert "'parameter 0'" in told["differs"] and "[2, 2]" in told["differs"]
    assert "'lr': 0.2" in told["options"]
    assert "another ZeRO1" in told["twice"]
    assert "construct a new one" in told["group"]


def misused(rank, world_size, zero):
    def fresh():
        module = net(rank)
        optimizer = make(zero, module)
        module(data(rank)).square().sum().backward()
        return module, optimizer

    told = {}
    module, optimizer = fresh()
    module.float().double()
    told["moved"] = error_of(RuntimeError, optimizer.step)
    module, optimizer = fresh()
    optimizer.zero_grad()
    with optimizer.no_sync():
        module(data(rank)).square().sum().backward()
    told["not averaged"] = error_of(RuntimeError, optimizer.step)
    if zero is ZeRO1:
        module, optimizer = fresh()
        nn.utils.clip_grad_norm_(module.parameters(), 1e-3)  # of this rank's own gradients: the ranks would part
        told["clipped"] = error_of(RuntimeError, optimizer.step)
    module = net(rank)
    module[0].weight.requires_grad_(False)
    optimizer = make(zero, module)
    module[0].weight.requires_grad_(True)
    module(data(rank)).square().sum().backward()
    told["unfrozen"] = error_of(RuntimeError, optimizer.step)
    return told


@BOTH
def test_misuse_that_would_train_something_else_is_told(ranks, zero):
    told = ranks(2, misused, zero=zero)[0]
    assert "moved to other memory" in told["moved"] and "'parameter " in told["moved"]
    assert "outside no_sync()" in told["not averaged"]
    assert "clip_grad_norm_ of this optimizer" in told.get("clipped", told["not averaged"])
    assert "unfrozen" in told["unfrozen"]


def under_torch_ddp(rank, world_size, zero, view):
    module = net(rank)
    ddp = DistributedDataParallel(module, gradient_as_bucket_view=view)
    optimizer = make(zero, module)
    ddp(data(rank)).square().sum().backward()
    return error_of(RuntimeError, optimizer.step)


@BOTH
@pytest.mark.parametrize("view", [True, False])
def test_two_that_average_are_one_too_many(ranks, zero, view):
    for rank, told in enumerate(ranks(2, under_torch_ddp, zero=zero, view=view)):
        assert "no PyTorch DDP" in told, f"rank {rank}"


def handled(rank, world_size, zero):
    module = net(rank)
    optimizer = make(zero, module)
    del optimizer
    module(data(rank)).square().sum().backward()  # its hooks are gone with it: nobody averages
    assert (
        gap([p.grad for p in module.parameters()], mean_of_ranks(module, lambda m, r: m(data(rank)).square().sum(), 1))
        == 0
    )


@BOTH
def test_an_optimizer_that_is_gone_leaves_the_parameters_alone(ranks, zero):
    ranks(2, handled, zero=zero)
