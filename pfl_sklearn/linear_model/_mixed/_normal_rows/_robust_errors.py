"""Errors of a linear mixed model's population that hold under any covariance within clients.

The sandwich of the clusters' scores, with residuals adjusted so that it is unbiased if the model's
own covariance is right (CR2 of Bell and McCaffrey, 2002, and Pustejovsky and Tipton, 2018), and
degrees of freedom of the same authors. Clusters are clients, or what clients are nested in. Rows of
a client are rotated to the triangle of their columns and residual: outside its space, adjustments
are the identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations_with_replacement
from typing import Any, NamedTuple

import numpy as np
from scipy.linalg import qr, solve_triangular

from pfl_sklearn._typing import Floats, Integers
from pfl_sklearn.linear_model._mixed._normal_rows._degrees_of_freedom import JointTest

_ZERO = 1e-12  # share of the largest eigenvalue, below which another is 0
_DEPENDENT = 1e-11  # share of a column that others do not explain, below which they do
_LEAST_SHARE = 0.9  # of a variance, that its estimate has on average


class RobustErrors(NamedTuple):
    """Variances (k,) of combinations, their degrees of freedom (k,), and a joint test.

    NaN where one cluster decides a combination, so that no residual tells its error.
    """

    variances: Floats
    dfs: Floats
    joint: JointTest


class ClusterSystems(NamedTuple):
    """Rows of clusters and their covariances, in columns that are orthonormal under these.

    So the information of all clusters together is the identity.
    """

    basis: Floats  # (p, k), from coefficients of these columns to those of the design
    # Rows (n, k) and residuals (n,) of every cluster, and their covariance V (n, n).
    parts: list[tuple[Floats, Floats, Floats]]
    informations: Floats  # (m, k, k), X' V^-1 X of every cluster
    scores: Floats  # (m, k), X' V^-1 r

    @property
    def largest_score(self) -> float:
        """Largest sum of scores, in standard deviations: 0 at the estimates of these rows."""
        return float(np.abs(self.scores.sum(axis=0)).max(initial=0.0))


def cluster_systems(
    x: Floats, residuals: Floats, noise: float, effects: Sequence[tuple[Integers, Floats]]
) -> ClusterSystems:
    """ClusterSystems of rows x (n, p) of the design with residuals (n,).

    `effects` are codes (n,) and the covariance (p, p) between them, for every grouping of the rows.
    The clusters are those of the last one: they are independent, and all have rows.
    """
    size = np.sqrt(np.mean(x**2, axis=0))  # columns of like length lose fewest digits
    scale = np.where(size > 0, size, 1.0)
    effects = [(codes, each * np.multiply.outer(scale, scale)) for codes, each in effects]
    table, clusters = np.column_stack([x / scale, residuals]), effects[-1][0]
    order = np.argsort(clusters, kind="stable")
    lowers, whitened = [], []
    for at in np.split(order, np.cumsum(np.bincount(clusters))[:-1]):
        rows, codes = table[at], [codes[at] for codes, _ in effects]
        if len(effects) == 1:
            rows = _triangle(rows)
            codes = [np.zeros(len(rows), dtype=np.intp)]
        X = rows[:, :-1]
        covariance = noise * np.eye(len(X))
        for code, (_, between) in zip(codes, effects, strict=True):
            covariance += (X @ between @ X.T) * (code[:, None] == code)
        lowers.append(np.linalg.cholesky(covariance))
        whitened.append(solve_triangular(lowers[-1], rows, lower=True))
    columns: Any = np.concatenate(whitened)
    # A factor of the columns themselves has twice the digits of one of their products.
    orthonormal, triangle, pivots = qr(columns[:, :-1], mode="economic", pivoting=True)
    size = np.abs(np.diag(triangle))
    rank = int(np.sum(size > _DEPENDENT * size[0]))
    basis = np.zeros((x.shape[1], rank))
    basis[pivots[:rank]] = solve_triangular(triangle[:rank, :rank], np.eye(rank))
    ends = np.cumsum([len(rows) for rows in whitened])[:-1]
    blocks = np.split(orthonormal[:, :rank], ends)
    errors = [rows[:, -1] for rows in whitened]
    parts: list[Any] = [
        (lower @ rows, lower @ error, lower @ lower.T)
        for lower, rows, error in zip(lowers, blocks, errors, strict=True)
    ]
    return ClusterSystems(
        basis / scale[:, None],
        parts,
        np.array([rows.T @ rows for rows in blocks]),
        np.array([rows.T @ error for rows, error in zip(blocks, errors, strict=True)]),
    )


def robust_errors(
    systems: ClusterSystems, L: Floats, adjusted: bool, independent: Floats, estimates: Floats
) -> RobustErrors:
    """RobustErrors of combinations L (k, p); with `adjusted` CR2, otherwise CR0.

    The joint test is that of `independent` ones (r, p) of them, with estimates (r,).
    """
    own = _Sandwich.of(systems, L @ systems.basis, adjusted)
    spread = np.array([own.variance(k, k) for k in range(len(L))])
    means, variances = own.means(), np.sum(own.scores**2, axis=0)
    variances[own.is_open] = np.nan
    # Combinations that are independent, and of variance 1, if the model's covariance is right.
    independent = independent @ systems.basis
    lower = np.linalg.cholesky(independent @ independent.T)
    free = _Sandwich.of(systems, np.linalg.solve(lower, independent), adjusted)
    joint = _hotelling_test(free, np.linalg.solve(lower, estimates))
    dfs = np.divide(2 * means**2, spread, out=np.full(len(L), np.nan), where=~own.is_open)
    return RobustErrors(variances, dfs, joint)


class _Sandwich(NamedTuple):
    """Parts of the sandwich of c combinations, from the weights u of m clusters' residuals."""

    scores: Floats  # (m, c), u' r
    squares: Floats  # (m, c, c), u' V u
    crossed: Floats  # (m, c, k), u' X
    is_open: Any  # (c,), whether one cluster decides it

    @classmethod
    def of(cls, systems, L, adjusted):
        parts = []
        for X, error, covariance in systems.parts:
            weights = np.linalg.solve(covariance, X @ L.T)
            if adjusted:
                weights = _adjustment(covariance, X @ X.T) @ weights
            parts.append((weights.T @ error, weights.T @ covariance @ weights, weights.T @ X))
        scores, squares, crossed = (np.array(each) for each in zip(*parts, strict=True))
        found = cls(scores, squares, crossed, np.zeros(len(L), bool))
        # CR2 is unbiased, unless the adjustment has left out what a cluster has no residual of.
        lacking = adjusted & (found.means() < _LEAST_SHARE * np.sum(L**2, axis=1))
        return found._replace(is_open=lacking)

    def means(self):
        """Means (c,) of the combinations' variances, if the model's covariance is right."""
        explained = np.einsum("mck,mck->c", self.crossed, self.crossed)
        return np.einsum("mcc->c", self.squares) - explained

    def variance(self, a, b):
        """Variance of the entry (a, b) of the sandwich, if the model's covariance is right."""
        # Residuals u' r have the products of `squares`, less u' X (X' V^-1 X)^-1 X' u also between
        # clusters: sums of products over pairs of clusters are traces of k x k matrices.
        crossed = self.crossed
        aa, bb, ab = (
            (self.squares[:, i, j], np.einsum("mk,mk->m", crossed[:, i], crossed[:, j]))
            for i, j in ((a, a), (b, b), (a, b))
        )
        total = aa[0] * bb[0] - aa[0] * bb[1] - bb[0] * aa[1] + ab[0] ** 2 - 2 * ab[0] * ab[1]
        products = crossed[:, a].T @ crossed[:, b]
        return float(np.sum(total) + np.sum(products**2) + np.sum(products * products.T))


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


def _hotelling_test(own, estimates):
    """Test of Pustejovsky and Tipton (2018) of independent estimates (r,) of variance 1."""
    r, pairs = len(estimates), combinations_with_replacement(range(len(estimates)), 2)
    variances = [(1 + (a != b)) * own.variance(a, b) for a, b in pairs]
    dof = r * (r + 1) / sum(variances)
    left, sandwich = dof - r + 1, own.scores.T @ own.scores
    # A test needs more clusters than estimates, and residuals that tell the errors of all.
    if left <= 0 or own.is_open.any() or np.linalg.matrix_rank(sandwich, hermitian=True) < r:
        return JointTest(np.nan, r, 0.0)
    statistic = estimates @ np.linalg.solve(sandwich, estimates)
    return JointTest(float(statistic * left / (dof * r)), r, float(left))
