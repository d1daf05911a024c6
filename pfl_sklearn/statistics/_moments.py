"""Clients' moments as an engine sums them, and the triangles that they stand for.

Columns are numbered, features first and then targets. Sums are those of columns that were centred
and scaled by constants, which keeps the digits; smallest and largest values are those of the
columns as they are. With names the moments of a client are

    n                 rows
    w, log_w          sums of the weights and of their logarithms
    s_j               sums of the columns
    p_i_j (i <= j)    sums of products
    low_j, high_j     smallest and largest values
"""

import numpy as np

from pfl_sklearn._clients import shown
from pfl_sklearn.statistics._triangles import factorize

_ROUNDING = 1e-6  # of means, over what they are made of


def moment_names(n_columns):
    """Names of sums, of products, and of smallest and largest values."""
    every = range(n_columns)
    products = [f"p_{i}_{j}" for i in every for j in range(i, n_columns)]
    return (
        [f"s_{j}" for j in every],
        products,
        [f"low_{j}" for j in every],
        [f"high_{j}" for j in every],
    )


def read_moments(moments, n_columns, ids):
    """Sizes and log weights (m,), packed moments (m, K) and bounds (m, p) of a dict of moments.

    The dict is emptied, so that no number is there twice.

    Raises
    ------
    ValueError
        For moments that are not there, and for values that no rows have.
    """
    sums, products, lowest, highest = moment_names(n_columns)
    weighted = "w" in moments
    needed = ["n", *sums, *products, *lowest, *highest, *(["w", "log_w"] if weighted else [])]
    absent = [name for name in needed if name not in moments]
    if absent:
        raise ValueError(f"moments lack the columns {absent[:20]}.")

    def columns(*names):
        values = np.empty((len(ids), len(names)))
        for j, name in enumerate(names):
            values[:, j] = column = moments.pop(name)
            if not np.isfinite(values[:, j]).all():
                worst = int(np.argmin(np.isfinite(values[:, j])))
                raise ValueError(
                    f"moments must be finite; got {name}={column[worst]} of {shown(ids[worst])}."
                )
        return values

    low, high, n = columns(*lowest), columns(*highest), columns("n")[:, 0]
    moments.setdefault("w", n)
    log_weights = columns("log_w")[:, 0] if weighted else np.zeros(len(ids))
    packed = columns("w", *sums, *products)
    for what, bad in (
        ("n must be a whole number above 0", (n < 1) | (n % 1 != 0)),
        ("w must be above 0", packed[:, 0] <= 0),
        ("low_j must be at most high_j", (low > high).any(axis=1)),
    ):
        if bad.any():
            raise ValueError(f"moments of client {shown(ids[np.argmax(bad)])} are wrong: {what}.")
    return n.astype(np.int64), log_weights, packed, low, high


def check_means(ids, packed, bounds, centre, scale):
    """Raise ValueError if means lie outside of the bounds, as with another centre or scale."""
    p = len(centre)
    means = centre + scale * packed[:, 1 : p + 1] / packed[:, :1]
    room = _ROUNDING * (np.abs(centre) + scale + np.maximum(*map(np.abs, bounds)))
    outside = ((means < bounds[0] - room) | (means > bounds[1] + room)).any(axis=1)
    if outside.any():
        worst = shown(ids[np.argmax(outside)])
        raise ValueError(
            f"moments of client {worst} have means outside of low_j and high_j; centre and scale "
            "must be those of the query."
        )


def triangles_of_moments(packed, n_rows, bounds, centre, scale):
    """Put packed triangles (m, K) of the columns as they are in place of moments.

    Parameters
    ----------
    packed : ndarray of shape (m, K)
        Sums of the weights, sums of the columns, and sums of their products.
    n_rows : ndarray of shape (m,)
    bounds : two ndarrays of shape (m, p)
    centre, scale : ndarrays of shape (p,)
    """
    p = len(centre)
    factorize(packed, n_rows, *bounds)
    first = packed[:, :1].copy()
    # [1 x] = [1 (x - c) / s] A with an upper triangle A: so is the product with A.
    _, columns = np.triu_indices(p + 1)
    packed *= np.append(1.0, scale)[columns]
    packed[:, 1 : p + 1] += first * centre
    constant = bounds[0] == bounds[1]
    np.copyto(packed[:, 1 : p + 1], bounds[0] * first, where=constant)
