"""Triangular factors of clients' rows: what least squares, means and variances need of them.

The rows [1 x y] of a client, times the roots of their weights, enter only through their products,
and so through any R with R'R equal to these. An upper triangle R of P columns is packed, row by
row, into P (P + 1) / 2 numbers.
"""

from typing import Any

import numpy as np
from scipy.linalg.lapack import dpstrf

CACHED_NUMBERS = (
    1 << 18
)  # of double precision: with two of them a block fits a core's cache of 4 MB
# Share of a column's variance within a client that others leave open, up to which it is rounding.
_LINEAR_COMBINATION = 1e-11
_SQUARE_ROUNDING = 8 * np.finfo(float).eps  # of a square sum, times the number of columns
_CANCELLATION = 1e-6  # and below which it takes care, as much of its digits is gone


class NotPositiveError(ValueError):
    """Products of a client are those of no rows; it has the client's position."""


def blocks_of_clients(n_clients, width):
    """Slices of clients whose triangles of `width` columns fit the cache."""
    step = max(CACHED_NUMBERS // (4 * width**2), 1)
    return [slice(start, min(start + step, n_clients)) for start in range(0, n_clients, step)]


def packed_length(width):
    """Numbers of an upper triangle of `width` columns."""
    return width * (width + 1) // 2


def pack(triangles):
    """Packed triangles (b, K) of trapezoids (b, k, P), k <= P."""
    k, width = triangles.shape[1:]
    rows, columns = np.triu_indices(width)
    packed = np.zeros((len(triangles), packed_length(width)))
    nonzero = rows < k  # a client of few rows has no more
    packed[:, nonzero] = triangles[:, rows[nonzero], columns[nonzero]]
    return packed


def unpack(packed, width):
    """Triangles (b, P, P) of packed ones (b, K)."""
    triangles = np.zeros((len(packed), width, width))
    triangles[:, *np.triu_indices(width)] = packed
    return triangles


def triangles_of_rows(rows, lowest, highest):
    """Triangles (b, k, P) of rows (b, n, P), the ones first, whose columns lie between bounds.

    Bounds (b, P - 1) are those of the other columns before they were weighted.
    """
    triangles: Any = with_positive_diagonals(np.linalg.qr(rows, mode="r"))
    # Rounding errors would tell apart what is constant within a client.
    ones = triangles[..., :1]
    constant = (lowest == highest)[:, None]
    triangles[..., 1:] = np.where(constant, lowest[:, None] * ones, triangles[..., 1:])
    return triangles


def with_positive_diagonals(triangles):
    """Trapezoids (..., k, P) with the same products, and no diagonal below 0: a normal form."""
    diagonals = np.diagonal(triangles, axis1=-2, axis2=-1)
    return triangles * np.where(diagonals < 0, -1.0, 1.0)[..., None]


def merge_triangles(first, second, lowest, highest):
    """Packed triangles (b, K) of clients whose rows are those of both; bounds as above."""
    width = lowest.shape[1] + 1
    result = np.empty_like(first)
    for part in blocks_of_clients(len(first), width):
        rows = np.concatenate([unpack(first[part], width), unpack(second[part], width)], axis=1)
        result[part] = pack(triangles_of_rows(rows, lowest[part], highest[part]))
    return result


def factorize(products, n_rows, lowest, highest):
    """Put packed triangles (b, K) in place of packed products R'R (b, K) of rows, the ones first.

    Cholesky's factorization, a column at a time for all clients of a block; with pivots for the few
    clients whose columns are nearly linear combinations of others. A column that is one, up to
    rounding, has a row of zeros. There are at most `n_rows` (b,) rows; bounds (b, P - 1) say which
    columns are constant. NotPositiveError has the first client whose products belong to no rows.
    """
    width = lowest.shape[1] + 1
    upper, diagonal = np.triu_indices(width), range(width)
    for part in blocks_of_clients(len(products), width):
        rest = np.zeros((width, width, len(products[part])))
        rest[upper] = products[part].T
        varies = lowest[part] != highest[part]
        about_means, close = _eliminate_ones(rest, varies.T)
        sizes, rows_left = about_means[diagonal, diagonal], n_rows[part] - 1
        if close.any():
            raise NotPositiveError(part.start + int(np.argmax(close)))
        # Of a small pivot little is known, and what follows is divided by its root.
        for k in range(1, width):
            share = np.divide(
                rest[k, k], sizes[k], out=np.zeros(len(rows_left)), where=sizes[k] > 0
            )
            nonzero = (share > _LINEAR_COMBINATION) & (rows_left > 0)
            # What rows cannot explain, and NaN, is left to the careful way.
            close |= nonzero & (share < _CANCELLATION) | ~(share > -_LINEAR_COMBINATION)
            close |= (rows_left == 0) & (share > _LINEAR_COMBINATION)
            rows_left -= nonzero
            rest[k, k:] = rest[k, k:] / np.sqrt(np.where(nonzero, rest[k, k], np.inf))
            for j in range(k + 1, width):
                rest[j, j:] -= rest[k, j] * rest[k, j:]
        for client in np.flatnonzero(close):
            products_left, sums = about_means[1:, 1:, client], rest[0, 1:, client]
            careful = _pivoted(products_left, sums, n_rows[part][client] - 1)
            if careful is None:
                raise NotPositiveError(part.start + int(client))
            rest[1:, 1:, client] = careful
        products[part] = rest[upper].T


def _eliminate_ones(rest, varies):
    """Divide the first row by the root of the weights; products (P, P, b) about the means.

    Also whether a square sum (b,) is negative beyond rounding, or a weight not positive.
    """
    diagonal = range(1, len(rest))
    raw = rest[diagonal, diagonal]
    wrong = ~(rest[0, 0] > 0)
    rest[0] /= np.sqrt(np.where(wrong, np.inf, rest[0, 0]))
    for j in diagonal:
        rest[j, j:] -= rest[0, j] * rest[0, j:]
    sizes = rest[diagonal, diagonal]
    wrong |= ~(sizes >= -_CANCELLATION * raw).all(axis=0)
    # What is constant, exactly or but for rounding, has no products about its mean.
    varies = varies & (sizes > _SQUARE_ROUNDING * len(rest) * raw)
    for j in diagonal:
        rest[j, j:] *= varies[j - 1] & varies[j - 1 :]
    return rest.copy(), wrong


def _pivoted(products, sums, most):
    """Triangle (k, k) of at most so many rows, or None if the products are those of no rows.

    Columns with the largest pivots come first, which keeps rounding errors small. Products are
    those about means, from which squares of `sums` (k,) were subtracted.
    """
    symmetric = np.triu(products) + np.triu(products, 1).T
    sizes = np.diag(symmetric)
    if not (np.isfinite(symmetric).all() and (sizes >= 0).all()):
        return None
    # What is left of a large square sum has its rounding errors, and should come late.
    room = _SQUARE_ROUNDING * len(products) / _LINEAR_COMBINATION
    scale = np.sqrt(np.where(sizes > 0, np.maximum(sizes, room * sums**2), 1.0))
    scaled = symmetric / np.multiply.outer(scale, scale)
    factor, pivots, rank, _ = dpstrf(scaled, tol=_LINEAR_COMBINATION)
    # LAPACK takes products below the tolerance for none, and so leaves other rows as they were.
    rows = np.zeros_like(scaled)
    rows[: min(rank, most), pivots - 1] = np.triu(factor)[: min(rank, most)]
    if np.abs(rows.T @ rows - scaled).max(initial=0.0) > _CANCELLATION:
        return None
    return with_positive_diagonals(np.triu(np.linalg.qr(rows * scale, mode="r")))
