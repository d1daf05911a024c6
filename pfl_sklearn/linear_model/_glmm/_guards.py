"""Safeguards of clients' logistic regressions.

They cover covariances and coefficients that the data do not identify, likelihoods without a finite
maximum, and columns far from zero.
"""

import numpy as np

from pfl_sklearn.linear_model._table import check_covariance_identified, varies_within_clients

_WEAK_SD = 2.5  # of the prior on separated slopes, in logits per standard deviation of a column
_TIGHT_SD = 1.0  # of the prior on a factor that diverged, in logits per size of a column
_MAIN = 0.2  # share of the largest contribution to a separating predictor that counts as main
_LARGEST_SD = 1e7  # logits; with much more, likelihoods lose all their digits
_HEAVIEST, _LIGHTEST = 1e6, 1e-3  # weight of a row, and of all rows together
AWAY = 10.0  # logits; we check larger standard deviations of the predictors between clients
HELD = 1 / 3  # if the tight prior leaves less than this share, the data do not support the rest


def check_spread_identified(table, prior):
    """Raise ValueError if the data do not identify the covariance between clients."""
    m = table.n_clients
    if len(table.y) == m:
        raise ValueError(
            f"each of the {m} clients has one row, so the data do not identify the variance "
            "between clients; give a prior with a known covariance."
        )
    check_covariance_identified(table, prior)


def check_row_weights(weights):
    """Raise ValueError if sample weights (n,) or None are outside what searches can follow."""
    if weights is None:
        return
    if weights.max() > _HEAVIEST or weights.sum() < _LIGHTEST:
        raise ValueError(
            f"sample_weight must be at most {_HEAVIEST:g} for a row and at least {_LIGHTEST:g} in "
            f"sum; got a largest weight of {weights.max():.3g} and a sum of {weights.sum():.3g}. A "
            "weight says how often a row counts; rescale the weights."
        )


def is_unmixed(table):
    """Whether no client has rows of two classes."""
    return not varies_within_clients(table.y, table.codes, table.n_clients)


def weak_slopes(columns, weights, intercept, penalty=_WEAK_SD**-2):
    """Precision (f,) of a normal prior on slopes; 0 for the intercept.

    It is `penalty` for a column with a standard deviation of 1, by default enough to keep separated
    slopes finite.
    """
    square = np.average(columns**2, axis=0, weights=weights)
    spread = _column_variances(columns, weights)
    unit = np.where(spread > 1e-12 * square, spread, square)
    precision = unit * penalty
    if intercept is not None:
        precision[intercept] = 0.0
    return precision


def separating_columns(columns, weights, coefficients):
    """Positions of the columns that do most to separate the classes.

    Their coefficients (a, f) diverged, so that the predictors vary mainly with them.
    """
    spread = np.sqrt(_column_variances(columns, weights))
    size = np.abs(coefficients).max(axis=0) * spread
    return tuple(np.flatnonzero((size > 0) & (size >= _MAIN * size.max())).tolist())


def _column_variances(columns, weights):
    """Weighted variances (f,) of columns (n, f)."""
    mean = np.average(columns, axis=0, weights=weights)
    return np.average((columns - mean) ** 2, axis=0, weights=weights)


def weak_spread(random, weights, tight=False):
    """Precision (q,) of the prior that keeps the differences between clients finite."""
    sd = _TIGHT_SD if tight else _WEAK_SD
    return np.average(random**2, axis=0, weights=weights) / sd**2


def predictor_spread(random, weights, factor):
    """Standard deviation between clients of the linear predictors, for random columns (n, q).

    We take the root mean square over the rows, under a factor (q, r).
    """
    weighted = random if weights is None else weights[:, None] * random
    total = len(random) if weights is None else weights.sum()
    moments = weighted.T @ random / total
    return float(np.sqrt(np.vdot(factor, moments @ factor)))


def check_known_spread(table, factor):
    """Raise ValueError if a known covariance lets predictors vary more than arithmetic can follow.

    The covariance is that of a factor (q, r).
    """
    spread = predictor_spread(table.columns[:, : table.n_random], table.weights, factor)
    if spread > _LARGEST_SD:
        raise ValueError(
            "the prior's covariance gives the predictors of random coefficients a standard "
            f"deviation of {spread:.3g} logits between clients; expected at most {_LARGEST_SD:g}. "
            "Scale the features, or give a smaller covariance."
        )
