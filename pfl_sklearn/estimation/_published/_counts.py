"""Proportions and rates of clients given noised counts alone, averaged over plausible populations.

Client i has z_i successes in n_i trials, or events in an exposure n_i, under a beta or a gamma
prior, and its count is released with discrete Laplace noise. As for means (`_population`), the
prior is known too badly to take an estimate of it as known, so we average over it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy.special import betaln, expit, gammaln, logsumexp

from pfl_sklearn._variance_averaging import quantiles_between
from pfl_sklearn.estimation._plausible_betas import BetaPriors
from pfl_sklearn.estimation._plausible_gammas import GammaPriors
from pfl_sklearn.priors._gamma import log_negative_binomial

_PER_AXIS, _ENOUGH, _ROUNDS = 11, 6, 12  # nodes of a grid, those that must count, and zooms
_SETTLED = 1.0  # nats by which the highest node may rise in the last round
_NATS, _NEGLIGIBLE = 9.0, 1e-4  # below the maximum; weight of a node over the largest
_TAIL = 14.0  # nats of the noise that a count is not searched beyond: 1e-6
_LEAST_SHARE = 1e-9  # of the variance between clients, and one less it
_CELLS_AT_ONCE = 1 << 20  # populations times clients times counts: 8 MB an array
# Groups of populations that intervals tell apart. The posterior of a rate of one expected event has
# a sharp peak at 0 under some, and none under others; with one group, 95 % intervals cover .87.
_GROUPS = 3
_NO_CHANCE = 1e-12  # of a count, which no interval could show
_MOST_COUNTS = 64  # that intervals of a client tell apart; neighbouring ones are merged


class ReleasedCounts(NamedTuple):
    """Released counts of m clients, and what is public."""

    counts: np.ndarray  # (m,), with noise
    sizes: np.ndarray  # (m,), trials or exposure
    scale: float  # of the discrete Laplace noise

    def windows(self, upper):
        """Counts (m, w) that each client may have, and the logarithms of the noise's odds."""
        half = int(np.ceil(_TAIL * self.scale))
        width = int(min(2 * half, np.max(upper))) + 1
        start = np.clip(np.clip(self.counts, 0, upper) - half, 0, np.maximum(upper - width + 1, 0))
        values = start[:, None] + np.arange(width)
        log_odds = -np.abs(self.counts[:, None] - values) / self.scale
        possible = values <= np.reshape(upper, (-1, 1))
        return np.where(possible, values, 0), np.where(possible, log_odds, -np.inf)


class CountFamily(NamedTuple):
    """Counts of a client under a prior with parameters a and b."""

    priors: Any  # PlausiblePriors, with shrinkage, intraclass correlation and quantiles
    upper: Callable[[np.ndarray], Any]  # largest count, of the sizes (m,)
    # Parameters (k,) of the logit (or logarithm) of a mean and of the logit of the share of the
    # variance that lies between clients.
    parameters: Callable[[np.ndarray, np.ndarray], Any]
    log_prior: Callable[[np.ndarray], Any]  # of the first axis
    log_marginals: Callable[..., np.ndarray]  # of counts and sizes under a and b
    moments: Callable[..., Any]  # mean and variance of a client's value given its count
    of_moments: Callable[..., Any]  # parameters of the prior with a mean and a variance
    row_variance: Callable[..., Any]  # of one trial, or unit of exposure, around a client's value
    range_of_means: Callable[[ReleasedCounts], tuple]  # of the first axis of the grid


def _log_of_uniform(logits):
    """Logarithm of the density of the logit of a uniform number."""
    return -np.logaddexp(0, logits) - np.logaddexp(0, -logits)


def _beta_parameters(logit_means, logit_shares):
    # Of a share s, 1 / s - 1 is exp(-logit).
    return expit(logit_means) * np.exp(-logit_shares), expit(-logit_means) * np.exp(-logit_shares)


