"""Proportions from private reports: their likelihood on a grid of H beta priors."""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from scipy.special import gammaln
from scipy.stats import binom

from pfl_sklearn._typing import Floats
from pfl_sklearn.estimation._category_reports import (
    CategoryReports,
    check_central_delta,
    estimate_from_reports,
    grid_weights_from_subsets,
    plausible_weights,
    report_histogram,
    report_subsets,
)
from pfl_sklearn.estimation._count_estimates import keep_own_if_single
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
# Weak: concentrations from .4 to 160 lie within two deviations. It matters only where the reports
# carry next to no information.
_LOG_HYPERPRIOR = -0.5 * (np.log(_CONCENTRATIONS / 8) / 1.5) ** 2
# Trials up to which reports are about the counts themselves. Subset selection sends one bit for
# each count, and the tables of probabilities have as many rows.
LARGEST_REPORTED_COUNT = 500
# Largest L2 distance between two clients' (x, 4 x (1 - x)), points of a parabola: with s = x + x'
# the square is at most s^2 (1 + 16 (1 - s)^2), which peaks at s = (48 - sqrt(128)) / 64.
# One of the two is (0, 0) there, so adding or removing a client can move the sums as far.
MOMENT_SENSITIVITY = 1.13409


class ProportionRelease(NamedTuple):
    """Released messages of the clients, and their likelihood under the beta priors of the grid."""

    mechanism: Any
    log_likelihood: Floats  # (H,)
    reports: CategoryReports | None = None  # of the counts themselves, which a grid prior needs
    epsilon_under: tuple[Any, ...] = ()


def proportions_from_release(table, senders, prior, params, rng):
    """Estimates from randomized counts of `senders`; with entries of the report."""
    if senders.n_clients > 1:
        check_spread_is_identified(senders)
    release = release_proportions(senders, prior, params, rng)
    average = average_of_betas(release.log_likelihood)
    grid = None
    if not isinstance(prior, BetaPrior):
        n = senders.common_trials
        probabilities = [binom.pmf(np.arange(n + 1)[:, None], n, prior.support)]
        weights = average.on_grid(prior.support)
        weights = grid_weights_from_subsets(weights, release.reports, probabilities)
        grid = prior.with_weights(weights)
    fitted = estimate_from_reports(table, average, grid, senders)
    entries = {"facts": release.mechanism.facts(), "epsilon_under": release.epsilon_under}
    return keep_own_if_single(fitted, table, BetaPriors), entries


def release_proportions(table, prior, params, rng):
    """ProportionRelease of the clients of a CountTable, by the release that fits them."""
    release = choose_release(params.trust, params.mechanism, table, prior)
    if release == "two_bit":
        return release_two_bits(table, params, rng)
    if release == "moments":
        return release_moments(table, params, rng)
    n, successes = table.common_trials, table.per_client(table.successes)
    report = report_subsets if release == "subset_selection" else report_histogram
    reports = report(successes, np.zeros_like(successes), n + 1, params, rng)
    value = reports.log_likelihood([probability_table(n)])
    return ProportionRelease(reports.mechanism, value, reports, reports.epsilon_under)


def choose_release(trust, mechanism, table, prior):
    """Name of the release, "auto" resolved; the numbers of trials are public."""
    n = table.common_trials
    has_counts = n is not None and n <= LARGEST_REPORTED_COUNT
    if trust == "central":
        return "histogram" if has_counts else "moments"
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
            f"{needs_counts} needs the same number of trials, at most {LARGEST_REPORTED_COUNT}, "
            f"for every client; got {table.trials.min()} to {table.trials.max()}. Use {instead}."
        )
    return mechanism


def check_trust(params):
    """Refuse mechanisms that do not go with the trust, before any data is touched."""
    if params.trust == "central" and params.mechanism not in ("auto", "gaussian"):
        raise ValueError(
            f"mechanism={params.mechanism!r} is local; trust='central' takes 'gaussian'."
        )
    if params.trust == "local" and params.mechanism == "gaussian":
        raise ValueError("mechanism='gaussian' needs trust='central'.")
    check_central_delta(params)


def average_of_betas(log_likelihood):
    """Beta priors weighted by the likelihood (H,) of the reports and the hyperprior."""
    weights, plausible = plausible_weights(log_likelihood + _LOG_HYPERPRIOR)
    return BetaPriors(_ALPHAS[plausible], _BETAS[plausible], weights)


def release_two_bits(table, params, rng):
    """ProportionRelease of one-bit reports about means and spreads."""
    mechanism = TwoBit(params.epsilon)
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
    return ProportionRelease(mechanism, value)


def release_moments(table, params, rng):
    """ProportionRelease of two noisy sums over clients: of their shares, and of their spreads."""
    mechanism = GaussianMechanism(MOMENT_SENSITIVITY, params.epsilon, params.delta)
    trials = table.per_client(table.trials)
    noisy = mechanism.privatize(moment_messages(table.per_client(table.successes), trials), rng)
    value = moment_log_likelihood(noisy, mechanism.noise_variance, trials)
    zero_out = mechanism.under_zero_out(MOMENT_SENSITIVITY)
    return ProportionRelease(mechanism, value, epsilon_under=zero_out)


def moment_messages(successes, trials):
    """Messages (m, 2): the proportion z / n and its spread 4 z (n - z) / n^2, both in [0, 1]."""
    share = successes / trials
    return np.column_stack([share, 4 * share * (1 - share)])


def moment_log_likelihood(noisy, noise_variance, trials):
    """Approximate log-likelihood (H,) of the noisy sums of :func:`moment_messages`."""
    # The two sums are treated as independent Gaussians, with the largest possible sampling variance
    # of the spread.
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
