"""Clients' proportions from a fitted prior, an average of priors, or the printed weights.

The printed weights exist to reproduce the paper's figures. They use the variance of the local
proportions as that of the true ones, which counts the sampling variance twice.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from scipy.special import betaincinv

from pfl_sklearn._typing import Floats
from pfl_sklearn._variance_averaging import averaging_share, blend
from pfl_sklearn.estimation._plausible_priors import BetaPriors, plausible_priors
from pfl_sklearn.estimation._proportion_reports import average_priors, refine_on_grid
from pfl_sklearn.priors import BetaPrior, GridPrior
from pfl_sklearn.theory import beta_own_weight, beta_shrinkage

# Smallest alpha + beta of an interval. A private fit may state a deviation near the largest that a
# proportion with its mean can have, where alpha and beta would be 0.
_LEAST_CONCENTRATION = 1e-2


class FittedProportions(NamedTuple):
    """A fitted population and its clients."""

    prior: Any
    mean: float
    mean_std: float
    icc: float
    means: Floats  # (m,)
    stds: Floats  # (m,)
    shrinkage: Floats  # (m,)
    exact: bool  # whether `means` and `stds` are those of the posterior under `prior`
    priors: BetaPriors | None = None  # that stand for an estimated one in intervals

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


def with_prior(table, prior, senders):
    """Posterior of the clients of a CountTable under a prior that those of `senders` gave."""
    mean, variance = prior.moments()
    std = _population_std(senders, mean, intraclass_correlation_of_shares(mean, variance))
    posterior = prior.posterior(table.successes, table.trials)
    return _describe(prior, mean, variance, std, table, posterior, exact=True)


def with_estimated_prior(table, prior, senders):
    """The same under an estimated prior, with errors averaged over beta priors.

    The distance of an estimate from the posterior under each of them counts as error.
    """
    fitted, share = with_prior(table, prior, senders), averaging_share(senders.n_clients)
    pairs = table.successes, table.trials
    beta = prior
    if not isinstance(prior, BetaPrior):
        # A grid of a few spikes knows no error of its own, so its errors are those of a beta prior.
        beta = BetaPrior().fit_counts(senders.successes, senders.trials, senders.counts, "ml")
    priors = BetaPriors(*np.array([[beta.alpha], [beta.beta], [1.0]]))
    mean_variance = fitted.mean_std**2
    if share:
        averaged = plausible_priors(senders, fitted.mean)
        mean_variance = blend(share, averaged.mean_variance(fitted.mean), mean_variance)
        averaged = averaged._replace(weights=share * averaged.weights)
        priors = priors._replace(weights=(1 - share) * priors.weights)
        priors = BetaPriors(*map(np.append, averaged, priors))
    variances = priors.variances(*pairs, prior.posterior(*pairs)[0])
    return fitted._replace(
        mean_std=math.sqrt(mean_variance),
        stds=np.sqrt(table.per_client(variances)),
        priors=None if prior is beta and not share else priors,
    )


def estimate_from_reports(table, prior, release, senders):
    """Posterior of the clients of a CountTable after the private reports of `senders`.

    Every client updates what the reports say of the population with its own exact counts.
    """
    average = average_priors(release.log_likelihood)
    fitted = _FROM_REPORTS[type(prior)](table, prior, average, release, senders)
    if table.n_clients > 1:
        return fitted
    # A single client has nobody to learn from: it keeps its share beside the released population.
    own = single_client(table, fitted.prior)
    return own._replace(mean=fitted.mean, mean_std=fitted.mean_std)


def _under_average(table, prior, average, release, senders):
    """Posterior of the clients of a CountTable, averaged over plausible beta priors."""
    mean, variance = average.moments()
    prior = BetaPrior().with_moments(mean, mean * (1 - mean) / variance - 1)
    posterior = average.posterior(table.successes, table.trials)
    return _describe(prior, mean, variance, average.mean()[1], table, posterior, exact=False)


def _under_grid(table, prior, average, release, senders):
    """Posterior under a grid prior that reports of the counts refine."""
    refined = refine_on_grid(prior, average, release, senders.common_trials)
    return with_prior(table, refined, senders)._replace(mean_std=average.mean()[1])


# How each prior follows from private reports.
_FROM_REPORTS = {BetaPrior: _under_average, GridPrior: _under_grid}


def with_printed_weights(table, messages, with_minus_one, cut=True):
    """Leave-one-out estimates of the paper from the clients' messages (m,).

    Weights that are not cut (private messages) may give estimates outside [0, 1] and have no
    posterior.
    """
    trials = table.per_client(table.trials)
    shares = table.per_client(table.successes) / trials
    prior = printed_prior(messages, trials, with_minus_one)
    means, own = printed_estimates(shares, trials, messages, with_minus_one, cut)
    mean, variance = prior.moments()
    spread = np.clip(means * (1 - means), 0, None) / (prior.alpha + prior.beta + trials + 1)
    return FittedProportions(
        prior,
        mean,
        float(messages.std(ddof=1) / math.sqrt(len(messages))),
        intraclass_correlation_of_shares(mean, variance),
        means,
        np.sqrt(spread) if cut else np.full(len(means), np.nan),
        1 - own,
        exact=False,
    )


def printed_estimates(shares, trials, messages, with_minus_one, cut=True):
    """Leave-one-out estimates of equation (6), or of equation (32) without the -1.

    Parameters
    ----------
    shares, trials : ndarrays of shape (m,)
        Each client's own proportion and number of trials; m >= 3.
    messages : ndarray of shape (m,)
        Messages of the clients: their proportions, or private versions of them.
    with_minus_one : bool
        Equation (6) subtracts 1 from mean (1 - mean) / variance.
    cut : bool
        Cut the weights of equation (6) at 1. With private messages nearly all weights are above 1.

    Returns
    -------
    means, own : ndarrays of shape (m,)
        Estimates and the weights on the clients' own proportions.
    """
    m = len(messages)
    if m < 3:  # the others' variance has m - 2 degrees of freedom
        raise ValueError(f"method='printed' needs at least 3 clients; got {m}.")
    others = (messages.sum() - messages) / (m - 1)
    variance = (messages @ messages - messages**2 - (m - 1) * others**2) / (m - 2)
    own = beta_own_weight(others, variance, trials, with_minus_one)
    if cut and with_minus_one:
        # No beta distribution has such a variance; its weight would be negative or above 1.
        own = np.where(variance >= others * (1 - others), 1.0, own)
    return own * shares + (1 - own) * others, own


def printed_prior(messages, trials, with_minus_one):
    """Beta prior with the mean and (uncorrected) variance of the messages."""
    mean, variance = messages.mean(), messages.var(ddof=1)
    own = beta_own_weight(np.array([mean]), np.array([variance]), np.ones(1), with_minus_one)[0]
    # As good as infinite: shares of equal size, whose variance is 0, give a weight of 0.
    largest = 1e4 * max(float(trials.max()), 100.0)
    concentration = np.clip(1 / own - 1, 1e-6, largest) if own > 0 else largest
    return BetaPrior().with_moments(mean, concentration)


def single_client(table, prior):
    """A single client without a known prior keeps its own share; the spread is unknown."""
    share = float(table.successes[0] / table.trials[0])
    std = math.sqrt(share * (1 - share) / table.trials[0])
    return FittedProportions(
        prior, share, std, math.nan, np.array([share]), np.array([std]), np.zeros(1), exact=False
    )


def matched_quantiles(means, stds, tails):
    """Quantiles of the beta distributions with these means and deviations; NaN if unknown."""
    inner = (stds > 0) & (means > 0) & (means < 1)
    mean = np.where(inner, means, 0.5)
    total = np.maximum(
        mean * (1 - mean) / np.where(inner, stds, 0.25) ** 2 - 1, _LEAST_CONCENTRATION
    )
    return tuple(
        np.where(inner, betaincinv(mean * total, (1 - mean) * total, tail), means + 0 * stds)
        for tail in tails
    )


def _describe(prior, mean, variance, mean_std, table, posterior, exact):
    """FittedProportions from posterior means and variances (u,) of the pairs of a CountTable."""
    means, variances = (table.per_client(values) for values in posterior)
    icc = intraclass_correlation_of_shares(mean, variance)
    shrinkage = table.per_client(beta_shrinkage(icc, table.trials))
    return FittedProportions(
        prior, mean, mean_std, icc, means, np.sqrt(variances), shrinkage, exact
    )


def intraclass_correlation_of_shares(mean, variance):
    """Variance of clients' probabilities over the largest that their mean allows."""
    limit = mean * (1 - mean)
    return variance / limit if limit > 0 else 0.0  # a population of 0 or 1 alone has no spread


def _population_std(table, mean, icc):
    """Standard error of the population mean given the intraclass correlation."""
    variance = mean * (1 - mean) * (icc + (1 - icc) / table.trials)
    if not np.all(variance > 0):  # a population of 0 or 1 alone
        return 0.0
    return float(np.sqrt(1 / np.sum(table.counts / variance)))
