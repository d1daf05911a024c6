"""A population regression from noisy moments: normal equations with noise in the matrix too.

Everything here is computed from released sums, public numbers and the user's parameters.
"""

from typing import NamedTuple

import numpy as np

_COEFFICIENT_SD = 2.0  # of the ridge, in units of target_bound / feature_bound
_TYPICAL = 1 / 4  # coefficients in units of that, for the first guess
_PASSES = 3
_ROUNDING = 1e-14
_STANDS_OUT = 4.0  # standard deviations of the noise on a released noise variance


class Population(NamedTuple):
    """Fitted population coefficients; None of it is exact."""

    mean: np.ndarray  # (p,)
    covariance: np.ndarray  # (p, p), of the error of the mean
    noise: float  # variance
    trusted: bool  # False if a released noise variance does not stand out of the noise on it


class Sizes(NamedTuple):
    """What is public of the numbers of rows; None is to be taken from the release."""

    largest: float  # that the weight can be: the number of clients (rows), or infinity
    share: float | None  # sum of squares of the clients' weights, over the squared weight
    inverse: float | None  # mean over the weight of a row's share in its client's message


def estimate_population(noisy, moments, sizes, between, noise):
    r"""Population coefficients, their covariance, and the noise variance if it is not given.

    With released A + E and b + e the equations are solved as a Bayesian regression of b on A: the
    error e - E theta has the covariance V, and theta a priori a standard deviation of 2
    `target_bound` / `feature_bound` (intercept: 2 `target_bound`). The ridge comes from the bounds
    alone, and where the release is precise it does not matter; where A is drowned the estimate goes
    to 0 and its covariance to the prior's. Negative eigenvalues of A + E are raised to 0.

    V has the noise of the release, s^2 (I (1 + \|theta\|^2) + theta theta') / 2 in the units of the
    message, and the variance of b given A from row to row and client to client: with S the
    covariance between clients, W the sum of weights and h the mean of 1 / (rows of a client), for
    clients of equal weight A S A / W + h (A S A / W + tr(S A) A) / W + h noise A. This takes
    features to have the same distribution in all clients, and the fourth moments of a Gaussian
    one. V depends on theta and the noise variance, which is iterated.

    Parameters
    ----------
    noisy : NoisyMoments
    moments : RegressionMoments
    sizes : Sizes
    between : ndarray of shape (p, p)
        In the order of the message, in the units of the data.
    noise : float or None

    Returns
    -------
    Population
        In the order of the message, in the units of the data.
    """
    target = moments.target_scale / moments.target_bound
    unit = moments.column_scales / target  # data's coefficients per coefficient of the message
    spread = between / np.multiply.outer(unit, unit)
    sizes, weight = _released_sizes(noisy, sizes)
    values, vectors = np.linalg.eigh(noisy.gram)
    gram = (vectors * np.maximum(values, 0.0)) @ vectors.T
    prior = np.full(len(unit), _COEFFICIENT_SD * moments.target_scale)
    if moments.intercept:
        prior[0] /= moments.intercept_scale
    product, trusted = np.diag((_TYPICAL * prior / _COEFFICIENT_SD) ** 2), True
    variance = moments.target_scale**2 / 9 if noise is None else noise * target**2
    for _ in range(_PASSES):
        error = _release_error(noisy.std, product)
        error += _sampling_error(gram, spread, variance, sizes, weight)
        mean, covariance = _posterior(gram, noisy.cross, error, prior)
        product = np.multiply.outer(mean, mean)
        if noise is None:
            variance, trusted = _noise_variance(
                noisy, gram, mean, spread, weight, moments.target_scale**2
            )
    covariance = covariance * np.multiply.outer(unit, unit)
    return Population(mean * unit, covariance, float(variance / target**2), trusted)


def _released_sizes(noisy, sizes):
    """Sizes without None, and the weight W; what is uncertain is taken on the safe side."""
    weight = min(max(noisy.weight, noisy.weight_std), sizes.largest)
    if sizes.inverse is not None:
        return sizes, weight
    summed = noisy.inverse_sizes + noisy.inverse_sizes_std
    return Sizes(sizes.largest, 1 / weight, min(max(summed / weight, 0.0), 1.0)), weight


def _release_error(std, product):
    """Covariance (p, p) of e - E theta, from theta theta' (p, p)."""
    return std**2 / 2 * ((1 + np.trace(product)) * np.eye(len(product)) + product)


def _sampling_error(gram, spread, variance, sizes, weight):
    """Covariance (p, p) of b - A theta of the exact moments."""
    moved = gram @ spread @ gram
    unequal = (moved / weight + np.trace(spread @ gram) * gram) / weight
    return sizes.share * moved + sizes.inverse * (unequal + variance * gram)


def _posterior(gram, cross, error, prior):
    """Mean (p,) and covariance (p, p) of theta ~ N(0, prior^2) given cross ~ N(gram theta, error).

    In coefficients of unit prior variance, and conditioned on the cross moments, so that neither a
    singular Gram matrix nor a tiny error does harm.
    """
    design = gram * prior
    sizes, directions = np.linalg.eigh(error)
    sizes = np.sqrt(np.maximum(sizes, _ROUNDING * sizes[-1]))
    whitened = directions.T @ np.column_stack([design, cross]) / sizes[:, None]
    left, values, right = np.linalg.svd(whitened[:, :-1])
    mean = right.T @ (values / (1 + values**2) * (left.T @ whitened[:, -1]))
    root = right.T / np.sqrt(1 + values**2) * prior[:, None]
    return mean * prior, root @ root.T


def _noise_variance(noisy, gram, mean, spread, weight, largest):
    """Residual variance less what varies between clients, and whether it stands out of its noise.

    At least one standard deviation of its noise, at most the bound on the squared target.
    """
    square = mean @ mean
    residual = noisy.square - 2 * mean @ noisy.cross + mean @ gram @ mean
    found = (residual - np.trace(spread @ gram)) / weight
    std = np.hypot(noisy.square_std, noisy.std * np.sqrt(2 * square + square**2)) / weight
    std = np.hypot(std, found * noisy.weight_std / weight)
    return float(min(max(found, std), largest)), bool(found > _STANDS_OUT * std)
