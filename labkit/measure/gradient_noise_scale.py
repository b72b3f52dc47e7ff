"""The gradient noise scale: the batch size above which a gradient is more signal than noise.

    one sample      g = G + noise       E|g|^2   = |G|^2 + tr(Sigma)
    a batch of B    G_B, their mean     E|G_B|^2 = |G|^2 + tr(Sigma) / B    two sizes: two equations

    |G|^2     = (B E|G_B|^2 - b E|G_b|^2) / (B - b)      signal: the mean gradient, squared
    tr(Sigma) = (E|G_b|^2 - E|G_B|^2) / (1/b - 1/B)      noise: variance of one sample's gradient
    B_simple  = tr(Sigma) / |G|^2                        there half of E|G_B|^2 is signal

Data parallelism has both gradients: a rank's own (b = B/n samples) and the average over ranks (B
samples). Cost: one number per rank and step. The two estimates are unbiased but their quotient is
not: average first, then divide. The interval holds every x for which noise - x signal may have mean
0 by Student's t, exact for Gaussian errors (Fieller, Some Problems in Interval Estimation, 1954).
McCandlish, Kaplan, Amodei et al., An Empirical Model of Large-Batch Training, 2018, section 2.2 and
appendix A.1.
"""

from dataclasses import dataclass

import numpy as np

from labkit.measure.stats import FEWEST


@dataclass(frozen=True, slots=True)
class NoiseScale:
    """The gradient noise scale with its interval.

    signal: |G|^2. noise: tr(Sigma). scale: B_simple in samples. low, high: its 95 % interval; for
    fewer than FEWEST pairs 0 and infinity. If the signal is not distinguishable from zero, scale or
    high is infinite: the batches were too small or too few.
    """

    signal: float
    noise: float
    scale: float
    low: float
    high: float

    def signal_share(self, batch):
        """Return the signal's part of E|G_B|^2: |G|^2 / (|G|^2 + tr(Sigma) / batch)."""
        return 1 / (1 + self.scale / batch)


def signal_and_noise(small, big, small_batch, big_batch):
    """Return unbiased (|G|^2, tr(Sigma)) from squared gradient norms at two batch sizes.

    small, big: numbers or arrays, for small_batch and big_batch samples. Raises ValueError unless
    big_batch is larger.
    """
    if not 0 < small_batch < big_batch:
        raise ValueError(
            f"small_batch={small_batch} must be above 0 and below big_batch={big_batch}"
        )
    signal = (big_batch * big - small_batch * small) / (big_batch - small_batch)
    noise = (small - big) / (1 / small_batch - 1 / big_batch)
    return signal, noise


def noise_scale(small, big, small_batch, big_batch):
    """Return the NoiseScale of pairs: small[i] and big[i] are squared norms at the same weights.

    Average the small ones of several ranks first. Raises ValueError for unequal lengths or none.
    """
    small = np.asarray(list(small), dtype=float)
    big = np.asarray(list(big), dtype=float)
    if small.shape != big.shape or small.ndim != 1 or not small.size:
        raise ValueError(f"small and big must be pairs: got {small.size} and {big.size} values")
    signal, noise = signal_and_noise(small, big, small_batch, big_batch)
    scale = noise.mean() / signal.mean() if signal.mean() > 0 else np.inf
    low, high = fieller(noise, signal) if small.size >= FEWEST else (0.0, np.inf)
    return NoiseScale(
        float(signal.mean()), float(noise.mean()), float(scale), float(low), float(high)
    )


def fieller(above, below):
    """Return (low, high), a 95 % interval, at least 0, of mean(above) / mean(below), paired.

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
    """Return the 97.5 % point of Student's t, by its expansion in 1 / freedom: 0.1 % from 5 on.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5.
    """
    z = 1.959964
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
