"""Population of a private linear regression, from one noisy sum of moments.

Estimates use the released sum, public numbers and the user's parameters only.
"""

from typing import NamedTuple

import numpy as np

from pfl_sklearn.linear_model._private import _constants as tuned
from pfl_sklearn.linear_model._private._messages import clip_eigenvalues


class ReleasedPopulation(NamedTuple):
    """Estimates of the population from a release."""

    mean: np.ndarray  # (p,)
    covariance: np.ndarray  # (p, p), of the error of the mean
    noise: float  # variance
    trusted: bool  # False if a released noise variance is mostly privacy noise


class ReleasedSizes(NamedTuple):
    """Numbers of rows or clients, public or released."""

    weight: float  # W, the number of clients or rows
    share: float  # sum of squares of the clients' weights, over the squared weight
    inverse: float  # mean over the weight of a row's share in its client's message


def released_sizes(noisy, counts, params):
    """ReleasedSizes of clients with counts (m,) of rows, conservative where they are noisy."""
    by_row, public = params.unit == "row", params.relation == "replace_one"
    n_units = counts.sum() if by_row else len(counts)
    weight = max(noisy.weight, noisy.weight_std)  # a divisor, so not below 0
    if public:
        weight = min(weight, n_units)
    if by_row:
        return ReleasedSizes(weight, np.sum(counts**2) / n_units**2, 1.0)
    if public:
        return ReleasedSizes(weight, 1 / n_units, np.mean(1 / counts))
    summed = noisy.inverse_sizes + noisy.inverse_sizes_std
    return ReleasedSizes(weight, 1 / weight, min(max(summed / weight, 0.0), 1.0))


def estimate_population(noisy, moments, sizes, between, noise):
    r"""Population coefficients, their covariance, and the noise variance if it is not given.

    From the released A + E and b + e we solve the normal equations as a Bayesian regression of b on
    A, whose error e - E theta has the covariance V. A priori theta has a standard deviation of 2
    `target_bound` / `feature_bound` (intercept: 2 `target_bound`). This ridge has no effect where
    the release is precise; where A is mostly noise, the estimate tends to 0 and its covariance to
    the prior's. Negative eigenvalues of A + E are raised to 0.

    V is the sum of two parts:

    - the noise of the release, s^2 (I (1 + \|theta\|^2) + theta theta') / 2 in the units of the
      message;
    - the sampling variance of b given A. With S the covariance between clients, W the sum of
      weights and h the mean of 1 / (rows of a client), it is
      A S A / W + h (A S A / W + tr(S A) A) / W + h noise A for clients of equal weight, if features
      have the same distribution in all clients, with the fourth moments of a Gaussian.

    V depends on theta and the noise variance, so we iterate. `between` (p, p) is S, `noise` the
    known noise variance or None. All columns are in the order of the message, in the units of the
    data.
    """
    target = moments.target_scale / moments.target_bound
    unit = moments.column_scales / target  # data's coefficients per coefficient of the message
    spread = between / np.multiply.outer(unit, unit)
    # Second moments are not negative, though noise may make the released ones so.
    gram = clip_eigenvalues(noisy.gram)
    prior = np.full(len(unit), tuned.COEFFICIENT_SD * moments.target_scale)
    if moments.intercept:
        prior[0] /= moments.intercept_scale
    product, trusted = np.diag((tuned.TYPICAL_SIZE * prior / tuned.COEFFICIENT_SD) ** 2), True
    # First guess: targets whose bound is three standard deviations away.
    variance = moments.target_scale**2 / 9 if noise is None else noise * target**2
    for _ in range(tuned.PASSES):
        error = _release_error(noisy.std, product)
        error += _sampling_error(gram, spread, variance, sizes)
        mean, covariance = _bayes_regression(gram, noisy.cross, error, prior)
        product = np.multiply.outer(mean, mean)
        if noise is None:
            variance, trusted = _noise_variance(
                noisy, gram, mean, spread, sizes.weight, moments.target_scale**2
            )
    covariance = covariance * np.multiply.outer(unit, unit)
    return ReleasedPopulation(mean * unit, covariance, float(variance / target**2), trusted)


def _release_error(std, product):
    """Covariance (p, p) of e - E theta, from theta theta' (p, p)."""
    return std**2 / 2 * ((1 + np.trace(product)) * np.eye(len(product)) + product)


def _sampling_error(gram, spread, variance, sizes):
    """Covariance (p, p) of b - A theta of the exact moments."""
    between = gram @ spread @ gram
    # Clients' Gram matrices differ by sampling of their rows.
    sampling = (between / sizes.weight + np.trace(spread @ gram) * gram) / sizes.weight
    return sizes.share * between + sizes.inverse * (sampling + variance * gram)


def _bayes_regression(gram, cross, error, prior):
    """Posterior (p,), (p, p) of theta ~ N(0, prior^2) given cross ~ N(gram theta, error)."""
    # We work with coefficients of unit prior variance and condition on the cross moments, so a
    # singular Gram matrix or a tiny error does no harm.
    design = gram * prior
    sizes, directions = np.linalg.eigh(error)
    sizes = np.sqrt(np.maximum(sizes, tuned.ROUNDED_VARIANCE * sizes[-1]))
    whitened = directions.T @ np.column_stack([design, cross]) / sizes[:, None]
    left, values, right = np.linalg.svd(whitened[:, :-1])
    mean = right.T @ (values / (1 + values**2) * (left.T @ whitened[:, -1]))
    root = right.T / np.sqrt(1 + values**2) * prior[:, None]
    return mean * prior, root @ root.T


def _noise_variance(noisy, gram, mean, spread, weight, largest):
    """Residual variance less that between clients, and whether it clearly exceeds its noise."""
    # The variance is at least one standard deviation of its noise, and at most the bound on the
    # squared target.
    square = mean @ mean
    residual = noisy.square - 2 * mean @ noisy.cross + mean @ gram @ mean
    variance = (residual - np.trace(spread @ gram)) / weight
    std = np.hypot(noisy.square_std, noisy.std * np.sqrt(2 * square + square**2)) / weight
    std = np.hypot(std, variance * noisy.weight_std / weight)
    return float(min(max(variance, std), largest)), bool(variance > tuned.TRUSTED * std)
