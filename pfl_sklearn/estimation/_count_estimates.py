"""Clients' proportions or rates, under a fitted prior or an average of priors.

With few clients posteriors are averaged over the conjugate priors that exact counts leave
plausible, and after a private release over those that the reports do. Counts are reported as
categories, 0 to k - 1, and give a likelihood of H priors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from scipy.special import logsumexp, softmax

from pfl_sklearn._typing import Floats
from pfl_sklearn._variance_averaging import (
    LEAST_LIKELY_RATIO,
    averaging_share,
    blend,
    quantiles_between,
    ratio_nodes,
)
from pfl_sklearn.privacy import GaussianMechanism, SubsetSelection
from pfl_sklearn.privacy._accounting._events import PureEvent
from pfl_sklearn.privacy._spending import UNPROTECTED, gaussian_events

# Values of the population mean for every ratio. Five locate the likely ratios; errors and quantiles
# need the tails of the mean.
_MEANS_PER_RATIO, _MEANS_TO_LOCATE = 15, 5
_PAIRS_AT_ONCE = 256  # of counts, times 900 to 2,500 priors: 2 to 5 MB for each array
_TRIED_RATIOS = np.geomspace(1e-6, 1e4, 61)  # of variances, between clients over within
_LEAST_WEIGHT_IN_QUANTILES = 1e-4  # relative to the largest; the rest moves no shown digit
# Share of the counts that the proposal for the mean uses: its tails must be wider than those of the
# posterior, or a few nodes would have all the weight.
SHARE_OF_PROPOSAL = 0.6
LEAST_PRIOR_WEIGHT = 1e-9  # relative to the largest; leaving priors out saves most of the work
_SUBSETS_AT_ONCE = 2048  # times up to 2,522 priors: 41 MB for each array
_EM_STEPS = 60  # reports blur the counts; to convergence, EM would fit their noise with spikes
# A replaced client leaves one category and enters another; one that contributes nothing only
# leaves.
HISTOGRAM_SENSITIVITY = 2**0.5
HISTOGRAM_ZERO_OUT_SENSITIVITY = 1.0


@dataclass(frozen=True, eq=False)
class PlausiblePriors:
    """Beta priors of proportions or gamma priors of rates, and their weights, which sum to 1.

    A subclass is a likelihood of counts: successes of trials, or events over exposure. It also says
    what follows from the mean and variance of any prior: `icc`, `shrinkage`, and `mean_std`, the
    standard error of the population mean.
    """

    conjugate: ClassVar[type[Any]]  # the class of the priors

    a: Floats  # (h,), alphas or shapes
    b: Floats  # (h,), betas or rates
    weights: Floats  # (h,)

    # From counts (u,): posterior parameters, and means and variances, each (u, h).
    _updated: ClassVar[Any]
    _given: ClassVar[Any]
    # From counts (u,): their log-probabilities (u, h), up to what is the same for all priors.
    _log_marginals: ClassVar[Any]
    # The conjugate prior with a mean and a variance, and the largest value that clients can have.
    _matched: ClassVar[Any]
    _end: ClassVar[float]
    # Probability of smaller values, and an upper bound of quantiles (u,), of posteriors (u, h).
    _below: ClassVar[Any]
    _highest: ClassVar[Any]
    # Priors (k, n_means) and their log weights for ratios (k,); expected counts of the largest
    # client.
    _grid: ClassVar[Any]
    _largest: ClassVar[Any]

    @classmethod
    def of(cls, prior: Any) -> Self:
        """One known prior, which has all of the weight."""
        return cls(*np.array([*prior._require_known(), 1.0])[:, None])

    @classmethod
    def plausible(cls, table: Any, mean: float) -> Self:
        """Priors after the counts of a CountTable, whose population mean was estimated."""

        def likelihood(ratios):
            return logsumexp(cls._grid(table, mean, ratios, _MEANS_TO_LOCATE)[2], axis=1)

        likely = max(
            _TRIED_RATIOS[int(np.argmax(likelihood(_TRIED_RATIOS)))],
            LEAST_LIKELY_RATIO / cls._largest(table, mean),
        )
        ratios, weights = ratio_nodes(likelihood, 1.0, likely)
        a, b, log_weights = cls._grid(table, mean, ratios, _MEANS_PER_RATIO)
        log_weights -= logsumexp(log_weights, axis=1, keepdims=True)
        joint = weights[:, None] * np.exp(log_weights)
        return cls(a.ravel(), b.ravel(), joint.ravel())

    def blended(self, share: float, others: Self) -> Self:
        """These priors with this share of the weight, and others with the rest."""
        weights = share * self.weights, (1 - share) * others.weights
        columns = (self.a, others.a), (self.b, others.b), weights
        return type(self)(*map(np.concatenate, columns))

    def mean(self):
        """Mean and standard deviation of the population mean."""
        means = self._given(np.zeros(1), np.zeros(1))[0][0]
        mean = float(self.weights @ means)
        return mean, float(np.sqrt(self.weights @ (means - mean) ** 2))

    def moments(self):
        """Mean and variance of the value of a client without counts."""
        means, variances = self._given(np.zeros(1), np.zeros(1))
        mean = self.weights @ means[0]
        return float(mean), float(self.weights @ (variances + (means - mean) ** 2)[0])

    def matched(self):
        """Conjugate prior with the mean and variance of the average."""
        return self._matched(*self.moments())

    def posterior(self, successes, trials):
        """Mean and variance (u,) of the clients' values given their own exact counts."""

        def posterior_of(successes, trials):
            # The weights are those before the client's own counts, which tell priors apart, too.
            log_joint = self._log_marginals(successes, trials)
            joint = softmax(log_joint + np.log(self.weights), axis=1)
            means, variances = self._given(successes, trials)
            mean = np.einsum("uh,uh->u", joint, means)
            squares = variances + (means - mean[:, None]) ** 2
            return np.stack([mean, np.einsum("uh,uh->u", joint, squares)])

        return by_blocks(posterior_of, successes, trials)

    def on_grid(self, support):
        """Mass of the averaged prior in the cells around the points of `support` (K,)."""
        edges = np.concatenate([[0.0], (support[1:] + support[:-1]) / 2, [self._end]])
        below = self._below(self.a[:, None], self.b[:, None], edges)
        mass = self.weights @ np.diff(below, axis=1)
        return mass / mass.sum()

    def variances(self, successes, trials, estimates):
        """Mean squares (u,) of the distance of values from estimates, given counts of clients."""

        def variances_of(successes, trials, estimates):
            # The weights come from these clients' counts already.
            means, variances = self._given(successes, trials)
            return (variances + (means - estimates[:, None]) ** 2) @ self.weights

        return by_blocks(variances_of, successes, trials, estimates)

    def quantiles(self, successes, trials, tails):
        """Quantiles (u,) of clients' values given counts (u,), for each of the tails."""
        # Most priors have hardly any weight, and every step of the root finder costs all that stay.
        counted = self.weights > _LEAST_WEIGHT_IN_QUANTILES * self.weights.max()
        weights = self.weights[counted] / self.weights[counted].sum()
        kept = type(self)(self.a[counted], self.b[counted], weights)
        a, b = kept._updated(successes, trials)

        def distribution(values, at):
            return self._below(a[at], b[at], values[:, None]) @ weights

        lowest = np.zeros(len(trials))
        return [
            quantiles_between(distribution, lowest, self._highest(a, b, tail), tail)
            for tail in tails
        ]


