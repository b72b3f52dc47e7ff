"""One bit and quantisation: codes, bytes on the wire, being right on average, memory."""

from functools import partial

import pytest
import torch
from torch import nn

from labkit import comm
from labkit.compression import OneBit, Quantize
from labkit.compression.chunks import rows_at_once
from labkit.compression.onebit import pack_bits
from labkit.parts.bucket import Bucket


def noise(n, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def hooked(compressor, gradient, p=None):
    bucket = Bucket([nn.Parameter(torch.zeros(len(gradient))) if p is None else p])
    bucket.buffer().copy_(gradient)
    return compressor.hook(None, bucket).wait(), compressor.residuals.of(bucket)


def test_bits_are_packed_eight_to_a_byte():
    bits = torch.tensor([1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1], dtype=torch.bool)
    assert pack_bits(bits).tolist() == [1, 2 + 128]
    values = noise(800).view(100, 8)
    told = OneBit(8).decode(torch.ones(100, 1), pack_bits(values.view(-1) >= 0))
    assert torch.equal(told, torch.where(values >= 0, 1.0, -1.0))


def test_a_gpu_gets_all_rows_at_once_and_the_table_of_signs_once():
    assert rows_at_once(torch.empty(10**6, device="meta"), 512) == 1954
    assert rows_at_once(torch.empty(10**6), 512) == 128
    compressor = OneBit(8)
    compressor.decode(torch.ones(1, 1, device="meta"), torch.zeros(1, dtype=torch.uint8, device="meta"))
    held = compressor.signs
    assert held.is_meta and pack_bits(torch.ones(8, dtype=torch.bool, device="meta")).is_meta


def picture(rank, world_size):
    """The example in onebit.py, with each row filled up to 8 by repeating it."""
    rows = torch.tensor([[0.3, -0.1, 0.2, -0.6] * 2, [4.0, -1.0, -2.0, 1.0] * 2])
    sent, residual = hooked(OneBit(8), rows.view(-1))
    return sent.view(2, 8)[:, :4].tolist(), residual.view(2, 8)[:, :4].tolist()


def test_the_picture_of_one_bit(ranks):
    sent, residual = ranks(1, picture)[0]
    assert sent == [pytest.approx([0.3, -0.3, 0.3, -0.3]), [2, -2, -2, 2]]
    assert residual == [pytest.approx([0, 0.2, -0.1, -0.3], abs=1e-6), [2, 1, 0, -1]]


def short_rows(rank, world_size):
    return [hooked(OneBit(16), noise(n) + 5.0)[0].tolist() for n in (1, 7, 16, 19)]


def test_filling_does_not_dilute_the_last_chunk(ranks):
    for sent, n in zip(ranks(1, short_rows)[0], (1, 7, 16, 19), strict=True):
        values = noise(n) + 5.0  # all positive: what is sent is the mean of the chunk
        assert sent == pytest.approx([float(part.mean()) for part in values.split(16) for _ in part], rel=1e-6)


def nearest(rank, world_size, bits):
    values = noise(1000)
    sent, _ = hooked(Quantize(bits, chunk=64, stochastic=False), values)
    steps = torch.cat([part.abs().max().expand(len(part)) for part in values.split(64)]) / (2 ** (bits - 1) - 1)
    return float(((sent - values).abs() / steps).max())


@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_to_the_nearest_is_off_by_half_a_step_at_most(ranks, bits):
    assert 0.4 < ranks(1, nearest, bits=bits)[0] < 0.501


def on_average(rank, world_size):
    compressor, p, total = Quantize(4, chunk=64), nn.Parameter(torch.zeros(64)), torch.zeros(64)
    for _ in range(3000):
        total += hooked(compressor, noise(64), p)[0]
    return float((total / 3000 - noise(64)).abs().max()), float(noise(64).abs().max() / 7)


def test_rounding_at_random_is_right_on_average(ranks):
    (gap, step), *others = ranks(2, on_average)
    assert gap < 0.05 * step  # five times its standard error; to the nearest would be off by up to half a step
    assert others == [(gap, step)]


def roundings(rank, world_size):
    """What this rank alone sends of the same gradient, in two steps, and what it draws itself in between."""
    torch.manual_seed(1)
    compressor, bucket = Quantize(8), Bucket([nn.Parameter(torch.zeros(512))])
    messages = []
    for _ in range(2):
        messages.append(compressor.compress(noise(512), bucket)[0].tolist())
        compressor.step += 1
    torch_number = float(torch.rand(1))
    torch.manual_seed(1)
    return messages, torch_number == float(torch.rand(1))


def test_roundings_differ_between_ranks_and_steps_and_disturb_no_other_random_number(ranks):
    (first, untouched), (second, _) = ranks(2, roundings)
    assert untouched
    assert len({tuple(message) for message in (*first, *second)}) == 4


def zeros_and_extremes(rank, world_size, make):
    told = []
    for value in (0.0, 1e-45, 1e-38, 1e34):
        sent, _ = hooked(make(), torch.full((600,), value))
        told.append(float((sent - value).abs().max()) <= 0.01 * value + 1e-37)
    return told


@pytest.mark.parametrize("make", [OneBit, Quantize, partial(Quantize, 4)])
def test_zeros_and_extremes(ranks, make):
    assert ranks(1, zeros_and_extremes, make=make)[0] == [True] * 4


def messages(rank, world_size, make, numel):
    compressor, p = make(), nn.Parameter(torch.zeros(numel))
    for _ in range(2):  # the first also compares the settings
        with comm.record() as log:
            hooked(compressor, noise(numel, rank), p)
    return [(event.op, event.sent_bytes) for event in log]


BYTES = {  # name: (function of nothing, elements, bytes of one message)
    "onebit": (OneBit, 2048 * 50, 50 * (256 + 4)),
    "onebit, a small bucket": (OneBit, 10, 2 + 4),
    "quantize8": (Quantize, 51200, 51200 + 4 * 100),
    "quantize4": (partial(Quantize, 4), 51200, 25600 + 4 * 100),
    "quantize4, not full": (partial(Quantize, 4), 513, 512 + 8),
}


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", BYTES)
def test_bytes(ranks, name, n):
    make, numel, size = BYTES[name]
    assert ranks(n, messages, make=make, numel=numel) == [[("all_gather", (n - 1) * size)]] * n


def test_settings_that_do_not_exist():
    for bits in (0, 1, 5, 16, 32):
        with pytest.raises(ValueError, match=f"bits must be 8 or 4, not {bits}"):
            Quantize(bits)
    for make in (OneBit, partial(Quantize, 8)):
        for chunk in (0, 7, 12, 64.0):
            with pytest.raises(ValueError, match="chunk must be a multiple of 8"):
                make(chunk=chunk)
