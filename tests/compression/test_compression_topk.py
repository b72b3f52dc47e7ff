"""Top-k: the selection, the bytes, the sum at the right indices."""

import pytest
import torch
from tensors import noise
from torch import nn

from labkit import comm
from labkit.compression import TopK
from labkit.compression.packing import pack, unpack
from labkit.compression.select import SAMPLED_FROM, top_indices
from labkit.ddp.bucket import Bucket


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("k", [800, 10_000, 250_000])
def test_the_sampled_selection_is_that_of_topk(k, seed):
    values = noise(1_000_000, seed=seed) ** 3  # heavy tails, as gradients have
    found = top_indices(values, k)
    wanted = torch.topk(values.abs(), k).indices
    assert len(found) == k  # the guess was low enough, as it nearly always is: then the answer is exact
    assert torch.equal(values[found].abs().sort().values, values[wanted].abs().sort().values)


@pytest.mark.parametrize("n", [1, 2, 100, SAMPLED_FROM - 1])
def test_small_tensors(n):
    values = noise(n)
    for k in {1, max(1, n // 3), n}:
        assert set(top_indices(values, k).tolist()) == set(torch.topk(values.abs(), k).indices.tolist())


def test_ties_zeros_and_nan():
    n, k = 200_000, 2000
    assert len(top_indices(torch.ones(n), k)) == k  # nothing exceeds the threshold: falls back
    sparse = torch.zeros(n)
    sparse[torch.arange(0, n, 400)] = 1.0
    assert set(top_indices(sparse, k).tolist()) == set(range(0, n, 400))  # the others need no index
    layered = noise(n)
    layered[: n // 100] = 100.0  # one row of an embedding: exactly as many as asked
    assert set(top_indices(layered, k).tolist()) == set(range(2000))
    assert len(top_indices(torch.full((n,), torch.nan), k)) == k


@pytest.mark.gpu
def test_selection_on_cuda():
    values = noise(1_000_000) ** 3
    found = top_indices(values.cuda(), 10_000)
    assert set(found.tolist()) == set(torch.topk(values.abs(), 10_000).indices.tolist())


def test_selection_leaves_the_models_random_numbers_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    top_indices(noise(200_000), 2000)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_packing(dtype):
    values, indices = noise(7).to(dtype), torch.arange(7, dtype=torch.int32)
    message = pack(values, indices)
    assert message.numel() == 7 * (dtype.itemsize + 4)
    rows = torch.stack([message, message])  # the second begins anywhere
    for row in rows:
        told = unpack(row, (dtype, 7), (torch.int32, 7))
        assert torch.equal(told[0], values) and torch.equal(told[1], indices)


def at_the_right_indices(rank, world_size):
    """The picture in topk.py."""
    rows = [[0.1, -0.9, 0.2, 0.0, 0.7, -0.1], [0.3, 0.1, -0.2, 0.6, -0.1, 0.0]]
    bucket, compressor = Bucket([nn.Parameter(torch.zeros(6))]), TopK(1 / 3)
    bucket.buffer().copy_(torch.tensor(rows[rank]))
    average = compressor.hook(None, bucket).wait()
    return (2 * average).tolist(), compressor.residuals.of(bucket).tolist()


def test_values_are_added_at_their_own_indices(ranks):
    (total, first), (other, second) = ranks(2, at_the_right_indices)
    assert total == other
    assert total == pytest.approx([0.3, -0.9, 0.0, 0.6, 0.7, 0.0])
    assert first == pytest.approx([0.1, 0.0, 0.2, 0.0, 0.0, -0.1])
    assert second == pytest.approx([0.0, 0.1, -0.2, 0.0, -0.1, 0.0])


def sent(rank, world_size, ratio, per):
    p, q = nn.Parameter(torch.zeros(300, 10)), nn.Parameter(torch.zeros(7))
    compressor = TopK(ratio, per)
    for _ in range(2):  # the first also compares the settings
        bucket = Bucket([p, q])
        bucket.buffer().copy_(noise(3007, seed=rank))
        with comm.record() as log:
            compressor.hook(None, bucket).wait()
    return [(event.op, event.sent_bytes) for event in log]


@pytest.mark.parametrize(("per", "k"), [("bucket", 30), ("tensor", 31)])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_bytes(ranks, n, per, k):
    assert ranks(n, sent, ratio=0.01, per=per) == [[("all_gather", (n - 1) * 8 * k)]] * n


@pytest.mark.parametrize("ratio", [0, -0.1, 1.01, float("nan")])
def test_a_ratio_that_does_not_exist(ratio):
    with pytest.raises(ValueError, match=r"ratio=.* must be above 0 and at most 1"):
        TopK(ratio)


def test_per_something_else():
    with pytest.raises(ValueError, match='per must be "bucket" or "tensor"'):
        TopK(0.1, per="layer")
