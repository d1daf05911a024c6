"""Clients' proportions from private reports, the printed weights, or a client's own counts alone.

The printed weights exist to reproduce the paper's figures. They use the variance of the local
proportions as that of the true ones, which counts the sampling variance twice.
"""

import math

import numpy as np
from scipy.special import betaincinv

from pfl_sklearn.estimation._count_estimates import FittedCounts, describe, with_prior
from pfl_sklearn.estimation._plausible_betas import BetaPriors
from pfl_sklearn.estimation._proportion_reports import average_priors, refine_on_grid
from pfl_sklearn.priors import BetaPrior, GridPrior
from pfl_sklearn.theory import beta_own_weight

# Smallest alpha + beta of an interval. A private fit may state a deviation near the largest that a
# proportion with its mean can have, where alpha and beta would be 0.
_LEAST_CONCENTRATION = 1e-2


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
    std = average.mean()[1]
    return describe(prior, (mean, variance), std, table, posterior, BetaPriors, exact=False)


def _under_grid(table, prior, average, release, senders):
    """Posterior under a grid prior that reports of the counts refine."""
    refined = refine_on_grid(prior, average, release, senders.common_trials)
    return with_prior(table, refined, senders, BetaPriors)._replace(mean_std=average.mean()[1])


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
    return FittedCounts(
        prior,
        mean,
        float(messages.std(ddof=1) / math.sqrt(len(messages))),
        BetaPriors.icc(mean, variance),
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
    return FittedCounts(
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