def by_blocks(function, *columns):
    """Call a function of columns (u,) for a block of clients at a time, which bounds its memory."""
    starts = range(0, len(columns[0]), _PAIRS_AT_ONCE)
    parts = [function(*(column[i : i + _PAIRS_AT_ONCE] for column in columns)) for i in starts]
    return np.concatenate(parts, axis=-1)


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


def count_events(prior, params, zero_out):
    """Accounting events of a fit.

    `zero_out` is the sensitivity of a trusted server's release when a client contributes nothing,
    relative to that under replacement.
    """
    if math.isinf(params.epsilon):
        return UNPROTECTED
    if prior.is_known:
        return ()
    if params.trust == "local":  # randomized response is pure, whatever delta says
        return (PureEvent(float(params.epsilon), 0.0, "replace_one"),)
    return gaussian_events(params.epsilon, params.delta, zero_out=zero_out)


def check_delta(params):
    """Refuse Gaussian noise without a delta, before any data is touched."""
    if params.trust == "central" and params.delta == 0:
        raise ValueError("delta must be above 0 for trust='central' (Gaussian noise); got 0.")


def subset_release(categories, groups, n_categories, epsilon, rng):
    """Mechanism and distinct subsets of reports, with how often each occurs, of every group.

    Categories (m,) are those of the clients, and `groups` (m,) numbers, from 0, of kinds of
    clients whose reports have different likelihoods.
    """
    mechanism = SubsetSelection(n_categories, epsilon)
    subsets = mechanism.privatize(categories, rng)
    # Equal subsets have equal likelihoods: with few categories there are far fewer than clients.
    return mechanism, [_distinct_rows(subsets[groups == g]) for g in range(groups.max() + 1)]


