"""Random draws of releases: seeds, bits, Gaussian noise on a public grid, numbers of trials."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np
from scipy.optimize import brentq
from sklearn.utils import check_random_state

from pfl_sklearn._typing import Bools, Floats
from pfl_sklearn.privacy._mechanisms._report_fields import check_positive

# Integers up to it are exact in double precision, and so are thresholds.
_RESOLUTION = 1 << 52


def noise_generator(random_state: Any) -> tuple[np.random.Generator, bool]:
    """Generator for noise, and whether the same noise can be drawn again.

    None takes its seed from the operating system, never from numpy's global state.
    """
    # Otherwise np.random.seed would fix the noise.
    if random_state is None:
        return np.random.default_rng(), False
    if isinstance(random_state, numbers.Integral):
        return np.random.default_rng(int(random_state)), True
    # 124 bits of a RandomState, which moves on: a later fit with it has other noise.
    entropy = check_random_state(random_state).randint(0, 2**31 - 1, size=4)
    return np.random.default_rng(entropy), True


def bernoulli(probability: Floats, lowest: float, rng: np.random.Generator) -> Bools:
    """Bits that are 1 with `probability`, drawn by comparing integers."""
    # Probabilities are rounded up to multiples of 2**-52 and kept within [lowest, 1 - lowest], so
    # rounding never raises the odds that a local randomizer promises.
    # With floating-point numbers, rounding would decide the smallest probabilities.
    floor = int(np.ceil(lowest * _RESOLUTION))
    threshold = np.clip(np.ceil(probability * _RESOLUTION), floor, _RESOLUTION - floor)
    return rng.integers(0, _RESOLUTION, size=threshold.shape) < threshold.astype(np.int64)


def public_grid(noise_std: float) -> float:
    """Step of the grid that values with noise of `noise_std` are rounded to."""
    # It is a power of two, about a millionth of the noise. Rounding removes the low-order bits,
    # which could otherwise reveal something about the exact value.
    check_positive("noise_std", noise_std)
    # Dividing and multiplying by a power of two is exact. The step depends on public numbers alone,
    # and rounding adds a share of 1e-13 to the variance of the noise.
    return 2.0 ** (math.frexp(noise_std)[1] - 21)


def gaussian_on_grid(exact: Floats, noise_std: float, rng: np.random.Generator) -> Floats:
    """Exact values plus Gaussian noise, rounded to the public grid."""
    # Rounding comes after the noise: it is post-processing. In place, as totals may be large.
    grid = public_grid(noise_std)
    noisy = rng.standard_normal(exact.shape)
    noisy *= noise_std
    noisy += exact
    noisy /= grid
    np.rint(noisy, out=noisy)
    noisy *= grid
    return noisy


def draw_n_trials(expected_trials: float, distribution: str, rng: np.random.Generator) -> int:
    """Number of trials of a private selection; 0 is possible for "poisson" only."""
    if distribution == "poisson":
        return int(rng.poisson(expected_trials))
    stop = stopping_probability(expected_trials, distribution)
    return int(rng.geometric(stop) if distribution == "geometric" else rng.logseries(1 - stop))


def stopping_probability(expected_trials: float, distribution: str) -> float:
    """Parameter gamma of the geometric or logarithmic distribution with the given mean."""
    if distribution == "geometric" or expected_trials == 1:
        return 1 / expected_trials

    def excess(log_stop: float) -> float:
        return math.expm1(-log_stop) / -log_stop - expected_trials

    # The mean is between 1 / sqrt(stop) and 1 / stop, which brackets the logarithm of `stop`.
    log_stop = brentq(excess, -2 * math.log(expected_trials) - 1e-9, -1e-12, xtol=1e-14)
    return math.exp(float(log_stop))
