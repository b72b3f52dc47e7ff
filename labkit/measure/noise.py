"""The gradient noise scale: the batch from which a gradient is more signal than noise.

    one sample      g = G + noise       E|g|^2   = |G|^2 + tr(Sigma)
    a batch of B    G_B, their mean     E|G_B|^2 = |G|^2 + tr(Sigma) / B    two sizes: two equations

    |G|^2     = (B E|G_B|^2 - b E|G_b|^2) / (B - b)      signal: what all samples agree on, squared
    tr(Sigma) = (E|G_b|^2 - E|G_B|^2) / (1/b - 1/B)      noise: variance of one sample's gradient
    B_simple  = tr(Sigma) / |G|^2                        there one half of E|G_B|^2 is signal

Data parallelism has both at hand: a rank's own gradient (b = B/n samples) and the average of all
ranks' (B samples). Cost: one number a rank and step. The two estimates are unbiased, their quotient
is not: average first, then divide.
McCandlish, Kaplan, Amodei et al., An Empirical Model of Large-Batch Training, 2018, section 2.2 and
appendix A.1.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class NoiseScale:
    """signal: |G|^2. noise: tr(Sigma). scale: B_simple in samples; low, high: its 95 % interval.

    The interval is a bootstrap's. Where the signal is not told from zero, scale or high is
    infinite: the batches were too small to see G.
    """

    signal: float
    noise: float
    scale: float
    low: float
    high: float

    def signal_share(self, batch):
        """How much of E|G_B|^2 is signal: |G|^2 / (|G|^2 + tr(Sigma) / batch)."""
        return 1 / (1 + self.scale / batch)


def signal_and_noise(small, big, small_batch, big_batch):
    """Unbiased (|G|^2, tr(Sigma)) from squared lengths of gradients of two sizes of batch.

    small, big: numbers or arrays, of small_batch and of big_batch samples. Raises ValueError
    unless big_batch is the larger one.
    """
    if not 0 < small_batch < big_batch:
        raise ValueError(
            f"two sizes of batch are needed, a smaller and a larger: {small_batch}, {big_batch}"
        )
    signal = (big_batch * big - small_batch * small) / (big_batch - small_batch)
    noise = (small - big) / (1 / small_batch - 1 / big_batch)
    return signal, noise


def noise_scale(small, big, small_batch, big_batch, resamples=2000, seed=0):
    """NoiseScale from pairs: small[i] and big[i] are squared lengths at the same weights.

    Several ranks' small ones are averaged before. The seed makes the interval repeat.
    """
    small, big = np.asarray(list(small), dtype=float), np.asarray(list(big), dtype=float)
    if small.shape != big.shape or small.ndim != 1 or not small.size:
        raise ValueError(f"pairs needed: got {small.size} and {big.size} values")
    signal, noise = signal_and_noise(small, big, small_batch, big_batch)
    drawn = np.random.default_rng(seed).integers(signal.size, size=(resamples, signal.size))
    low, high = np.percentile(
        quotient(noise[drawn].mean(axis=1), signal[drawn].mean(axis=1)),
        [2.5, 97.5],
        method="nearest",
    )
    scale = quotient(noise.mean(), signal.mean())
    return NoiseScale(
        float(signal.mean()), float(noise.mean()), float(scale), float(low), float(high)
    )


def quotient(noise, signal):
    """noise / signal, infinite where no signal was seen."""
    return np.where(signal > 0, noise / np.where(signal > 0, signal, 1.0), np.inf)
