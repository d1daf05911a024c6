"""Fits of clients with so few rows that restricted likelihood has no maximum with noise.

Let nu be the number of rows beyond those that the clients' own coefficients fit exactly, summed
over the clients. With nu = 0 and a full covariance, restricted likelihood is largest at a noise
variance of zero, if it is bounded at all; with simpler covariances it often is. We then take
posterior means, under the prior that also serves to average errors over the variances.
"""

import numpy as np

from pfl_sklearn._warnings import warn_caller
from pfl_sklearn.linear_model._mixed._averaged import LazyAverages, average, solve
from pfl_sklearn.linear_model._mixed._identified import listed_names
from pfl_sklearn.linear_model._mixed._variance_points import find_points


def rows_to_spare(table, varies):
    """Rows that the clients' own coefficients do not fit exactly: sum of n_i - rank Z_i.

    `varies` (q,) says which of the random columns belong to Z_i.
    """
    at = np.flatnonzero(varies)
    spare = table.n_rows - int(np.minimum(table.sizes, len(at)).sum())
    if spare:  # a lower bound, and the caller asks for 0 only: no ranks are needed
        return spare
    blocks = [rows[..., at] for _, rows in table.batches]
    # Ranks should not depend on the features' units.
    scale = np.max([np.abs(block).max(axis=(0, 1)) for block in blocks], axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    ranks = sum(int(np.linalg.matrix_rank(block / scale).sum()) for block in blocks)
    return table.n_rows - ranks


def warn_of_few_rows(table, averaged=True):
    """Warn that the rows cannot tell noise from differences between clients, and what we did."""
    sizes, names = table.sizes, table.names[: table.n_random]
    outcome = "The noise variance is estimated as 0, and standard deviations are too small."
    if averaged:
        outcome = "The estimates are posterior means under a weak prior instead."
    warn_caller(
        f"The {len(names)} coefficients that vary ({listed_names(names)}) fit the rows of every "
        f"client exactly ({sizes.min()} to {sizes.max()} rows), so restricted likelihood cannot "
        f"tell noise from differences between clients. {outcome} Let fewer coefficients vary "
        "(random), or give noise_variance.",
        UserWarning,
    )


def posterior_means(case):
    """Case with posterior means as its estimates, its averages, and the mean variances.

    Returns
    -------
    case : Case
    source : LazyAverages
    covariance : ndarray of shape (q, q)
        Between clients, in the scale of the reduction.
    noise : float
    """
    points = find_points(case.reduced, case.settings, case.family, case.ratio)
    population, deviations = 0.0, 0.0
    for at, weight in zip(points.kept, points.kept_weights, strict=True):
        solved = solve(case, points.factors[at])
        population = population + weight * solved.population
        deviations = deviations + weight * solved.deviations
    case = case._replace(population=population, deviations=deviations)
    covariances = points.factors @ points.factors.transpose(0, 2, 1) * points.noises[:, None, None]
    covariance = np.tensordot(points.weights, covariances, 1)
    source = LazyAverages(averages=average(case, points))
    return case, source, covariance, float(points.weights @ points.noises)
