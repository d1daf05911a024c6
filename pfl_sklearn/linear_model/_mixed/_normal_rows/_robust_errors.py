"""Errors of a linear mixed model's population that hold under any covariance within clients.

The sandwich of the clients' scores, with residuals adjusted so that it is unbiased if the model's
own covariance is right (CR2 of Bell and McCaffrey, 2002, and Pustejovsky and Tipton, 2018), and
degrees of freedom of the same authors. Rows of a client are rotated to the triangle of their
columns and residual: outside its space, adjustments are the identity.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pfl_sklearn._typing import Floats, Integers

_ZERO = 1e-12  # share of the largest eigenvalue, below which another is 0


class RobustErrors(NamedTuple):
    """Variances (k,) of combinations of coefficients, and their degrees of freedom."""

    variances: Floats
    dfs: Floats
    # Largest score of a coefficient, in standard deviations: 0 at the estimates of these rows.
    largest_score: float


def robust_errors(
    x: Floats,
    residuals: Floats,
    codes: Integers,
    L: Floats,
    between: Floats,
    noise: float,
    adjusted: bool,
) -> RobustErrors:
    """RobustErrors of combinations L (k, p) for rows x (n, p) of the design with residuals (n,).

    `between` (p, p) is the covariance between clients, and `codes` (n,) say which client a row is
    of; with `adjusted` CR2, otherwise CR0.
    """
    size = np.sqrt(np.mean(x**2, axis=0))  # columns of like length lose fewest digits
    scale = np.where(size > 0, size, 1.0)
    x, L = x / scale, L / scale
    between = between * np.multiply.outer(scale, scale)
    order = np.argsort(codes, kind="stable")
    table = np.column_stack([x, residuals])[order]
    ends = np.cumsum(np.bincount(codes))
    parts = [_triangle(rows) for rows in np.split(table, ends[:-1]) if len(rows)]
    covariances = [
        rows[:, :-1] @ between @ rows[:, :-1].T + noise * np.eye(len(rows)) for rows in parts
    ]
    pairs = list(zip(parts, covariances, strict=True))
    normal = sum(
        rows[:, :-1].T @ np.linalg.solve(covariance, rows[:, :-1]) for rows, covariance in pairs
    )
    inverse = np.linalg.pinv(normal, hermitian=True)
    # Of every client: score, squares u' V u, and X' u, with u the weights of its residuals.
    score = sum(
        rows[:, :-1].T @ np.linalg.solve(covariance, rows[:, -1]) for rows, covariance in pairs
    )
    length = np.sqrt(np.maximum(np.diag(normal), np.finfo(float).tiny))
    variances, squares = np.zeros(len(L)), np.zeros((len(pairs), len(L)))
    crossed = np.zeros((len(pairs), len(L), len(normal)))
    for at, (rows, covariance) in enumerate(pairs):
        X = rows[:, :-1]
        weights = np.linalg.solve(covariance, X @ inverse @ L.T)
        if adjusted:
            weights = _adjustment(covariance, X @ inverse @ X.T) @ weights
        variances += (weights.T @ rows[:, -1]) ** 2
        squares[at] = np.sum(weights * (covariance @ weights), axis=0)
        crossed[at] = weights.T @ X
    largest = float(np.max(np.abs(score) / length))
    return RobustErrors(variances, _degrees_of_freedom(squares, crossed, inverse), largest)


def _triangle(rows):
    """Rows of a client rotated to at most as many as there are columns."""
    return np.linalg.qr(rows, mode="r") if len(rows) > rows.shape[1] else rows


def _adjustment(covariance, explained):
    """Symmetric A with A (V - explained) A = V, for the covariance V of a client's rows."""
    values, vectors = np.linalg.eigh(covariance)
    root = vectors * np.sqrt(values) @ vectors.T
    values, vectors = np.linalg.eigh(root @ (covariance - explained) @ root)
    # Rows that decide a coefficient alone have no residual there.
    positive = values > _ZERO * values[-1]
    inverse_root = vectors[:, positive] / np.sqrt(values[positive]) @ vectors[:, positive].T
    return root @ inverse_root @ root


def _degrees_of_freedom(squares, crossed, inverse):
    """Degrees of freedom (k,) of sums of squares of residuals, of mean and variance."""
    # The residuals' products over clients are those of `squares` less X (X' V^-1 X)^-1 X'.
    pulled = crossed @ inverse
    own = np.einsum("mkp,mkp->mk", pulled, crossed)
    mean = np.sum(squares - own, axis=0)
    moments = np.einsum("mkp,mkq->kpq", crossed, crossed) @ inverse
    between = np.einsum("kpq,kqp->k", moments, moments)
    total = np.sum(squares**2 - 2 * squares * own, axis=0) + between
    return mean**2 / total
