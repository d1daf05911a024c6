"""Noise on running sums as a linear map."""

import numpy as np


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
