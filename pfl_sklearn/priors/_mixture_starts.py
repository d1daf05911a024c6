"""Starts of EM for normal mixtures, and the choice among their ends."""

import numpy as np

from pfl_sklearn.priors._kmeans import cluster_means, lloyd, nearest_centre, spread_centres
from pfl_sklearn.priors._mixture_em import Mixture, run
from pfl_sklearn.priors._mixture_polish import polish

_FLOOR = 1e-6
_NO_SPREAD = 1e-100  # floor where clients do not differ; its square is a number
_START_CLIENTS = 20_000
_START_STEPS, _START_TOLERANCE = 50, 1e-5
_EM_STEPS, _EM_TOLERANCE = 20, 1e-8
_LLOYD_STEPS = 10


def fit_mixture(x, s, n_components, shape, *, n_init, rng, known):
    """Best of several spread starts.

    Parameters
    ----------
    x : ndarray of shape (m, d)
    s : ndarray of shape (m,)
        Sampling variances.
    n_components : int
    shape : Shape
    n_init : int
    rng : RandomState
    known : Mixture
        What `shape` leaves as it is; the rest of it is not looked at.

    Returns
    -------
    MixtureFit
        Started on at most 20,000 clients, drawn at random. A solution with a component at the
        floor of its variance is taken only if every start ends in one.
    """
    start = _best_start(x, s, n_components, shape, n_init, rng, known)
    return finish(start, x, s, shape)


def select_components(x, s, largest, shape, *, n_init, rng, known):
    """Fit of the number k of components, 1 to `largest`, with the smallest BIC.

    `known` takes k and gives what `shape` leaves as it is. The search ends when two more
    components have not helped.
    """
    found = []
    for k in range(1, largest + 1):
        start = _best_start(x, s, k, shape, n_init, rng, known(k))
        fit = finish(start, x, s, shape)
        size = shape.n_parameters(k, x.shape[1]) * np.log(len(x))
        found.append((size - 2 * fit.log_likelihood, k, fit))
        best = min(found, key=lambda entry: entry[:2])
        if k >= best[1] + 2:
            break
    return best[2]


def finish(mixture, x, s, shape):
    """Fit on all clients from a start: some steps of EM, then quasi-Newton ones."""
    floor = variance_floor(x, s)
    s = _floored(s, shape, floor)
    return polish(run(mixture, x, s, shape, floor, _EM_STEPS, _EM_TOLERANCE), x, s, shape, floor)


def fixed_variance(k, d, variance):
    """Mixture of which nothing is known but the variance of every component."""
    return Mixture(np.full((k, d), np.nan), np.full((k, d), variance), None, np.full(k, 1 / k))


def in_order(mixture):
    """The same components, heaviest first, ties by first coordinate."""
    order = np.lexsort((mixture.means[:, 0], -mixture.weights))
    vectors = None if mixture.vectors is None else mixture.vectors[order]
    return Mixture(mixture.means[order], mixture.values[order], vectors, mixture.weights[order])


def variance_floor(x, s):
    """Smallest variance of a component: with the noise, a millionth of the clients' spread."""
    spread = float(np.mean(np.var(x, axis=0)))
    return max(_FLOOR * spread - float(s.min()), 0.0) if spread > 0 else _NO_SPREAD


def _floored(s, shape, floor):
    """Sampling variances (m,), or (1,) if all are alike, which is faster.

    With the floor, where components have no variance to take it.
    """
    s = s[:1] if np.ptp(s) == 0 else s
    return np.maximum(s, floor) if shape.covariance_type == "fixed" else s


def _best_start(x, s, k, shape, n_init, rng, known):
    """Mixture after a few steps on some clients from the best of `n_init` starts."""
    floor = variance_floor(x, s)
    subset = slice(None)
    if len(x) > _START_CLIENTS:
        subset = rng.choice(len(x), _START_CLIENTS, replace=False)
    few, noise = x[subset], _floored(s[subset], shape, floor)
    found = []
    for attempt in range(n_init if shape.means else 1):
        start = _start(few, noise, k, shape, floor, rng, known, attempt % 2 == 1)
        found.append(run(start, few, noise, shape, floor, _START_STEPS, _START_TOLERANCE))
    return max(found, key=lambda fit: (fit.interior, fit.log_likelihood)).mixture


def _start(x, s, k, shape, floor, rng, known, projected):
    """Components from k-means on the clients, or on their leading directions."""
    d = x.shape[1]
    spread = np.mean(np.var(x, axis=0))
    precision = np.broadcast_to(1 / (s + spread + 1e-300), len(x))
    if shape.means:
        space = _leading(x, k) if projected and k < d else x
        centres = spread_centres(space, k, precision, rng)
        labels = lloyd(space, centres, precision, _LLOYD_STEPS)[1]
        means = cluster_means(x, labels, precision, np.tile(x.mean(axis=0), (k, 1)))
    else:
        means = known.means
        labels = nearest_centre(x, means)
    weights = np.full(k, 1 / k) if shape.weights else known.weights
    if shape.covariance_type == "fixed":
        return Mixture(means, known.values, known.vectors, weights)
    within = np.mean((x - means[labels]) ** 2, axis=0) - s.mean()
    value = max(within.mean(), 0.01 * spread, floor)
    vectors = np.broadcast_to(np.eye(d), (k, d, d)) if shape.covariance_type == "full" else None
    return Mixture(means, np.full((k, d), value), vectors, weights)


def _leading(x, k):
    """Coordinates (m, k) of the clients in the directions of largest spread."""
    centred = x - x.mean(axis=0)
    return centred @ np.linalg.eigh(centred.T @ centred)[1][:, -k:]
