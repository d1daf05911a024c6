"""Points that stand for the posterior of the variances of groupings, and their weights.

A covariance over the noise variance has the logarithms of its standard deviations for parameters,
and a full one the inverse hyperbolic tangents of its partial correlations.
"""

from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize
from scipy.special import chdtri, ndtri
from scipy.stats import qmc

_FALL = 6.0  # nats below the maximum at which a grid ends
# A sum over equal steps of a smooth density is exact as soon as steps are about its width.
_COARSE, _FINE = 7, 13  # points of an axis that find the ends, and that integrate
_FIRST_REACH = 1.5  # of the coarse grid around the start, in logarithms
_MOST_BOXES = 20
_NEGLIGIBLE_WEIGHT = 1e-4  # weight over the largest one
_LEAST_SD = 0.05  # over the noise's, at which a search starts if the estimate is less
_LARGEST_CORRELATION = 0.9  # likewise
_STEP = 0.1  # of differences for the curvature
_FLATTEST = 0.05  # where the likelihood is flat the prior's tails count
_WIDTH, _NARROWEST, _WIDEST = 1.5, 0.5, 3.0  # standard deviations that measure skewed sides
_N_SAMPLED = 8  # binary logarithm of the number of points in three or more dimensions
_DOF = 5.0  # of the proposal, whose tails have to be longer than those of the posterior


class Points(NamedTuple):
    """Parameters and their weights, which sum to 1."""

    values: np.ndarray  # (n, t)
    weights: np.ndarray  # (n,)


def n_parameters(shape):
    """Number of parameters of an estimated ratio."""
    q = len(shape.varies)
    if shape.name == "full":
        return q * (q + 1) // 2
    return 1 if shape.name == "spherical" else int(shape.varies.sum())


def root_at(shape, values):
    """Root (q, q) of a ratio with these parameters."""
    q = len(shape.varies)
    if shape.name == "full":
        return np.exp(values[:q])[:, None] * _correlation_root(q, np.tanh(values[q:]))
    sds = np.zeros(q)
    sds[shape.varies] = np.exp(values)
    return np.diag(sds)


def parameters_near(shape, ratio):
    """Parameters (t,) of a ratio (q, q), moved away from singular ones."""
    sds = np.maximum(np.sqrt(np.diag(ratio)), _LEAST_SD)
    if shape.name == "spherical":
        return np.log(sds[shape.varies][:1])
    if shape.name == "diag":
        return np.log(sds[shape.varies])
    correlation = _LARGEST_CORRELATION * ratio / sds / sds[:, None]
    np.fill_diagonal(correlation, 1.0)
    return np.concatenate([np.log(sds), np.arctanh(_partial_correlations(correlation))])


def log_variance_prior(shape, values):
    """Log density of parameters: half-Cauchy standard deviations, uniform correlations."""
    if shape.name != "full":
        return -np.logaddexp(values, -values).sum()
    sds, angles = np.split(values, [len(shape.varies)])
    # Partial correlations of column j then are symmetric beta variables (Lewandowski, Kurowicka
    # and Joe, 2009).
    powers = len(sds) - np.tril_indices(len(sds), -1)[1]
    return -np.logaddexp(sds, -sds).sum() - powers @ np.logaddexp(angles, -angles)


def _correlation_root(q, partial):
    root = np.zeros((q, q))
    root[np.tril_indices(q, -1)] = partial
    remaining = np.ones(q)
    for j in range(q):
        root[j, j] = 1.0
        root[j:, j] *= np.sqrt(remaining[j:])
        remaining = np.maximum(remaining - root[:, j] ** 2, 0.0)
    return root


def _partial_correlations(correlation):
    root = np.linalg.cholesky(correlation)
    remaining = np.cumsum(root[:, ::-1] ** 2, axis=1)[:, ::-1]
    return (root / np.sqrt(np.where(remaining > 0, remaining, 1.0)))[np.tril_indices(len(root), -1)]


