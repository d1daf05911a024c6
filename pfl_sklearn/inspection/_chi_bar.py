"""Null distributions of likelihood ratios where variances may be zero.

A likelihood ratio behaves like the squared length of a normal vector's projection onto a cone: the
directions in which the larger model extends the smaller one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.special import comb
from scipy.stats import chi2

from pfl_sklearn._typing import Floats

_DRAWS = 20_000  # a p-value of 0.05 is then off by 0.0015
_DRAWN_NUMBERS = 1 << 22  # of all matrices together, 32 MB
_FEWEST_DRAWS = 200  # of large matrices, whose weights vary little


class ChiBarSquare(NamedTuple):
    """Mixture of chi-square distributions; 0 degrees of freedom stand for the number 0."""

    degrees_of_freedom: tuple[int, ...]
    weights: tuple[float, ...]

    def plus(self, n_linear: int) -> ChiBarSquare:
        """The distribution with an independent chi-square variable of `n_linear` degrees added."""
        return ChiBarSquare(tuple(k + n_linear for k in self.degrees_of_freedom), self.weights)

    def tail(self, value: float) -> float:
        """Probability of at least `value`."""
        if value <= 0:  # the number 0 is at least 0, too
            return 1.0
        tails = [chi2.sf(value, k) if k else 0.0 for k in self.degrees_of_freedom]
        return float(np.dot(self.weights, tails))


class SimulatedCone(NamedTuple):
    """Distribution by drawn directions: the share of a normal vector's square that is explained."""

    n_dimensions: int
    shares: Floats  # (n_draws,)

    def tail(self, value: float) -> float:
        """Probability of at least `value`."""
        if value <= 0:
            return 1.0
        with np.errstate(divide="ignore"):
            return float(np.mean(chi2.sf(value / self.shares, self.n_dimensions)))


def null_of_independent_variances(r: int) -> ChiBarSquare:
    """Distribution for r new variances whose estimates are uncorrelated."""
    return ChiBarSquare(tuple(range(r + 1)), tuple(float(comb(r, k)) / 2**r for k in range(r + 1)))


def null_of_full_covariance(r: int) -> ChiBarSquare:
    r"""Distribution for a new covariance (r, r): projections onto semidefinite matrices.

    A symmetric normal matrix whose projection has rank s, with eigenvalues :math:`\lambda_i > 0`
    and :math:`-\mu_j < 0`, has the squared length of s (s + 1) / 2 + a degrees of freedom, where a
    counts successes in trials of probabilities :math:`\lambda_i / (\lambda_i + \mu_j)`. That
    follows from the product of :math:`\lambda_i + \mu_j` in the density of the eigenvalues.
    """
    size = r * (r + 1) // 2
    if r <= 2:  # known in closed form, so the usual tests depend on no draws
        half = 0.5 if r == 1 else np.sqrt(0.125)
        weights = np.array([0.5, 0.5] if r == 1 else [0.5 - half, half, half, 0.5 - half])
    else:
        weights = _semidefinite_weights(_eigenvalues(r))
        weights = (weights + weights[::-1]) / 2  # the cone is its own dual
    return ChiBarSquare(tuple(range(size + 1)), tuple(map(float, weights)))


def null_of_low_rank(q: int, rank: int, n_linear: int, *, at_zero: bool) -> SimulatedCone:
    """Distribution for loadings (q, rank) beside a ridge, which is new, too, if `at_zero`."""
    values = _eigenvalues(q)
    bottom, top = values[:, : q - rank], values[:, q - rank :]
    ridge = bottom.mean(axis=1, keepdims=True)
    total, rest = np.sum(values**2, axis=1), np.sum((bottom - ridge) ** 2, axis=1)
    n_dimensions = q * (q + 1) // 2 + n_linear
    # The best fit of low rank keeps the largest eigenvalues, and the ridge is the others' mean.
    if at_zero:  # ridge and loadings are variances then, and none may be negative
        ridge = np.maximum(ridge, 0.0)
        rest = np.sum((bottom - ridge) ** 2, axis=1) + np.sum(np.minimum(top, 0.0) ** 2, axis=1)
    else:  # the smaller model has a ridge of its own: the common part is no new direction
        total, n_dimensions = total - q * values.mean(axis=1) ** 2, n_dimensions - 1
    # Linear parameters explain all of their directions. Seed 1: independent of the eigenvalues.
    linear = np.random.default_rng(1).chisquare(n_linear, len(values)) if n_linear else 0.0
    return SimulatedCone(n_dimensions, np.maximum(total - rest + linear, 0.0) / (total + linear))


def _eigenvalues(r):
    """Ascending eigenvalues (n_draws, r) of symmetric normal matrices, seeded.

    Entries off the diagonal have half the variance of those on it, as in a vector of the lower
    triangle with entries off the diagonal multiplied by the root of 2.
    """
    n_draws = max(min(_DRAWS, _DRAWN_NUMBERS // r**2), _FEWEST_DRAWS)
    drawn = np.random.default_rng(0).standard_normal((n_draws, r, r))
    return np.linalg.eigvalsh((drawn + drawn.transpose(0, 2, 1)) / 2)


def _semidefinite_weights(values):
    """Weights (r (r + 1) / 2 + 1,) of the degrees of freedom, from eigenvalues (n_draws, r)."""
    r = values.shape[1]
    weights, ranks = np.zeros(r * (r + 1) // 2 + 1), np.sum(values > 0, axis=1)
    for s in np.unique(ranks):
        of_rank = values[ranks == s]
        above, below = of_rank[:, r - s :], -of_rank[:, : r - s]
        odds = above[:, :, None] / (above[:, :, None] + below[:, None, :])
        odds = odds.reshape(len(of_rank), s * (r - s))
        least = s * (s + 1) // 2
        weights[least : least + odds.shape[1] + 1] += _successes(odds).sum(axis=0)
    return weights / len(values)


def _successes(odds):
    """Distributions (n, k + 1) of the number of successes in trials of probabilities (n, k)."""
    chances = np.zeros((len(odds), odds.shape[1] + 1))
    chances[:, 0] = 1.0
    for k in range(odds.shape[1]):
        p = odds[:, k, None]
        chances[:, 1 : k + 2] = chances[:, 1 : k + 2] * (1 - p) + chances[:, : k + 1] * p
        chances[:, 0] *= 1 - p[:, 0]
    return chances
