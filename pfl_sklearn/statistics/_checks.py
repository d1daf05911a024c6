"""What rows must be like for statistics to be made of them."""

import numpy as np

from pfl_sklearn._float_range import check_bounds

LACKING = "{} of {} rows lack a value, a weight or a client; missing='drop' leaves them out."
NOTHING = "found {} rows, none of which is complete and of positive weight."
INFINITE = "features and targets must be finite; got infinity."


def rows_used(values, weights):
    """Which rows (n,) are complete, and which of these have a positive weight."""
    complete = ~np.isnan(values).any(axis=1)
    if weights is None:
        return complete, complete
    complete &= ~np.isnan(weights)
    if (weights < 0).any():
        raise ValueError(f"sample_weight must be at least 0; got {np.nanmin(weights):g}.")
    return complete, complete & (weights > 0)


def check_missing(missing):
    if missing not in ("error", "drop"):
        raise ValueError(f"missing must be 'error' or 'drop'; got {missing!r}.")


def check_scale(scale, missing, n_features):
    """Raise ValueError if a first pass found what no statistics are made of."""
    if missing == "error" and scale.n_incomplete:
        raise ValueError(LACKING.format(scale.n_incomplete, scale.n_rows))
    if scale.least_weight < 0:
        raise ValueError(f"sample_weight must be at least 0; got {scale.least_weight:g}.")
    if not scale.n_used:
        raise ValueError(NOTHING.format(scale.n_rows))
    if not np.isfinite(scale.heaviest + scale.lowest.sum() + scale.highest.sum()):
        raise ValueError(INFINITE)
    check_range((scale.lowest[None], scale.highest[None]), n_features, scale.heaviest)


def check_range(bounds, n_features, heaviest):
    """Raise ValueError if values are too large or too small to be squared."""
    low, high = bounds[0].min(axis=0), bounds[1].max(axis=0)
    for name, at in (("X", slice(n_features)), ("y", slice(n_features, None))):
        check_bounds(name, low[at], high[at], max(heaviest, 1.0))
