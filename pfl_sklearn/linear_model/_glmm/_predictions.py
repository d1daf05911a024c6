"""Predictions that are averages over a Gaussian posterior of the predictors."""

from functools import cache

import numpy as np
from scipy.special import expit, ndtri, softmax

from pfl_sklearn.linear_model._algebra import row_slices

_NODE_CELLS = 1 << 20  # rows times nodes at a time: 8 MB for each temporary array
_NODES = np.arange(-64, 65) / 8  # equally spaced, in standard deviations
_WEIGHTS = np.exp(-0.5 * _NODES**2) / np.exp(-0.5 * _NODES**2).sum()
_EVERY = 4  # node for losses that are compared: the error is 1e-6 up to a standard deviation of 3
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

    `variances_of` is that of `averaged_probabilities`. Underflows count as the smallest float.
    """
    if outcome.n_outputs > 1:
        chances = averaged_probabilities(predictors, outcome.coding, variances_of)
        likelihoods = chances[np.arange(len(y)), y]
    else:
        constants = outcome.constants(y)

        def likelihood(block, u):
            terms = outcome.terms(u[..., None], y[block, None], np.ones(1))
            return np.exp(terms.value + constants[block, None])

        likelihoods = averaged(likelihood, predictors[:, 0], variances_of(np.ones(1)), _EVERY)
    return np.log(np.maximum(likelihoods, np.finfo(float).tiny))


def averaged(function, means, variances, every=1):
    """Averages (n,) of a function of normal predictors with means (n,) and variances (n,).

    `function` takes a slice of the rows and their predictors (b, k), and returns values (b, k).
    `every` node is used that many steps from the last one.
    """
    result = np.empty(len(means))
    # A variance is a difference, which rounding may leave below 0.
    spread = np.sqrt(np.clip(variances, 0.0, _LARGEST_VARIANCE))
    nodes, weights = _NODES[::every], _WEIGHTS[::every] * every
    for block in row_slices(len(means), len(nodes), _NODE_CELLS):
        predictors = means[block, None] + spread[block, None] * nodes
        # A product of a matrix would round by how many rows there are.
        result[block] = np.einsum("bk,k->b", function(block, predictors), weights)
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
