"""Marginal likelihood of clients' logistic regressions with one effect each, by quadrature.

Adaptive Gauss-Hermite quadrature: the nodes of a client lie around the mode of its effect v, at
distances of its standard deviation s there. With h(v) the log-likelihood minus v^2 / 2,

    log I = log s + log sum_k w_k exp(h(mode + s x_k) + x_k^2 / 2).

One point is Laplace's approximation. The gradients are those of the sum, nodes included.
"""

from functools import cache

import numpy as np

from pfl_sklearn.linear_model._algebra import row_slices
from pfl_sklearn.linear_model._glmm._likelihood import (
    CLOSE_ENOUGH,
    RowStack,
    find_mode,
    form_of,
    population_predictors,
)

_MANY = 7  # points from which the sum hardly depends on where its centre lies
_CELLS = 1 << 18  # rows times nodes at a time: they fit the cache


@cache
def _nodes(n_points):
    """Nodes and log weights of Gauss-Hermite quadrature for the standard normal density."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(n_points)
    return nodes, np.log(weights / weights.sum())


def evaluate_quadrature(clients, x, y, w, state, *, outcome, population, factor, n_points):
    """As `evaluate_stack`, for a factor (q, 1) and two classes, with `n_points` per client."""
    stack = RowStack(clients, x, y, w)
    form = form_of(x, factor)
    offset = population_predictors(x, population)
    close = (CLOSE_ENOUGH,) if n_points >= _MANY else ()
    mode = find_mode(form, outcome, offset, stack, state, *close)
    features = form.features[..., 0]
    centre = form.effects(mode.state)[:, 0, 0]
    value, score, across = 0.0, np.empty_like(features), np.empty_like(features)
    for part in row_slices(len(x), features.shape[1] * n_points, _CELLS):
        some = (features[part], offset[part, :, 0], y[part], w[part], centre[part])
        at_mode = mode.predictors[part], mode.terms.score[part, :, 0]
        weight = mode.terms.weight[part, :, 0, 0]
        total, score[part], across[part] = _integrate(outcome, *some, *at_mode, weight, n_points)
        value += total
    columns = x.reshape(-1, x.shape[-1])
    by_population = score.reshape(1, -1) @ columns
    by_factor = columns[:, : len(factor)].T @ across.reshape(-1, 1)
    return value, by_population, by_factor, mode.state, bool(mode.found.all())


def _integrate(outcome, features, offset, y, w, centre, predictors, score, weight, n_points):
    """Summed log integrals of clients, and slopes (b, n) in their offsets and their features."""
    nodes, log_weights = _nodes(n_points)
    curvature = 1 + np.einsum("bn,bn->b", weight, features**2)
    size = curvature**-0.5
    effects = centre + size * nodes[:, None]  # (k, b)
    values, scores = _at_nodes(features, offset, y, w, effects)
    slopes = np.einsum("knb,nb->kb", scores, features.T) - effects
    logs = values + (log_weights + nodes**2 / 2)[:, None] - effects**2 / 2
    highest = logs.max(axis=0)
    share = np.exp(logs - highest)
    total = share.sum(axis=0)
    share /= total
    by_centre = np.sum(share * slopes, axis=0)
    by_size = 1 / size + np.sum(share * slopes * nodes[:, None], axis=0)
    weight_slope = outcome.weight_slopes(predictors, w, np.ones((*w.shape, 1, 1)))[..., 0]
    by_curvature = -0.5 * by_size * size**3
    bent = weight_slope * features**2 * by_curvature[:, None]
    by_mode = (by_centre + np.einsum("bn,bn->b", bent, features)) / curvature
    pulled = weight * features
    by_offset = np.einsum("kb,knb->nb", share, scores).T + bent - by_mode[:, None] * pulled
    by_features = np.einsum("kb,knb->nb", share * effects, scores).T
    by_features = by_features + centre[:, None] * bent + 2 * by_curvature[:, None] * pulled
    by_features += by_mode[:, None] * (score - centre[:, None] * pulled)
    return float(np.sum(np.log(size * total) + highest)), by_offset, by_features


def _at_nodes(features, offset, y, w, effects):
    """Log-likelihoods (k, b) of clients at their nodes, and the rows' slopes (k, n, b) there.

    Clients come last, so that sums over rows add long vectors. All work is done in place.
    """
    features, offset = np.ascontiguousarray(features.T), np.ascontiguousarray(offset.T)
    sign = np.where(y.T > 0, 1.0, -1.0)
    weights = None if np.all(w == 1) else np.ascontiguousarray(w.T)
    signed = sign if weights is None else sign * weights
    values, scores = np.empty(effects.shape), np.empty((len(effects), *features.shape))
    small, right = np.empty_like(features), np.empty(features.shape, dtype=bool)
    for k, effect in enumerate(effects):
        wrong = scores[k]  # first the odds against a row's label, in the end its slope
        odds = features * effect
        odds += offset
        odds *= sign
        np.abs(odds, out=small)
        np.negative(small, out=small)
        np.exp(small, out=small)
        np.greater_equal(odds, 0.0, out=right)
        wrong.fill(1.0)
        np.copyto(wrong, small, where=right)
        small += 1.0
        wrong /= small
        wrong *= signed
        np.log(small, out=small)
        np.minimum(odds, 0.0, out=odds)
        odds -= small
        if weights is not None:
            odds *= weights
        odds.sum(axis=0, out=values[k])
    return values, scores
