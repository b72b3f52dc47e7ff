"""The noise scale of gradients whose mean and covariance are known."""

import numpy as np
import pytest

from labkit.measure.gradient_noise_scale import noise_scale, signal_and_noise

G = np.array([0.3, -0.4, 0.0, 1.2])  # |G|^2 = 1.69
DEVIATIONS = np.array([1.0, 2.0, 0.5, 3.0])  # tr(Sigma) = 14.25
SIGNAL, NOISE = 1.69, 14.25


def squares(pairs, ranks, share, seed=0):
    """Per pair: the mean of the ranks' |own gradient|^2, and |average|^2, of `share` Gaussian samples a rank."""
    draw = np.random.default_rng(seed).standard_normal((pairs, ranks, share, len(G)))
    own = (G + DEVIATIONS * draw).mean(axis=2)  # [pair, rank, parameter]
    return (own**2).sum(axis=2).mean(axis=1), (own.mean(axis=1) ** 2).sum(axis=1)


@pytest.mark.parametrize(("ranks", "share"), [(2, 2), (2, 6), (4, 3)])
def test_both_estimates_are_unbiased(ranks, share):
    signal, noise = signal_and_noise(*squares(40_000, ranks, share), share, ranks * share)
    for estimates, truth in ((signal, SIGNAL), (noise, NOISE)):
        error = estimates.std() / np.sqrt(estimates.size)  # of their mean
        assert abs(estimates.mean() - truth) < 3.5 * error
        assert error < 0.04 * truth  # or the line above would say little


def test_expected_lengths_give_the_numbers_exactly():
    small, big = (SIGNAL + NOISE / batch for batch in (5, 20))
    assert signal_and_noise(small, big, 5, 20) == pytest.approx((SIGNAL, NOISE), rel=1e-12)


def test_the_scale_is_a_quotient_of_means_and_its_interval_covers_the_truth():
    hits, truth = 0, NOISE / SIGNAL
    for seed in range(200):
        found = noise_scale(*squares(300, 2, 6, seed), 6, 12)
        assert found.scale == pytest.approx(found.noise / found.signal) and found.low < found.scale < found.high
        hits += found.low <= truth <= found.high
    assert 180 <= hits <= 200


@pytest.mark.parametrize("pairs", [6, 12])
def test_few_pairs_have_a_wide_interval_and_fewer_none(pairs):
    found = [noise_scale(*squares(pairs, 2, 6, seed), 6, 12) for seed in range(300)]
    assert sum(one.low <= NOISE / SIGNAL <= one.high for one in found) >= 280  # a bootstrap: 253 and 261
    few = noise_scale(*squares(5, 2, 6), 6, 12)
    assert (few.low, few.high) == (0.0, np.inf)


def test_half_of_the_squared_length_is_signal_at_the_scale():
    found = noise_scale([SIGNAL + NOISE / 5] * 6, [SIGNAL + NOISE / 20] * 6, 5, 20)
    assert found.scale == pytest.approx(NOISE / SIGNAL) and found.low == pytest.approx(found.high)
    assert found.signal_share(found.scale) == pytest.approx(0.5)


def test_without_signal_no_finite_scale():
    assert noise_scale([1.0, 1.0], [0.4, 0.4], 1, 2).scale == np.inf


@pytest.mark.parametrize(("small", "big"), [(8, 8), (8, 4), (0, 4)])
def test_one_size_of_batch_says_nothing(small, big):
    with pytest.raises(ValueError, match=r"small_batch=. must be above 0 and below big_batch"):
        signal_and_noise(1.0, 1.0, small, big)


@pytest.mark.parametrize(("small", "big"), [([], []), ([1.0], [1.0, 2.0])])
def test_pairs_are_needed(small, big):
    with pytest.raises(ValueError, match="pairs"):
        noise_scale(small, big, 1, 2)
