"""What holds for every compressor of the registry, and for those of the family with other settings."""

import copy
import warnings
from contextlib import nullcontext
from functools import partial
from unittest import mock

import hook_training
import pytest
import torch
import torch.distributed as dist
from hook_training import batch
from tensors import mlp, noise
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labkit import comm
from labkit.compression import COMPRESSORS, DGC, Cast, OneBit, PowerSGD, Quantize, RandomK, TopK, build
from labkit.ddp import DDP
from labkit.ddp.bucket import Bucket

STEPS = 5
MAKE = {
    **COMPRESSORS,
    "topk_tensor": partial(TopK, 0.1, per="tensor"),
    "topk_whole": partial(TopK, 1.0),
    "topk_forgetful": partial(TopK, 0.1, feedback=False),
    "randomk_whole": partial(RandomK, 1.0),
    "randomk_forgetful": partial(RandomK, 0.1, feedback=False),
    "fp16_feedback": partial(Cast, torch.float16, feedback=True),
    "bf16_feedback": partial(Cast, torch.bfloat16, feedback=True),
    "quantize8_feedback": partial(Quantize, 8, feedback=True, stochastic=False),
    "quantize4_feedback": partial(Quantize, 4, feedback=True, chunk=64),
    "onebit_forgetful": partial(OneBit, feedback=False, chunk=256),
    "dgc_whole": partial(DGC, 1.0, momentum=0.0),
    "powersgd_whole": partial(PowerSGD, 40, min_saving=0),
    "powersgd_all": partial(PowerSGD, 2, min_saving=0),
    "powersgd_cold": partial(PowerSGD, 2, warm_start=False),
    "powersgd_forgetful": partial(PowerSGD, 2, feedback=False),
}
EXACT = {
    "topk",
    "topk_tensor",
    "topk_whole",
    "randomk",
    "randomk_whole",
    "bf16_feedback",
    "fp16_feedback",
}  # what is sent is taken out whole: not a bit is lost
WHOLE = {"topk_whole", "randomk_whole", "powersgd_whole", "dgc_whole"}  # at full ratio or rank
BY_TENSOR = {
    "topk_tensor",
    "topk_whole",
    "randomk_whole",
    "fp16",
    "bf16",
    "powersgd",
    "powersgd_all",
}  # what is sent of a tensor does not depend on its neighbours in the bucket
# DGC sends what has become of gradients under momentum: not their sum. See test_compression_dgc.py.
IDENTITY = [name for name in MAKE if MAKE[name]().feedback and name != "dgc"]
WITH_FEEDBACK = [name for name in MAKE if MAKE[name]().feedback]


def train(module, hook, rank, steps, **settings):
    """Train with a hook. Returns each step's averaged gradients."""
    optimizer, seen = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), []
    hook_training.train(module, hook, optimizer, rank, steps, seen=seen, **settings)
    return seen


class Watch:
    """A hook around a hook, which keeps what went in, what came out and what is owed, by step."""

    def __init__(self, compressor):
        self.compressor, self.steps = compressor, []

    def owed(self, bucket):
        return self.compressor.residuals.of(bucket).double().clone()

    def __call__(self, group, bucket):
        gradient, before = bucket.buffer().double().clone(), self.owed(bucket)
        average = self.compressor.hook(group, bucket).wait()
        self.steps.append((gradient, before, average.double().clone(), self.owed(bucket)))
        done = torch.futures.Future()
        done.set_result(average)
        return done


def alone(rank, world_size):
    """A group of this rank only: what a hook returns there is what this rank sends."""
    return [dist.new_group([r]) for r in range(world_size)][rank]


def error_of_the_identity(rank, world_size, name):
    watch = Watch(MAKE[name]())
    train(mlp(24, 40, 40, 4), watch, rank, range(STEPS), group=alone(rank, world_size))
    gaps = [(sent + after - (gradient + before)) for gradient, before, sent, after in watch.steps]
    moved = sum(float(after.abs().sum()) for *_, after in watch.steps)
    return max(float(gap.abs().max()) for gap in gaps), moved


@pytest.mark.parametrize("name", IDENTITY)
def test_sent_and_residual_are_gradient_and_previous_residual(ranks, name):
    for rank, (gap, moved) in enumerate(ranks(2, error_of_the_identity, name=name)):
        assert gap <= 1e-7, f"rank {rank}"  # gradient + residual itself is rounded to float32 (values below 1)
        assert (moved < 1e-3) == (name in WHOLE), f"rank {rank}"  # else the line above says nothing