def _beta_binomial(counts, sizes, a, b):
    chances = betaln(counts + a, sizes - counts + b) - betaln(a, b)
    choices = gammaln(sizes + 1) - gammaln(counts + 1) - gammaln(sizes - counts + 1)
    return choices + chances


def _beta_moments(counts, sizes, a, b):
    total = sizes + a + b
    mean = (counts + a) / total
    return mean, mean * (1 - mean) / (total + 1)


def _beta_of_moments(mean, variance):
    total = mean * (1 - mean) / variance - 1
    return mean * total, (1 - mean) * total


def _gamma_parameters(log_means, logit_shares):
    return np.exp(-logit_shares), np.exp(-logit_shares - log_means)


def _gamma_moments(counts, sizes, a, b):
    mean = (counts + a) / (sizes + b)
    return mean, mean / (sizes + b)


def _gamma_of_moments(mean, variance):
    return mean**2 / variance, mean / variance


def _trials(sizes):
    return sizes


def _no_limit(sizes):
    return np.full(len(sizes), 2**62)


def _variance_of_a_trial(mean, variance):
    return mean * (1 - mean) - variance


def _variance_of_events(mean, variance):
    return mean


def _range_of_logits(released):
    # From a tenth of a success in all trials to the same of a failure.
    end = np.log(10.0 * released.sizes.sum() + 1)
    return -end, end


def _range_of_log_rates(released):
    """Logarithms of rates from a tenth of an event in all to more than any client's noise hides."""
    most = np.maximum(released.counts, 0) + 10 * released.scale + 10
    return np.log(0.1 / released.sizes.sum()), np.log(3 * np.max(most / released.sizes))


BINOMIAL = CountFamily(
    BetaPriors,
    _trials,
    _beta_parameters,
    _log_of_uniform,
    _beta_binomial,
    _beta_moments,
    _beta_of_moments,
    _variance_of_a_trial,
    _range_of_logits,
)
POISSON = CountFamily(
    GammaPriors,
    _no_limit,
    _gamma_parameters,
    np.zeros_like,  # uniform in the logarithm of a mean rate
    log_negative_binomial,
    _gamma_moments,
    _gamma_of_moments,
    _variance_of_events,
    _range_of_log_rates,
)


class PublishedCounts(NamedTuple):
    """Posterior of every client's proportion or rate, and of its share of the rows in the table."""

    family: CountFamily
    a: np.ndarray  # (k,)
    b: np.ndarray  # (k,)
    weights: np.ndarray  # (k,)
    means: np.ndarray  # (m,), of the target
    stds: np.ndarray  # (m,)
    pooled: np.ndarray  # (m,), average weights of the population
    place: np.ndarray  # (m,), of a client among the u distinct ones
    # Of c possible counts, in each group of populations: their probabilities, and means and
    # variances of the target given them.
    chances: np.ndarray  # (u, c)
    centres: np.ndarray  # (u, c)
    variances: np.ndarray  # (u, c)
    of_table: bool

    def of_clients(self, clients):
        """The posterior of some clients alone."""
        own = {name: getattr(self, name)[clients] for name in ("means", "stds", "pooled")}
        rows, place = np.unique(self.place[clients], return_inverse=True)
        counts = {name: getattr(self, name)[rows] for name in ("chances", "centres", "variances")}
        return self._replace(**own, **counts, place=place)

    def central(self, level):
        """Bounds (m,) of the central intervals."""
        quantile = self._of_counts if self.of_table else self._mixed
        return quantile((1 - level) / 2)[self.place], quantile((1 + level) / 2)[self.place]

    def _of_counts(self, tail):
        """Quantiles (u,) of shares in the table, which are those of whole numbers."""
        places = np.argmax(np.cumsum(self.chances, axis=1) >= tail - 1e-12, axis=1)
        return np.take_along_axis(self.centres, places[:, None], 1)[:, 0]

    def _mixed(self, tail):
        """Quantiles (u,) of mixtures of beta or gamma distributions with matched moments."""
        mean, std = _moments(self.chances, self.centres, self.variances)
        # Moments of what has no weight underflow; any others will do.
        counts = self.chances > _NO_CHANCE
        means = np.where(counts, self.centres, mean[:, None])
        a, b = self.family.of_moments(means, np.where(counts, self.variances, std[:, None] ** 2))

        def distribution(values, at):
            below = self.family.priors._cdf(a[at], b[at], values[:, None])
            return np.einsum("uc,uc->u", self.chances[at], below)

        # Cantelli's inequality.
        odds = np.sqrt(tail / (1 - tail))
        low, high = np.maximum(mean - std / odds, 0), mean + std * odds
        upper_end = self.family.priors._upper_end
        return quantiles_between(distribution, low, np.minimum(high, upper_end), tail)


