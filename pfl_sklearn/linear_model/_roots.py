"""Roots of symmetric, positive semi-definite matrices that may be singular."""

import numpy as np

_RANK = 1e-11


def square_root(covariance):
    """Root L (q, q) of a covariance L L'."""
    values, vectors = np.linalg.eigh(covariance)
    return vectors * np.sqrt(np.maximum(values, 0.0))


def inverse_root(normal):
    """Root L (p, rank) of the pseudo-inverse L L' of a matrix, and the matrix's log determinant."""
    if not len(normal):
        return np.zeros((0, 0)), 0.0
    values, vectors = np.linalg.eigh(normal)
    kept = values > _RANK * max(values[-1], 0.0)
    return vectors[:, kept] / np.sqrt(values[kept]), float(np.log(values[kept]).sum())
