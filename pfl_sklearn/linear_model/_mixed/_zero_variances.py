"""Whether a variance between clients may be zero: likelihood ratio tests of a fit's components.

Averages over the variances say nothing of that: under their prior no variance is zero, so their
quantiles lie above it.
"""

from math import comb

import numpy as np
from scipy.special import chdtrc

from pfl_sklearn.linear_model._algebra import Factor, factor_of, uncorrelating
from pfl_sklearn.linear_model._mixed._reduction import random_moments
from pfl_sklearn.linear_model._mixed._variance_search import at_ratio, search_factor

_NULL_MAX_ITER, _NULL_TOL = 500, 1e-6  # of the search without the variance
_ABSENT = 1e-8  # share of a combination of coefficients, of one that rounding errors put there


def zero_p_values(case):
    """P-values (q,) of the hypotheses that a coefficient of the data's columns does not vary."""
    reduced, settings, q = case.reduced, case.settings, case.reduced.n_random
    combinations = case.frame.back[:q, :q] * case.family.varies
    largest = np.abs(combinations).max(axis=1, keepdims=True)
    combinations[np.abs(combinations) <= _ABSENT * largest] = 0.0
    best = at_ratio(reduced, settings, case.ratio).point.criterion
    # Each hypothesis is a search, so equal ones are tested once.
    p_values = {
        row: _p_value(case, np.array(row), best) if any(row) else 1.0
        for row in dict.fromkeys(map(tuple, combinations))
    }
    return np.array([p_values[tuple(row)] for row in combinations])


def _p_value(case, row, best):
    """P-value of the hypothesis that a combination (q,) of the coefficients does not vary.

    A variance is not negative, so the statistic is a mixture of chi-squares, with the covariances
    that fall away and binomially many of the variances (Self and Liang, 1987; Stram and Lee, 1994).
    """
    reduced, family = case.reduced, case.family
    n_variances, n_covariances = 1, 0
    if family.has_one_ratio:  # without it nothing varies
        factor = None
    elif family.shape == "full":
        factor, n_covariances = _full_without(reduced, row), len(row) - 1
    else:
        # An intercept of uncentred columns combines several coefficients: none of them may vary.
        left, n_variances = family.varies & (row == 0), int(np.count_nonzero(row))
        factor = factor_of("diag", len(row), varies=left) if left.any() else None
    if factor is None:
        smaller = at_ratio(reduced, case.settings, np.zeros((len(row),) * 2))
    else:
        smaller = search_factor(reduced, case.settings, factor, _NULL_MAX_ITER, _NULL_TOL)
    statistic = smaller.point.criterion - best
    if not statistic > 0:  # the estimate is zero itself
        return 1.0
    tails = [
        comb(n_variances, s) * chdtrc(s + n_covariances, statistic)
        for s in range(n_variances + 1)
        if s + n_covariances
    ]
    return sum(tails) / 2**n_variances


def _full_without(reduced, row):
    """Factor of the covariances (q, q) under which a combination (q,) does not vary."""
    q = len(row)
    across = np.linalg.qr(row[:, None], mode="complete")[0][:, 1:]
    across = across @ uncorrelating(across.T @ random_moments(reduced) @ across)
    lower = np.tril_indices(q - 1)
    positions = np.arange(q * (q - 1)).reshape(q, q - 1)[1:][lower]
    start = np.eye(q - 1)[lower]
    basis = np.column_stack([row, across])  # no parameter stands in the first row of the factor
    return Factor((q, q - 1), positions, np.arange(len(start)), start, q - 1, basis)
