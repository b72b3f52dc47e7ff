"""What travels by all_reduce: random-k, casts, PowerSGD. Bytes, and what is particular to each."""

from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from tensors import mlp, noise
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from labkit import comm
from labkit.compression import Cast, PowerSGD, RandomK
from labkit.ddp import DDP
from labkit.ddp.bucket import Bucket


def filled(parameters, seed):
    bucket = Bucket(parameters)
    bucket.buffer().copy_(noise(bucket.numel, seed=seed))
    return bucket


def messages(rank, world_size, make, shapes):
    """The second step's: the first also compares the settings."""
    compressor, parameters = make(), [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for _ in range(2):
        with comm.record() as log:
            compressor.hook(None, filled(parameters, rank)).wait()
    return [(event.op, event.payload_bytes) for event in log]


MATRICES = [(60, 80), (30,), (64, 3, 5, 5), (4, 4)]
BYTES = {  # name: (function of nothing, bytes of the messages)
    "randomk": (partial(RandomK, 0.01), [96 * 4]),
    "fp16": (Cast, [9646 * 2]),
    "bf16_feedback": (partial(Cast, torch.bfloat16, feedback=True), [9646 * 2]),
    # P of 60 x 80 and 64 x 75, the vector and the matrix that would not shrink; then Q of the two.
    "powersgd": (partial(PowerSGD, 3), [4 * (3 * (60 + 64) + 30 + 16), 4 * 3 * (80 + 75)]),
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes(ranks, name):
    make, sizes = BYTES[name]
    assert ranks(2, messages, make=make, shapes=MATRICES) == [[("all_reduce", size) for size in sizes]] * 2


def half(rank, world_size, hook, wrap):
    module = mlp(24, 40, 40, 4)
    wrapped = wrap(module)
    wrapped.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        optimizer.zero_grad()
        wrapped(noise(8, 24, seed=10 * step + rank)).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def ours_and_theirs(rank, world_size):
    return [
        half(rank, world_size, hook, wrap)
        for hook in (Cast(torch.float16).hook, default_hooks.fp16_compress_hook)
        for wrap in (DDP, DistributedDataParallel)
    ]


def test_fp16_is_pytorchs_fp16_to_the_bit_on_both_wrappers(ranks):
    for rank, told in enumerate(ranks(2, ours_and_theirs)):
        assert all(torch.equal(told[0], other) for other in told[1:]), f"rank {rank}"


def too_large(rank, world_size):
    told = []
    for feedback in (False, True):
        compressor, p = Cast(torch.float16, feedback), nn.Parameter(torch.zeros(4))
        bucket = Bucket([p])
        bucket.buffer().copy_(torch.tensor([1.0, 2.0, 1e5, -3.0]))
        told.append(compressor.hook(None, bucket).wait().tolist())
    return told, compressor.residuals.of(bucket).tolist()


@pytest.mark.filterwarnings("ignore:.*inf or NaN")
def test_what_fp16_cannot_hold_is_inf_or_waits(ranks):
    (without, with_feedback), residual = ranks(1, too_large)[0]
    assert without == [1.0, 2.0, float("inf"), -3.0]
    assert with_feedback == [1.0, 2.0, 65504.0, -3.0]
    assert residual == [0.0, 0.0, 1e5 - 65504.0, 0.0]


@pytest.mark.parametrize(("numel", "ratio"), [(1, 0.01), (10, 0.5), (1000, 0.037), (999, 0.9), (50, 1.0)])
def test_places_are_distinct_and_everywhere(numel, ratio):
    compressor, seen = RandomK(ratio), set()
    for _ in range(400):
        places = compressor.draw(numel, 0, "cpu").tolist()
        assert len(set(places)) == len(places) == max(1, round(ratio * numel))
        seen.update(places)
        compressor.step += 1
    assert seen == set(range(numel))


def averaged_over_many_steps(rank, world_size, numel, ratio):
    """Of a gradient of ones: whatever the values, what arrives is a multiple of them."""
    compressor, p = RandomK(ratio, feedback=False), nn.Parameter(torch.zeros(numel))
    total = torch.zeros(numel)
    for _ in range(4000):
        bucket = Bucket([p])
        bucket.buffer().fill_(1.0)
        total += compressor.hook(None, bucket).wait()
    return total / 4000


@pytest.mark.slow
@pytest.mark.parametrize(("numel", "ratio"), [(40, 0.5), (10, 0.9), (11, 0.36)])
def test_without_feedback_random_k_is_right_on_average(ranks, numel, ratio):
    mean = ranks(1, averaged_over_many_steps, numel=numel, ratio=ratio)[0]
    assert float((mean - 1).abs().max()) < 0.1  # four times the standard error in parts of three


def multiples(rank, world_size, dtype):
    compressor, p = RandomK(0.003, feedback=False), nn.Parameter(torch.zeros(1000, dtype=dtype))
    bucket = Bucket([p])
    bucket.buffer().fill_(1.5)
    sent = compressor.hook(None, bucket).wait()
    return sent[sent != 0].tolist(), torch.tensor([333, 333, 334]).mul(1.5).to(dtype).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_random_k_rounds_the_product_and_not_the_factor(ranks, dtype):
    sent, wanted = ranks(1, multiples, dtype=dtype)[0]  # in bfloat16 333 itself would be 332
    assert sent == wanted


def low_rank(rank, world_size):
    """Gradients whose mean has rank 2: two columns hold it, so nothing but rounding is lost."""
    rows = noise(60, 2, dtype=torch.float64)
    cols = [noise(2, 80, seed=1 + r, dtype=torch.float64) for r in range(world_size)]
    bucket, compressor = Bucket([nn.Parameter(torch.zeros(60, 80, dtype=torch.float64))]), PowerSGD(2)
    bucket.buffer().copy_((rows @ cols[rank]).view(-1))
    average = compressor.hook(None, bucket).wait().clone()
    return float((average.view(60, 80) - rows @ sum(cols) / world_size).abs().max())


def test_power_sgd_finds_a_mean_of_low_rank(ranks):
    assert max(ranks(2, low_rank)) < 1e-12


def converged(rank, world_size, warm_start):
    """The same gradient again and again: with a warm start this is power iteration, which finds the best of rank 2."""
    matrix = (noise(60 * 80).view(60, 80)) @ torch.diag(0.9 ** torch.arange(80.0))
    compressor, p = PowerSGD(2, feedback=False, warm_start=warm_start), nn.Parameter(torch.zeros(60, 80))
    for _ in range(60):
        bucket = Bucket([p])
        bucket.buffer().copy_(matrix.view(-1))
        average = compressor.hook(None, bucket).wait()
    best = torch.linalg.svdvals(matrix)[2:].square().sum().sqrt()
    return float((average.view(60, 80) - matrix).norm() / best)


def test_a_warm_start_finds_the_best_approximation(ranks):
    assert ranks(1, converged, warm_start=True)[0] == pytest.approx(1.0, abs=1e-3)
    assert ranks(1, converged, warm_start=False)[0] > 1.01


def order(rank, world_size):
    """Messages of one step with a bucket for each parameter."""
    compressor = PowerSGD(2, min_saving=0)
    wrapped = DDP(mlp(24, 40, 40, 4), bucket_cap_mb=0)
    wrapped.register_comm_hook(None, compressor.hook)
    for _ in range(2):
        with comm.record() as log:
            wrapped(noise(8, 24, seed=rank)).square().mean().backward()
    return [event.payload_bytes // 4 for event in log if event.op == "all_reduce"]


def test_q_follows_the_next_buckets_p(ranks):
    bias, last, middle, first = 40, (2 * 4, 2 * 40), (2 * 40, 2 * 40), (2 * 40, 2 * 24)
    wanted = [4, last[0], bias, last[1], middle[0], bias, middle[1], *first]
    assert ranks(2, order) == [wanted, wanted]


def while_q_travels(rank, world_size, feedback):
    """Whether the hook writes to the gradients between the start of the second message and its end."""
    bucket, future, before = filled([nn.Parameter(torch.zeros(40, 50))], rank), torch.futures.Future(), []

    def start_mean(message, group):
        before.append(bucket.buffer().clone())
        return SimpleNamespace(wait=lambda: None, get_future=lambda: future)

    with mock.patch("labkit.compression.powersgd.start_mean", start_mean):
        average = PowerSGD(2, feedback=feedback).hook(None, bucket)
    assert len(before) == 2
    touched = not torch.equal(bucket.buffer(), before[1])
    future.set_result(None)
    average.wait()
    return touched


@pytest.mark.parametrize("feedback", [True, False])
def test_nobody_writes_where_the_average_arrives(ranks, feedback):
    """On CUDA another stream does so, which waits for the message only."""
    assert ranks(1, while_q_travels, feedback=feedback) == [False]


def too_wide(rank, world_size):
    with pytest.raises(ValueError, match="rank=5 exceeds the smaller side of every matrix: use at most 4"):
        PowerSGD(5).hook(None, filled([nn.Parameter(torch.zeros(4, 9)), nn.Parameter(torch.zeros(70))], 0))


def test_settings_that_do_not_exist(ranks):
    ranks(1, too_wide)
    for bad in (0, -1, 1.5):
        with pytest.raises(ValueError, match=r"rank=.* must be an integer >= 1"):
            PowerSGD(bad)
    with pytest.raises(ValueError, match=r"float16 or torch\.bfloat16"):
        Cast(torch.int8)
    with pytest.raises(ValueError, match="ratio"):
        RandomK(0)
