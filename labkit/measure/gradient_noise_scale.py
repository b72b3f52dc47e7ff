"""The gradient noise scale: the batch from which a gradient is more signal than noise.

    one sample      g = G + noise       E|g|^2   = |G|^2 + tr(Sigma)
    a batch of B    G_B, their mean     E|G_B|^2 = |G|^2 + tr(Sigma) / B    two sizes: two equations

    |G|^2     = (B E|G_B|^2 - b E|G_b|^2) / (B - b)      signal: what all samples agree on, squared
    tr(Sigma) = (E|G_b|^2 - E|G_B|^2) / (1/b - 1/B)      noise: variance of one sample's gradient
    B_simple  = tr(Sigma) / |G|^2                        there one half of E|G_B|^2 is signal

Data parallelism has both at hand: a rank's own gradient (b = B/n samples) and the average of all
ranks' (B samples). Cost: one number a rank and step. The two estimates are unbiased, their quotient
is not: average first, then divide. The interval holds every x for which noise - x signal may have
the mean 0 by Student's t, exact for Gaussian errors (Fieller, Some Problems in Interval Estimation,
1954).
McCandlish, Kaplan, Amodei et al., An Empirical Model of Large-Batch Training, 2018, section 2.2 and
appendix A.1.
"""

from dataclasses import dataclass

import numpy as np

from labkit.measure.stats import FEWEST


@dataclass(frozen=True, slots=True)
class NoiseScale:
    """signal: |G|^2. noise: tr(Sigma). scale: B_simple in samples; low, high: its 95 % interval.

    Where the signal cannot be distinguished from zero, scale or high is infinite: the batches were
    too small, or too few, to see G. Of fewer than FEWEST pairs the interval is 0 to infinity.
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


def noise_scale(small, big, small_batch, big_batch):
    """NoiseScale from pairs: small[i] and big[i] are squared lengths at the same weights.

    Several ranks' small ones are averaged before. Raises ValueError for unequal numbers or none.
    """
    small, big = np.asarray(list(small), dtype=float), np.asarray(list(big), dtype=float)
    if small.shape != big.shape or small.ndim != 1 or not small.size:
        raise ValueError(f"pairs needed: got {small.size} and {big.size} values")
    signal, noise = signal_and_noise(small, big, small_batch, big_batch)
    scale = noise.mean() / signal.mean() if signal.mean() > 0 else np.inf
    low, high = fieller(noise, signal) if small.size >= FEWEST else (0.0, np.inf)
    return NoiseScale(
        float(signal.mean()), float(noise.mean()), float(scale), float(low), float(high)
    )


def fieller(above, below):
    """95 % interval, of what is not negative, of mean(above) / mean(below); the values are paired.

    All x with |mean(above - x below)| <= t standard errors: a x^2 - 2 b x + c <= 0.
    """
    n = above.size
    t2 = student(n - 1) ** 2 / n
    variance = np.cov(above, below)
    a = below.mean() ** 2 - t2 * variance[1, 1]
    b = above.mean() * below.mean() - t2 * variance[0, 1]
    c = above.mean() ** 2 - t2 * variance[0, 0]
    root = np.sqrt(max(b * b - a * c, 0.0))
    low = max(c / (b + root), 0.0) if b > 0 else 0.0
    high = (b + root) / a if a > 0 and below.mean() > 0 else np.inf
    return low, high


def student(freedom):
    """97.5 % point of Student's t, by its expansion in 1 / freedom: to 0.1 % from 5 on.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5.
    """
    z = 1.959964
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
