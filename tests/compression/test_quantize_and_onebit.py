"""One bit and quantisation: codes, bytes sent, unbiasedness, memory."""

from functools import partial

import pytest
import torch
from tensors import noise
from torch import nn

from labkit import comm
from labkit.compression import OneBit, Quantize
from labkit.compression.chunks import rows_at_once
from labkit.compression.onebit import pack_bits
from labkit.ddp.bucket import Bucket

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


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


def nearest(rank, world_size, bits, dtype):
    values = noise(1000).to(dtype)
    p = nn.Parameter(torch.zeros(1000, dtype=dtype))
    sent, _ = hooked(Quantize(bits, chunk=64, stochastic=False), values, p)
    largest = [part.abs().max().expand(len(part)) for part in values.double().split(64)]
    steps = torch.cat(largest) / (2 ** (bits - 1) - 1)
    return float(((sent.double() - values.double()).abs() / steps).max())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_to_the_nearest_is_off_by_half_a_step_at_most(ranks, bits, dtype):
    arriving = (2 ** (bits - 1) - 1) * torch.finfo(dtype).eps / 2  # a number of that dtype
    assert 0.4 < ranks(1, nearest, bits=bits, dtype=dtype)[0] < 0.501 + arriving


def whole_steps(rank, world_size, bits, dtype, stochastic):
    levels = 2 ** (bits - 1) - 1
    values = (torch.arange(-levels, levels + 1).repeat(400) / 1024).to(dtype)
    p = nn.Parameter(torch.zeros(len(values), dtype=dtype))
    compressor = Quantize(bits, chunk=16 * (levels + 1), stochastic=stochastic)
    return torch.equal(hooked(compressor, values, p)[0], values)


@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_whole_steps_come_back_to_the_bit(ranks, bits, dtype, stochastic):
    told = ranks(1, whole_steps, bits=bits, dtype=dtype, stochastic=stochastic)
    assert told == [True]


ROWS = 16384  # chunks with the same 64 values: as many roundings of each


def on_average(rank, world_size, bits, dtype, exponent):
    """The mean of what arrives, in steps: (largest gap of any value, mean gap, its gain).

    A step is a power of two: 16 bits hold every whole number of them, so alone nothing is rounded.
    """
    levels, step = 2 ** (bits - 1) - 1, 2.0**-exponent
    values = levels * (2 * torch.rand(64, generator=torch.Generator().manual_seed(0)) - 1)
    values[0] = levels
    values = (values * step).to(dtype)
    p = nn.Parameter(torch.zeros(64 * ROWS, dtype=dtype))
    sent, _ = hooked(Quantize(bits, chunk=64), values.repeat(ROWS), p)
    mean, wanted = sent.view(ROWS, 64).double().mean(0) / step, values.double() / step
    gap = mean - wanted
    return float(gap.abs().max()), float(gap.mean()), float(mean @ wanted / wanted.square().sum())


@pytest.mark.slow
@pytest.mark.parametrize("exponent", [10, 20])  # the second: below the normal numbers of float16
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_at_random_is_right_on_average(ranks, bits, dtype, exponent):
    largest, mean, _ = ranks(1, on_average, bits=bits, dtype=dtype, exponent=exponent)[0]
    assert largest < 0.025  # six times the standard error of a coin; to the nearest: 0.5
    assert abs(mean) < 0.003


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_the_mean_of_three_ranks_is_right_on_average(ranks, bits, dtype):
    told = ranks(3, on_average, bits=bits, dtype=dtype, exponent=10)
    assert told[0] == told[1] == told[2]
    assert abs(told[0][2] - 1) < 5e-4  # a third, rounded to bfloat16, is off by four times that


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


def messages(rank, world_size, make, numel, dtype):
    compressor, p = make(), nn.Parameter(torch.zeros(numel, dtype=dtype))
    for _ in range(2):  # the first also compares the settings
        with comm.record() as log:
            hooked(compressor, noise(numel, seed=rank), p)
    return [(event.op, event.sent_bytes) for event in log]


BYTES = {  # name: (function of nothing, elements, bytes of one message)
    "onebit": (OneBit, 2048 * 50, 50 * (256 + 4)),
    "onebit, a small bucket": (OneBit, 10, 2 + 4),
    "quantize8": (Quantize, 51200, 51200 + 4 * 100),
    "quantize4": (partial(Quantize, 4), 51200, 25600 + 4 * 100),
    "quantize4, not full": (partial(Quantize, 4), 513, 512 + 8),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", BYTES)
def test_bytes(ranks, name, n, dtype):
    make, numel, size = BYTES[name]
    told = ranks(n, messages, make=make, numel=numel, dtype=dtype)
    assert told == [[("all_gather", (n - 1) * size)]] * n


def test_settings_that_do_not_exist():
    for bits in (0, 1, 5, 16, 32):
        with pytest.raises(ValueError, match=f"bits={bits} must be 8 or 4"):
            Quantize(bits)
    for make in (OneBit, partial(Quantize, 8)):
        for chunk in (0, 7, 12, 64.0):
            with pytest.raises(ValueError, match=r"chunk=.* must be a positive multiple of 8"):
                make(chunk=chunk)
