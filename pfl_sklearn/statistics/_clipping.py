"""Rows scaled to the bounds of a private fit before they are summed.

Scaling a row by a factor is the same as giving it the square of that as its weight. So the
triangles of scaled rows are those of weighted ones, and whatever sums weighted rows sums these.
"""

import math
from numbers import Real
from typing import NamedTuple

import narwhals as nw
import numpy as np

from pfl_sklearn._clients import format_id
from pfl_sklearn._columns import LARGEST, SMALLEST
from pfl_sklearn.privacy import RegressionMoments
from pfl_sklearn.statistics._cholesky import CACHED_NUMBERS

_NORM_ROUNDING = 1e-9  # of the norm of a message


def check_release_bounds(n_features, n_targets, sample_weight, feature_bound, target_bound):
    """Bounds of a private fit by name, as floats or None.

    Raises ValueError for an invalid bound, for one bound without the other where there are
    features, and for anything that no private fit takes.
    """
    bounds = {"feature_bound": feature_bound, "target_bound": target_bound}
    for name, bound in bounds.items():
        if bound is not None:
            number = isinstance(bound, Real) and not isinstance(bound, bool)
            if not (number and 0 < bound < math.inf):
                raise ValueError(f"{name} must be a finite number above 0; got {bound!r}.")
            bounds[name] = float(bound)
    if bounds["feature_bound"] is bounds["target_bound"] is None:
        return bounds
    if target_bound is None or (feature_bound is None) != (n_features == 0):
        raise ValueError(
            "feature_bound and target_bound go together if there are features, and without "
            f"features target_bound is given alone; got feature_bound={feature_bound!r} and "
            f"target_bound={target_bound!r} for {n_features} features."
        )
    if n_features and n_targets != 1:
        raise ValueError(
            "bounds of features are those of a private regression, which has features and one "
            f"target; got {n_targets} targets."
        )
    if sample_weight is not None:
        raise ValueError(
            "sample_weight does not go with bounds: its effect on the sensitivity of a private fit "
            "is undefined."
        )
    return bounds


def clipping_of(n_features, bounds):
    """RegressionMoments that scale the rows of a regression to its bounds; None without them."""
    return None if bounds["feature_bound"] is None else RegressionMoments(n_features, **bounds)


def units_of(clipping):
    """Bounds (d + 1,) of the features, then of the target."""
    return np.append(np.full(clipping.n_features, clipping.feature_bound), clipping.target_bound)


class Limits(NamedTuple):
    """Sizes (p,) of values in statistics for a private fit, as such a fit refuses no finite value.

    Larger ones are cut, and smaller ones are 0, so that all squares and products are finite and of
    full precision. They depend on the bounds alone.
    """

    least: np.ndarray
    largest: np.ndarray


def limits_of(n_features, n_targets, bounds):
    """Limits of features and targets; None without bounds."""
    if bounds["target_bound"] is None:
        return None
    units = np.full(n_features + n_targets, bounds["target_bound"])
    units[:n_features] = bounds["feature_bound"]
    # The squares of values and of values over a bound.
    return Limits(SMALLEST * np.maximum(units, 1.0), LARGEST * np.minimum(units, 1.0))


def clip_to_limits(limits, values):
    """Put the values (n, p) within their limits, in place."""
    step = max(CACHED_NUMBERS // max(values.shape[1], 1), 1)
    for start in range(0, len(values), step):
        rows = values[start : start + step]
        np.clip(rows, -limits.largest, limits.largest, out=rows)
        rows[np.abs(rows) < limits.least] = 0.0


def clip_frame_to_limits(limits, frame):
    """A lazy frame of numbers v_0, v_1, ... within their limits; null stays null."""
    pairs = enumerate(zip(limits.least.tolist(), limits.largest.tolist(), strict=True))
    names = frame.collect_schema().names()
    columns = {f"v_{j}": pair for j, pair in pairs if f"v_{j}" in names}
    cut = [nw.col(name).clip(-most, most) for name, (_, most) in columns.items()]
    frame = frame.with_columns(*cut)
    return frame.with_columns(
        nw.when(nw.col(name).abs() < least).then(0.0).otherwise(nw.col(name)).alias(name)
        for name, (least, _) in columns.items()
    )


def squared_factors(clipping, values):
    """Weights (n,) of rows (n, d + 1), the target last: squares of their factors."""
    result, step = np.empty(len(values)), max(CACHED_NUMBERS // values.shape[1], 1)
    for start in range(0, len(values), step):
        rows = values[start : start + step]
        result[start : start + step] = clipping.scaled(rows[:, :-1], rows[:, -1])[1] ** 2
    return result


def with_squared_factors(frame, clipping, weight):
    """A lazy frame of numbers v_0, v_1, ..., the target last; weights are squared factors."""
    # As RegressionMoments.scaled, whose message has norm |z|^2 + tau^2 with an intercept under
    # replacement, so no root is needed.
    tau, least = clipping.target_scale**2, clipping.intercept_scale**2
    names = [f"v_{j}" for j in range(clipping.n_features + 1)]
    units = units_of(clipping).tolist()
    values = [nw.col(name) * (1 / unit) for name, unit in zip(names, units, strict=True)]
    squares = values[0] * values[0]
    for value in values[1:-1]:
        squares = squares + value * value
    frame = frame.with_columns(squares.alias("square"), (values[-1] * values[-1]).alias("beyond"))
    # The target first: the whole row shrinks until it is at its bound.
    frame = frame.with_columns(
        nw.when(nw.col("beyond") > 1.0).then(1 / nw.col("beyond")).otherwise(1.0).alias("factor")
    )
    frame = frame.with_columns(((nw.col("square") + least) * nw.col("factor")).alias("square"))
    share = clipping.add_remove_sensitivity / (nw.col("square") + tau)
    outside = nw.col("square") > 1.0 + least
    factor = nw.when(outside).then(nw.col("factor") * share).otherwise(nw.col("factor"))
    return frame.with_columns(factor.alias(weight)).drop("square", "beyond", "factor")


def scaled_triangles(clipping, triangles):
    """Rows (b, P, P) of messages and their factors (b, P), of triangles of scaled rows."""
    units = np.append(clipping.column_scales, clipping.target_scale / clipping.target_bound)
    return triangles * units, triangles[..., 0]


def check_clipped(clipping, ids, n_rows, triangles):
    """Raise ValueError for a client whose triangle (P, P) is not that of rows within the bounds."""
    rows, factors = scaled_triangles(clipping, triangles)
    mean = clipping._summed(rows, factors) / n_rows[:, None]
    beyond = np.linalg.norm(mean, axis=1) > clipping.add_remove_sensitivity * (1 + _NORM_ROUNDING)
    if beyond.any():
        raise ValueError(
            f"rows of client {format_id(ids[np.argmax(beyond)])} are not scaled to feature_bound="
            f"{clipping.feature_bound!r} and target_bound={clipping.target_bound!r}."
        )
