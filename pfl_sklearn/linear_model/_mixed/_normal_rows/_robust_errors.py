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


class ClientSystems(NamedTuple):
    """Rows of clients and their covariances, and what they say of p coefficients.

    All columns are divided by `scale` (p,).
    """

    scale: Floats
    parts: list[tuple[Floats, Floats]]  # rows (k, p + 1) with the residual last, and V (k, k)
    informations: Floats  # (m, p, p), X' V^-1 X of every client
    scores: Floats  # (m, p), X' V^-1 r

    @property
    def largest_score(self) -> float:
        """Largest sum of scores, in standard deviations: 0 at the estimates of these rows."""
        total = np.diag(self.informations.sum(axis=0))
        length = np.sqrt(np.maximum(total, np.finfo(float).tiny))
        return float(np.max(np.abs(self.scores.sum(axis=0)) / length))


def client_systems(
    x: Floats, residuals: Floats, codes: Integers, between: Floats, noise: float
) -> ClientSystems:
    """ClientSystems of rows x (n, p) of the design with residuals (n,).

    `between` (p, p) is the covariance between clients, and `codes` (n,) say which client a row is
    of; all clients have rows.
    """
    size = np.sqrt(np.mean(x**2, axis=0))  # columns of like length lose fewest digits
    scale = np.where(size > 0, size, 1.0)
    x, between = x / scale, between * np.multiply.outer(scale, scale)
    order = np.argsort(codes, kind="stable")
    table = np.column_stack([x, residuals])[order]
    parts, products = [], []
    for client in np.split(table, np.cumsum(np.bincount(codes))[:-1]):
        rows = _triangle(client)
        X = rows[:, :-1]
        covariance = X @ between @ X.T + noise * np.eye(len(X))
        parts.append((rows, covariance))
        products.append(X.T @ np.linalg.solve(covariance, rows))
    both = np.array(products)
    return ClientSystems(scale, parts, both[:, :, :-1], both[:, :, -1])


def robust_errors(systems: ClientSystems, L: Floats, adjusted: bool) -> RobustErrors:
    """RobustErrors of combinations L (k, p); with `adjusted` CR2, otherwise CR0."""
    L, m = L / systems.scale, len(systems.parts)
    inverse = np.linalg.pinv(systems.informations.sum(axis=0), hermitian=True)
    # Of every client: squares u' V u, and X' u, with u the weights of its residuals.
    variances, squares = np.zeros(len(L)), np.zeros((m, len(L)))
    crossed = np.zeros((m, len(L), len(inverse)))
    for at, (rows, covariance) in enumerate(systems.parts):
        X = rows[:, :-1]
        weights = np.linalg.solve(covariance, X @ inverse @ L.T)
        if adjusted:
            weights = _adjustment(covariance, X @ inverse @ X.T) @ weights
        variances += (weights.T @ rows[:, -1]) ** 2
        squares[at] = np.sum(weights * (covariance @ weights), axis=0)
        crossed[at] = weights.T @ X
    return RobustErrors(variances, _degrees_of_freedom(squares, crossed, inverse))


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
