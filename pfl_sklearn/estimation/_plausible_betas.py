"""Beta priors of proportions, and how plausible counts make them."""

import numpy as np
from scipy.special import betainc, betaincinv, betaln, gammaln, xlog1py, xlogy

from pfl_sklearn.estimation._count_estimates import SHARE_OF_PROPOSAL, PlausiblePriors
from pfl_sklearn.priors import BetaPrior
from pfl_sklearn.priors._beta import largest_concentration
from pfl_sklearn.theory import beta_shrinkage

_LONGEST_PRODUCT = 1000  # trials, up to which a table of sums of logarithms takes 20 MB
_LARGEST_RATIO = 1e8  # hardly any client is between 0 and 1 there: more would change nothing


class BetaPriors(PlausiblePriors):
    """Beta priors and their weights, which sum to 1.

    A priori the intraclass correlation is Beta(1/2, 1/2), and the population mean uniform.
    """

    conjugate = BetaPrior
    _end = 1.0

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

    def mean_variance(self, table, mean):
        """Mean square of the population mean's distance from an estimate."""
        return float(self.weights @ (self.a / (self.a + self.b) - mean) ** 2)

    def _log_marginals(self, successes, trials):
        return log_marginals(successes, trials, self.a, self.b)

    @staticmethod
    def _matched(mean, variance):
        return BetaPrior().with_moments(mean, mean * (1 - mean) / variance - 1)

    def _updated(self, successes, trials):
        return successes[:, None] + self.a, (trials - successes)[:, None] + self.b

    def _given(self, successes, trials):
        total = trials[:, None] + (self.a + self.b)
        means = (successes[:, None] + self.a) / total
        return means, means * (1 - means) / (total + 1)

    _below = staticmethod(betainc)

    @staticmethod
    def _highest(a, b, tail):
        return np.ones(len(a))

    @staticmethod
    def _largest(table, mean):
        return table.trials.max()

    @staticmethod
    def _grid(table, mean, ratios, n_means):
        """The means are at equal steps of a wide beta distribution around the estimate.

        Weights are likelihoods, with the steps that integrate over the mean.
        """
        ratios = np.clip(ratios, 1 / largest_concentration(table.trials), _LARGEST_RATIO)[:, None]
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
    """Beta-binomial log-probabilities (u, h) of sequences with these counts, up to rounding.

    Without the binomial coefficient, which is the same for all priors.
    """
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
