"""Comm hooks: PyTorch's own run on our DDP and give what they give on PyTorch's, and ours run on PyTorch's."""

import pytest
import torch
import torch.distributed as dist
from tensors import gap, mlp, noise
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from labkit import comm
from labkit.ddp import DDP
from labkit.local_sgd import LocalSGD

STEPS = 6


def data(rank, step):
    return noise(8, 16, seed=10 * step + rank)


def halved_sum(state, bucket):
    """A hook as a user would write it: counts its buckets, sums, and divides afterwards."""
    state.append((bucket.index(), bucket.is_last(), [tuple(g.shape) for g in bucket.gradients()]))
    assert [p.shape for p in bucket.parameters()] == [g.shape for g in bucket.gradients()]
    buffer = bucket.buffer()
    assert buffer.numel() == sum(g.numel() for g in bucket.gradients())
    future = comm.all_reduce(buffer, async_op=True).get_future()
    return future.then(lambda done: done.value()[0] / 2)


def elsewhere(state, bucket):
    """A hook whose result is another tensor, of another shape, and known at once."""
    buffer = bucket.buffer().clone()
    comm.all_reduce(buffer)
    future = torch.futures.Future()
    future.set_result((buffer / 2).double().view(1, -1))
    return future


def power(rank_of_matrices):
    return powerSGD_hook.PowerSGDState(None, rank_of_matrices, start_powerSGD_iter=2, min_compression_rate=1)


HOOKS = {  # name: (a new state, hook)
    "none": (lambda: None, None),
    "allreduce": (lambda: None, default_hooks.allreduce_hook),
    "fp16": (lambda: None, default_hooks.fp16_compress_hook),
    "fp16_wrapper": (lambda: None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "power": (lambda: power(2), powerSGD_hook.powerSGD_hook),
    "power_fp16": (lambda: power(1), default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)),
    "halved_sum": (list, halved_sum),
}


def train(rank, world_size, name, wrap, settings):
    make_state, hook = HOOKS[name]
    module, state = mlp(16, 32, 32, 4), make_state()
    wrapped = wrap(module, **settings)
    if hook is not None:
        wrapped.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        wrapped(data(rank, step)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in module.parameters()], state if name == "halved_sum" else None


def both(rank, world_size, name, ours, theirs):
    return train(rank, world_size, name, DDP, ours), train(rank, world_size, name, DistributedDataParallel, theirs)


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_gives_the_same_on_both(ranks, name):
    for rank, ((ours, _), (theirs, _)) in enumerate(ranks(2, both, name=name, ours={}, theirs={"bucket_cap_mb": 25})):
        assert gap(ours, theirs) == 0.0, f"rank {rank}"


@pytest.mark.parametrize(
    "form", [{"bucket_cap_mb": 0, "overlap": False}, {"bucket_cap_mb": 0}, {"bucket_cap_mb": 0.002}], ids=str
)
@pytest.mark.parametrize("name", ["allreduce", "fp16", "fp16_wrapper", "halved_sum"])
def test_a_hook_gives_the_same_with_many_buckets(ranks, name, form):
    for rank, ((ours, state), (theirs, _)) in enumerate(ranks(2, both, name=name, ours=form, theirs={})):
        assert gap(ours, theirs) == 0.0, f"rank {rank}"  # two ranks: how sums are grouped cannot matter
        if state is not None:
            count = len(state) // STEPS
            assert count > 1, f"rank {rank}"
            assert [index for index, _, _ in state] == list(range(count)) * STEPS, f"rank {rank}"
            assert [last for _, last, _ in state] == ([False] * (count - 1) + [True]) * STEPS, f"rank {rank}"


def test_compression_loses_something_or_the_tests_above_say_nothing(ranks):
    plain, *_ = ranks(2, train, name="none", wrap=DDP, settings={})
    for name in ("fp16", "power"):
        compressed, *_ = ranks(2, train, name=name, wrap=DDP, settings={})
        assert 0 < gap(plain[0], compressed[0]) < 0.1, name


