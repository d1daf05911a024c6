"""Gamma population prior of rates."""

from __future__ import annotations

from typing import Self

import numpy as np
from scipy.optimize import brentq
from scipy.special import digamma, gammaincinv, gammaln, xlog1py, xlogy
from sklearn.base import clone

from pfl_sklearn._parameters import POSITIVE, parameter, with_parameters
from pfl_sklearn._typing import Floats, TableLike
from pfl_sklearn.priors._label_counts import log_rising
from pfl_sklearn.priors._prior import CountPrior, minimum_from, one_per_client

# Populations without any event still need a mean above 0: events in all of the exposure.
_FEWEST_EVENTS = 1e-12
_MOST_ALIKE, _LEAST_ALIKE = 1e8, 1e-8  # shapes of populations that are observed without noise
_SMALLEST_SHAPE = 1e-6  # nearly all clients are at 0
_START_SHAPES = 24
_MAX_LOG_MEAN = 30.0  # of the population mean over the pooled rate


@with_parameters
class GammaPrior(CountPrior):
    r"""Gamma distribution of the clients' rates.

    .. math:: \lambda_i \sim \mathrm{Gamma}(a, b), \qquad i = 1, \dots, m,

    with shape a and rate b: the mean is :math:`a / b`, and the coefficient of variation
    :math:`1 / \sqrt a`. The rate b is in units of exposure. It is the credibility constant: the
    estimate of a client with that exposure is half-way between its own rate and the population's.

    Parameters
    ----------
    shape, rate : float, > 0, or None, default=None
        Parameters a and b of the distribution. Give both (known) or neither (estimated).

    References
    ----------
    Bühlmann, H. and Gisler, A. (2005). A course in credibility theory and its applications.
    Springer.

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn.priors import GammaPrior
    >>> mean, variance = GammaPrior(shape=2.0, rate=4.0).posterior(np.array([3]), np.array([6.0]))
    >>> mean, variance
    (array([0.5]), array([0.05]))
    """

    _estimated = ("shape", "rate")
    _all_or_none = True

    shape: float | None = parameter(default=None, ranges=[POSITIVE, None], kw_only=False)
    rate: float | None = parameter(default=None, ranges=[POSITIVE, None], kw_only=False)

    def with_moments(self, mean: float, variance: float) -> Self:
        r"""Copy of this prior with a given mean and variance.

        Parameters
        ----------
        mean : float, > 0
            Mean :math:`a / b`.
        variance : float, > 0
            Variance :math:`a / b^2`.
        """
        rate = mean / variance
        return clone(self).set_params(shape=float(mean * rate), rate=float(rate))

    def moments(self) -> tuple[float, float]:
        """Mean and variance of a known prior."""
        shape, rate = self._require_known()
        return shape / rate, shape / rate / rate

    def fit(self, theta: TableLike) -> Self:
        """Fit the prior by maximum likelihood to rates observed without noise.

        Parameters
        ----------
        theta : array-like of shape (n_clients,) or (n_clients, 1), > 0
            One rate per client.
        """
        self._validate_params()
        theta = one_per_client(theta)
        if not (theta > 0).all():
            raise ValueError(f"theta must be above 0 to fit a GammaPrior; got {theta.min():g}.")
        if self.is_known:
            return clone(self)
        mean = theta.mean()
        spread = -np.mean(np.log(theta / mean))  # 0 for equal rates

        def excess(log_shape):
            return log_shape - digamma(np.exp(log_shape)) - spread

        low, high = np.log(_LEAST_ALIKE), np.log(_MOST_ALIKE)
        # log a - psi(a) falls from infinity to 0.
        shape = np.exp(brentq(excess, low, high) if excess(high) < 0 < excess(low) else high)
        return self.with_moments(mean, mean**2 / shape)

    def _fit_counts(self, successes, trials, counts, method):
        estimate = credibility_estimates if method == "moments" else _negative_binomial_ml
        mean, rate = estimate(successes, trials, counts)
        return clone(self).set_params(shape=float(mean * rate), rate=float(rate))

    def _log_prob(self, theta):
        shape, rate = self._require_known()
        if (theta < 0).any():
            raise ValueError(f"theta must not be negative; got {theta.min():g}.")
        scaled = rate * theta
        return xlogy(shape - 1, scaled) - scaled + np.log(rate) - gammaln(shape)

    def _draw(self, n_samples, rng):
        shape, rate = self._require_known()
        return rng.gamma(shape, 1 / rate, size=(n_samples, 1))

    def _posterior(self, events, exposure):
        shape, rate = self._require_known()
        mean = (shape + events) / (rate + exposure)
        return mean, mean / (rate + exposure)

    def _posterior_quantiles(self, events, exposure, tails):
        shape, rate = self._require_known()
        return [gammaincinv(shape + events, tail) / (rate + exposure) for tail in tails]


