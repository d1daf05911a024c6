"""Information on the variances of several groupings, for degrees of freedom by Satterthwaite.

The observed information, and the slopes of the population's covariance, are differences of the
criterion and of that covariance between equations at variances near the estimates.
"""

from itertools import combinations
from typing import Any

import numpy as np

from pfl_sklearn.linear_model._algebra import square_root
from pfl_sklearn.linear_model._mixed._normal_rows._degrees_of_freedom import VarianceInformation

_STEP = 0.01  # standard errors: differences are exact to about 1e-4, and rounding to 1e-5
_SMALLER, _MOST_TRIES = 0.1, 4  # of a step that leaves the variances' range


def grouped_information(variances: Any, back: Any) -> VarianceInformation:
    """VarianceInformation of FittedVariances that have a profile.

    `back` (p, k) leads from the free columns of the equations to the population's coefficients.
    """
    steps, equations_at = _steps(variances)
    n = len(steps)
    centre = equations_at(np.zeros(n))
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
    expected = np.linalg.pinv(variances.errors[: len(steps), : len(steps)], hermitian=True)
    products = np.zeros((n, n, 0, 0))  # of Kenward and Roger, who need more than differences
    return VarianceInformation(slopes, products, expected, observed / 2, root, noise)


def _root(equations):
    """Root (k, k) of the covariance of the population's coefficients, over the noise variance."""
    of_population = equations.inverse_root[equations.products.n_outer_effects :]
    triangle: Any = np.linalg.qr(of_population.T, mode="r")
    return triangle.T


def _steps(variances):
    """Steps (n,) of the variance components, and a function of changes that gives equations."""
    profile, directions = variances.profile, variances.directions
    errors = np.sqrt(np.diag(variances.errors))
    free = [*directions, None] if variances.free_noise else directions

    def equations_at(changes):
        ratios = list(variances.ratios)
        for (k, direction), change in zip(directions, changes, strict=False):
            ratios[k] = ratios[k] + change * direction
        if any(np.linalg.eigvalsh(each)[0] < -1e-12 * max(np.trace(each), 0) for each in ratios):
            raise np.linalg.LinAlgError("a ratio has a negative variance")
        noise = variances.noise
        if variances.free_noise:
            noise *= np.exp(changes[-1])
        return profile.points.at([square_root(each) for each in ratios], noise)

    steps = np.zeros(len(free))
    for at in range(len(free)):
        step = _STEP * errors[at]
        for _ in range(_MOST_TRIES):
            try:
                for sign in (1, -1):
                    equations_at(sign * step * np.eye(len(free))[at])
                break
            except np.linalg.LinAlgError:
                step *= _SMALLER
        steps[at] = step
    return steps, equations_at
