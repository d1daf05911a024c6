"""Proportions from private reports of the counts, or of one client.

The reports give a likelihood on a grid of H beta priors (mean x concentration).
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from scipy.special import betaincinv, gammaln
from scipy.stats import binom

from pfl_sklearn._typing import Floats
from pfl_sklearn.estimation import _count_estimates as counted
from pfl_sklearn.estimation._counts import check_spread_is_identified
from pfl_sklearn.estimation._plausible_betas import BetaPriors, log_marginals
from pfl_sklearn.priors import BetaPrior
from pfl_sklearn.privacy import GaussianMechanism, TwoBit

# The grid of beta priors. Two-bit reports of 10,000 clients at an epsilon of 1 leave an error of
# .015 in the mean, more than its steps of .01. Between neighbouring concentrations, 31 % apart, no
# weight on a client's own share changes by more than .07.
_MEANS, _CONCENTRATIONS = (
    axis.ravel()
    for axis in np.meshgrid(
        np.linspace(0.02, 0.98, 97), np.geomspace(0.5, 400.0, 26), indexing="ij"
    )
)
_ALPHAS, _BETAS = _MEANS * _CONCENTRATIONS, (1 - _MEANS) * _CONCENTRATIONS
# Weak: within two deviations lie concentrations from .4 to 160. It decides where the reports say
# next to nothing.
_LOG_HYPERPRIOR = -0.5 * (np.log(_CONCENTRATIONS / 8) / 1.5) ** 2
# Trials up to which reports are about the counts themselves. Subset selection sends one bit for
# each count, and the tables of probabilities have as many rows.
LARGEST_COUNT = 500
# Largest L2 distance between two clients' (x, 4 x (1 - x)), points of a parabola: with s = x + x'
# the square is at most s^2 (1 + 16 (1 - s)^2), which peaks at s = (48 - sqrt(128)) / 64.
# One of the two is (0, 0) there, so adding or removing a client can move the sums as far.
MOMENT_SENSITIVITY = 1.13409
# Smallest alpha + beta of an interval. A private fit may state a deviation near the largest that a
# proportion with its mean can have, where alpha and beta would be 0.
_LEAST_CONCENTRATION = 1e-2


def average_priors(log_likelihood):
    """Beta priors weighted by the likelihood (H,) of the reports and the hyperprior."""
    log_weights = log_likelihood + _LOG_HYPERPRIOR
    weights = np.exp(log_weights - log_weights.max())
    plausible = weights > counted.LEAST_PRIOR_WEIGHT
    weights = weights[plausible]
    return BetaPriors(_ALPHAS[plausible], _BETAS[plausible], weights / weights.sum())


class ProportionRelease(NamedTuple):
    """What the clients released, and its likelihood under the beta priors of the grid."""

    mechanism: Any
    messages: Any
    log_likelihood: Floats  # (H,)
    epsilon_under: tuple[Any, ...] = ()


def two_bit_release(table, epsilon, delta, rng):
    """Release of one-bit reports about means and spreads."""
    mechanism = TwoBit(epsilon)
    trials = table.per_client(table.trials)
    reports = mechanism.privatize(table.per_client(table.successes), trials, rng)
    on_mean = reports.bits[~reports.asks_spread]
    value = _binomial_log_likelihood(
        np.count_nonzero(on_mean), len(on_mean), mechanism.response.probability(_MEANS)
    )
    # E 4 z (n - z) / n^2 = 4 (n - 1) / n E p (1 - p), so clients of equal n are counted together.
    spread = 4 * _MEANS * (1 - _MEANS) * _CONCENTRATIONS / (_CONCENTRATIONS + 1)
    asked, ones = (
        np.bincount(trials[which], minlength=trials.max() + 1)
        for which in (reports.asks_spread, reports.asks_spread & reports.bits)
    )
    for n in np.flatnonzero(asked):
        probability = mechanism.response.probability(spread * (n - 1) / n)
        value += _binomial_log_likelihood(ones[n], asked[n], probability)
    return ProportionRelease(mechanism, None, value)


def subset_release(table, epsilon, delta, rng):
    """Release of subsets of the counts 0..n."""
    n = table.common_trials
    successes = table.per_client(table.successes)
    mechanism, subsets = counted.subset_release(
        successes, np.zeros_like(successes), n + 1, epsilon, rng
    )
    value = counted.subset_log_likelihood(mechanism, subsets, [probability_table(n)])
    return ProportionRelease(mechanism, subsets, value)


def central_release(table, epsilon, delta, rng):
    """Release of a noisy histogram of the counts 0..n, or of two moments if the trials differ."""
    n = table.common_trials
    if n is None or n > LARGEST_COUNT:
        return _moment_release(table, epsilon, delta, rng)
    histogram = np.zeros(n + 1)
    histogram[table.successes] = table.counts
    mechanism, noisy, under = counted.histogram_release(histogram, epsilon, delta, rng)
    value = counted.histogram_log_likelihood(
        noisy, mechanism.noise_variance, table.n_clients * probability_table(n)
    )
    return ProportionRelease(mechanism, noisy, value, under)


def _moment_release(table, epsilon, delta, rng):
    """Release of two noisy sums over clients: their shares, and the spreads of these."""
    mechanism = GaussianMechanism(MOMENT_SENSITIVITY, epsilon, delta)
    trials = table.per_client(table.trials)
    messages = moment_messages(table.per_client(table.successes), trials)
    noisy = mechanism.privatize(messages, rng)
    value = moment_log_likelihood(noisy, mechanism.noise_variance, trials)
    return ProportionRelease(mechanism, noisy, value, mechanism.under_zero_out(MOMENT_SENSITIVITY))


# The release behind each mechanism parameter.
RELEASES = {
    "two_bit": two_bit_release,
    "subset_selection": subset_release,
    "gaussian": central_release,
}


def check_trust(params):
    """Refuse mechanisms that do not go with the trust, before any data is touched."""
    if params.trust == "central" and params.mechanism not in ("auto", "gaussian"):
        raise ValueError(
            f"mechanism={params.mechanism!r} is local; trust='central' takes 'gaussian'."
        )
    if params.trust == "local" and params.mechanism == "gaussian":
        raise ValueError("mechanism='gaussian' needs trust='central'.")
    counted.check_delta(params)


def choose_release(trust, mechanism, table, prior):
    """Name of the release, "auto" resolved; the numbers of trials are public."""
    if trust == "central":
        return "gaussian"
    n = table.common_trials
    has_counts = n is not None and n <= LARGEST_COUNT
    if mechanism == "auto":
        mechanism = "subset_selection" if has_counts else "two_bit"
    needs_counts = ""
    if mechanism == "subset_selection" and not has_counts:
        needs_counts, instead = "subset selection", "mechanism='two_bit' or 'auto'"
    elif mechanism == "two_bit" and not isinstance(prior, BetaPrior):
        # Two bits identify a mean and a variance, which is all that a beta prior has.
        needs_counts, instead = f"a private {type(prior).__name__}", "prior='beta'"
    if needs_counts:
        raise ValueError(
            f"{needs_counts} needs the same number of trials, at most {LARGEST_COUNT}, for every "
            f"client; got {table.trials.min()} to {table.trials.max()}. Use {instead}."
        )
    return mechanism


def moment_messages(successes, trials):
    """Messages (m, 2): the proportion z / n and its spread 4 z (n - z) / n^2, both in [0, 1]."""
    share = successes / trials
    return np.column_stack([share, 4 * share * (1 - share)])


def moment_log_likelihood(noisy, noise_variance, trials):
    """Approximate log-likelihood (H,) of the noisy sums of :func:`moment_messages`.

    The two sums are treated as independent Gaussians, with the largest possible sampling variance
    of the spread.
    """
    n_clients, inverse = len(trials), np.sum(1 / trials)
    # Var z/n = Var p + E p (1 - p) / n; of p (1 - p) the share c / (c + 1) is within clients. A
    # number in [0, 1] with mean s has at most the variance s (1 - s).
    limit = _MEANS * (1 - _MEANS)
    shared = 1 / (_CONCENTRATIONS + 1)
    share_variance = limit * (shared * n_clients + (1 - shared) * inverse)
    spread = 4 * limit * (1 - shared) * (n_clients - inverse)
    spread_variance = spread * (1 - spread / n_clients)
    value = 0.0
    for total, expected, variance in (
        (noisy[0], n_clients * _MEANS, share_variance + noise_variance),
        (noisy[1], spread, spread_variance + noise_variance),
    ):
        value = value - 0.5 * ((total - expected) ** 2 / variance + np.log(variance))
    return value


@lru_cache(maxsize=8)
def probability_table(n):
    """Beta-binomial probabilities (n + 1, H) of the counts 0..n under all priors."""
    cells = np.arange(n + 1)
    log_choose = gammaln(n + 1) - gammaln(cells + 1) - gammaln(n - cells + 1)
    log_table = log_marginals(cells, np.full(n + 1, n), _ALPHAS, _BETAS)
    table = np.exp(log_choose[:, None] + log_table)
    table.flags.writeable = False
    return table


def _binomial_log_likelihood(ones, n, probability):
    """Log-likelihood (H,) of `ones` among n bits, each 1 with this probability (H,)."""
    return ones * np.log(probability) + (n - ones) * np.log1p(-probability)


def proportions_from_release(table, senders, prior, params, rng):
    """Randomize the counts of `senders`, and fit to these; with entries of the report."""
    if senders.n_clients > 1:
        check_spread_is_identified(senders)
    way = choose_release(params.trust, params.mechanism, senders, prior)
    release = RELEASES[way](senders, params.epsilon, params.delta, rng)
    entries = {"facts": release.mechanism.facts(), "epsilon_under": release.epsilon_under}
    return estimate_from_reports(table, prior, release, senders), entries


def estimate_from_reports(table, prior, release, senders):
    """Posterior of the clients of a CountTable after the private reports of `senders`."""
    average = average_priors(release.log_likelihood)
    refined = None
    if not isinstance(prior, BetaPrior):  # reports of the counts refine a grid
        n = senders.common_trials
        probabilities = [binom.pmf(np.arange(n + 1)[:, None], n, prior.support)]
        weights = average.on_grid(prior.support)
        mechanism = release.mechanism
        refined = prior.with_weights(
            counted.refined_weights(weights, mechanism, release.messages, probabilities)
        )
    fitted = counted.estimate_from_reports(table, average, refined, senders)
    if table.n_clients > 1:
        return fitted
    # A single client has nobody to learn from: it keeps its share beside the released population.
    own = single_client(table, fitted.prior)
    return own._replace(mean=fitted.mean, mean_std=fitted.mean_std)


def single_client(table, prior):
    """A single client without a known prior keeps its own share; the spread is unknown."""
    share = float(table.successes[0] / table.trials[0])
    std = math.sqrt(share * (1 - share) / table.trials[0])
    return counted.FittedCounts(
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
