"""Summaries of residuals for plots: means in bins, quantile limits, and spreads of clients."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.special import betaincinv, chdtri, ndtri

from pfl_sklearn._clients import row_counts, segment_sums
from pfl_sklearn._typing import Floats, Integers

_LIMITS = 0.025, 0.5, 0.975  # probabilities of 95 % limits and of the median
_MOST_BINS, _ROWS_PER_BIN = 20, 20  # the standard error of a mean of 20 rows is sd / 4.5


def binned_residuals(fitted: Floats, residuals: Floats, expected: Floats | None = None) -> Any:
    """Means by fitted value, in bins of equally many rows.

    Returns mean fitted value, mean residual, standard deviation of residuals and mean of
    `expected`, each (n_bins,); the last is None if `expected` is.
    """
    n_bins = int(np.clip(len(fitted) // _ROWS_PER_BIN, 1, _MOST_BINS))
    # Fitted values are tied if features are constant; equal edges become one.
    edges = np.unique(np.quantile(fitted, np.linspace(0, 1, n_bins + 1)))
    codes = np.searchsorted(edges[1:-1], fitted, side="right")
    counts = row_counts(codes, max(len(edges) - 1, 1))
    codes = (np.cumsum(counts > 0) - 1)[codes]  # of bins that hold rows
    counts = counts[counts > 0]
    at, mean = (segment_sums(values, codes, len(counts)) / counts for values in (fitted, residuals))
    squares = segment_sums((residuals - mean[codes]) ** 2, codes, len(counts))
    std = np.sqrt(squares / np.maximum(counts - 1, 1))  # 0 for a single row
    if expected is not None:
        expected = segment_sums(expected, codes, len(counts)) / counts
    return at, mean, std, expected


def quantile_limits(n: int, ranks: Integers | None = None) -> Any:
    """2.5, 50 and 97.5 % quantiles (k,) of ordered values of n standard normal ones.

    `ranks` (k,) are from 1 to n; None: all. Order statistics of uniform values are Beta(i, n + 1 -
    i).
    """
    ranks = np.arange(1, n + 1) if ranks is None else ranks
    return tuple(ndtri(betaincinv(ranks, n + 1 - ranks, p)) for p in _LIMITS)


def client_spreads(standardized, share, codes, n_clients):
    """Degrees of freedom (m,) and root mean squares (m,) of clients' standardized residuals.

    The root mean squares are 1 if the model holds. Clients that are fitted exactly have none:
    `standardized` (n,) is NaN there. `share` (n,) is the variance of a residual over that of the
    noise.
    """
    usable = np.isfinite(standardized)
    share, codes = share[usable], codes[usable]
    squares = segment_sums(standardized[usable] ** 2 * share, codes, n_clients)
    # A share below 1 is the degrees of freedom of a row that was fitted; new rows count fully.
    dof = segment_sums(np.minimum(share, 1), codes, n_clients)
    total, has_residuals = segment_sums(share, codes, n_clients), dof > 0
    return dof[has_residuals], np.sqrt(squares[has_residuals] / total[has_residuals])


def spread_limits(dof):
    """95 % limits (m,) of the root mean square of normal values with these degrees of freedom."""
    return tuple(np.sqrt(chdtri(dof, tail) / dof) for tail in (_LIMITS[2], _LIMITS[0]))
