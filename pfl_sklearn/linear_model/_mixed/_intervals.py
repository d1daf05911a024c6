"""Central intervals of probabilities and of new counts, by the posterior of their predictors."""

import numpy as np
from scipy.special import digamma, expit, ndtr, ndtri, zeta

from pfl_sklearn.linear_model._mixed._families import bounded_exp
from pfl_sklearn.linear_model._mixed._posterior import HIGHEST_TAIL
from pfl_sklearn.linear_model._mixed._predictions import (
    averaged,
    contrast_covariances,
    node_probabilities,
)

_SOBOL = 4096  # points, and their mirror images: 256 leave up to .02 too much in a tail
_MOST_SKEWED = 1.0  # of a half-normal density; beyond it the expansion is not monotone
_WIDE = 100.0  # variance of a predictor over that of a count's threshold


def probability_bounds(logits, moments_of, coding, level):
    """Bounds (n, K) of class probabilities.

    Two classes: quantiles of the log odds. K classes: quantiles over quasi-random nodes. Tails of
    2.5 % are exact to .001 or so, in all our trials (of up to 10 classes) to .004.

    Parameters
    ----------
    logits : ndarray of shape (n, c)
        At the modes.
    moments_of : callable
        Shift of the mean, variance and third central moment (n,) of a combination (c,).
    coding : ndarray of shape (c, a)
        Orthonormal.
    level : float in (0, 1)
    """
    if logits.shape[1] == 1:
        bounds = skewed_bounds(logits[:, 0], moments_of(np.ones(1)), level)
        # Of both signs: 1 less the second would lose the digits of a small one.
        both = [np.column_stack([-second, first]) for first, second in (bounds, bounds[::-1])]
        return tuple(expit(bound) for bound in both)
    shifts = [moments_of(contrast)[0] for contrast in coding.T]
    means = logits + np.column_stack(shifts) @ coding.T
    result = np.empty((2, *logits.shape))
    tails = (1 - level) / 2, (1 + level) / 2
    covariances = contrast_covariances(coding, lambda g: moments_of(g)[1])
    nodes = node_probabilities(means, coding, lambda block: covariances[block], _SOBOL)
    for block, chances in nodes:
        # Each node stands in the middle of its share.
        result[:, block] = np.quantile(chances, tails, axis=1, method="hazen")
    return tuple(result)


def skewed_bounds(modes, moments, level):
    """Central bounds of values with shifts of the mean from the mode, variances and thirds."""
    shifts, variances, thirds = moments
    # Rounding may leave a tail of 0, whose bound would be infinite.
    quantile = ndtri(min(0.5 + level / 2, HIGHEST_TAIL))
    means = modes + shifts
    return tuple(skewed_quantile(means, variances, thirds, z) for z in (-quantile, quantile))


def skewed_quantile(means, variances, thirds, z):
    """Quantiles of values with these central moments, at the normal quantile z.

    Cornish and Fisher's (1938) expansion in the skewness: a half-normal density, which is that of a
    client without events under a wide prior, has tails of 2.5 % of .032 and .020 by it.
    """
    spread = np.sqrt(np.maximum(variances, 0.0))
    with np.errstate(over="ignore", under="ignore"):  # a spread whose cube overflows is not skewed
        cubes = spread**3
    skewness = np.divide(thirds, cubes, out=np.zeros_like(spread), where=cubes > 0)
    skewness = np.clip(skewness, -_MOST_SKEWED, _MOST_SKEWED)
    moved = z + skewness * (z**2 - 1) / 6 - skewness**2 * (2 * z**3 - 5 * z) / 36
    return means + spread * moved


def count_bounds(outcome, means, variances, level):
    """Bounds (n,) of new counts: the least with a tail of (1 - level) / 2 at or below, or above.

    Parameters
    ----------
    outcome : Poisson or NegativeBinomial
    means, variances : ndarrays of shape (n,)
        Of the normal predictors.
    level : float in (0, 1)
    """
    tail = (1 - level) / 2
    variances = np.maximum(variances, 0.0)  # differences, which rounding may leave below 0
    # The predictor exceeds this in a quarter of the tail. So does a count its mean by `far`
    # standard deviations at most (Cantelli's inequality).
    rate = bounded_exp(means - ndtri(tail / 4) * np.sqrt(variances))
    far = np.sqrt(4 / tail)
    high = np.ceil(rate + far * np.sqrt(rate) * np.sqrt(1 + outcome.dispersion * rate))

    def share(name, rows, counts):
        return averaged_tail(outcome, name, counts, means[rows], variances[rows])

    # Each from its own side, where a small share has all its digits.
    lower = _least(lambda rows, counts: share("cdf", rows, counts) >= tail, high)
    return lower, _least(lambda rows, counts: share("sf", rows, counts) <= tail, high)


def averaged_tail(outcome, name, counts, means, variances):
    """Probabilities (n,) of counts up to ("cdf") or above ("sf") some, over normal predictors.

    A count is at most y if its predictor is below a threshold: the log of a gamma variable with
    shape y + 1, less that of the gamma factor of a negative binomial mean. Where the threshold is
    narrow beside the predictor, the average would see a step between two nodes. There we take the
    difference of the two for normal, which is exact to 1e-4.
    """
    centre, width = digamma(counts + 1), zeta(2, counts + 1)  # zeta(2, a) is the trigamma function
    if outcome.dispersion > 0:
        k = 1 / outcome.dispersion
        centre, width = centre - digamma(k) + np.log(k), width + zeta(2, k)
    sign, result = 1.0 if name == "cdf" else -1.0, np.empty(len(means))
    wide = variances > _WIDE * width
    result[wide] = ndtr(sign * (centre - means)[wide] / np.sqrt(variances + width)[wide])
    narrow = np.flatnonzero(~wide)

    def tails(block, predictors):
        law = outcome.distribution(bounded_exp(predictors))
        return getattr(law, name)(counts[narrow[block], None])

    result[narrow] = averaged(tails, means[narrow], variances[narrow])
    return result


def _least(reached, high):
    """Least counts (n,), up to `high`, for which ``reached(rows, counts)`` is true."""
    low, high = np.full(len(high), -1.0), high.copy()
    while True:
        middle = np.floor(low / 2 + high / 2)
        rows = np.flatnonzero((low < middle) & (middle < high))
        if not len(rows):
            return high
        middle = middle[rows]
        enough = reached(rows, middle)
        high[rows[enough]] = middle[enough]
        low[rows[~enough]] = middle[~enough]
