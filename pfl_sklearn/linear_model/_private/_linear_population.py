"""Population regression from noisy moments, and the clients' posteriors around it.

The estimates of the population use released sums, public numbers and the user's parameters only.
The clients' posteriors use each client's own exact rotated rows and the released population.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from pfl_sklearn._parallel import map_batches
from pfl_sklearn.linear_model._algebra import square_root
from pfl_sklearn.linear_model._mixed._posterior import RowPosterior

_COEFFICIENT_SD = 2.0  # prior sd behind the ridge, in units of target_bound / feature_bound
_TYPICAL = 1 / 4  # size of coefficients in the same units, for the first guess
_PASSES = 3  # the error depends on the estimate, which depends on the error
_ROUNDED_VARIANCE = 1e-14  # of a direction, over the largest of all
_NEARLY_NO_NOISE = 1e-6  # of a noise variance of no use: clients then follow their own rows
LARGEST_ENTRY = 1e150  # of a row that can be squared
_TRUSTED = 4.0  # standard deviations of the noise on a released noise variance


class ReleasedPopulation(NamedTuple):
    """Estimates from a release; none of them is exact."""

    mean: np.ndarray  # (p,)
    covariance: np.ndarray  # (p, p), of the error of the mean
    noise: float  # variance
    trusted: bool  # False if the noise on a released noise variance swamps it


class PublicSizes(NamedTuple):
    """Public facts about the numbers of rows; None stands for a value to take from the release."""

    largest: float  # upper bound on the weight: the number of clients (rows), or infinity
    share: float | None  # sum of squares of the clients' weights, over the squared weight
    inverse: float | None  # mean over the weight of a row's share in its client's message


def estimate_population(noisy, moments, sizes, between, noise):
    r"""Population coefficients, their covariance, and the noise variance if it is not given.

    From the released A + E and b + e we solve the normal equations as a Bayesian regression of b on
    A. The error e - E theta has the covariance V. A priori theta has a standard deviation of 2
    `target_bound` / `feature_bound` (intercept: 2 `target_bound`). This ridge depends on the bounds
    alone. It has no effect where the release is precise; where noise swamps A the estimate tends to
    0 and its covariance to the prior's. Negative eigenvalues of A + E are raised to 0.

    V is the sum of two parts:

    - the noise of the release, s^2 (I (1 + \|theta\|^2) + theta theta') / 2 in the units of the
      message;
    - the variance of b given A between rows and clients. With S the covariance between clients, W
      the sum of weights and h the mean of 1 / (rows of a client), it is
      A S A / W + h (A S A / W + tr(S A) A) / W + h noise A for clients of equal weight. Here we
      assume that features have the same distribution in all clients, with the fourth moments of a
      Gaussian.

    V depends on theta and the noise variance, so we iterate.

    Parameters
    ----------
    noisy : NoisyMoments
    moments : RegressionMoments
    sizes : PublicSizes
    between : ndarray of shape (p, p)
        In the order of the message, in the units of the data.
    noise : float or None
        Known noise variance.

    Returns
    -------
    ReleasedPopulation
        In the order of the message, in the units of the data.
    """
    target = moments.target_scale / moments.target_bound
    unit = moments.column_scales / target  # data's coefficients per coefficient of the message
    spread = between / np.multiply.outer(unit, unit)
    sizes, weight = _released_sizes(noisy, sizes)
    # Second moments are not negative, though noise may make the released ones so.
    values, vectors = np.linalg.eigh(noisy.gram)
    gram = (vectors * np.maximum(values, 0.0)) @ vectors.T
    prior = np.full(len(unit), _COEFFICIENT_SD * moments.target_scale)
    if moments.intercept:
        prior[0] /= moments.intercept_scale
    product, trusted = np.diag((_TYPICAL * prior / _COEFFICIENT_SD) ** 2), True
    # First guess: targets whose bound is three standard deviations away.
    variance = moments.target_scale**2 / 9 if noise is None else noise * target**2
    for _ in range(_PASSES):
        error = _release_error(noisy.std, product)
        error += _sampling_error(gram, spread, variance, sizes, weight)
        mean, covariance = _bayes_regression(gram, noisy.cross, error, prior)
        product = np.multiply.outer(mean, mean)
        if noise is None:
            variance, trusted = _noise_variance(
                noisy, gram, mean, spread, weight, moments.target_scale**2
            )
    covariance = covariance * np.multiply.outer(unit, unit)
    return ReleasedPopulation(mean * unit, covariance, float(variance / target**2), trusted)


def _released_sizes(noisy, sizes):
    """PublicSizes without None, and the weight W; uncertain values err on the safe side."""
    weight = min(max(noisy.weight, noisy.weight_std), sizes.largest)  # a divisor, so not below 0
    if sizes.inverse is not None:
        return sizes, weight
    summed = noisy.inverse_sizes + noisy.inverse_sizes_std
    return PublicSizes(sizes.largest, 1 / weight, min(max(summed / weight, 0.0), 1.0)), weight


def _release_error(std, product):
    """Covariance (p, p) of e - E theta, from theta theta' (p, p)."""
    return std**2 / 2 * ((1 + np.trace(product)) * np.eye(len(product)) + product)


def _sampling_error(gram, spread, variance, sizes, weight):
    """Covariance (p, p) of b - A theta of the exact moments."""
    moved = gram @ spread @ gram
    unequal = (moved / weight + np.trace(spread @ gram) * gram) / weight
    return sizes.share * moved + sizes.inverse * (unequal + variance * gram)


def _bayes_regression(gram, cross, error, prior):
    """Mean (p,) and covariance (p, p) of theta ~ N(0, prior^2) given cross ~ N(gram theta, error).

    We work with coefficients of unit prior variance and condition on the cross moments, so a
    singular Gram matrix or a tiny error does no harm.
    """
    design = gram * prior
    sizes, directions = np.linalg.eigh(error)
    sizes = np.sqrt(np.maximum(sizes, _ROUNDED_VARIANCE * sizes[-1]))
    whitened = directions.T @ np.column_stack([design, cross]) / sizes[:, None]
    left, values, right = np.linalg.svd(whitened[:, :-1])
    mean = right.T @ (values / (1 + values**2) * (left.T @ whitened[:, -1]))
    root = right.T / np.sqrt(1 + values**2) * prior[:, None]
    return mean * prior, root @ root.T


def _noise_variance(noisy, gram, mean, spread, weight, largest):
    """Residual variance minus that between clients, and whether it exceeds its noise clearly.

    The variance is at least one standard deviation of its noise, and at most the bound on the
    squared target.
    """
    square = mean @ mean
    residual = noisy.square - 2 * mean @ noisy.cross + mean @ gram @ mean
    variance = (residual - np.trace(spread @ gram)) / weight
    std = np.hypot(noisy.square_std, noisy.std * np.sqrt(2 * square + square**2)) / weight
    std = np.hypot(std, variance * noisy.weight_std / weight)
    return float(min(max(variance, std), largest)), bool(variance > _TRUSTED * std)


def client_posteriors(table, released, covariance):
    """Coefficients (m, p) and their posterior under N(released.mean, covariance + its error).

    We add the error of the released mean to the prior covariance (q, q) of the random coefficients,
    so if the mean is all noise every client keeps its own regression. The posterior of the fixed
    coefficients has their released error; we ignore its correlation with the others. We do not
    remove a client's own contribution from the release, where it is one of many under noise.

    A client's numbers are the same bits whoever else is in the table. Otherwise their last digits
    would tell. So no matrix product runs over the rows of several clients, and sums over columns
    run in one layout.

    If the released noise variance is of no use, we treat rows as nearly exact: every client keeps
    its own regression, falls back on the released mean where its rows leave coefficients open, and
    states no standard deviation. Rows that are too large to be squared count as absent.
    """
    q, p = table.n_random, table.n_columns
    noise = released.noise if released.trusted else _NEARLY_NO_NOISE * released.noise
    ratio, error = np.zeros((p, p)), np.zeros((p, p))
    ratio[:q, :q] = (covariance + released.covariance[:q, :q]) / noise
    error[q:, q:] = released.covariance[q:, q:]
    residuals = ((clients, with_residuals(rows, released.mean)) for clients, rows in table.batches)
    # What overflows is one client's own, and a warning would tell everybody of its rows.
    with np.errstate(over="ignore", invalid="ignore"):
        root = square_root(ratio[:q, :q])
        solved = map_batches(partial(whiten_batch, root=root), residuals, 1)
        coefficients = np.tile(released.mean, (table.n_clients, 1))
        # The same width for every table, so that it does not reveal the largest client's rows.
        rows = np.zeros((table.n_clients, q, p))
        for clients, whitened in solved:
            pulled = whitened[:, None, :, -1] @ whitened[:, :, :q]
            coefficients[clients, :q] += (pulled @ ratio[:q, :q])[:, 0]
            rows[clients, : whitened.shape[1]] = whitened[:, :, :-1]
    stated = released.noise if released.trusted else np.nan
    return coefficients, RowPosterior(rows, ratio, stated, error, np.ones(p))


def with_residuals(rows, mean):
    """Rows (b, k, p + 1): the columns, and the residuals under a mean (p,)."""
    # Gathered rows lie in memory as their number of clients has it, and last digits follow.
    rows = np.ascontiguousarray(rows)
    columns = rows[..., :-2]
    residuals = rows[..., -2] - np.sum(columns * mean, axis=-1)
    return np.concatenate([columns, residuals[..., None]], axis=-1)


def whiten_batch(clients, rows, root):
    """Clients, and rows (b, k, p + 1) times the inverse root of I + Z P Z', P = root root'.

    Singular values cope with rows of any size; k is at most the number q of random columns.
    """
    q = len(root)
    # An error would tell that a client has such a residual. NaN fails the comparison, too.
    rows[~(np.abs(rows).max(axis=2) < LARGEST_ENTRY)] = 0.0
    if rows.shape[1] > q:
        triangular: Any = np.linalg.qr(rows, mode="r")
        rows = triangular[:, :q]
    left, values, _ = np.linalg.svd(rows[:, :, :q] @ root, full_matrices=False)
    return clients, left.transpose(0, 2, 1) @ rows / np.hypot(1, values)[..., None]
