"""Checks of rows for statistics, and triangles of clients whose rows are in memory."""

from typing import Any

import narwhals as nw
import numpy as np
from sklearn.utils import check_array, check_consistent_length, column_or_1d

from pfl_sklearn._clients import client_batches, encode_clients, row_counts, segment_sums
from pfl_sklearn._columns import check_bounds, name_bad_columns
from pfl_sklearn.statistics._cholesky import CACHED_NUMBERS, pack, packed_length, triangles_of_rows
from pfl_sklearn.statistics._clipping import clip_to_limits, squared_factors

LACKING = "{} of {} rows lack a value, a weight or a client; missing='drop' leaves them out."
NOTHING = "found {} rows, none of which is complete and of positive weight."
INFINITE = "features and targets must be finite; got infinity."
INFINITE_WEIGHT = "sample_weight must be finite; got infinity."


def rows_used(values, weights):
    """Which rows (n,) are complete, and which of these have a positive weight."""
    complete = ~np.isnan(values).any(axis=1)
    if weights is None:
        return complete, complete
    complete &= ~np.isnan(weights)
    if (weights < 0).any():
        raise ValueError(f"sample_weight must be at least 0; got {np.nanmin(weights):g}.")
    if np.isinf(weights).any():
        raise ValueError(INFINITE_WEIGHT)
    return complete, complete & (weights > 0)


def check_missing(missing):
    if missing not in ("error", "drop"):
        raise ValueError(f"missing must be 'error' or 'drop'; got {missing!r}.")


def check_scale(scale, missing):
    """Raise ValueError if a first pass found what no statistics are made of."""
    if missing == "error" and scale.n_incomplete:
        raise ValueError(LACKING.format(scale.n_incomplete, scale.n_rows))
    if scale.least_weight < 0:
        raise ValueError(f"sample_weight must be at least 0; got {scale.least_weight:g}.")
    if not scale.n_used:
        raise ValueError(NOTHING.format(scale.n_rows))
    if scale.heaviest == np.inf:
        raise ValueError(INFINITE_WEIGHT)
    if not np.isfinite([*scale.lowest, *scale.highest]).all():
        raise ValueError(INFINITE)


def check_range(bounds, n_features, heaviest):
    """Raise ValueError if values are too large or too small to be squared."""
    low, high = bounds[0].min(axis=0), bounds[1].max(axis=0)
    for name, at in (("X", slice(n_features)), ("y", slice(n_features, None))):
        check_bounds(name, low[at], high[at], max(heaviest, 1.0))


def fields_of_values(values, names, n_features, groups, sample_weight, missing, private, n_lost=0):
    """Fields of ClientStatistics of numbers (n, p), features first; NaN are missing ones.

    `private` are Limits, within which the numbers are put in place, or None, and RegressionMoments
    to whose bounds rows are scaled, too, or None. Another `n_lost` rows have no client.
    """
    limits, clipping = private
    ids, codes = encode_clients(groups, len(values))
    weights = sample_weight
    if sample_weight is not None:
        weights = column_or_1d(
            check_array(
                sample_weight,
                dtype=np.float64,
                ensure_2d=False,
                ensure_all_finite=False,  # of which rows_used tells
                input_name="sample_weight",
            )
        )
        check_consistent_length(values, weights)
    complete, used = rows_used(values, weights)
    n_rows = len(values) + n_lost
    n_left_out = n_rows - int(complete.sum())
    if n_left_out and missing == "error":
        raise ValueError(LACKING.format(n_left_out, n_rows))
    if not used.any():
        raise ValueError(NOTHING.format(n_rows))
    if not used.all():
        known = np.flatnonzero(np.bincount(codes[used], minlength=len(ids)))
        ids, codes = ids[known], np.searchsorted(known, codes[used])
        values, weights = values[used], None if weights is None else weights[used]
    if not np.isfinite(values).all():
        raise ValueError(INFINITE)
    if limits is not None:
        clip_to_limits(limits, values)
    log_weights = np.zeros(len(ids))
    if weights is not None:
        log_weights = segment_sums(np.log(weights), codes, len(ids))
    with np.errstate(over="ignore", invalid="ignore"):  # of values that are refused below
        packed, lowest, highest = triangles_by_client(values, weights, codes, len(ids))
    if limits is None:
        check_range((lowest, highest), n_features, 1.0 if weights is None else weights.max())
    clipped = None
    if clipping is not None:
        factors = squared_factors(clipping, values)
        clipped = triangles_by_client(values, factors, codes, len(ids))[0]
    return {
        "clients": ids,
        "n_samples_per_client": row_counts(codes, len(ids)),
        "n_features": n_features,
        "n_targets": values.shape[1] - n_features,
        "feature_names": names[0],
        "target_names": names[1],
        "n_left_out": n_left_out,
        "packed": packed,
        "log_weights": log_weights,
        "lowest": lowest,
        "highest": highest,
        "clipped": clipped,
    }


