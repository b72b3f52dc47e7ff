"""fp8 products against torch's own fp8 product, against autograd in fp64, and against what a format can hold."""

import pytest
import torch
from torch.nn import functional

from labkit import models
from labkit.amp.fp8 import E4M3, E5M2, Product, fp8, rounded


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype, bits", [(E4M3, 3), (E5M2, 2)])
@pytest.mark.parametrize("size", [1e-20, 1e-5, 1.0, 1e9])
def test_with_a_scale_the_error_does_not_depend_on_the_size(dtype, bits, size):
    values = size * (0.5 + numbers(1000).abs())
    error = (rounded(values, dtype) / values - 1).abs().max()
    assert error <= 2.0 ** -(bits + 1) * (1 + 1e-5)  # half of the distance to the next number
    assert rounded(values, dtype).max() == pytest.approx(values.max().item(), rel=1e-6)


def test_without_a_scale_the_small_vanish_and_the_large_stop_at_the_largest():
    values = torch.tensor([2.0**-11, 1.0, -1e6])
    assert rounded(values, E4M3, scaled=False).tolist() == [0.0, 1.0, -448.0]
    assert rounded(values, E5M2, scaled=False).tolist() == [2.0**-11, 1.0, -57344.0]


def test_zeros_stay_zeros_and_what_is_not_finite_is_not_hidden_by_a_scale():
    assert rounded(torch.zeros(3), E4M3).tolist() == [0.0] * 3
    for bad in (float("nan"), float("inf")):
        assert not rounded(torch.tensor([1.0, bad]), E4M3).isfinite().all()


def test_the_product_is_torchs():
    """torch._scaled_mm multiplies fp8 tensors themselves and divides by the scales afterwards."""
    x, weight = numbers(32, 64), 0.02 * numbers(16, 64, seed=1)
    scales = [448 / t.abs().max() for t in (x, weight)]
    low = [(t * scale).to(E4M3) for t, scale in zip((x, weight), scales, strict=True)]
    torchs = torch._scaled_mm(low[0], low[1].T, scale_a=1 / scales[0], scale_b=1 / scales[1], out_dtype=torch.float32)
    torch.testing.assert_close(Product.apply(x, weight, True), torchs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scaled", [True, False])
def test_backward_is_that_of_the_rounded_numbers(scaled):
    x, weight, gradient = numbers(2, 5, 8), numbers(3, 8, seed=1), numbers(2, 5, 3, seed=2)
    held = [t.clone().requires_grad_() for t in (x, weight)]
    Product.apply(*held, scaled).backward(gradient)
    exact = [rounded(t, E4M3, scaled).requires_grad_() for t in (x, weight)]
    functional.linear(*exact).backward(rounded(gradient, E5M2, scaled))
    for ours, theirs in zip(held, exact, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_only_linear_layers_change():
    torch.manual_seed(0)
    model, tokens = models.build("gpt"), torch.randint(256, (2, 16))
    with fp8():
        low = model(tokens)
        same = torch.nn.LayerNorm(8)(torch.ones(2, 8))
    assert not torch.equal(low, model(tokens)) and torch.equal(same, torch.nn.LayerNorm(8)(torch.ones(2, 8)))
    linear, x = torch.nn.Linear(8, 4), numbers(3, 8)
    with fp8():
        inside = linear(x)
        named = functional.linear(input=x, weight=linear.weight)
    torch.testing.assert_close(inside, Product.apply(x, linear.weight, True) + linear.bias)
    torch.testing.assert_close(named, Product.apply(x, linear.weight, True))
