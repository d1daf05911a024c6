"""Search where many variances are unknown: each enters only where the likelihood rises in it.

Of many variances most end at 0. A search over all of them at once takes most of its steps, each
with as many effects as there are coefficients, to get them there.
"""

import numpy as np

from pfl_sklearn.linear_model._algebra import CovarianceFactor, square_root
from pfl_sklearn.linear_model._mixed._marginal_maximum import as_maximum, lowest_point

MANY_VARIANCES = 6  # with fewer, all at once take about as long
# Roots of variances, in natural units. At a larger probe the others are too far from 0 to tell.
_PROBE, _ENTRY, _GONE = 0.05, 0.5, 0.03
_RISE = 1e-2  # nats per squared standard error of a root, from which a variance enters
_SHARE = 0.5  # of the steepest rise: variances with less wait
_ROUGH_TOL = 0.1  # nats per standard error: near enough to ask which variances enter or leave
_MOST_ENTRIES = 20  # of sets of variances; three are enough as a rule


def maximize_stepwise(objective_with, full, max_iter, tol, begin=1.0):
    """MarginalMaximum of the Objective `full`, as by `maximize`; its covariance is diagonal.

    ``objective_with(shape)`` is the same Objective with another shape of the covariance.
    """
    n_population, n = full.root.shape[1], len(full.shape.start)
    sizes, metric = np.zeros(n), np.eye(n_population + n)
    population, n_iter = np.zeros(n_population), 0
    # The one in which the likelihood of the pooled model rises most is the first to enter.
    first = np.arange(n) == np.argmin(_slopes_at_zero(full, population, sizes))
    kept = first
    tol_now = max(tol, _ROUGH_TOL)
    for _ in range(_MOST_ENTRIES):
        if not kept.any():  # a search has one variance at least
            kept = first
        sizes[kept & (sizes == 0)] = begin * _ENTRY
        at = np.append(np.ones(n_population, dtype=bool), kept)
        part = objective_with(_part_of(full.shape, kept))
        begun = np.append(population, sizes[kept] / full.unit)
        root = square_root((metric @ metric.T)[np.ix_(at, at)])
        descent, flat = lowest_point(part, begun, root, max(max_iter - n_iter, 1), tol_now)
        n_iter += descent.n_iter
        population = descent.point[:n_population]
        sizes[kept] = np.abs(descent.point[n_population:]) * full.unit
        metric = np.eye(len(metric))
        metric[np.ix_(at, at)] = descent.metric
        left = np.where(sizes < _GONE, 0.0, sizes)
        slopes = _slopes_at_zero(full, population, left)
        rising = slopes < -_RISE
        # What one coefficient does not explain yet lets the likelihood rise in others, too.
        entering = rising & ~kept & (slopes <= _SHARE * slopes[~kept].min(initial=0.0))
        # One that would enter again stays where it is.
        sizes = np.where(kept & rising, sizes, left)
        kept = (sizes > 0) | entering
        if n_iter >= max_iter or (not entering.any() and tol_now == tol):
            break
        if not entering.any():
            tol_now = tol
    point = np.append(population, sizes / full.unit)
    value = full(point)[0]  # from here on the modes are of all effects, too
    end = descent._replace(point=point, value=value, metric=metric, n_iter=n_iter)
    return as_maximum(full, end, flat and tol_now == tol and not entering.any())


def _part_of(shape, kept):
    """The CovarianceFactor (q, r) of the r variances of a diagonal one that are kept."""
    at = np.flatnonzero(kept)
    rows, columns = shape.positions[at] // shape.shape[1], np.arange(len(at))
    positions = rows * len(at) + columns
    return CovarianceFactor((shape.shape[0], len(at)), positions, columns, shape.start[at])


def _slopes_at_zero(full, population, sizes):
    """Second derivatives (n,) of the objective in the roots of variances of 0, others are 0."""
    # The slope is 0 there, so that of a small root over the root is the second derivative.
    probed = np.where(sizes > 0, sizes, _PROBE) / full.unit
    slope = full(np.append(population, probed))[1][len(population) :]
    return np.where(sizes > 0, 0.0, slope / probed)
