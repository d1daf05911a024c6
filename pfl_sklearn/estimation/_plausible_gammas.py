"""Gamma priors of rates, weighted by the likelihood of counts."""

import math

import numpy as np
from scipy.special import betaincinv, betaln, gammainc, gammaincinv, xlog1py, xlogy

from pfl_sklearn.estimation._count_estimates import (
    SHARE_OF_PROPOSAL,
    FittedCounts,
    PlausiblePriors,
)
from pfl_sklearn.priors import GammaPrior
from pfl_sklearn.priors._gamma import largest_shape, log_negative_binomial

# Jeffreys' prior of a Poisson mean: as if half an event had been seen. It keeps the errors of
# clients without events above 0.
_HALF_AN_EVENT = 0.5
# Of variances. Without events no ratio is unlikely, and the errors would have no bound.
_LARGEST_GAMMA_RATIO = 1e4
# Credibilities of a typical client, whose rates b are finite and above 0.
_LEAST_CREDIBILITY, _LARGEST_CREDIBILITY = 1e-100, 1 - 1e-12


class GammaPriors(PlausiblePriors):
    """Gamma priors and their weights, which sum to 1.

    The ratio of the variances is 1 / shape, the squared coefficient of variation of clients' rates.
    For an exposure that brings one event on average, it is the variance of counts between clients
    over that within. A priori 1 / (1 + shape), the share of that count's variance which is between
    clients, is Beta(1/2, 1/2). Given the shape, the population mean has the prior of Jeffreys.
    Neither depends on the unit of exposure.
    """

    conjugate = GammaPrior
    _upper_end = np.inf

    @classmethod
    def of_one_client(cls):
        """Prior of Jeffreys of a Poisson rate, for a client that has nobody to learn from."""
        return cls(*np.array([[_HALF_AN_EVENT], [0.0], [1.0]]))

    @staticmethod
    def icc(mean, variance):
        """Share of the variance between clients in that of a count over an exposure of 1."""
        return variance / (variance + mean) if variance > 0 else 0.0

    @staticmethod
    def shrinkage(mean, variance, exposure):
        """Weights (u,) on the population under the gamma prior with this mean and variance."""
        return mean / (mean + exposure * variance) if variance > 0 else np.ones(len(exposure))

    @staticmethod
    def mean_std(table, mean, variance):
        """Standard error of the population mean under a prior with this mean and variance."""
        if not mean > 0:  # no client has events
            return 0.0
        return float(np.sqrt(_mean_variances(table, mean, np.array([variance / mean]) / mean)[0]))

    @classmethod
    def single_client(cls, table, prior):
        """A single client keeps its own rate; the spread between clients is unknown."""
        rates, priors = table.successes / table.trials, cls.of_one_client()
        stds = np.sqrt(priors.variances(table.successes, table.trials, rates))
        mean, std = float(rates[0]), float(stds[0])
        return FittedCounts(prior, mean, std, math.nan, rates, stds, np.zeros(1), True, priors)

    @staticmethod
    def matched_quantiles(means, stds, tails):
        """Quantiles (m,) of the gamma distributions with these means and standard deviations."""
        shapes = (means / stds) ** 2
        return tuple(gammaincinv(shapes, tail) * means / shapes for tail in tails)

    def mean_variance(self, table, mean):
        """Variance of the estimated population mean, averaged over the ratios."""
        # The posterior of the mean itself has such long tails that its variance may be infinite.
        return float(self.weights @ _mean_variances(table, _above_0(table, mean), 1 / self.a))

    def new_client_variance(self, mean, mean_variance):
        """Mean square of a new client's distance from the population mean, an estimate."""
        return float(self.weights @ (1 / self.a)) * (mean**2 + mean_variance) + mean_variance

    def _log_marginals(self, events, exposure):
        return log_negative_binomial(events[:, None], exposure[:, None], self.a, self.b)

    @staticmethod
    def _from_moments(mean, variance):
        return GammaPrior().with_moments(mean, variance)

    def _posterior_parameters(self, events, exposure):
        return events[:, None] + self.a, exposure[:, None] + self.b

    def _posterior_moments(self, events, exposure):
        shapes, rates = self._posterior_parameters(events, exposure)
        return shapes / rates, shapes / rates / rates  # the square might overflow

    @staticmethod
    def _cdf(shapes, rates, values):
        return gammainc(shapes, rates * values)

    @staticmethod
    def _draw(rng, shapes, rates):
        return rng.gamma(shapes, 1 / rates)

    @staticmethod
    def _quantile_bound(shapes, rates, tail):
        # Cantelli's inequality.
        return np.max((shapes + np.sqrt(shapes / (1 - tail))) / rates, axis=1)

    @staticmethod
    def _largest_expected(table, mean):
        return _above_0(table, mean) * table.trials.max()

    @staticmethod
    def _grid(table, mean, ratios, n_means):
        """Weights are likelihoods times the prior of Jeffreys, with steps that integrate over b."""
        events, exposure, counts = table.successes, table.trials, table.counts
        mean = _above_0(table, mean)
        largest = largest_shape(mean * exposure)
        shapes = 1 / np.clip(ratios, 1 / largest, _LARGEST_GAMMA_RATIO)[:, None]
        rates, log_density = _proposed_rates(table, mean, shapes, n_means)
        events, exposure = events[:, None, None], exposure[:, None, None]
        marginals = np.tensordot(
            counts, log_negative_binomial(events, exposure, shapes, rates), axes=1
        )
        # On the logarithm of b a client's information is the shape times its credibility.
        information = shapes * np.tensordot(counts, exposure / (rates + exposure), axes=1)
        value = marginals + 0.5 * np.log(information)
        return np.broadcast_to(shapes, rates.shape), rates, value - log_density


