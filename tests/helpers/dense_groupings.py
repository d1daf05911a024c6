"""Linear mixed models of several groupings with the covariance of all rows written out."""

from typing import NamedTuple

import numpy as np
from scipy.linalg import block_diag


class Effects(NamedTuple):
    """Effects of a grouping's levels on rows; a code of -1 stands for no level, or a new one."""

    codes: np.ndarray  # (n,)
    columns: np.ndarray  # (n, q)
    covariance: np.ndarray  # (q, q)

    def shared(self, other):
        """Covariances (n, m) of the effects on these rows with those on others."""
        same = (self.codes[:, None] == other.codes) & (self.codes >= 0)[:, None]
        return same * (self.columns @ self.covariance @ other.columns.T)

    def indicator(self, n_levels=None):
        """Matrix (n, L q) from all effects to the rows."""
        n_levels = self.codes.max() + 1 if n_levels is None else n_levels
        n, q = self.columns.shape
        result, seen = np.zeros((n, n_levels, q)), np.flatnonzero(self.codes >= 0)
        result[seen, self.codes[seen]] = self.columns[seen]
        return result.reshape(n, -1)


class DenseFit(NamedTuple):
    """Generalized least squares at given variances."""

    log_likelihood: float
    population: np.ndarray  # (p,)
    population_covariance: np.ndarray  # (p, p)
    inverse: np.ndarray  # (n, n), of the rows' covariance
    residuals: np.ndarray  # (n,)

    @property
    def pull(self):
        """P y (n,)."""
        return self.inverse @ self.residuals

    def projection(self, X):
        """P (n, n): the inverse without what the population's columns explain."""
        shared = self.inverse @ X
        return self.inverse - shared @ self.population_covariance @ shared.T


def solve(X, y, weights, effects, noise, restricted=True):
    """DenseFit of rows X (n, p), y and weights (n,), to which all `effects` add."""
    V = np.diag(noise / weights) + sum(each.shared(each) for each in effects)
    inverse = np.linalg.inv(V)
    normal = X.T @ inverse @ X
    covariance = np.linalg.inv(normal)
    population = covariance @ X.T @ inverse @ y
    residuals = y - X @ population
    n, log_det = len(y), np.linalg.slogdet(V)[1]
    if restricted:
        n, log_det = n - X.shape[1], log_det + np.linalg.slogdet(normal)[1]
    square = residuals @ inverse @ residuals
    value = -0.5 * (n * np.log(2 * np.pi) + log_det + square)
    return DenseFit(float(value), population, covariance, inverse, residuals)


def predict(fit, X, effects, new_X, new_effects):
    """Means and variances (m,) of the rows new_X (m, p) with effects new_effects."""
    pairs = list(zip(new_effects, effects, strict=True))
    shared = sum(new.shared(old) for new, old in pairs)
    mean = new_X @ fit.population + shared @ fit.pull
    prior = sum(_quadratic(new.columns, old.covariance) for new, old in pairs)
    left = new_X - shared @ fit.inverse @ X
    variance = prior - _quadratic(shared, fit.inverse)
    return mean, variance + _quadratic(left, fit.population_covariance)


class DensePosterior(NamedTuple):
    """Estimates and error covariances of all effects, then the population's coefficients."""

    estimates: np.ndarray
    conditional: np.ndarray  # covariance of the effects alone, were the population known
    total: np.ndarray  # of all
    log_likelihood: float  # restricted
    square: float  # of the residuals, in the covariance of the rows
    sizes: list  # numbers of effects of each grouping

    def blocks(self, covariance, k, q):
        """Variances (L, q) of the effects of a grouping."""
        start = sum(self.sizes[:k])
        return np.diag(covariance)[start : start + self.sizes[k]].reshape(-1, q)


def posterior(X, y, weights, effects, noise):
    """DensePosterior of rows X (n, p), y and weights (n,), to which all `effects` add."""
    fit = solve(X, y, weights, effects, noise)
    indicators = [each.indicator() for each in effects]
    indicator, sizes = np.hstack(indicators), [part.shape[1] for part in indicators]
    blocks = [
        np.kron(np.eye(size // len(each.covariance)), each.covariance)
        for each, size in zip(effects, sizes, strict=True)
    ]
    covariance = block_diag(*blocks)
    loadings = indicator @ covariance
    conditional = covariance - loadings.T @ fit.inverse @ loadings
    pull, error = loadings.T @ fit.inverse @ X, fit.population_covariance
    total = np.block([
        [conditional + pull @ error @ pull.T, -pull @ error],
        [-error @ pull.T, error],
    ])  # fmt: skip
    estimates = np.append(loadings.T @ fit.pull, fit.population)
    square = fit.residuals @ fit.pull
    return DensePosterior(estimates, conditional, total, fit.log_likelihood, square, sizes)


def _quadratic(rows, matrix):
    return np.sum((rows @ matrix) * rows, axis=1)