def credibility_estimates(events: Floats, exposure: Floats, counts: Floats) -> tuple[float, float]:
    """Mean and rate by the moments of Bühlmann and Straub, with Poisson variances within clients.

    Pairs of `events` and `exposure` (u,) belong to `counts` (u,) clients. The rate is largest
    if chance alone explains how clients differ.
    """
    total = counts @ exposure
    local, weights = events / exposure, exposure / total
    pooled = counts @ events / total
    # With weights of the exposure, sum E (x - pooled)^2 has the mean
    # (m - 1) pooled + between (total - sum E^2 / total).
    squares = (counts * weights) @ (local - pooled) ** 2
    free = (counts.sum() - 1) * pooled / total
    between = (squares - free) / (counts @ (weights * (1 - weights)))
    if not between > 0:
        return _alike(pooled, exposure, total)
    rate = pooled / between
    credibility = counts * exposure / (exposure + rate)
    return float(credibility @ local / credibility.sum()), float(rate)


def _alike(pooled, exposure, total):
    """Mean and rate that stand for clients of one rate."""
    mean = max(pooled, _FEWEST_EVENTS / total)
    return float(mean), float(largest_shape(mean * exposure) / mean)


def largest_shape(expected: Floats) -> float:
    """Shape that stands for "all clients alike": 10,000 times the largest expected count."""
    # No client's own events then move its posterior mean by more than 1 in 10,000.
    return 1e4 * max(float(np.max(expected)), 1.0)


def _negative_binomial_ml(events, exposure, counts):
    """Mean and rate that maximize the marginal likelihood."""
    total = counts @ exposure
    pooled = counts @ events / total
    if pooled == 0:  # any spread explains clients without events
        return _alike(pooled, exposure, total)
    expected, share = pooled * exposure, counts / counts.sum()
    # What takes long depends on the events alone, of which few differ.
    distinct, position = np.unique(events, return_inverse=True)
    frequency = np.bincount(position, share)

    def negative(point):  # in the logarithms of mean / pooled and of the shape
        relative, shape = np.exp(point)
        odds = relative * expected / shape
        excess = share @ ((events - relative * expected) / (1 + odds))
        value = frequency @ log_ways(shape, distinct) - shape * (share @ np.log1p(odds))
        value -= share @ xlog1py(events, 1 / odds)
        rising = frequency @ digamma(shape + distinct) - digamma(shape)
        by_shape = shape * (rising - share @ np.log1p(odds)) - excess
        return -value, -np.array([excess, by_shape])

    largest = largest_shape(expected)
    # The likelihood can be flat towards "all alike", so the search starts at the best of a grid.
    starts = [(0.0, np.log(shape)) for shape in np.geomspace(1e-2, largest, _START_SHAPES)]
    bounds = [(-_MAX_LOG_MEAN, _MAX_LOG_MEAN), (np.log(_SMALLEST_SHAPE), np.log(largest))]
    relative, shape = np.exp(minimum_from(starts, negative, bounds))
    mean = pooled * relative
    return float(mean), float(shape / mean)


def log_negative_binomial(events, exposure, shape, rate):
    """Log-probabilities of counts of which the rates are gamma distributed; shapes broadcast."""
    value = log_ways(shape, events) - shape * np.log1p(exposure / rate)
    return value - xlog1py(events, rate / exposure)


def log_ways(shape, events):
    """Log of Gamma(shape + events) / (Gamma(shape) events!), where neither is lost to rounding."""
    few = log_rising(shape, events) - gammaln(events + 1)
    return np.where(events > shape, log_rising(events + 1.0, shape - 1) - gammaln(shape), few)