def _proposed_rates(table, mean, shapes, n_means):
    """Rates b (k, n_means) around a population mean, and their log densities, for shapes (k, 1)."""
    # If all exposures are E, the credibility E / (b + E) is beta distributed given a shape, and the
    # steps of its distribution are equal. For unequal exposures we take a typical one, and widen it
    # to match the information of all of them.
    n_clients, n_events = table.counts.sum(), table.counts @ table.successes + _HALF_AN_EVENT
    typical, centre = n_events / (n_clients * mean), shapes / mean
    credibility = np.sum(table.counts / (centre / table.trials + 1), axis=1, keepdims=True)
    share = SHARE_OF_PROPOSAL * credibility * (centre / typical + 1) / n_clients
    first, second = share * n_events, share * n_clients * shapes
    steps = betaincinv(first, second, (np.arange(n_means) + 0.5) / n_means)
    steps = np.clip(steps, _LEAST_CREDIBILITY, _LARGEST_CREDIBILITY)
    # Of the logarithm of b, up to the logarithm of the number of steps.
    log_density = xlogy(first, steps) + xlog1py(second, -steps) - betaln(first, second)
    return typical * (1 - steps) / steps, log_density + np.log(n_means)


def _above_0(table, mean):
    """Population mean with half an event more, in all of the exposure."""
    return mean + _HALF_AN_EVENT / (table.counts @ table.trials)


def _mean_variances(table, mean, ratios):
    """Variances (h,) of an estimated population mean, by the ratios (h,) of clients' variances."""
    expected = mean * table.trials[:, None]
    return mean**2 / (table.counts @ (expected / (1 + expected * ratios)))


def new_client_variance(fitted):
    """Mean square of a new client's distance from the estimated population mean; NaN if unknown."""
    if math.isnan(fitted.icc):  # a single client shows no spread
        return math.nan
    if not fitted.exact:  # an average over priors, whose variance has the error of the mean
        return fitted.prior.moments()[1]
    mean_variance = fitted.mean_std**2
    if fitted.priors is None:  # the prior counts as known
        return fitted.prior.moments()[1] + mean_variance
    return fitted.priors.new_client_variance(fitted.mean, mean_variance)
