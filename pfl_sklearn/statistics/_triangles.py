"""Triangular factors of clients' rows: what least squares, means and variances need of them.

The rows [1 x y] of a client, times the roots of their weights, enter only through their products,
and so through any R with R'R equal to these. An upper triangle R of P columns is packed, row by
row, into P (P + 1) / 2 numbers.
"""

from typing import Any

import numpy as np

_CELLS = 1 << 17  # numbers of a block of clients, which then fits the processor's cache
# A pivot below it, times the number of columns and the sum of squares, is nothing but rounding.
_ROUNDING = 8 * np.finfo(float).eps
# Share of a column's variance within a client that others leave open, from which on it is rounding:
# its square root is the precision of what a moment says of a direction.
_COMBINATION = 1e-11
_TOO_NEGATIVE = 1e-6  # a pivot below minus it, times the sum of squares, is no rounding error


class NotPositiveError(ValueError):
    """Products of a client are those of no rows; it has the client's position."""


def blocks_of_clients(n_clients, width):
    """Slices of clients whose triangles of `width` columns fit the cache."""
    step = max(_CELLS // (2 * width**2), 1)
    return [slice(start, min(start + step, n_clients)) for start in range(0, n_clients, step)]


def packed_length(width):
    """Numbers of an upper triangle of `width` columns."""
    return width * (width + 1) // 2


def pack(triangles):
    """Packed triangles (b, K) of trapezoids (b, k, P), k <= P."""
    k, width = triangles.shape[1:]
    rows, columns = np.triu_indices(width)
    packed = np.zeros((len(triangles), packed_length(width)))
    there = rows < k  # a client of few rows has no more
    packed[:, there] = triangles[:, rows[there], columns[there]]
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
    triangles: Any = np.linalg.qr(rows, mode="r")
    # Rounding errors would tell apart what is constant within a client.
    ones = triangles[..., :1]
    constant = (lowest == highest)[:, None]
    triangles[..., 1:] = np.where(constant, lowest[:, None] * ones, triangles[..., 1:])
    return triangles


def merged(first, second, lowest, highest):
    """Packed triangles (b, K) of clients whose rows are those of both; bounds as above."""
    width = lowest.shape[1] + 1
    result = np.empty_like(first)
    for part in blocks_of_clients(len(first), width):
        rows = np.concatenate([unpack(first[part], width), unpack(second[part], width)], axis=1)
        result[part] = pack(triangles_of_rows(rows, lowest[part], highest[part]))
    return result


def factorize(products, n_rows, lowest, highest):
    """Put packed triangles (b, K) in place of packed products R'R (b, K) of rows, the ones first.

    Cholesky's factorization, a column at a time for all clients of a block. A column that is a
    combination of those before, up to rounding, has a row of zeros. There are no more rows than
    `n_rows` (b,). Bounds (b, P - 1) say which columns are constant.

    Raises
    ------
    NotPositiveError
        With the first client whose products are those of no rows.
    """
    width = lowest.shape[1] + 1
    upper, diagonal = np.triu_indices(width), range(width)
    for part in blocks_of_clients(len(products), width):
        rest = np.zeros((width, width, len(products[part])))
        rest[upper] = products[part].T
        varies = np.vstack([np.ones(rest.shape[2], bool), (lowest[part] != highest[part]).T])
        left, sizes = n_rows[part].copy(), rest[diagonal, diagonal].copy()
        least = _ROUNDING * width * sizes
        for k in range(width):
            negative = ~(rest[k, k] >= -_TOO_NEGATIVE * sizes[k])  # or NaN
            if negative.any():
                raise NotPositiveError(part.start + int(np.argmax(negative)))
            there = (rest[k, k] > least[k]) & varies[k] & (left > 0)
            left -= there
            root = np.sqrt(np.where(there, rest[k, k], np.inf))
            rest[k, k:] = rest[k, k:] / root
            for j in range(k + 1, width):
                rest[j, j:] -= rest[k, j] * rest[k, j:]
                if k == 0:  # products about the means, which are 0 for what is constant
                    rest[j, j:] *= varies[j] & varies[j:]
            if k == 0:
                least = np.maximum(least, _COMBINATION * rest[diagonal, diagonal])
        products[part] = rest[upper].T