def _moments(chances, centres, variances):
    """Means and standard deviations (u,) of mixtures."""
    mean = np.einsum("uc,uc->u", chances, centres)
    square = variances + (centres - mean[:, None]) ** 2
    return mean, np.sqrt(np.einsum("uc,uc->u", chances, square))


def published_counts(family, released, known, of_table):
    """PublishedCounts of ReleasedCounts; `known` are the parameters (a, b) of a prior, or None."""
    # Clients with the same count and size have the same posterior.
    rows, place, repeats = np.unique(
        np.stack([released.counts, released.sizes]), axis=1, return_inverse=True, return_counts=True
    )
    place, distinct = place.ravel(), released._replace(counts=rows[0], sizes=rows[1])
    values, log_odds = distinct.windows(family.upper(distinct.sizes))
    if known is None:
        ranges = family.range_of_means(released)
        a, b, heights = _plausible_priors(family, distinct.sizes, values, log_odds, repeats, ranges)
    else:
        a, b, heights = (np.array([float(value)]) for value in (*known, 0.0))
    weights = np.exp(heights - heights.max())
    kept = weights > _NEGLIGIBLE
    a, b, weights = a[kept], b[kept], weights[kept] / weights[kept].sum()
    populations = a, b, weights, _groups(a, weights)
    parts = [
        _posteriors(family, part, populations, of_table)
        for part in _blocks(len(weights), distinct.sizes, values, log_odds)
    ]
    chances, centres, variances = (np.concatenate(part) for part in zip(*parts, strict=True))
    means, stds = (values[place] for values in _moments(chances, centres, variances))
    pooled = weights @ _shares_of_population(family, released, a, b, of_table)
    clients = means, stds, pooled, place
    return PublishedCounts(family, a, b, weights, *clients, chances, centres, variances, of_table)


def _groups(a, weights):
    """Numbers (k,) of groups of populations of equal weight, by the first parameter."""
    order = np.argsort(a)
    middles = np.cumsum(weights[order]) - weights[order] / 2
    numbers = np.empty(len(a), dtype=int)
    numbers[order] = np.minimum(middles * _GROUPS, _GROUPS - 1)
    return np.unique(numbers, return_inverse=True)[1]


def _shares_of_population(family, released, a, b, of_table):
    """Weights (k, m) of the population in the best linear estimates under priors (k,)."""
    mean, between = (part[:, None] for part in family.moments(0.0, 0.0, a, b))
    sampling = family.row_variance(mean, between) / released.sizes
    noise = 2 * (released.scale / released.sizes) ** 2
    if of_table:
        return noise / (between + sampling + noise)
    return (sampling + noise) / (between + sampling + noise)


