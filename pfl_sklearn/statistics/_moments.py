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

from typing import Any, NamedTuple

import numpy as np

from pfl_sklearn._clients import format_id
from pfl_sklearn._warnings import warn_caller
from pfl_sklearn.statistics._cholesky import NotPositiveError, factorize
from pfl_sklearn.statistics._plausibility import (
    MOMENT_ROUNDING,
    outside_bounds,
    too_many_rows,
    wrong_weights,
)
from pfl_sklearn.statistics._rows import check_range

CHANGED = "the data changed between two queries of the engine."
_LARGEST_SQUARE_SHARE = 1e-6 / (
    64 * np.finfo(float).eps
)  # largest share of a square sum about other values
_TOLERATED_SHARE = 0.01  # of the clients, which may lose digits without a warning


class MomentTable(NamedTuple):
    """Moments of m clients about a centre and in a scale."""

    clients: Any  # (m,), sorted ids
    n_rows: np.ndarray  # (m,)
    log_weights: np.ndarray  # (m,)
    packed: np.ndarray  # (m, K): sums of the weights, of the columns, and of their products
    lowest: np.ndarray  # (m, p), neither centred nor scaled
    highest: np.ndarray  # (m, p)
    centre: np.ndarray  # (p,), or (m, p) where each client has its own
    scale: np.ndarray  # (p,)


def fields_of_moments(sums, names, n_targets, n_left_out, limited=False):
    """Fields of ClientStatistics of Moments, which give up their numbers.

    `sums` are the Moments of the rows, and perhaps of the same rows scaled to bounds; `names` are
    those of the features, then the targets; `limited` says whether values were put within the
    limits of a private fit, which reports nothing about them. ValueError for products that no rows
    have.
    """
    d, moments = len(names) - n_targets, sums[0]
    for table in sums[1:]:
        if not all(map(np.array_equal, table[:2], moments[:2])):
            raise ValueError(CHANGED)
    if not limited:
        heaviest = max(float(np.max(moments.packed[:, 0] / moments.n_rows)), 1.0)
        check_range((moments.lowest, moments.highest), d, heaviest)
        _warn_of_lost_digits(moments, names)
    for table in sums:
        try:
            triangles_of_moments(table)
        except NotPositiveError as error:
            client = format_id(moments.clients[error.args[0]])
            raise ValueError(
                f"moments of client {client} are those of no rows: the products are not positive "
                "semidefinite, or not about the centre of the sums."
            ) from None
    return {
        "clients": moments.clients,
        "n_samples_per_client": moments.n_rows,
        "n_features": d,
        "n_targets": n_targets,
        "feature_names": tuple(names[:d]),
        "target_names": tuple(names[d:]),
        "n_left_out": n_left_out,
        "packed": moments.packed,
        "log_weights": moments.log_weights,
        "lowest": moments.lowest,
        "highest": moments.highest,
        "clipped": sums[1].packed if len(sums) > 1 else None,
    }


def _warn_of_lost_digits(moments, names):
    """Warn if rounding of square sums about the centre shows in what clients vary by."""
    rows, columns = np.triu_indices(len(names) + 1)
    of_squares = np.flatnonzero(rows == columns)[1:]
    mean_weights = moments.packed[:, 0] / moments.n_rows
    for j, (name, at) in enumerate(zip(names, of_squares, strict=True)):
        spread = (moments.highest[:, j] - moments.lowest[:, j]) / moments.scale[j]
        # A column that varies by this much has half its square about the mean, at least.
        lost = (spread > 0) & (
            moments.packed[:, at] > _LARGEST_SQUARE_SHARE * mean_weights * spread**2 / 2
        )
        if lost.mean() > _TOLERATED_SHARE:
            warn_caller(
                f"sums of {name!r} lost digits of {lost.sum()} of {len(lost)} clients, whose "
                "values differ by little for their distance from the constant that was subtracted "
                "of all. from_rows keeps the digits; so may another unit, or the table without "
                "outliers.",
                UserWarning,
            )


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


