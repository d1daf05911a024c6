"""Rows scaled to the bounds of a private fit before they are summed.

Scaling a row by a factor is the same as giving it the square of that as its weight. So the
triangles of scaled rows are those of weighted ones, and whatever sums weighted rows sums these.
"""

import narwhals as nw
import numpy as np

from pfl_sklearn._clients import shown
from pfl_sklearn.privacy import RegressionMoments

_HUGE = 1e150  # in units of a bound, where RegressionMoments cuts values
_CELLS = 1 << 18  # numbers of a block of rows, which then fits the processor's cache
_ROUNDING = 1e-9  # of the norm of a message


def clipping_of(n_features, n_targets, sample_weight, feature_bound, target_bound):
    """RegressionMoments that scale the rows of a regression to its bounds; None without bounds.

    Raises
    ------
    ValueError
        For one bound without the other, and for what no private regression takes.
    """
    if feature_bound is None and target_bound is None:
        return None
    if feature_bound is None or target_bound is None:
        raise ValueError(
            "feature_bound and target_bound go together; got "
            f"feature_bound={feature_bound!r} and target_bound={target_bound!r}."
        )
    if n_targets != 1 or not n_features:
        raise ValueError(
            "bounds are those of a private regression, which has features and one target; got "
            f"{n_features} features and {n_targets} targets."
        )
    if sample_weight is not None:
        raise ValueError(
            "sample_weight does not go with bounds: its effect on the sensitivity of a private fit "
            "is undefined."
        )
    return RegressionMoments(n_features, feature_bound, target_bound)


def bounds_of(clipping, clipped):
    """Fields of ClientStatistics: the bounds, and triangles of the rows scaled to them."""
    if clipping is None:
        return {}
    bounds = {"feature_bound": clipping.feature_bound, "target_bound": clipping.target_bound}
    return {**bounds, "clipped": clipped}


def squared_factors(clipping, values):
    """Squares (n,) of the factors of rows (n, d + 1), the target last."""
    result, step = np.empty(len(values)), max(_CELLS // values.shape[1], 1)
    for start in range(0, len(values), step):
        rows = values[start : start + step]
        result[start : start + step] = clipping.scaled(rows[:, :-1], rows[:, -1])[1] ** 2
    return result


def with_squared_factors(frame, clipping, weight):
    """A lazy frame of numbers v_0, v_1, ..., the target last, whose weights are squared factors.

    The same as RegressionMoments.scaled, whose norm of a message is |z|^2 + tau^2 with an intercept
    under replacement; no root is needed.
    """
    tau, least = clipping.target_scale**2, clipping.intercept_scale**2
    names = [f"v_{j}" for j in range(clipping.n_features + 1)]
    bounds = [*[clipping.feature_bound] * clipping.n_features, clipping.target_bound]
    units = (nw.col(name) * (1 / b) for name, b in zip(names, bounds, strict=True))
    cut = [value.clip(-_HUGE, _HUGE) for value in units]
    squares = cut[0] * cut[0]
    for value in cut[1:-1]:
        squares = squares + value * value
    frame = frame.with_columns(squares.alias("square"), (cut[-1] * cut[-1]).alias("beyond"))
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
    beyond = np.linalg.norm(mean, axis=1) > clipping.add_remove_sensitivity * (1 + _ROUNDING)
    if beyond.any():
        raise ValueError(
            f"rows of client {shown(ids[np.argmax(beyond)])} are not scaled to feature_bound="
            f"{clipping.feature_bound!r} and target_bound={clipping.target_bound!r}."
        )
