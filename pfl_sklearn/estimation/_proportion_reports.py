"""Proportions when the server sees private reports of the counts.

The reports give a likelihood on a grid of H beta priors (mean x concentration). Estimates are
posterior means averaged over that grid, for u distinct pairs of counts.
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from scipy.special import gammaln
from scipy.stats import binom

from pfl_sklearn._typing import Floats
from pfl_sklearn.estimation._plausible_betas import BetaPriors, log_marginals
from pfl_sklearn.priors import BetaPrior
from pfl_sklearn.privacy import GaussianMechanism, OneBit, SubsetSelection, TwoBit
from pfl_sklearn.privacy._accounting._events import PureEvent
from pfl_sklearn.privacy._spending import UNPROTECTED, gaussian_events

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
_LEAST_PRIOR_WEIGHT = 1e-9  # relative to the largest; leaving priors out saves most of the work
_ROWS_AT_ONCE = 2048  # subsets, times 2,522 priors: 41 MB for each array
_EM_STEPS = 60  # reports blur the counts; to convergence, EM would fit their noise with spikes
# Trials up to which reports are about the counts themselves. Subset selection sends one bit for
# each count, and the tables of probabilities have as many rows.
LARGEST_COUNT = 500
# Largest L2 distance between two clients' (x, 4 x (1 - x)), points of a parabola: with s = x + x'
# the square is at most s^2 (1 + 16 (1 - s)^2), which peaks at s = (48 - sqrt(128)) / 64.
# One of the two is (0, 0) there, so adding or removing a client can move the sums as far.
MOMENT_SENSITIVITY = 1.13409
# A replaced client leaves one cell and enters another; one that contributes nothing only leaves.
HISTOGRAM_SENSITIVITY = 2**0.5
HISTOGRAM_ZERO_OUT_SENSITIVITY = 1.0
_ONE_BIT_CAVEAT = (
    "one-bit messages carry no information on the spread between clients, so the shrinkage is "
    "arbitrary; mechanism='one_bit' exists to reproduce published figures."
)


def average_priors(log_likelihood):
    """Beta priors weighted by the likelihood (H,) of the reports and the hyperprior."""
    log_weights = log_likelihood + _LOG_HYPERPRIOR
    weights = np.exp(log_weights - log_weights.max())
    plausible = weights > _LEAST_PRIOR_WEIGHT
    weights = weights[plausible]
    return BetaPriors(_ALPHAS[plausible], _BETAS[plausible], weights / weights.sum())


class ProportionRelease(NamedTuple):
    """What the clients released, and its likelihood under the beta priors of the grid."""

    mechanism: Any
    messages: Any
    log_likelihood: Floats | None  # (H,)
    epsilon_under: tuple[Any, ...] = ()
    caveats: tuple[str, ...] = ()


def proportion_events(prior, params):
    """Accounting events of a fit.

    The numbers of trials decide whether a trusted server releases a histogram or moments. When a
    client contributes nothing, the moments have the larger relative sensitivity.
    """
    if math.isinf(params.epsilon):
        return UNPROTECTED
    if prior.is_known:
        return ()
    if params.trust == "local":  # randomized response is pure, whatever delta says
        return (PureEvent(float(params.epsilon), 0.0, "replace_one"),)
    return gaussian_events(params.epsilon, params.delta, zero_out=1.0)


def one_bit_release(table, epsilon, delta, rng):
    """Release of one decoded bit per client, without information on the priors' spread."""
    mechanism = OneBit(epsilon)
    bits = mechanism.privatize(table.per_client(table.successes / table.trials), rng)
    return ProportionRelease(mechanism, mechanism.decode(bits), None, caveats=(_ONE_BIT_CAVEAT,))


def two_bit_release(table, epsilon, delta, rng):
    """Release of one-bit answers about means and spreads."""
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
    """Release of subsets (m, n + 1) of the counts 0..n."""
    n = table.common_trials
    mechanism = SubsetSelection(n + 1, epsilon)
    subsets = mechanism.privatize(table.per_client(table.successes), rng)
    distinct, counts = distinct_rows(subsets)
    probabilities = probability_table(n)
    # Equal subsets have equal likelihoods: with few trials there are far fewer than clients.
    value = sum(
        counts[start : start + _ROWS_AT_ONCE]
        @ mechanism.log_likelihood(distinct[start : start + _ROWS_AT_ONCE], probabilities)
        for start in range(0, len(distinct), _ROWS_AT_ONCE)
    )
    return ProportionRelease(mechanism, subsets, value)


def central_release(table, epsilon, delta, rng):
    """Release of a noisy histogram of the counts 0..n, or of two moments if the trials differ."""
    n = table.common_trials
    if n is None or n > LARGEST_COUNT:
        return _moment_release(table, epsilon, delta, rng)
    mechanism = GaussianMechanism(HISTOGRAM_SENSITIVITY, epsilon, delta)
    # A cell that no client is in is released, too: which are empty would tell of the data.
    histogram = np.zeros(n + 1)
    histogram[table.successes] = table.counts
    noisy = mechanism.privatize(histogram, rng)
    value = histogram_log_likelihood(noisy, mechanism.noise_variance, table.n_clients)
    under = mechanism.under_zero_out(HISTOGRAM_ZERO_OUT_SENSITIVITY)
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
    "one_bit": one_bit_release,
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
    if params.trust == "central" and params.delta == 0:
        raise ValueError("delta must be above 0 for trust='central' (Gaussian noise); got 0.")


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


def histogram_log_likelihood(noisy, noise_variance, n_clients):
    """Approximate log-likelihood (H,) of a noisy histogram (n + 1,) of the counts.

    The cells are treated as independent Gaussians with their Poisson and noise variances.
    """
    expected = n_clients * probability_table(len(noisy) - 1)
    variance = expected + noise_variance
    return -0.5 * np.sum((noisy[:, None] - expected) ** 2 / variance + np.log(variance), axis=0)


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


def refine_on_grid(prior, average, release, n):
    """Grid prior: the averaged beta prior, then EM steps on the likelihood of the subsets."""
    distinct, counts = distinct_rows(release.messages)
    probabilities = binom.pmf(np.arange(n + 1)[:, None], n, prior.support)
    likelihood = np.exp(release.mechanism.log_likelihood(distinct, probabilities))
    weights = average.on_grid(prior.support)
    for _ in range(_EM_STEPS):
        weights *= (counts / (likelihood @ weights)) @ likelihood / counts.sum()
    return prior.with_weights(weights / weights.sum())


def distinct_rows(subsets):
    """Distinct rows of a boolean matrix (m, k) and how often each occurs."""
    # Rows sort faster as strings of bytes than element by element.
    packed = np.ascontiguousarray(np.packbits(subsets, axis=1))
    keys = packed.view(np.dtype((np.void, packed.shape[1]))).ravel()
    _, first, counts = np.unique(keys, return_index=True, return_counts=True)
    return subsets[first], counts


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
