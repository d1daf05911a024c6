"""Beta population prior of proportions."""

from __future__ import annotations

from typing import Self

import numpy as np
from scipy.special import betaincinv, betaln, digamma, expit, logit, xlog1py, xlogy
from sklearn.base import clone

from pfl_sklearn._parameters import POSITIVE, parameter, with_parameters
from pfl_sklearn._typing import Integers, TableLike
from pfl_sklearn.priors._prior import CountPrior, minimum_from, one_per_client
from pfl_sklearn.theory import beta_moments, debiased_share_variance

# Within these logits a mean and its complement differ from 0 by more than the rounding of 1.
_MAX_LOGIT = 30.0
# Populations in which all rows are failures still need alpha > 0.
_SMALLEST_MEAN = 1e-12
# Stands for clients that are all at 0 or 1.
_MIN_CONCENTRATION = 1e-6
_START_CONCENTRATIONS = 24


@with_parameters
class BetaPrior(CountPrior):
    r"""Beta distribution of the clients' proportions.

    .. math:: p_i \sim \mathrm{Beta}(\alpha, \beta), \qquad i = 1, \dots, m.

    Its mean is :math:`\alpha / (\alpha + \beta)`. Clients are more alike the larger the
    concentration :math:`\alpha + \beta` is (Section 2.2 of Ozkara et al., 2023).

    Parameters
    ----------
    alpha, beta : float, > 0, or None, default=None
        Parameters. Give both (known) or neither (estimated).

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn.priors import BetaPrior
    >>> mean, variance = BetaPrior(alpha=1.0, beta=1.0).posterior(np.array([3]), np.array([4]))
    >>> mean.round(3), variance.round(4)
    (array([0.667]), array([0.0317]))
    """

    _estimated = ("alpha", "beta")
    _all_or_none = True

    alpha: float | None = parameter(default=None, ranges=[POSITIVE, None], kw_only=False)
    beta: float | None = parameter(default=None, ranges=[POSITIVE, None], kw_only=False)

    def with_moments(self, mean: float, concentration: float) -> Self:
        r"""Copy of this prior with a given mean and concentration.

        Parameters
        ----------
        mean : float in [0, 1]
            Mean :math:`\alpha / (\alpha + \beta)`, moved off 0 and 1 where necessary.
        concentration : float, > 0
            Sum :math:`\alpha + \beta`.
        """
        mean = np.clip(mean, _SMALLEST_MEAN, 1 - _SMALLEST_MEAN)
        return clone(self).set_params(
            alpha=float(mean * concentration), beta=float((1 - mean) * concentration)
        )

    def moments(self) -> tuple[float, float]:
        """Mean and variance of a known prior."""
        return beta_moments(*self._require_known())

    def fit(self, theta: TableLike) -> Self:
        """Fit the prior by maximum likelihood to proportions observed without noise.

        Parameters
        ----------
        theta : array-like of shape (n_clients,) or (n_clients, 1), within (0, 1)
            One proportion per client.
        """
        self._validate_params()
        theta = one_per_client(theta)
        if not ((theta > 0) & (theta < 1)).all():
            raise ValueError("theta must lie within (0, 1) to fit a BetaPrior.")
        if self.is_known:
            return clone(self)
        by_alpha, by_beta = np.log(theta).mean(), np.log1p(-theta).mean()

        def log_likelihood(alpha, beta, total):
            value = (alpha - 1) * by_alpha + (beta - 1) * by_beta - betaln(alpha, beta)
            slopes = (
                by_alpha - digamma(alpha) + digamma(total),
                by_beta - digamma(beta) + digamma(total),
            )
            return value, slopes

        return self.with_moments(*_maximize(log_likelihood, theta.mean(), [10.0], 1e8))

    def _fit_counts(self, successes, trials, counts, method):
        mean, concentration = moment_estimates(successes, trials, counts)
        if method == "ml":
            mean, concentration = _beta_binomial_ml(successes, trials, counts, mean)
        return self.with_moments(mean, concentration)

    def _log_prob(self, theta):
        alpha, beta = self._require_known()
        return xlogy(alpha - 1, theta) + xlog1py(beta - 1, -theta) - betaln(alpha, beta)

    def _draw(self, n_samples, rng):
        return rng.beta(self.alpha, self.beta, size=(n_samples, 1))

    def _posterior(self, successes, trials):
        alpha, beta = self._require_known()
        total = alpha + beta + trials
        mean = (alpha + successes) / total
        return mean, mean * (1 - mean) / (total + 1)

    def _posterior_quantiles(self, successes, trials, tails):
        alpha, beta = self._require_known()
        alphas, betas = alpha + successes, beta + trials - successes
        return [betaincinv(alphas, betas, tail) for tail in tails]