def subset_log_likelihood(mechanism, reports, probabilities):
    """Log-likelihood (H,) of reports under probabilities (k, H) of the categories, by groups."""
    return sum(
        counts[start : start + _SUBSETS_AT_ONCE]
        @ mechanism.log_likelihood(distinct[start : start + _SUBSETS_AT_ONCE], table)
        for (distinct, counts), table in zip(reports, probabilities, strict=True)
        for start in range(0, len(distinct), _SUBSETS_AT_ONCE)
    )


def refined_weights(weights, mechanism, reports, probabilities):
    """Weights (K,) of a grid after EM steps on the likelihood of subsets, by groups."""
    likelihood = np.exp(
        np.concatenate(
            [
                mechanism.log_likelihood(distinct, table)
                for (distinct, _), table in zip(reports, probabilities, strict=True)
            ]
        )
    )
    counts = np.concatenate([counts for _, counts in reports])
    for _ in range(_EM_STEPS):
        weights *= (counts / (likelihood @ weights)) @ likelihood / counts.sum()
    return weights / weights.sum()


def histogram_release(histogram, epsilon, delta, rng):
    """Mechanism, noisy histogram (k,) of the categories, and epsilons under other relations."""
    mechanism = GaussianMechanism(HISTOGRAM_SENSITIVITY, epsilon, delta)
    # A category that no client is in is released, too: which are empty would tell of the data.
    noisy = mechanism.privatize(histogram, rng)
    return mechanism, noisy, mechanism.under_zero_out(HISTOGRAM_ZERO_OUT_SENSITIVITY)


def histogram_log_likelihood(noisy, noise_variance, expected):
    """Approximate log-likelihood (H,) of a noisy histogram (k,) with expectations (k, H).

    The categories are treated as independent Gaussians with their Poisson and noise variances.
    """
    variance = expected + noise_variance
    return -0.5 * np.sum((noisy[:, None] - expected) ** 2 / variance + np.log(variance), axis=0)


def estimate_from_reports(table, average, refined, senders):
    """Posterior of the clients of a CountTable after the private reports of `senders`.

    Every client updates with its own exact counts what the reports say of the population: an
    average of conjugate priors, or the grid prior `refined` if it is not None.
    """
    mean_std = average.mean()[1]
    if refined is not None:
        return with_prior(table, refined, senders, type(average))._replace(mean_std=mean_std)
    posterior = average.posterior(table.successes, table.trials)
    return describe(
        average.matched(), average.moments(), mean_std, table, posterior, type(average), exact=False
    )


def _distinct_rows(subsets):
    """Distinct rows of a boolean matrix (m, k) and how often each occurs."""
    # Rows sort faster as strings of bytes than element by element.
    packed = np.ascontiguousarray(np.packbits(subsets, axis=1))
    keys = packed.view(np.dtype((np.void, packed.shape[1]))).ravel()
    _, first, counts = np.unique(keys, return_index=True, return_counts=True)
    return subsets[first], counts