def gap_on_a_grid(rank, world_size, name):
    """The same with gradients that are multiples of 2**-10, whose sums float32 holds without rounding."""
    compressor, p = MAKE[name](), nn.Parameter(torch.zeros(30, 50))
    group, worst = alone(rank, world_size), 0.0
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        bucket = Bucket([p])
        bucket.buffer().copy_(torch.randint(-999, 999, (1500,), generator=generator) / 1024)
        wanted = bucket.buffer() + compressor.residuals.of(bucket)
        sent = compressor.hook(group, bucket).wait()
        worst = max(worst, float((sent + compressor.residuals.of(bucket) - wanted).abs().max()))
    return worst


@pytest.mark.parametrize("name", sorted(EXACT))
def test_the_identity_is_exact_where_the_arithmetic_allows(ranks, name):
    assert ranks(2, gap_on_a_grid, name=name) == [0.0, 0.0]


def learn(rank, world_size, name, wrap, settings):
    module, compressor = mlp(24, 40, 40, 4), MAKE[name]()
    if rank:
        for p in module.parameters():  # other weights: the wrapper must broadcast
            p.data.add_(rank)
    seen = train(module, compressor.hook, rank, range(STEPS), wrap=wrap, **settings)
    return torch.cat([p.detach().flatten() for p in module.parameters()]), seen


@pytest.mark.parametrize("settings", [{}, {"bucket_cap_mb": 0.002}, {"bucket_cap_mb": 0, "overlap": False}], ids=str)
@pytest.mark.parametrize("name", MAKE)
def test_ranks_are_equal_to_the_bit(ranks, name, settings):
    (first, _), *others = ranks(3, learn, name=name, wrap=DDP, settings=settings)
    for rank, (other, _) in enumerate(others, 1):
        assert torch.equal(first, other), f"rank {rank}"


@pytest.mark.parametrize("name", MAKE)
def test_ranks_are_equal_on_pytorchs_wrapper_with_many_buckets(ranks, name):
    told = ranks(2, learn, name=name, wrap=DistributedDataParallel, settings={"bucket_cap_mb": 0.003})
    assert torch.equal(told[0][0], told[1][0])


