"""Posteriors of clients and population, averaged over the variances of a linear mixed model.

They also stand in where clients have so few rows that restricted likelihood has no maximum with
noise. Let nu be the number of rows beyond those that the clients' own coefficients fit exactly,
summed over the clients. With nu = 0 and a full covariance, restricted likelihood is largest at a
noise variance of zero, if it is bounded at all; with simpler covariances it often is. We then take
posterior means, under the prior that also serves to average errors over the variances.
"""

from functools import partial

import numpy as np
from scipy.special import chdtri

from pfl_sklearn.linear_model._mixed._averages import (
    LazyAverages,
    PointPosterior,
    WeightedPoints,
    averages_around,
)
from pfl_sklearn.linear_model._mixed._gaussian._profiled_likelihood import (
    client_deviations,
    profile,
    whiten,
)
from pfl_sklearn.linear_model._mixed._gaussian._variance_points import find_points
from pfl_sklearn.linear_model._mixed._gaussian._variance_search import zero_p_values

_NOISE_LEVELS = (np.arange(200) + 0.5) / 200  # probabilities, of draws of the noise at a point


def lazy_averages(case):
    """Averages of a ScaledFit, over the points that it finds when they are first asked for."""
    return LazyAverages(partial(average, case), partial(zero_p_values, case))


def average(case, points=None):
    """Averages of a ScaledFit, over given VariancePoints or those that it finds."""
    if points is None:
        points = find_points(case.reduced, case.settings, case.family, case.ratio)
    back, q = case.frame.back, case.deviations.shape[1]
    weighted = WeightedPoints(
        (solve(case, points.factors[at]) for at in points.kept),
        points.noises[points.kept],
        points.kept_weights,
        points.dof,
        points.larger,
    )
    components = _components(points, back[:q, :q])
    estimates = case.population, case.deviations
    return averages_around(case.frame, estimates, case.offset, weighted, *components)


def solve(case, factor):
    """Population and clients at a factor (q, r) of the covariance over the noise."""
    reduced, settings = case.reduced, case.settings
    m, q = reduced.n_clients, reduced.n_random
    ratio, whitened = factor @ factor.T, whiten(reduced, factor)
    point = profile(reduced, whitened, settings)
    population = np.zeros(reduced.n_columns)
    root = np.zeros((len(population), point.root.shape[1]))
    population[settings.first :], root[settings.first :] = point.coefficients, point.root
    own, moved = np.empty((m, q, q)), np.empty((m, q, root.shape[1]))
    for stack, rows in zip(reduced.stacks, whitened.rows, strict=True):
        pulled = (rows[:, :, :q] @ ratio).transpose(0, 2, 1)
        own[stack.clients] = ratio - pulled @ pulled.transpose(0, 2, 1)
        moved[stack.clients] = root[:q] - pulled @ (rows[:, :, :-1] @ root)
    deviations = client_deviations(reduced, whitened, point, ratio)
    return PointPosterior(population, root, deviations, own, moved, ratio)


def _components(points, back):
    """Draws (n, q q + 1) of the covariance between clients and the noise variance, and weights."""
    ratios = back @ (points.factors @ points.factors.transpose(0, 2, 1)) @ back.T
    noises, weights = points.noises[:, None], points.weights[:, None]
    if np.isfinite(points.dof):  # the noise is known up to a scaled inverse chi-square
        spread = points.dof / chdtri(points.dof, _NOISE_LEVELS)
        noises, weights = noises * spread, weights * np.full(len(spread), 1 / len(spread))
    flat = ratios.reshape(len(ratios), 1, -1) * noises[:, :, None]
    flat = np.concatenate([flat, noises[:, :, None]], axis=2)
    return flat.reshape(-1, flat.shape[2]), weights.ravel()


def posterior_means(case):
    """Case with posterior means as its estimates, its averages, and the mean variances.

    Returns
    -------
    case : ScaledFit
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
    source = LazyAverages(average(case, points))
    return case, source, covariance, float(points.weights @ points.noises)