def find_points(log_density, start):
    """Points for a log density (unnormalized) of t parameters, near whose mode (t,) we start."""
    points = (_on_grid if len(start) <= 2 else _around_mode)(log_density, start)
    kept = points.weights > _NEGLIGIBLE_WEIGHT * points.weights.max()
    weights = points.weights[kept]
    return Points(points.values[kept], weights / weights.sum())


def _on_grid(log_density, start):
    """Equally spaced points, on a box outside of which the density is negligible."""
    low, high = start - _FIRST_REACH, start + _FIRST_REACH
    for _ in range(_MOST_BOXES):
        values = _evaluate_grid(log_density, low, high, _COARSE)[1]
        near, before = values > values.max() - _FALL, high - low
        step, ends = before / (_COARSE - 1), []
        for axis in range(len(start)):
            others = tuple(k for k in range(len(start)) if k != axis)
            ends.append(np.flatnonzero(near.any(axis=others))[[0, -1]])
        first, last = np.transpose(ends)
        is_open = (first == 0) | (last == _COARSE - 1)
        low, high = (
            np.where(first == 0, low - before / 2, low + (first - 1) * step),
            np.where(last == _COARSE - 1, high + before / 2, high - (_COARSE - 2 - last) * step),
        )
        if not is_open.any() and np.all(high - low > before / 2):
            break
    grid, values = _evaluate_grid(log_density, low, high, _FINE)
    return Points(grid.reshape(-1, len(start)), np.exp(values - values.max()).ravel())


def _evaluate_grid(log_density, low, high, n):
    axes = [np.linspace(*ends, n) for ends in zip(low, high, strict=True)]
    grid = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1)
    values = [log_density(point) for point in grid.reshape(-1, len(axes))]
    return grid, np.reshape(values, grid.shape[:-1])


def _around_mode(log_density, start):
    """Points of a skewed Student's distribution around the mode, weighted by the density."""

    def loss(at: Any) -> float:
        return -float(log_density(at))

    # The weights make up for an imprecise mode, so a loose search will do.
    loose: Any = {"gtol": 1e-2}
    mode = minimize(loss, start, method="BFGS", options=loose).x
    top, t = log_density(mode), len(start)
    values, axes = np.linalg.eigh(-_curvature_at(log_density, mode))
    axes = axes / np.sqrt(np.maximum(values, _FLATTEST))
    # Each side of an axis has its own width (Rue, Martino and Chopin, 2009).
    falls = [
        [top - log_density(mode + sign * _WIDTH * axis) for axis in axes.T] for sign in (-1, 1)
    ]
    widths = _WIDTH / np.sqrt(2 * np.maximum(falls, np.finfo(float).tiny))
    widths = np.clip(widths, _NARROWEST, _WIDEST)
    # A fixed sequence, which fills space evenly: the same table has the same errors.
    shares = qmc.Sobol(t + 1, scramble=False).random_base2(_N_SAMPLED)
    shares = (shares + 0.5 / len(shares)) % 1.0
    normal = ndtri(shares[:, :t]) * np.sqrt(_DOF / chdtri(_DOF, shares[:, t:]))
    width = np.where(normal < 0, widths[0], widths[1])
    points = mode + (width * normal) @ axes.T
    proposal = -(_DOF + t) / 2 * np.log1p(np.sum(normal**2, axis=1) / _DOF)
    proposal -= np.log(width).sum(axis=1)
    logs = np.array([log_density(point) for point in points]) - proposal
    weights = np.exp(logs - logs.max())
    # Weights are truncated, so that no single point dominates (Ionides, 2008).
    return Points(points, np.minimum(weights, np.sqrt(len(weights)) * weights.mean()))


def _curvature_at(log_density, mode):
    """Second derivatives (t, t), by differences."""
    t = len(mode)
    result, moves = np.empty((t, t)), _STEP * np.eye(t)
    for a in range(t):
        for b in range(a + 1):
            both = [
                first * second * log_density(mode + first * moves[a] + second * moves[b])
                for first in (-1, 1)
                for second in (-1, 1)
            ]
            result[a, b] = result[b, a] = sum(both) / (2 * _STEP) ** 2
    return result
