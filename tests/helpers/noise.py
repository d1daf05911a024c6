"""What the noise of a release is: its scale and shape, or a linear map of white noise."""

import numpy as np
from scipy import stats

SMALLEST_P = 1e-6


def is_calibrated(draws, std):
    """Two-sided chi-square on the scale and Kolmogorov-Smirnov on the shape, both at 1e-6."""
    draws = np.asarray(draws)
    below = stats.chi2(draws.size).cdf(np.sum(draws**2) / std**2)
    shape = stats.kstest(draws, stats.norm(scale=std).cdf).pvalue
    return min(2 * below, 2 * (1 - below), shape) > SMALLEST_P


class OneAtATime:
    """A generator whose k-th vector of draws is the k-th unit vector: one stream for each draw."""

    def __init__(self):
        self.n_draws = 0

    def standard_normal(self, shape):
        drawn = np.zeros(shape)
        drawn[self.n_draws] = 1.0
        self.n_draws += 1
        return drawn


def noise_matrix(mechanism, n):
    """Noise on sums as a linear map of white noise of unit variance: (n releases, n draws)."""
    registers = np.zeros((mechanism.n_registers(n), n))
    rng = OneAtATime()
    return np.stack([mechanism.advance(registers, k, rng) for k in range(1, n + 1)])