def read_moments(ids, moments, centre, scale):
    """Moments of a dict of moments (m,) about a centre (p,) and in a scale (p,).

    The dict is emptied, so that no number is held twice. Raises ValueError for missing moments, and
    for values that no rows have.
    """
    sums, products, lowest, highest = moment_names(len(centre))
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
                    f"moments must be finite; got {name}={column[worst]} of client "
                    f"{format_id(ids[worst])}."
                )
        return values

    low, high, n = columns(*lowest), columns(*highest), columns("n")[:, 0]
    moments.setdefault("w", n)
    log_weights = columns("log_w")[:, 0] if weighted else np.zeros(len(ids))
    packed = columns("w", *sums, *products)
    for fault, bad in (
        ("n must be a whole number above 0", (n < 1) | (n % 1 != 0)),
        ("w must be above 0", packed[:, 0] <= 0),
        ("low_j must be at most high_j", (low > high).any(axis=1)),
    ):
        if bad.any():
            raise ValueError(
                f"moments of client {format_id(ids[np.argmax(bad)])} are wrong: {fault}."
            )
    return MomentTable(ids, n.astype(np.int64), log_weights, packed, low, high, centre, scale)


def read_constants(names, centre, scale):
    """Centre and scale (p,) of the columns with these names; None for 0 and 1."""
    constants = []
    for name, values, default in (("centre", centre, 0.0), ("scale", scale, 1.0)):
        values = np.full(len(names), default) if values is None else np.asarray(values, float)
        if values.shape != (len(names),) or not np.isfinite(values).all():
            raise ValueError(f"{name} must have one number for each of {names}; got {values}.")
        constants.append(values)
    if (constants[1] <= 0).any():
        raise ValueError(f"scale must be above 0; got {constants[1]}.")
    return constants


def check_moments(moments):
    """Raise ValueError for moments of no rows, such as about another centre or in another scale."""
    low, high, centre, scale = moments[-4:]
    p, weights = len(centre), moments.packed[:, :1]
    if too_many_rows(moments.n_rows):
        raise ValueError("moments have n of more rows than can be counted.")
    rows, columns = np.triu_indices(p + 1)
    with np.errstate(all="ignore"):  # of values that are refused later
        sums = moments.packed[:, 1 : p + 1] / weights
        squares = moments.packed[:, rows == columns][:, 1:] / weights
        means = centre + scale * sums
        spreads = scale * np.sqrt(np.maximum(squares - sums**2, 0.0))
        most = np.sqrt(np.maximum((high - means) * (means - low), 0.0))
    room = MOMENT_ROUNDING * (np.abs(centre) + scale + np.maximum(np.abs(low), np.abs(high)))
    for fault, wrong in (
        ("means outside of low_j and high_j", outside_bounds(means, low, high, room)),
        ("squares that need values beyond low_j or high_j", (spreads > most + room).any(axis=1)),
    ):
        if wrong.any():
            worst = format_id(moments.clients[np.argmax(wrong)])
            raise ValueError(
                f"moments of client {worst} have {fault}; centre and scale must be those of the "
                "query."
            )
    wrong = wrong_weights(moments.n_rows, weights[:, 0], moments.log_weights, False)
    if wrong.any():
        worst = format_id(moments.clients[np.argmax(wrong)])
        raise ValueError(
            f"moments of client {worst} are wrong: no n weights "
            "have the sum w and the sum log_w of natural logarithms."
        )


def triangles_of_moments(moments):
    """Put packed triangles (m, K) of the columns as they are in place of sums of Moments."""
    packed, low, high, centre, scale = moments[-5:]
    p = len(scale)
    factorize(packed, moments.n_rows, low, high)
    first = packed[:, :1].copy()
    # [1 x] = [1 (x - c) / s] A with an upper triangle A: so is the product with A.
    _, columns = np.triu_indices(p + 1)
    packed *= np.append(1.0, scale)[columns]
    packed[:, 1 : p + 1] += first * centre
    np.copyto(packed[:, 1 : p + 1], low * first, where=low == high)