def results_elsewhere(rank, world_size, form):
    module, plain = mlp(16, 32, 32, 4), mlp(16, 32, 32, 4)
    wrapped = DDP(module, **form)
    wrapped.register_comm_hook(None, elsewhere)
    wrapped(data(rank, 0)).square().mean().backward()
    DDP(plain)(data(rank, 0)).square().mean().backward()
    return gap([p.grad for p in module.parameters()], [p.grad for p in plain.parameters()])


@pytest.mark.parametrize("form", [{}, {"bucket_cap_mb": 0}])
def test_the_result_may_be_another_tensor(ranks, form):
    assert ranks(2, results_elsewhere, form=form) == [0.0, 0.0]


def misuse(rank, world_size):
    wrapped = DDP(mlp(16, 32, 32, 4))
    with pytest.raises(TypeError, match="callable"):
        wrapped.register_comm_hook(None, "allreduce")
    for hook, words in ((of_ints, "bucket is annotated int"), (to_int, "return is annotated int")):
        with pytest.raises(ValueError, match=f"{words}, and must be (GradBucket|Future)"):
            wrapped.register_comm_hook(None, hook)
    wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(RuntimeError, match="registered already"):
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    for hook, words in ((lambda state, bucket: 1, "a comm hook returned int"), (one, "future returned int")):
        wrapped = DDP(mlp(16, 32, 32, 4))
        wrapped.register_comm_hook(None, hook)
        with pytest.raises(TypeError, match=words):
            wrapped(data(rank, 0)).sum().backward()
    optimizer = LocalSGD(torch.optim.SGD(mlp(16, 32, 32, 4).parameters(), 0.1), 1, hook=lambda state, bucket: 1)
    with pytest.raises(TypeError, match="a comm hook returned int"):
        optimizer.average()


def of_ints(state, bucket: int) -> torch.futures.Future[torch.Tensor]:
    return default_hooks.allreduce_hook(state, bucket)


def to_int(state, bucket: dist.GradBucket) -> int:
    return 1


def one(state, bucket):
    future = torch.futures.Future()
    future.set_result(1)
    return future


def test_misuse_is_a_clear_error(ranks):
    ranks(2, misuse)


class Flaky:
    """Fails in its second bucket, once."""

    def __init__(self):
        self.calls = 0

    def __call__(self, state, bucket):
        self.calls += 1
        if self.calls == 2:
            raise KeyError("flaky")
        return default_hooks.allreduce_hook(state, bucket)


def failing(rank, world_size):
    module, plain = mlp(16, 32, 32, 4), mlp(16, 32, 32, 4)
    wrapped = DDP(module, bucket_cap_mb=0)
    wrapped.register_comm_hook(None, Flaky())
    with pytest.raises(KeyError):
        wrapped(data(rank, 0)).square().mean().backward()
    module.zero_grad()
    wrapped(data(rank, 1)).square().mean().backward()
    DDP(plain)(data(rank, 1)).square().mean().backward()
    return gap([p.grad for p in module.parameters()], [p.grad for p in plain.parameters()])


def test_after_a_hook_has_raised_the_next_step_works(ranks):
    assert ranks(2, failing) == [0.0, 0.0]


def accumulated(rank, world_size, wrap):
    module = mlp(16, 32, 32, 4)
    wrapped = wrap(module)
    wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
    for _ in range(2):
        module.zero_grad()
        with wrapped.no_sync():
            wrapped(data(rank, 0)).square().mean().backward()
        wrapped(data(rank, 1)).square().mean().backward()
    return [p.grad.clone() for p in module.parameters()]


def test_hooks_and_no_sync(ranks):
    ours, theirs = (ranks(2, accumulated, wrap=wrap) for wrap in (DDP, DistributedDataParallel))
    assert max(map(gap, ours, theirs)) == 0.0


def kept_by_to(rank, world_size):
    module, plain = mlp(16, 32, 32, 4), mlp(16, 32, 32, 4).double()
    wrapped = DDP(module)
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    wrapped.double()
    wrapped(data(rank, 0).double()).square().mean().backward()
    DDP(plain)(data(rank, 0).double()).square().mean().backward()
    return gap([p.grad for p in module.parameters()], [p.grad for p in plain.parameters()])


def test_a_hook_stays_when_the_model_moves(ranks):
    for rank, told in enumerate(ranks(2, kept_by_to)):
        assert 0 < told < 1e-3, f"rank {rank}"
