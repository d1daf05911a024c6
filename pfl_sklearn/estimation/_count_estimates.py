"""Clients' proportions or rates from exact counts, under a fitted prior or an average of priors."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from pfl_sklearn._typing import Floats
from pfl_sklearn._variance_averaging import averaging_share, blend
from pfl_sklearn.estimation._plausible_priors import PlausiblePriors


class FittedCounts(NamedTuple):
    """A fitted population and its clients."""

    prior: Any
    mean: float
    mean_std: float
    icc: float
    means: Floats  # (m,)
    stds: Floats  # (m,)
    shrinkage: Floats  # (m,)
    exact: bool  # whether `means` and `stds` are those of the posterior under `prior`
    priors: PlausiblePriors | None = None  # that stand for an estimated one in intervals

    def attributes(self, table):
        """Fitted attributes by name, for the clients of a CountTable."""
        return {
            "n_samples_per_client_": table.per_client(table.trials),
            "local_means_": table.per_client(table.successes / table.trials),
            "means_": self.means,
            "stds_": self.stds,
            "shrinkage_": self.shrinkage,
            "prior_": self.prior,
            "population_mean_": self.mean,
            "population_mean_std_": self.mean_std,
            "icc_": self.icc,
            "_posterior_is_exact": self.exact,
            "_priors": self.priors,
        }


def estimate_exactly(table, senders, prior, params, likelihood):
    """Fit the prior to the exact counts of `senders`, and estimate all clients of a CountTable.

    `likelihood` is the class of PlausiblePriors that goes with the counts.
    """
    if prior.is_known:
        # A mean that was given has no sampling error.
        return with_prior(table, prior, senders, likelihood)._replace(mean_std=0.0)
    prior = prior.fit_counts(senders.successes, senders.trials, senders.counts, params.method)
    estimate = with_estimated_prior if params.uncertainty == "full" else with_prior
    return estimate(table, prior, senders, likelihood)


def with_prior(table, prior, senders, likelihood):
    """Posterior of the clients of a CountTable under a prior that those of `senders` gave."""
    mean, variance = prior.moments()
    std = likelihood.mean_std(senders, mean, variance)
    posterior = prior.posterior(table.successes, table.trials)
    return describe(prior, (mean, variance), std, table, posterior, likelihood)


def with_estimated_prior(table, prior, senders, likelihood):
    """The same under an estimated prior, with errors averaged over conjugate priors.

    The distance of an estimate from the posterior under each of them counts as error.
    """
    fitted = with_prior(table, prior, senders, likelihood)
    share, conjugate = averaging_share(senders.n_clients), prior
    pairs = table.successes, table.trials
    if not isinstance(prior, likelihood.conjugate):
        # A grid of a few spikes knows no error of its own; its errors are those of a smooth prior.
        conjugate = likelihood.conjugate().fit_counts(
            senders.successes, senders.trials, senders.counts, "ml"
        )
    priors = likelihood.of(conjugate)
    mean_variance = fitted.mean_std**2
    if share:
        averaged = likelihood.plausible(senders, fitted.mean)
        mean_variance = blend(share, averaged.mean_variance(senders, fitted.mean), mean_variance)
        priors = averaged.blended(share, priors)
    variances = priors.variances(*pairs, prior.posterior(*pairs)[0])
    return fitted._replace(
        mean_std=math.sqrt(mean_variance),
        stds=np.sqrt(table.per_client(variances)),
        priors=None if prior is conjugate and not share else priors,
    )


def describe(prior, moments, mean_std, table, posterior, likelihood, exact=True):
    """FittedCounts from posterior means and variances (u,) of the pairs of a CountTable.

    `moments` are the mean and the variance of the population.
    """
    means, variances = (table.per_client(values) for values in posterior)
    icc = likelihood.icc(*moments)
    shrinkage = table.per_client(likelihood.shrinkage(*moments, table.trials))
    return FittedCounts(
        prior, moments[0], mean_std, icc, means, np.sqrt(variances), shrinkage, exact
    )


def central_bounds(table, prior, priors, level):
    """Bounds (m,) of the central intervals of the clients of a CountTable.

    They are quantiles of posteriors under `prior`, or averaged over `priors`.
    """
    tails = (1 - level) / 2, (1 + level) / 2
    pairs = table.successes, table.trials
    bounds = (
        prior.posterior_quantiles(*pairs, tails)
        if priors is None  # the prior counts as known
        else priors.quantiles(*pairs, tails)
    )
    return tuple(table.per_client(bound) for bound in bounds)
