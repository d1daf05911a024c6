"""Beta priors of proportions, weighted by the likelihood of counts."""

import math

import numpy as np
from scipy.special import betainc, betaincinv, betaln, gammaln, xlog1py, xlogy

from pfl_sklearn.estimation._count_estimates import (
    SHARE_OF_PROPOSAL,
    FittedCounts,
    PlausiblePriors,
)
from pfl_sklearn.priors import BetaPrior
from pfl_sklearn.priors._beta import largest_concentration
from pfl_sklearn.theory import beta_shrinkage

_LONGEST_PRODUCT = 1000  # trials, up to which a table of sums of logarithms takes 20 MB
_LARGEST_BETA_RATIO = 1e8  # hardly any client is between 0 and 1 there: more would change nothing
# Smallest alpha + beta of an interval. A private fit may state a deviation near the largest that a
# proportion with its mean can have, where alpha and beta would be 0.
_LEAST_CONCENTRATION = 1e-2


class BetaPriors(PlausiblePriors):
    """Beta priors and their weights, which sum to 1.

    A priori the intraclass correlation is Beta(1/2, 1/2), and the population mean uniform.
    """

    conjugate = BetaPrior
    _upper_end = 1.0

    @staticmethod
    def icc(mean, variance):
        """Variance of clients' probabilities over the largest that their mean allows."""
        limit = mean * (1 - mean)
        return variance / limit if limit > 0 else 0.0  # a population of 0 or 1 alone has no spread

    @classmethod
    def shrinkage(cls, mean, variance, trials):
        """Weights (u,) on the population under the beta prior with this mean and variance."""
        return beta_shrinkage(cls.icc(mean, variance), trials)

    @classmethod
    def mean_std(cls, table, mean, variance):
        """Standard error of the population mean under a prior with this mean and variance."""
        icc = cls.icc(mean, variance)
        variance = mean * (1 - mean) * (icc + (1 - icc) / table.trials)
        if not np.all(variance > 0):  # a population of 0 or 1 alone
            return 0.0
        return float(np.sqrt(1 / np.sum(table.counts / variance)))

    @staticmethod
    def single_client(table, prior):
        """A single client keeps its own share; the spread between clients is unknown."""
        share = float(table.successes[0] / table.trials[0])
        std = math.sqrt(share * (1 - share) / table.trials[0])
        return FittedCounts(
            prior, share, std, math.nan, np.array([share]), np.array([std]), np.zeros(1), False
        )

    @staticmethod
    def matched_quantiles(means, stds, tails):
        """Quantiles (m,) of beta distributions with these moments; the mean without a variance."""
        inner = (stds > 0) & (means > 0) & (means < 1)
        mean = np.where(inner, means, 0.5)
        total = np.maximum(
            mean * (1 - mean) / np.where(inner, stds, 0.25) ** 2 - 1, _LEAST_CONCENTRATION
        )
        # A standard deviation of NaN, as of the printed weights, gives bounds of NaN.
        return tuple(
            np.where(inner, betaincinv(mean * total, (1 - mean) * total, tail), means + 0 * stds)
            for tail in tails
        )

    def mean_variance(self, table, mean):
        """Mean square of the population mean's distance from an estimate."""
        return float(self.weights @ (self.a / (self.a + self.b) - mean) ** 2)

    def _log_marginals(self, successes, trials):
        return log_marginals(successes, trials, self.a, self.b)

    @staticmethod
    def _from_moments(mean, variance):
        return BetaPrior().with_moments(mean, mean * (1 - mean) / variance - 1)

    def _posterior_parameters(self, successes, trials):
        return successes[:, None] + self.a, (trials - successes)[:, None] + self.b

    def _posterior_moments(self, successes, trials):
        total = trials[:, None] + (self.a + self.b)
        means = (successes[:, None] + self.a) / total
        return means, means * (1 - means) / (total + 1)

    _cdf = staticmethod(betainc)

    @staticmethod
    def _draw(rng, a, b):
        return rng.beta(a, b)

    @staticmethod
    def _quantile_bound(a, b, tail):
        return np.ones(len(a))

    @staticmethod
    def _largest_expected(table, mean):
        return table.trials.max()

    @staticmethod
    def _grid(table, mean, ratios, n_means):
        """The means are at equal steps of a wide beta distribution around the estimate."""
        # Weights are likelihoods times the steps that integrate over the mean.
        ratios = np.clip(ratios, 1 / largest_concentration(table.trials), _LARGEST_BETA_RATIO)[
            :, None
        ]
        # Trials of a client are correlated: for the mean they count as fewer independent ones.
        correlation = ratios / (1 + ratios)
        trials = np.sum(
            table.counts * table.trials / (1 + (table.trials - 1) * correlation), axis=1
        )
        trials = SHARE_OF_PROPOSAL * trials[:, None]
        a, b = 1 + trials * mean, 1 + trials * (1 - mean)
        means = betaincinv(a, b, (np.arange(n_means) + 0.5) / n_means)
        means = np.clip(means, 1e-12, 1 - 1e-12)  # alpha and beta must be above 0
        density = xlogy(a - 1, means) + xlog1py(b - 1, -means) - betaln(a, b)
        alphas, betas = means / ratios, (1 - means) / ratios
        likelihoods = log_marginals(table.successes, table.trials, alphas.ravel(), betas.ravel())
        value = (table.counts @ likelihoods).reshape(alphas.shape)
        return alphas, betas, value + (-density - np.log(n_means))


def log_marginals(successes, trials, alphas, betas):
    """Beta-binomial log-probabilities (u, h) of sequences with these counts, up to rounding."""
    # Without the binomial coefficient, which is the same for all priors.
    failures = trials - successes
    return (
        _log_rising(alphas, successes)
        + _log_rising(betas, failures)
        - _log_rising(alphas + betas, trials)
    )


def _log_rising(values, steps):
    """Log of values (values + 1) ... (values + steps - 1): (u, h) for steps (u,), values (h,)."""
    highest = int(steps.max(initial=0))
    if highest > _LONGEST_PRODUCT:
        return gammaln(steps[:, None] + values) - gammaln(values)
    table = np.zeros((highest + 1, len(values)))
    np.cumsum(np.log(np.arange(highest)[:, None] + values), axis=0, out=table[1:])
    return table[steps]