def read_columns(X, y, missing, private):
    """Features and targets (n, p), their names, and the number of features."""
    targets = _check_values("y", y, missing, private)
    features = np.empty((len(targets), 0)) if X is None else _check_values("X", X, missing, private)
    check_consistent_length(features, targets)
    names = () if X is None else _column_names(X), _column_names(y)
    return np.hstack([features, targets]), names, features.shape[1]


def _check_values(name, values, missing, private):
    """Values (n, k) as floats; if they are for a `private` fit, errors show none."""
    finite: Any = True if missing == "error" else "allow-nan"
    with name_bad_columns(values if name == "X" else None, private=private):
        checked = check_array(
            values,
            dtype=np.float64,
            ensure_all_finite=finite,
            input_name=name,
            ensure_2d=name == "X",
        )
    return checked.reshape(len(checked), -1)


def _column_names(values):
    """Names of columns, or None where not all are strings."""
    frame = nw.from_native(values, pass_through=True, allow_series=True)
    if isinstance(frame, nw.DataFrame | nw.Series):
        names = frame.columns if isinstance(frame, nw.DataFrame) else [frame.name]
        if names and all(isinstance(name, str) and name for name in names):
            return tuple(names)
    return None


def triangles_by_client(values, weights, codes, n_clients):
    """Packed triangles (m, K), smallest and largest values (m, p) of the clients."""
    width = values.shape[1] + 1
    triangles = np.empty((n_clients, packed_length(width)))
    lowest, highest = np.empty((2, n_clients, width - 1))
    for clients, numbers in client_batches(codes, n_clients, CACHED_NUMBERS // width):
        low, high = _batch_bounds(values, numbers, width)
        blocks = [
            triangles_of_rows(_weighted_rows(values, weights, part), low, high)
            for part in _split_batch(numbers, width)
        ]
        joined: Any = blocks[0]
        if len(blocks) > 1:  # a client whose rows do not fit the cache
            joined = triangles_of_rows(np.concatenate(blocks, axis=1), low, high)
        triangles[clients], lowest[clients], highest[clients] = pack(joined), low, high
    return triangles, lowest, highest


def _split_batch(numbers, width):
    """The numbers (b, n) of rows in parts that fit the cache."""
    step = max(CACHED_NUMBERS // (len(numbers) * width), width)
    return [numbers[:, start : start + step] for start in range(0, numbers.shape[1], step)]


def _batch_bounds(values, numbers, width):
    """Smallest and largest values (b, p) of rows (b, n)."""
    bounds = [
        (values[part].min(axis=1), values[part].max(axis=1))
        for part in _split_batch(numbers, width)
    ]
    return np.min([low for low, _ in bounds], axis=0), np.max([high for _, high in bounds], axis=0)


def _weighted_rows(values, weights, numbers):
    """Rows (b, n, P) with numbers (b, n), a one first, times the roots of their weights."""
    rows = np.ones((*numbers.shape, values.shape[1] + 1))
    rows[..., 1:] = values[numbers]
    return rows if weights is None else rows * np.sqrt(weights[numbers])[..., None]
