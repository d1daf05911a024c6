"""Predictions that are averages over a Gaussian posterior of the predictors."""

from functools import cache

import numpy as np
from scipy.special import expit, logsumexp, ndtri, softmax

from pfl_sklearn.linear_model._algebra import row_slices
from pfl_sklearn.linear_model._glmm._quadrature import nodes_of

_NODE_CELLS = 1 << 20  # rows times nodes at a time: 8 MB for each temporary array
_NODES = np.arange(-64, 65) / 8  # equally spaced, in standard deviations
_WEIGHTS = np.exp(-0.5 * _NODES**2) / np.exp(-0.5 * _NODES**2).sum()
_POINTS, _NEWTON_STEPS = 15, 20  # of quadrature around a mode, and to find it
_LONGEST_STEP = 3.0  # of a predictor, as exponentials grow fast
_LARGEST_VARIANCE = 1e200  # of huge features; an infinite one would make NaN of a node at 0
_SOBOL = 256  # points, each used with both signs: odd moments are exact


def averaged_probabilities(logits, contrasts, variances_of):
    """Probabilities (n, K) averaged over normal logits.

    Two classes: the trapezoidal rule on 129 nodes, whose error decreases geometrically (below 1e-6
    up to a standard deviation of 10). K classes: 256 points of a Sobol sequence and their mirror
    images in the K - 1 contrasts; errors are about 1e-3, and below 1e-2 in all our trials.

    Parameters
    ----------
    logits : ndarray of shape (n, c)
        Means of the logits; c is 1 for two classes, else K.
    contrasts : ndarray of shape (c, a)
        Orthonormal.
    variances_of : callable
        Variance (n,) of a combination (c,) of the logits.
    """
    if logits.shape[1] == 1:
        variances = variances_of(np.ones(1))
        # The second is not 1 less the first, which would lose the digits of a small one.
        both = (averaged(lambda _, u: expit(u), sign * logits[:, 0], variances) for sign in (-1, 1))
        return np.column_stack(list(both))
    result = np.empty_like(logits)
    for block, chances in node_probabilities(logits, contrasts, variances_of):
        result[block] = chances.mean(axis=1)
    return result


def averaged_log_likelihoods(outcome, predictors, y, variances_of):
    """Logs (n,) of likelihoods of responses (n,) averaged over normal predictors (n, c).

    `variances_of` is that of `averaged_probabilities`. With one predictor we integrate by adaptive
    quadrature around the mode of likelihood and normal density together: large counts leave a
    likelihood that is narrow and far away.
    """
    if outcome.n_outputs > 1:
        chances = averaged_probabilities(predictors, outcome.coding, variances_of)
        return np.log(np.maximum(chances[np.arange(len(y)), y], np.finfo(float).tiny))
    means, ones = predictors[:, 0], np.ones(len(y))
    spread = np.sqrt(np.clip(variances_of(np.ones(1)), 0.0, _LARGEST_VARIANCE))
    z = np.zeros(len(y))  # standard deviations of the predictor from its mean

    def curvature_of(terms):
        return 1 + spread**2 * terms.weight[:, 0, 0]

    for _ in range(_NEWTON_STEPS):
        terms = outcome.terms((means + spread * z)[:, None], y, ones)
        step = (spread * terms.score[:, 0] - z) / curvature_of(terms)
        z += step * np.minimum(1, _LONGEST_STEP / np.maximum(spread * np.abs(step), _LONGEST_STEP))
    terms = outcome.terms((means + spread * z)[:, None], y, ones)
    size = curvature_of(terms)[:, None] ** -0.5
    nodes, log_weights = nodes_of(_POINTS)
    effects = z[:, None] + size * nodes
    inside = outcome.terms((means + spread * effects.T).T[..., None], y[:, None], np.ones(1)).value
    # exp(x^2 / 2) undoes the weight of the rule, which is for a normal density.
    logs = inside - effects**2 / 2 + (log_weights + nodes**2 / 2) + np.log(size)
    return logsumexp(logs, axis=1) + outcome.constants(y)


def averaged(function, means, variances):
    """Averages (n,) of a function of normal predictors with means (n,) and variances (n,).

    `function` takes a slice of the rows and their predictors (b, k), and returns values (b, k).
    """
    result = np.empty(len(means))
    # A variance is a difference, which rounding may leave below 0.
    spread = np.sqrt(np.clip(variances, 0.0, _LARGEST_VARIANCE))
    for block in row_slices(len(means), len(_NODES), _NODE_CELLS):
        predictors = means[block, None] + spread[block, None] * _NODES
        # A product of a matrix would round by how many rows there are.
        result[block] = np.einsum("bk,k->b", function(block, predictors), _WEIGHTS)
    return result


def node_probabilities(logits, contrasts, variances_of, n_points=_SOBOL):
    """Blocks of rows and their probabilities (b, 2 n_points, K) at nodes of equal weight, K > 2."""
    roots = _roots(_contrast_covariances(contrasts, variances_of))
    nodes = _normal_nodes(contrasts.shape[1], n_points)
    for block in row_slices(len(logits), len(nodes) * logits.shape[1], _NODE_CELLS):
        moved = nodes @ (contrasts @ roots[block]).transpose(0, 2, 1)
        yield block, softmax(logits[block, None] + moved, axis=2)


def _contrast_covariances(contrasts, variances_of):
    """Covariances (n, a, a) of the contrasts of the logits, from the variances of sums."""
    a = contrasts.shape[1]
    own = [variances_of(contrasts[:, k]) for k in range(a)]
    covariances = np.empty((len(own[0]), a, a))
    for k in range(a):
        covariances[:, k, k] = own[k]
        for j in range(k):
            # cov(u, v) = (var(u + v) - var(u) - var(v)) / 2: posteriors give variances alone.
            both = variances_of(contrasts[:, k] + contrasts[:, j])
            covariances[:, k, j] = covariances[:, j, k] = 0.5 * (both - own[k] - own[j])
    return covariances


def _roots(covariances):
    """Symmetric square roots (n, a, a)."""
    values, vectors = np.linalg.eigh(covariances)
    return (vectors * np.sqrt(np.maximum(values, 0.0))[:, None, :]) @ vectors.transpose(0, 2, 1)


@cache
def _normal_nodes(n_dimensions, n_points=_SOBOL):
    """Quasi-random normal nodes (2 n_points, a), symmetric about 0 and the same in every call."""
    from scipy.stats.qmc import Sobol

    # The first point of the sequence is 0, whose normal quantile is infinite: half a cell further.
    points = Sobol(n_dimensions, scramble=False).random(n_points) + 0.5 / n_points
    nodes = ndtri(points)
    return np.concatenate([nodes, -nodes])
