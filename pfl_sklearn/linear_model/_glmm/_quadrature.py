"""Marginal likelihood of clients' logistic regressions with one effect each, by quadrature.

Adaptive Gauss-Hermite quadrature: the nodes of a client lie around the mode of its effect v, at
distances of its standard deviation s there. With h(v) the log-likelihood minus v^2 / 2,

    log I = log s + log sum_k w_k exp(h(mode + s x_k) + x_k^2 / 2).

One point is Laplace's approximation. The gradients are those of the sum, nodes included.
"""

from functools import cache

import numpy as np
from scipy.special import logsumexp

from pfl_sklearn.linear_model._algebra import row_slices
from pfl_sklearn.linear_model._glmm._likelihood import (
    RowStack,
    find_mode,
    form_of,
    population_predictors,
)

_CELLS = 1 << 17  # rows times nodes at a time: they fit the cache


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
    mode = find_mode(form, outcome, offset, stack, state)
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
    terms = outcome.row_values(offset + features * effects[..., None], y, w)
    logs = terms.value.sum(axis=2) + (log_weights + nodes**2 / 2)[:, None] - effects**2 / 2
    integral = logsumexp(logs, axis=0)
    share = np.exp(logs - integral)
    slopes = np.einsum("kbn,bn->kb", terms.score, features) - effects
    by_centre = np.sum(share * slopes, axis=0)
    by_size = 1 / size + np.sum(share * slopes * nodes[:, None], axis=0)
    weight_slope = outcome.weight_slopes(predictors, w, np.ones((*w.shape, 1, 1)))[..., 0]
    by_curvature = -0.5 * by_size * size**3
    bent = weight_slope * features**2 * by_curvature[:, None]
    by_mode = (by_centre + np.einsum("bn,bn->b", bent, features)) / curvature
    pulled = weight * features
    by_offset = np.einsum("kb,kbn->bn", share, terms.score) + bent - by_mode[:, None] * pulled
    by_features = np.einsum("kb,kbn->bn", share * effects, terms.score)
    by_features += centre[:, None] * bent + 2 * by_curvature[:, None] * pulled
    by_features += by_mode[:, None] * (score - centre[:, None] * pulled)
    return float(np.sum(np.log(size) + integral)), by_offset, by_features