def _plausible_priors(family, sizes, values, log_odds, repeats, ranges):
    """Parameters (k,) on a grid, and the logarithms of their posterior densities.

    The prior of the share is uniform. That of other fits, Beta(1/2, 1/2), puts so much weight near
    0 that intervals of 100 clients with 5 rows cover .90 for .95.
    """
    end = -np.log(_LEAST_SHARE)
    low, high = np.array([ranges, (-end, end)]).T
    highest = -np.inf
    for _ in range(_ROUNDS):
        step = (high - low) / _PER_AXIS
        axes = low[:, None] + step[:, None] * (np.arange(_PER_AXIS) + 0.5)
        means, shares = (axis.ravel() for axis in np.meshgrid(*axes, indexing="ij"))
        a, b = family.parameters(means, shares)
        log_prior = family.log_prior(means) + _log_of_uniform(shares)
        fits = _log_likelihoods(family, sizes, values, log_odds, a, b)  # (k, m)
        heights = fits @ repeats + log_prior
        likely = heights.reshape(_PER_AXIS, _PER_AXIS) > heights.max() - _NATS
        counted = [np.flatnonzero(likely.any(axis=axis)) for axis in (1, 0)]
        # A narrow maximum between the nodes shows as a higher one in the next round.
        if min(map(len, counted)) >= _ENOUGH and heights.max() < highest + _SETTLED:
            break
        highest = max(highest, heights.max())
        ends = np.array([axis[rows[[0, -1]]] for axis, rows in zip(axes, counted, strict=True)])
        low, high = np.maximum(low, ends[:, 0] - step), np.minimum(high, ends[:, 1] + step)
    return a, b, heights


def _log_likelihoods(family, sizes, values, log_odds, a, b):
    """Log-likelihoods (k, m) of clients' released counts under priors (k,)."""
    blocks = _blocks(len(a), sizes, values, log_odds)
    return np.concatenate(
        [logsumexp(_joint(family, part, a, b), axis=2) for part in blocks], axis=1
    )


def _posteriors(family, part, populations, of_table):
    """Chances, means and variances (m, c) of some clients."""
    sizes, values, _ = part
    a, b, weights, group_of = populations
    joint = _joint(family, part, a, b)
    joint = np.exp(joint - logsumexp(joint, axis=2, keepdims=True)) * weights[:, None, None]
    if of_table:
        centres = values / sizes[:, None]
        chances, variances = joint.sum(axis=0), np.zeros((len(sizes), 1))
    else:
        given = values[None], sizes[None, :, None], a[:, None, None], b[:, None, None]
        target = family.moments(*given)
        cells = [
            _mixtures(joint[rows], *(value[rows] for value in target))
            for rows in (group_of == number for number in range(group_of.max() + 1))
        ]
        chances, centres, variances = (
            np.concatenate(cell, axis=1) for cell in zip(*cells, strict=True)
        )
    return chances, centres, variances


def _mixtures(weights, means, variances):
    """Weights, means and variances (m, c) of distributions (k, m, w), over neighbouring counts."""
    # Finest at the start of a window: distributions of small counts differ most.
    width = weights.shape[2]
    shares = np.arange(_MOST_COUNTS) / _MOST_COUNTS
    starts = (
        np.unique((width * shares**2).astype(int)) if width > _MOST_COUNTS else np.arange(width)
    )
    # What has no weight, such as a count that is not possible, has the moments of any other.
    weights = np.maximum(weights, np.finfo(float).tiny)

    def total(values):
        return np.add.reduceat(np.sum(weights * values, axis=0), starts, axis=1)

    whole = total(1.0)
    mean = total(means) / whole
    distances = means - np.repeat(mean, np.diff(starts, append=width), axis=1)
    return whole, mean, total(variances + distances**2) / whole


def _joint(family, part, a, b):
    """Logarithms (k, m, w) of the probabilities of counts and of the noise on them."""
    sizes, values, log_odds = part
    a, b = a[:, None, None], b[:, None, None]
    return family.log_marginals(values[None], sizes[None, :, None], a, b) + log_odds


def _blocks(k, sizes, values, log_odds):
    """Sizes, counts and odds of some clients at a time, which bounds the memory."""
    step = max(_CELLS_AT_ONCE // (k * values.shape[1]), 1)
    for start in range(0, len(sizes), step):
        part = slice(start, start + step)
        yield sizes[part], values[part], log_odds[part]