def moment_estimates(successes, trials, counts):
    """Mean and concentration that match mean and debiased variance of the local proportions.

    Clients weigh as their trials do (Kleinman, 1973), as in the credibility of Bühlmann and
    Straub. The concentration is the smallest if all clients are at 0 or 1, and the largest if
    sampling alone explains how they differ.
    """
    local, weights = successes / trials, trials / (counts @ trials)
    mean = float(counts @ (weights * local))
    # The squares have the mean sum(free * variance), of variances of the local proportions.
    free = counts * weights * (1 - weights)
    limit, largest, variance = mean * (1 - mean), largest_concentration(trials), 0.0
    # Clients with one trial each say nothing about how clients differ, nor does a single one.
    if free.sum() > 0 and (share := free @ (1 / trials) / free.sum()) < 1:
        spread = (counts * weights) @ (local - mean) ** 2 / free.sum()
        variance = debiased_share_variance(mean, spread, share)
    if variance <= limit / (largest + 1):
        return mean, largest
    concentration = float(np.clip(limit / variance - 1, _MIN_CONCENTRATION, largest))
    credibility = counts * trials / (trials + concentration)
    return float(credibility @ local / credibility.sum()), concentration


def largest_concentration(trials: Integers) -> float:
    """Concentration that stands for "all clients alike": 10,000 times the largest client."""
    # No client's own rows then move its posterior mean by more than 1 in 10,000.
    return 1e4 * max(float(np.max(trials)), 100.0)


def _beta_binomial_ml(successes, trials, counts, mean):
    """Mean and concentration that maximize the marginal likelihood."""
    failures, share = trials - successes, counts / counts.sum()

    def log_likelihood(alpha, beta, total):
        value = share @ (betaln(successes + alpha, failures + beta) - betaln(alpha, beta))
        common = digamma(total) - share @ digamma(trials + total)
        slopes = (
            share @ digamma(successes + alpha) - digamma(alpha) + common,
            share @ digamma(failures + beta) - digamma(beta) + common,
        )
        return value, slopes

    # The likelihood can be flat towards "all alike", so the search starts at the best of a grid.
    largest = largest_concentration(trials)
    starts = np.geomspace(1e-2, largest, _START_CONCENTRATIONS)
    return _maximize(log_likelihood, mean, starts, largest)


def _maximize(log_likelihood, mean, concentrations, largest):
    """Mean and concentration at the maximum of a log-likelihood, from the best concentration.

    `log_likelihood` takes alpha, beta and their sum; it returns a value and the slopes in alpha and
    beta.
    """

    def negative(point):  # in logit(mean) and log(concentration), which have no ends
        mean, total = expit(point[0]), np.exp(point[1])
        value, (by_alpha, by_beta) = log_likelihood(mean * total, (1 - mean) * total, total)
        by_logit = mean * (1 - mean) * total * (by_alpha - by_beta)
        by_log = total * (mean * by_alpha + (1 - mean) * by_beta)
        return -value, -np.array([by_logit, by_log])

    centre = np.clip(logit(mean), -_MAX_LOGIT, _MAX_LOGIT)
    starts = [(centre, np.log(concentration)) for concentration in concentrations]
    bounds = [(-_MAX_LOGIT, _MAX_LOGIT), (np.log(_MIN_CONCENTRATION), np.log(largest))]
    at = minimum_from(starts, negative, bounds)
    return float(expit(at[0])), float(np.exp(at[1]))
