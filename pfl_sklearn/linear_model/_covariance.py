"""Shapes of a between-client covariance, as factors that are linear in free parameters.

A covariance is L L' with a factor L (q, r) whose entries are free parameters or zero. Zero
variances lie inside the parameter space, so a search needs no bounds.
"""

from typing import NamedTuple

import numpy as np


class Factor(NamedTuple):
    """Factor (q, r): the entry ``positions[k]`` of the flat factor is parameter ``owners[k]``."""

    shape: tuple
    positions: np.ndarray
    owners: np.ndarray
    start: np.ndarray  # (n_parameters,), a factor of the identity or near it

    @property
    def starts(self):
        """Several starts; none is a step of length 1 away from zero, which is stationary."""
        return [scale * self.start for scale in (0.7, 0.07, 7.0)]

    def row_scales(self, parameters):
        """Lengths (n_parameters,) of the rows of the factor that hold a parameter."""
        rows = np.sqrt(np.sum(self.matrix(parameters) ** 2, axis=1))
        scales = np.zeros(len(self.start))
        np.maximum.at(scales, self.owners, rows[self.positions // self.shape[1]])
        return scales

    def matrix(self, parameters):
        """Factor (q, r) of parameters (n_parameters,)."""
        flat = np.zeros(self.shape[0] * self.shape[1])
        flat[self.positions] = parameters[self.owners]
        return flat.reshape(self.shape)

    def pull_back(self, gradient):
        """Gradient (n_parameters,) from the one in the factor's entries (q, r)."""
        return np.bincount(self.owners, gradient.ravel()[self.positions], len(self.start))


def factor_of(covariance_type, q, rank=None):
    """Factor of a covariance of q coefficients.

    Parameters
    ----------
    covariance_type : {"spherical", "diag", "full", "low_rank"}
        "low_rank" is B B' of rank `rank` plus a common ridge, which is estimated as well.
    q : int
    rank : int or None
        For "low_rank"; None is 1.

    Returns
    -------
    Factor
    """
    diagonal = np.arange(q) * (q + 1)
    if covariance_type == "spherical":
        return Factor((q, q), diagonal, np.zeros(q, dtype=np.intp), np.ones(1))
    if covariance_type == "diag":
        return Factor((q, q), diagonal, np.arange(q), np.ones(q))
    if covariance_type == "full":
        lower = np.flatnonzero(np.tril(np.ones((q, q))))
        return Factor((q, q), lower, np.arange(len(lower)), np.eye(q).ravel()[lower])
    return _low_rank(q, min(rank or 1, q))


def _low_rank(q, rank):
    shape = (q, rank + q)
    at = np.arange(q * (rank + q)).reshape(shape)
    loadings = at[:, :rank][np.tril(np.ones((q, rank), dtype=bool))]
    ridge = at[np.arange(q), rank + np.arange(q)]
    owners = np.concatenate([np.arange(len(loadings)), np.full(q, len(loadings))])
    start = np.where(loadings // (rank + q) == loadings % (rank + q), 1.0, 0.3)
    return Factor(shape, np.concatenate([loadings, ridge]), owners, np.append(start, 0.5))
