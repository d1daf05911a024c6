"""The sum of a normal and a Laplace variable: its density, and what it says of the normal one.

All functions take a distance x (m,) of the sum from the mean, the standard deviation s of the
normal variable and the scale b of the Laplace variable, each (m,) or a number.
"""

from typing import NamedTuple

import numpy as np
from scipy.special import erfcx, log_ndtr

_FAR = -12.0  # below it, moments of a cut normal distribution come from their series
_LOG_ROOT_2_PI = 0.5 * np.log(2 * np.pi)


class Sides(NamedTuple):
    """Logarithms (m,) of the density of the sum, and of its parts by the sign of the noise."""

    total: np.ndarray
    below: np.ndarray  # the normal variable is below the sum
    above: np.ndarray


def log_density(x, s, b):
    """Sides of the density at x."""
    below, above = _one_side(x, s, b), _one_side(-x, s, b)
    return Sides(np.logaddexp(below, above), below, above)


def _one_side(x, s, b):
    """Logarithm of the part of the density in which the normal variable is below the sum."""
    # exp(s^2 / 2 b^2 - x / b) ndtr(x / s - s / b) / 2 b. Both factors may overflow together.
    from_end = (s / b - x / s) / np.sqrt(2)
    with np.errstate(over="ignore"):  # not where it is used
        far = np.log(erfcx(np.maximum(from_end, 0.0)) / 2) - (x / s) ** 2 / 2
    near = (s / b) ** 2 / 2 - x / b + log_ndtr(-from_end * np.sqrt(2))
    return np.where(from_end > 0, far, near) - np.log(2 * b)


def moments(x, s, b):
    """Means (m,) and variances (m,) of the normal variable given the sum, and log densities (m,).

    Given the sign of the noise, the normal variable is a normal one with another mean, cut at the
    sum.
    """
    density = log_density(x, s, b)
    share_below, share_above = _shares(density)
    distance_below, variance_below = _cut_normal(x / s - s / b)
    distance_above, variance_above = _cut_normal(-x / s - s / b)
    below, above = x - s * distance_below, x + s * distance_above
    mean = share_below * below + share_above * above
    variance = share_below * (s**2 * variance_below + (below - mean) ** 2)
    variance += share_above * (s**2 * variance_above + (above - mean) ** 2)
    return mean, variance, density.total


def distribution(t, x, s, b):
    """Probability (m,) that the normal variable is at most t (m,), given the sum."""
    share_below, share_above = _shares(log_density(x, s, b))
    below = _cut_distribution((np.minimum(t, x) - s**2 / b) / s, x / s - s / b)
    above = _cut_distribution(-(np.maximum(t, x) + s**2 / b) / s, -x / s - s / b)
    return share_below * below + share_above * (1 - above)


def _shares(density):
    """Probabilities (m,) that the normal variable is below and above the sum."""
    return np.exp(density.below - density.total), np.exp(density.above - density.total)


def _cut_distribution(z, end):
    """Distribution at z of a standard normal variable that is at most `end`."""
    return np.exp(np.minimum(log_ndtr(z) - log_ndtr(end), 0.0))


def _cut_normal(end):
    """How far the mean of a standard normal variable cut above `end` is below it; its variance."""
    is_far = end < _FAR
    close = np.where(is_far, 0.0, end)
    hazard = np.exp(-(close**2) / 2 - _LOG_ROOT_2_PI - log_ndtr(close))
    distance, variance = close + hazard, 1 - hazard * (close + hazard)
    # Near the end of a far tail the distribution is almost exponential, and digits cancel.
    far = np.where(is_far, end, -1.0)
    u = 1 / far**2
    far_distance = -(1 - 2 * u + 10 * u**2 - 74 * u**3) / far
    far_variance = u * (1 - 6 * u + 50 * u**2 - 518 * u**3)
    return np.where(is_far, far_distance, distance), np.where(is_far, far_variance, variance)
