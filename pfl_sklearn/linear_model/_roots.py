"""Roots of symmetric, positive semi-definite matrices that may be singular."""

import numpy as np

_RANK = 1e-11
_OUTSIDE = 1e-5  # share of a combination outside the row space, above which it is left open


def square_root(covariance):
    """Root L (q, q) of a covariance L L', exact for every variance on its own scale."""
    lengths = _lengths(covariance)
    values, vectors = np.linalg.eigh(covariance / lengths / lengths[:, None])
    return lengths[:, None] * vectors * np.sqrt(np.maximum(values, 0.0))


def inverse_root(normal, scale=1.0):
    """Root L (p, rank) of a generalized inverse L L' of a matrix, and a log pseudo-determinant.

    The latter is of the matrix before its columns and rows were multiplied by `scale` (p,). Columns
    get length 1 before the rank is judged: what varies between clients only weighs little where
    clients differ much, and is not less determined for that.
    """
    if not len(normal):
        return np.zeros((0, 0)), 0.0
    lengths, values, vectors, kept = _spectrum(normal)
    values, vectors = values[kept], vectors[:, kept]
    log_det = np.log(values).sum() + 2 * _log_volume(vectors, lengths / scale)
    return vectors / np.sqrt(values) / lengths[:, None], float(log_det)


def estimable(normal, combinations=None):
    """Whether the normal equations (p, p) determine combinations (k, p) of the coefficients.

    They do not if a combination leaves the row space; without `combinations` (p,) answers for the
    coefficients themselves.
    """
    lengths, _, vectors, kept = _spectrum(normal)
    scaled = np.eye(len(normal)) if combinations is None else combinations
    scaled = scaled / lengths
    outside = np.linalg.norm(scaled @ vectors[:, ~kept], axis=1)
    return outside <= _OUTSIDE * np.linalg.norm(scaled, axis=1)


def _spectrum(normal):
    """Lengths (p,), eigenvalues and vectors of columns of length 1, and which are not nothing."""
    lengths = _lengths(normal)
    values, vectors = np.linalg.eigh(normal * np.multiply.outer(1 / lengths, 1 / lengths))
    kept = values > _RANK * max(values.max(initial=0.0), 0.0)
    return lengths, values, vectors, kept


def _lengths(matrix):
    """Roots (p,) of the diagonal; 1 for those that are 0."""
    lengths = np.sqrt(np.maximum(np.diag(matrix), 0.0))
    lengths[lengths == 0] = 1.0
    return lengths


def _log_volume(vectors, lengths):
    """Log volume of orthonormal columns (p, rank) whose rows are multiplied by `lengths` (p,)."""
    if vectors.shape[1] == len(lengths):
        return np.log(lengths).sum()
    order = np.argsort(-lengths)  # long rows first: else short ones drown in their rounding errors
    upper = np.linalg.qr(vectors[order] * lengths[order, None], mode="r")
    return np.log(np.abs(np.diag(upper))).sum()
