"""Means of residuals, their spread by client, and limits of both if values are normal."""

from typing import Any

import numpy as np
from scipy.special import betaincinv, chdtri, ndtri

from pfl_sklearn._clients import row_counts, segment_sums
from pfl_sklearn._typing import Floats, Integers

_LEVELS = 0.025, 0.5, 0.975  # of limits that hold 95 %, and of the median between them
_MOST_BINS, _ROWS_PER_BIN = 20, 20  # a mean of 20 rows has a fifth of a residual's spread


def binned_residuals(fitted: Floats, residuals: Floats, expected: Floats | None = None) -> Any:
    """Means by fitted value, in bins of equally many rows.

    Returns
    -------
    at, mean, std, expected : ndarrays of shape (n_bins,)
        Mean fitted value, mean residual, standard deviation of residuals, and mean of `expected`
        (None if that is None).
    """
    n_bins = int(np.clip(len(fitted) // _ROWS_PER_BIN, 1, _MOST_BINS))
    # Fitted values may be tied, where features are constant: equal edges are one edge.
    edges = np.unique(np.quantile(fitted, np.linspace(0, 1, n_bins + 1)))
    codes = np.searchsorted(edges[1:-1], fitted, side="right")
    counts = row_counts(codes, max(len(edges) - 1, 1))
    codes = (np.cumsum(counts > 0) - 1)[codes]  # of bins that hold rows
    counts = counts[counts > 0]
    at, mean = (segment_sums(each, codes, len(counts)) / counts for each in (fitted, residuals))
    squares = segment_sums((residuals - mean[codes]) ** 2, codes, len(counts))
    std = np.sqrt(squares / np.maximum(counts - 1, 1))  # 0 for a single row
    if expected is not None:
        expected = segment_sums(expected, codes, len(counts)) / counts
    return at, mean, std, expected


def quantile_limits(n: int, ranks: Integers | None = None) -> Any:
    """Quantiles of the ordered values of n standard normal ones.

    Parameters
    ----------
    n : int
    ranks : ndarray of shape (k,), default=None
        Which of them, from 1 to n. None: all.

    Returns
    -------
    lower, median, upper : ndarrays of shape (k,)
        At levels 2.5, 50 and 97.5 %: order statistics of uniform values are Beta(i, n + 1 - i).
    """
    ranks = np.arange(1, n + 1) if ranks is None else ranks
    return tuple(ndtri(betaincinv(ranks, n + 1 - ranks, p)) for p in _LEVELS)


def client_spreads(standardized, share, codes, n_clients):
    """Spread of the residuals of every client that has any which are not exact.

    Parameters
    ----------
    standardized : ndarray of shape (n,)
        Standardized residuals; NaN where exact.
    share : ndarray of shape (n,)
        Variance of a residual over that of the noise.
    codes : ndarray of shape (n,)
    n_clients : int

    Returns
    -------
    dof, spread : ndarrays of shape (m,)
        Degrees of freedom, and root mean squares, which are 1 if the model holds.
    """
    usable = np.isfinite(standardized)
    share, codes = share[usable], codes[usable]
    squares = segment_sums(standardized[usable] ** 2 * share, codes, n_clients)
    # A share below 1 is what the fit left of a row's own residual; new rows count fully.
    dof = segment_sums(np.minimum(share, 1), codes, n_clients)
    total, has_residuals = segment_sums(share, codes, n_clients), dof > 0
    return dof[has_residuals], np.sqrt(squares[has_residuals] / total[has_residuals])


def spread_limits(dof):
    """95 % limits (m,) of the root mean square of normal values with these degrees of freedom."""
    return tuple(np.sqrt(chdtri(dof, tail) / dof) for tail in (_LEVELS[2], _LEVELS[0]))
