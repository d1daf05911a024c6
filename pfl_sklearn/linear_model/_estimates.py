"""What fits of linear models take and give, whatever the prior.

Columns are in the order of the prior: the random ones first, the fixed ones after them.
"""

from typing import Any, NamedTuple

import numpy as np


class Table(NamedTuple):
    """Rows of m clients."""

    columns: np.ndarray  # (n, p), the q random columns first
    y: np.ndarray  # (n,)
    codes: np.ndarray  # (n,)
    n_clients: int
    weights: np.ndarray | None  # (n,), precision
    n_random: int
    intercept: int | None  # position of the intercept among the columns
    names: list  # of the random columns


class Options(NamedTuple):
    """Parameters of a fit that are not the prior's."""

    method: str
    noise_variance: float | None
    solver: str
    max_iter: int
    tol: float
    learning_rate: float | None
    variance_floor: float | None
    n_jobs: int | None


class Estimates(NamedTuple):
    """Fitted population and clients."""

    population: np.ndarray  # (p,)
    population_covariance: np.ndarray  # (p, p)
    coefficients: np.ndarray  # (m, p)
    posterior: Any  # of _posterior, or None where the clients have a mode only
    prior: Any  # with the fitted values
    covariance: np.ndarray  # (q, q), of the random coefficients between clients
    noise: float
    log_likelihood: float
    n_iter: int
    converged: bool
    responsibilities: np.ndarray | None = None  # (m, k)


def centred(table, known_mean):
    """Targets, and what was taken off them: a known mean of the random part, or their own mean.

    Returns the targets (n,) and the offset (p,) that is to be added to the population.
    """
    offset = np.zeros(table.columns.shape[1])
    if known_mean is not None:
        offset[: table.n_random] = known_mean
        return table.y - table.columns[:, : table.n_random] @ known_mean, offset
    if table.intercept is None:
        return table.y, offset
    offset[table.intercept] = np.average(table.y, weights=table.weights)
    return table.y - offset[table.intercept], offset


def point_estimates(population, coefficients, prior, covariance, noise, n_iter, done, shares=None):
    """Estimates without a posterior."""
    unknown = np.full((len(population), len(population)), np.nan)
    return Estimates(
        population,
        unknown,
        coefficients,
        None,
        prior,
        covariance,
        float(noise),
        np.nan,
        n_iter,
        done,
        shares,
    )
