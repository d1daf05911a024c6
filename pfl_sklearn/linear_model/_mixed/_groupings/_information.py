"""Information on the variances of several groupings, for degrees of freedom by Satterthwaite.

The observed information, and the slopes of the population's covariance, are differences of the
criterion and of that covariance between equations at variances near the estimates.
"""

from itertools import combinations
from typing import Any

import numpy as np

from pfl_sklearn.linear_model._algebra import square_root
from pfl_sklearn.linear_model._mixed._groupings._variance_bounds import estimation_errors
from pfl_sklearn.linear_model._mixed._normal_rows._degrees_of_freedom import VarianceInformation

_STEP = 0.01  # standard errors, or shares of a variance: differences are exact to about 1e-4
_ZERO = 1e-6  # share of the largest eigenvalue of a covariance, below which another is 0


def grouped_information(variances: Any, back: Any) -> VarianceInformation:
    """VarianceInformation of FittedVariances that have a profile.

    `back` (p, k) leads from the free columns of the equations to the population's coefficients.
    """
    directions = _directions(variances)
    free = [*directions, None] if variances.free_noise else directions

    def equations_at(changes):
        ratios = list(variances.ratios)
        for (k, direction), change in zip(directions, changes, strict=False):
            ratios[k] = ratios[k] + change * direction
        noise = variances.noise * (np.exp(changes[-1]) if variances.free_noise else 1.0)
        return variances.profile.points.at([square_root(each) for each in ratios], noise)

    n = len(free)
    centre = equations_at(np.zeros(n))
    errors = estimation_errors(centre, directions, [], variances.free_noise)[:n, :n]
    steps = _STEP * np.minimum(1.0, np.sqrt(np.diag(errors)))
    noise, root = centre.noise, back @ _root(centre)
    inverse = np.linalg.pinv(root)
    moved = [[equations_at(sign * each) for sign in (1, -1)] for each in np.diag(steps)]
    slopes, observed = np.zeros((n, root.shape[1], root.shape[1])), np.zeros((n, n))
    for at, pair in enumerate(moved):
        ahead, behind = (inverse @ back @ _root(each) * np.sqrt(each.noise) for each in pair)
        slopes[at] = (ahead @ ahead.T - behind @ behind.T) / (2 * noise * steps[at])
        second = sum(each.criterion for each in pair) - 2 * centre.criterion
        observed[at, at] = second / steps[at] ** 2
    for a, b in combinations(range(n), 2):
        both = np.zeros(n)
        both[[a, b]] = steps[[a, b]]
        second = sum(equations_at(sign * both).criterion for sign in (1, -1))
        second -= sum(each.criterion for each in moved[a] + moved[b]) - 2 * centre.criterion
        observed[a, b] = observed[b, a] = second / (2 * steps[a] * steps[b])
    expected = np.linalg.pinv(errors, hermitian=True)
    products = np.zeros((n, n, 0, 0))  # of Kenward and Roger, who need more than differences
    return VarianceInformation(slopes, products, expected, observed / 2, root, noise)


def _root(equations):
    """Root (k, k) of the covariance of the population's coefficients, over the noise variance."""
    of_population = equations.inverse_root[equations.products.n_outer_effects :]
    triangle: Any = np.linalg.qr(of_population.T, mode="r")
    return triangle.T


def _directions(variances):
    """Directions (k, (q, q)) in which the estimated ratios may move, as shares of themselves.

    What is 0 stays so, and counts as known: a variance, and a direction of a singular covariance.
    """
    profile, found = variances.profile, []
    for k, (shape, turn) in enumerate(zip(profile.shapes, profile.turns, strict=True)):
        if shape is None or not variances.ratios[k].any():
            continue
        if shape.name == "spherical":
            found.append((k, variances.ratios[k]))
        elif shape.name == "diag":
            columns = turn * np.diag(profile.roots[k])
            found += [(k, np.outer(each, each)) for each in columns.T if each.any()]
        else:
            values, vectors = np.linalg.eigh(variances.ratios[k])
            positive = values > _ZERO * values[-1]
            columns = vectors[:, positive] * np.sqrt(values[positive])
            for a, b in combinations(range(columns.shape[1]), 2):
                pair = np.outer(columns[:, a], columns[:, b])
                found.append((k, (pair + pair.T) / 2))
            found += [(k, np.outer(each, each)) for each in columns.T]
    return found