def of_dtype(rank, world_size, name, dtype):
    """Two steps alone: what was sent and what is owed against what was asked, relative to the largest."""
    compressor, p, group = MAKE[name](), nn.Parameter(torch.zeros(48, 50, dtype=dtype)), alone(rank, world_size)
    asked = total = 0.0
    for step in range(2):
        bucket = Bucket([p])
        bucket.buffer().copy_(noise(2400, seed=step))
        asked = asked + bucket.buffer().double()
        sent = compressor.hook(group, bucket).wait()
        assert sent.dtype == dtype, f"rank {rank}, step {step}"
        assert bool(sent.isfinite().all()), f"rank {rank}, step {step}"
        total = total + sent.double()
    owed = compressor.residuals.of(bucket)
    assert owed.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    return float((total + owed.double() - asked).abs().max() / asked.abs().max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", MAKE)
def test_gradients_of_other_dtypes(ranks, name, dtype):
    gap = ranks(1, of_dtype, name=name, dtype=dtype)[0]
    if name in IDENTITY:
        # What is sent arrives in the gradients' own dtype; and float64 is not what a 16-bit message holds exactly.
        assert gap < {torch.bfloat16: 0.02, torch.float16: 0.002, torch.float64: 1e-12}[dtype]


def single_matrix(rank, world_size, name, wrap):
    """One parameter: both wrappers lay it out the same way."""
    torch.manual_seed(0)
    module, compressor = nn.Sequential(nn.Linear(24, 16, bias=False), nn.Tanh()), MAKE[name]()
    train(module, compressor.hook, rank, range(STEPS), wrap=wrap)
    return module[0].weight.detach()


@pytest.mark.parametrize("name", [name for name in MAKE if name != "powersgd_whole"])  # of another model
def test_the_same_on_ours_and_on_pytorchs(ranks, name):
    ours, theirs = (ranks(2, single_matrix, name=name, wrap=wrap) for wrap in (DDP, DistributedDataParallel))
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(theirs[0], theirs[1])


def many_buckets(rank, world_size, name, wrap):
    """A bucket a parameter; in PyTorch's DDP only after the first step, which has a single one."""
    return learn(rank, world_size, name, wrap, {"bucket_cap_mb": 1e-6 if wrap is not DDP else 0})[0]


@pytest.mark.parametrize("name", sorted(BY_TENSOR))
def test_the_same_on_both_with_a_bucket_for_each_parameter(ranks, name):
    ours, theirs = (ranks(2, many_buckets, name=name, wrap=wrap) for wrap in (DDP, DistributedDataParallel))
    assert torch.equal(ours[0], theirs[0])


def total_of_all_steps(rank, world_size, name, wrap, settings):
    """Everything averaged so far, and what this rank still owes, against everything it was asked to send."""
    asked = []

    def hook(group, bucket):
        asked.append((list(bucket.parameters()), bucket.buffer().double().clone()))
        return compressor.hook(group, bucket)

    module, compressor = mlp(24, 40, 40, 4), MAKE[name]()
    seen = train(module, hook, rank, range(STEPS), wrap=wrap, **settings)
    total = {p: torch.zeros(p.numel(), dtype=torch.float64) for p in module.parameters()}
    for parameters, flat in asked:
        for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            total[p] += part
    owed = {p: part.double() for p, part in compressor.residuals._parts.items()}
    flat = [torch.cat([found[p] for p in module.parameters()]) for found in (total, owed)]
    return sum(part.double() for part in seen), *flat


@pytest.mark.parametrize("wrap", [DDP, DistributedDataParallel])
@pytest.mark.parametrize("name", IDENTITY)
def test_nothing_is_lost_when_buckets_are_laid_out_anew(ranks, name, wrap):
    told = ranks(2, total_of_all_steps, name=name, wrap=wrap, settings={"bucket_cap_mb": 0.003})
    averaged = told[0][0]
    asked, owed = (sum(rank[i] for rank in told) / 2 for i in (1, 2))
    largest = float(asked.abs().max())
    # What is sent in 16 bits is also added up in 16 bits.
    assert float((averaged + owed - asked).abs().max()) < (2**-8 * largest if "16" in name else 1e-6)


@pytest.mark.parametrize("name", sorted(WHOLE))
def test_at_full_ratio_or_rank_it_is_plain_averaging(ranks, name):
    (_, plain), _ = ranks(2, against_plain, name=None)
    (_, ours), _ = ranks(2, against_plain, name=name)
    for step, (mine, theirs) in enumerate(zip(ours, plain, strict=True)):
        assert float((mine - theirs).abs().max()) < 1e-6, f"step {step}"


def against_plain(rank, world_size, name):
    module = mlp(24, 40, 40, 4)
    seen = train(module, MAKE[name]().hook if name else None, rank, range(STEPS))
    return None, seen


def as_in_a_file(state):
    """A copy in which the elements of each tensor lie row by row."""
    if isinstance(state, dict):
        return {name: as_in_a_file(value) for name, value in state.items()}
    if isinstance(state, torch.Tensor):
        return state.clone(memory_format=torch.contiguous_format)
    return copy.deepcopy(state)


def resumed(rank, world_size, name):
    module, first = mlp(24, 40, 40, 4), MAKE[name]()
    train(module, first.hook, rank, range(3))
    saved = as_in_a_file(first.state_dict())
    again = MAKE[name]()
    again.load_state_dict(saved)
    told = [train(copy.deepcopy(module), hook, rank, range(3, 6)) for hook in (again.hook, MAKE[name]().hook)]
    first.load_state_dict(saved)  # one that has been used
    return *map(torch.stack, told), torch.stack(train(module, first.hook, rank, range(3, 6)))


def straight_through(rank, world_size, name):
    """Six steps without a break, with the momentum of the optimizer dropped in the middle as `resumed` drops it."""
    module, compressor = mlp(24, 40, 40, 4), MAKE[name]()
    wrapped = DDP(module)
    wrapped.register_comm_hook(None, compressor.hook)
    seen = []
    for step in range(6):
        if step % 3 == 0:
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        optimizer.zero_grad()
        wrapped(batch(rank, step)).square().mean().backward()
        seen.append(torch.cat([p.grad.flatten().clone() for p in module.parameters()]))
        optimizer.step()
    return torch.stack(seen[3:])


@pytest.mark.parametrize("name", WITH_FEEDBACK)
def test_a_saved_state_goes_on_to_the_bit(ranks, name):
    straight = ranks(2, straight_through, name=name)[0]
    again, without, used = ranks(2, resumed, name=name)[0]
    assert torch.equal(again, straight)
    assert torch.equal(used, straight)
    if name not in WHOLE:  # the state matters
        assert not torch.equal(without, straight)


def poisoned(rank, world_size, name, value, dtype):
    """Rank 1 has a bad gradient in step 1. What each rank gets, and whether its residual stayed clean."""
    compressor, p = MAKE[name](), nn.Parameter(torch.zeros(40, 50, dtype=dtype))
    results, told, kept = [], [], None
    for step in range(3):
        bucket = Bucket([p])
        gradient = noise(2000, seed=10 * step + rank)
        if (rank, step) == (1, 1):
            gradient[7] = value
            kept = compressor.residuals.of(bucket).clone()
        bucket.buffer().copy_(gradient)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            results.append(bool(torch.isfinite(compressor.hook(None, bucket).wait()).all()))
        told.append([str(w.message) for w in caught])
        if (rank, step) == (1, 1):
            assert torch.equal(compressor.residuals.of(bucket), kept), f"rank {rank}, step {step}"
    return results, told, bool(torch.isfinite(compressor.residuals.of(bucket)).all())


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(float("nan"), torch.float32), (float("inf"), torch.float32), (float("inf"), torch.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize("name", MAKE)
def test_a_bad_gradient_is_told_reaches_every_rank_and_leaves_no_trace(ranks, name, value, dtype):
    for rank, (finite, told, clean) in enumerate(ranks(2, poisoned, name=name, value=value, dtype=dtype)):
        assert finite == [True, False, True], f"rank {rank}"
        assert clean, f"rank {rank}"
        assert [len(lines) for lines in told] == [0, rank, 0], f"rank {rank}"
        assert all("inf or NaN in the gradients of bucket 0" in line for lines in told for line in lines), (
            f"rank {rank}"
        )


class Stumble(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise KeyError("stumbled")


def broken_off(rank, world_size, name):
    """A backward that ends in the middle on all ranks, when some buckets have left; then three steps as usual."""
    module, compressor = mlp(24, 40, 40, 4), MAKE[name]()
    wrapped = DDP(module, bucket_cap_mb=0)
    wrapped.register_comm_hook(None, compressor.hook)
    handle = module[2].register_forward_hook(lambda part, inputs, output: Stumble.apply(output))
    with pytest.raises(KeyError):
        wrapped(batch(rank, 0)).square().mean().backward()
    handle.remove()
    for step in range(3):
        module.zero_grad()
        wrapped(batch(rank, step)).square().mean().backward()
    return torch.cat([p.grad.flatten().clone() for p in module.parameters()])


@pytest.mark.parametrize("name", COMPRESSORS)
def test_after_a_backward_that_broke_off_ranks_still_agree(ranks, name):
    first, second = ranks(2, broken_off, name=name)
    assert bool(first.isfinite().all())
    assert torch.equal(first, second)


def scaled(rank, world_size, name):
    """The second gradient with a scale four times as large: the residual must follow. Powers of two round nothing."""
    p, told = nn.Parameter(torch.zeros(40, 50)), []
    for scale in (1.0, 4.0):
        compressor = MAKE[name]()
        for step, factor in enumerate((1.0, scale)):
            bucket = Bucket([p])
            bucket.buffer().copy_(factor * noise(2000, seed=step))
            if step:
                compressor.scale_residuals(scale)
            sent = compressor.hook(None, bucket).wait()
        told.append(sent / scale)
    return float((told[0] - told[1]).abs().max())


@pytest.mark.parametrize("name", ["topk", "dgc", "onebit", "bf16_feedback"])
def test_residuals_follow_the_loss_scale(ranks, name):
    assert ranks(1, scaled, name=name) == [0.0]


class Lost:
    """The Work of a message that has not arrived."""

    def wait(self):
        raise ConnectionError("the link is gone")

    def get_future(self):
        future = torch.futures.Future()
        future.set_exception(ConnectionError("the link is gone"))
        return future


def lost(rank, world_size, name, number):
    """Message `number` of a step fails, as all do when a link is cut in the middle of it."""
    compressor, bucket = MAKE[name](), Bucket([nn.Parameter(torch.zeros(40, 50))])
    compressor.hook(None, bucket).wait()
    left = iter(range(number))

    def carry(operation, *arguments, **options):
        return operation(*arguments, **options) if next(left, None) is not None else Lost()

    replaced = {op: partial(carry, getattr(comm, op)) for op in ("all_reduce", "all_gather")}
    with mock.patch.multiple(comm, **replaced), pytest.raises(Exception, match="the link is gone"):
        compressor.hook(None, bucket).wait()


@pytest.mark.parametrize(("name", "number"), [*((name, 0) for name in MAKE), ("powersgd", 1)])
def test_a_message_that_did_not_arrive_is_an_error_and_no_average(ranks, name, number):
    ranks(1, lost, name=name, number=number)


def different(rank, world_size, makes, told):
    compressor, p = makes[rank](), nn.Parameter(torch.zeros(8, 9))
    with pytest.raises(ValueError, match=told):
        compressor.hook(None, Bucket([p]))


@pytest.mark.parametrize(
    ("makes", "told"),
    [
        ([partial(TopK, 0.1), partial(TopK, 0.2)], r"rank 0 has .*TopK\(ratio=0.1.*rank 1 has .*TopK\(ratio=0.2"),
        ([partial(Quantize, 4), partial(Quantize, 8)], r"bits=4.*rank 1 has .*bits=8"),
        ([partial(PowerSGD, 1), partial(PowerSGD, 2)], r"\(rank=1.*rank 1 has .*\(rank=2"),
        ([OneBit, Cast], r"OneBit.*rank 1 has .*Cast"),
    ],
    ids=["ratio", "bits", "rank", "kind"],
)
def test_ranks_with_different_settings_are_told(ranks, makes, told):
    ranks(2, different, makes=makes, told=told)


def loaded_by_one(rank, world_size):
    """Random places come of the step's number: where it differs, ranks would add unlike to unlike."""
    compressor, bucket = RandomK(0.5), Bucket([nn.Parameter(torch.zeros(8))])
    compressor.hook(None, bucket).wait()
    state = compressor.state_dict()
    for step in (3, 4 + rank):
        compressor.load_state_dict(state | {"step": step})
        with pytest.raises(ValueError, match=r"at step 4, rank 1 has .*at step 5") if step > 3 else nullcontext():
            compressor.hook(None, bucket).wait()


def test_ranks_at_different_steps_are_told(ranks):
    ranks(2, loaded_by_one)


def empty(rank, world_size, name):
    with comm.record() as log:
        answer = MAKE[name]().hook(None, Bucket([nn.Parameter(torch.zeros(0))])).wait()
    return answer.numel(), len(log)


@pytest.mark.parametrize("name", MAKE)
def test_an_empty_bucket_sends_nothing(ranks, name):
    assert ranks(2, empty, name=name) == [(0, 0)] * 2


@pytest.mark.parametrize("name", MAKE)
def test_a_state_of_other_settings_is_refused(name):
    state = MAKE[name]().state_dict()
    state["settings"] = {"ratio": 0.5}
    with pytest.raises(ValueError, match="cannot load a state with other settings"):
        MAKE[name]().load_state_dict(state)


def test_an_unknown_name_is_told_the_known_ones():
    with pytest.raises(ValueError, match="topk"):
        build("zip")


def misfits(rank, world_size):
    def bucket(*sizes):
        made = Bucket([nn.Parameter(torch.zeros(size)) for size in sizes], names=[f"w{i}" for i in range(len(sizes))])
        made.buffer().fill_(1.0)
        return made

    saved = TopK(0.5)
    saved.hook(None, bucket(4, 6)).wait()
    other = TopK(0.5)
    other.load_state_dict(saved.state_dict())
    with pytest.raises(ValueError, match="'w1' has 6 elements, but the parameter has 7"):
        other.hook(None, bucket(4, 7))
    other = TopK(0.5)
    other.load_state_dict(saved.state_dict())
    with pytest.raises(KeyError, match="no residual was saved for 'w2'"):
        other.hook(None, bucket(4, 6, 2))


def test_a_state_that_does_not_fit_is_named(ranks):
    ranks(1, misfits)
