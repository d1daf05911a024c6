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
from typing import NamedTuple

import numpy as np

from pfl_sklearn._typing import Floats, Integers
from pfl_sklearn.linear_model._mixed._normal_rows._degrees_of_freedom import JointTest

_ZERO = 1e-12  # share of the largest eigenvalue, below which another is 0


class RobustErrors(NamedTuple):
    """Variances (k,) of combinations, their degrees of freedom (k,), and a joint test."""

    variances: Floats
    dfs: Floats
    joint: JointTest


class ClientSystems(NamedTuple):
    """Rows of clients and their covariances, and what they say of p coefficients.

    All columns are divided by `scale` (p,).
    """

    scale: Floats
    parts: list[tuple[Floats, Floats]]  # rows (n, p + 1) with the residual last, and V (n, n)
    informations: Floats  # (m, p, p), X' V^-1 X of every client
    scores: Floats  # (m, p), X' V^-1 r

    @property
    def largest_score(self) -> float:
        """Largest sum of scores, in standard deviations: 0 at the estimates of these rows."""
        total = np.diag(self.informations.sum(axis=0))
        length = np.sqrt(np.maximum(total, np.finfo(float).tiny))
        return float(np.max(np.abs(self.scores.sum(axis=0)) / length))


def client_systems(
    x: Floats, residuals: Floats, noise: float, effects: Sequence[tuple[Integers, Floats]]
) -> ClientSystems:
    """ClientSystems of rows x (n, p) of the design with residuals (n,).

    `effects` are codes (n,) and the covariance (p, p) between them, for every grouping of the rows.
    The clusters are those of the last one: they are independent, and all have rows.
    """
    size = np.sqrt(np.mean(x**2, axis=0))  # columns of like length lose fewest digits
    scale = np.where(size > 0, size, 1.0)
    effects = [(codes, each * np.multiply.outer(scale, scale)) for codes, each in effects]
    table, clusters = np.column_stack([x / scale, residuals]), effects[-1][0]
    order = np.argsort(clusters, kind="stable")
    parts, products = [], []
    for at in np.split(order, np.cumsum(np.bincount(clusters))[:-1]):
        rows, codes = table[at], [codes[at] for codes, _ in effects]
        if len(effects) == 1:
            rows = _triangle(rows)
            codes = [np.zeros(len(rows), dtype=np.intp)]
        X = rows[:, :-1]
        covariance = noise * np.eye(len(X))
        for code, (_, between) in zip(codes, effects, strict=True):
            covariance += (X @ between @ X.T) * (code[:, None] == code)
        parts.append((rows, covariance))
        products.append(X.T @ np.linalg.solve(covariance, rows))
    both = np.array(products)
    return ClientSystems(scale, parts, both[:, :, :-1], both[:, :, -1])


def robust_errors(
    systems: ClientSystems, L: Floats, adjusted: bool, basis: Floats, of_basis: Floats
) -> RobustErrors:
    """RobustErrors of combinations L (k, p); with `adjusted` CR2, otherwise CR0.

    The joint test is that of a `basis` (r, p) of them with estimates (r,).
    """
    inverse = np.linalg.pinv(systems.informations.sum(axis=0), hermitian=True)
    own = _Sandwich.of(systems, L / systems.scale, inverse, adjusted)
    spread = np.array([own.variance(k, k, inverse) for k in range(len(L))])
    # Combinations that are independent, and of variance 1, if the model's covariance is right.
    basis = basis / systems.scale
    lower = np.linalg.cholesky(basis @ inverse @ basis.T)
    free = _Sandwich.of(systems, np.linalg.solve(lower, basis), inverse, adjusted)
    joint = _hotelling_test(free, np.linalg.solve(lower, of_basis), inverse)
    dfs = 2 * own.means(inverse) ** 2 / spread
    return RobustErrors(np.sum(own.scores**2, axis=0), dfs, joint)


class _Sandwich(NamedTuple):
    """Parts of the sandwich of k combinations, from the weights u of m clusters' residuals."""

    scores: Floats  # (m, k), u' r
    squares: Floats  # (m, k, k), u' V u
    crossed: Floats  # (m, k, p), u' X

    @classmethod
    def of(cls, systems, L, inverse, adjusted):
        parts = []
        for rows, covariance in systems.parts:
            X = rows[:, :-1]
            weights = np.linalg.solve(covariance, X @ inverse @ L.T)
            if adjusted:
                weights = _adjustment(covariance, X @ inverse @ X.T) @ weights
            parts.append((weights.T @ rows[:, -1], weights.T @ covariance @ weights, weights.T @ X))
        return cls._make(np.array(each) for each in zip(*parts, strict=True))

    def means(self, inverse):
        """Means (k,) of the combinations' variances, if the model's covariance is right."""
        explained = np.einsum("mkp,mkp->k", self.crossed @ inverse, self.crossed)
        return np.einsum("mkk->k", self.squares) - explained

    def variance(self, a, b, inverse):
        """Variance of the entry (a, b) of the sandwich, if the model's covariance is right."""
        # Residuals u' r have the products of `squares`, less u' X (X' V^-1 X)^-1 X' u also between
        # clusters: sums of products over pairs of clusters are traces of p x p matrices.
        pulled = self.crossed @ inverse
        aa, bb, ab = (
            (self.squares[:, i, j], np.einsum("mp,mp->m", pulled[:, i], self.crossed[:, j]))
            for i, j in ((a, a), (b, b), (a, b))
        )
        total = aa[0] * bb[0] - aa[0] * bb[1] - bb[0] * aa[1] + ab[0] ** 2 - 2 * ab[0] * ab[1]
        products = self.crossed[:, a].T @ self.crossed[:, b]
        one, other = inverse @ products, inverse @ products.T
        return float(np.sum(total) + np.sum(one * other.T) + np.sum(one * one.T))


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


def _hotelling_test(own, estimates, inverse):
    """Test of Pustejovsky and Tipton (2018) of independent estimates (r,) of variance 1."""
    r, pairs = len(estimates), combinations_with_replacement(range(len(estimates)), 2)
    variances = [(1 + (a != b)) * own.variance(a, b, inverse) for a, b in pairs]
    dof = r * (r + 1) / sum(variances)
    statistic = estimates @ np.linalg.solve(own.scores.T @ own.scores, estimates)
    left = dof - r + 1
    if left <= 0:  # fewer clusters than such a test needs
        return JointTest(np.nan, r, 0.0)
    return JointTest(float(statistic * left / (dof * r)), r, float(left))
