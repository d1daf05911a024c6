"""Clients' proportions or rates under a fitted prior, or averaged over plausible priors.

Posteriors are averaged over the conjugate priors that exact counts leave plausible if clients are
few, and over those that the reports leave plausible after a private release.
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

# Values of the population mean for every ratio. Five locate the likely ratios; errors and quantiles
# need the tails of the mean.
_MEANS_PER_RATIO, _MEANS_TO_LOCATE = 15, 5
_PAIRS_PER_BLOCK = 256  # of counts, times 900 to 2,500 priors: 2 to 5 MB for each array
_TRIED_RATIOS = np.geomspace(1e-6, 1e4, 61)  # of variances, between clients over within
_LEAST_WEIGHT_IN_QUANTILES = 1e-4  # relative to the largest; the rest moves no shown digit
# Share of the counts that the proposal for the mean uses: its tails must be wider than those of the
# posterior, or a few nodes would have all the weight.
SHARE_OF_PROPOSAL = 0.6


@dataclass(frozen=True, eq=False)
class PlausiblePriors:
    """Beta priors of proportions or gamma priors of rates, and their weights, which sum to 1.

    A subclass is a likelihood of counts: successes in trials, or events over exposure. From mean
    and variance of any prior it computes `icc`, `shrinkage`, and `mean_std`, the standard error of
    the population mean. `single_client` has the estimates for one client without others, and
    `matched_quantiles` the quantiles of conjugate distributions with given moments.
    """

    conjugate: ClassVar[type[Any]]  # the class of the priors

    a: Floats  # (h,), alphas or shapes
    b: Floats  # (h,), betas or rates
    weights: Floats  # (h,)

    # From counts (u,): posterior parameters, and means and variances, each (u, h).
    _posterior_parameters: ClassVar[Any]
    _posterior_moments: ClassVar[Any]
    # From counts (u,): their log-probabilities (u, h), up to what is the same for all priors.
    _log_marginals: ClassVar[Any]
    # The conjugate prior with a mean and a variance, and the largest value that clients can have.
    _from_moments: ClassVar[Any]
    _upper_end: ClassVar[float]
    # The distribution function, random values, and an upper bound of quantiles (u,), of posteriors
    # (u, h).
    _cdf: ClassVar[Any]
    _draw: ClassVar[Any]
    _quantile_bound: ClassVar[Any]
    # Priors (k, n_means) and their log weights for ratios (k,); expected counts of the largest
    # client.
    _grid: ClassVar[Any]
    _largest_expected: ClassVar[Any]

    @classmethod
    def from_prior(cls, prior: Any) -> Self:
        """One known prior, which has all of the weight."""
        return cls(*np.array([*prior._require_known(), 1.0])[:, None])

    @classmethod
    def from_counts(cls, table: Any, mean: float) -> Self:
        """Priors after the counts of a CountTable, whose population mean was estimated."""

        def likelihood(ratios):
            return logsumexp(cls._grid(table, mean, ratios, _MEANS_TO_LOCATE)[2], axis=1)

        likely = max(
            _TRIED_RATIOS[int(np.argmax(likelihood(_TRIED_RATIOS)))],
            LEAST_LIKELY_RATIO / cls._largest_expected(table, mean),
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
        means = self._posterior_moments(np.zeros(1), np.zeros(1))[0][0]
        mean = float(self.weights @ means)
        return mean, float(np.sqrt(self.weights @ (means - mean) ** 2))

    def moments(self):
        """Mean and variance of the value of a client without counts."""
        means, variances = self._posterior_moments(np.zeros(1), np.zeros(1))
        mean = self.weights @ means[0]
        return float(mean), float(self.weights @ (variances + (means - mean) ** 2)[0])

    def matched(self):
        """Conjugate prior with the mean and variance of the average."""
        return self._from_moments(*self.moments())

    def posterior(self, successes, trials):
        """Mean and variance (u,) of the clients' values given their own exact counts."""

        def posterior_of(successes, trials):
            # These weights precede the client's own counts, which also make some priors likelier.
            log_joint = self._log_marginals(successes, trials)
            joint = softmax(log_joint + np.log(self.weights), axis=1)
            means, variances = self._posterior_moments(successes, trials)
            mean = np.einsum("uh,uh->u", joint, means)
            squares = variances + (means - mean[:, None]) ** 2
            return np.stack([mean, np.einsum("uh,uh->u", joint, squares)])

        return by_blocks(posterior_of, successes, trials)

    def on_grid(self, support):
        """Mass of the averaged prior in the cells around the points of `support` (K,)."""
        edges = np.concatenate([[0.0], (support[1:] + support[:-1]) / 2, [self._upper_end]])
        below = self._cdf(self.a[:, None], self.b[:, None], edges)
        mass = self.weights @ np.diff(below, axis=1)
        return mass / mass.sum()

    def variances(self, successes, trials, estimates):
        """Mean squares (u,) of the distance of values from estimates, given counts of clients."""

        def variances_of(successes, trials, estimates):
            # The weights come from these clients' counts already.
            means, variances = self._posterior_moments(successes, trials)
            return (variances + (means - estimates[:, None]) ** 2) @ self.weights

        return by_blocks(variances_of, successes, trials, estimates)

    def quantiles(self, successes, trials, tails):
        """Quantiles (u,) of clients' values given counts (u,), for each of the tails."""
        priors = self._likely()
        a, b = priors._posterior_parameters(successes, trials)

        def distribution(values, at):
            return self._cdf(a[at], b[at], values[:, None]) @ priors.weights

        lowest = np.zeros(len(trials))
        return [
            quantiles_between(distribution, lowest, self._quantile_bound(a, b, tail), tail)
            for tail in tails
        ]

    def below(self, successes, trials, values):
        """Probabilities (m,) that clients' values, given counts (m,), are below others (m,)."""
        priors = self._likely()

        def probability(successes, trials, values):
            a, b = priors._posterior_parameters(successes, trials)
            return self._cdf(a, b, values[:, None]) @ priors.weights

        return by_blocks(probability, successes, trials, values)

    def draws(self, successes, trials, n, rng):
        """Draws (n, m) from the joint posterior of clients given counts (m,)."""
        # All clients of a draw have one prior.
        chosen = rng.choice(len(self.weights), size=n, p=self.weights)
        priors = type(self)(self.a[chosen], self.b[chosen], self.weights[chosen])
        return self._draw(rng, *priors._posterior_parameters(successes, trials)).T

    def _likely(self):
        """The priors that have weight: each costs time in every step of a root finder."""
        relevant = self.weights > _LEAST_WEIGHT_IN_QUANTILES * self.weights.max()
        weights = self.weights[relevant] / self.weights[relevant].sum()
        return type(self)(self.a[relevant], self.b[relevant], weights)


def by_blocks(function, *columns):
    """Call a function of columns (u,) for a block of clients at a time, which bounds its memory."""
    starts = range(0, len(columns[0]), _PAIRS_PER_BLOCK)
    parts = [function(*(column[i : i + _PAIRS_PER_BLOCK] for column in columns)) for i in starts]
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
    if prior.is_known:  # a given mean has no sampling error
        return with_prior(table, prior, senders, likelihood)._replace(mean_std=0.0)
    if table.n_clients == 1:  # one client shows no spread between clients
        return likelihood.single_client(table, prior)
    prior = prior.fit_counts(senders.successes, senders.trials, senders.counts, params.method)
    estimate = with_estimated_prior if params.uncertainty == "full" else with_prior
    return estimate(table, prior, senders, likelihood)


def keep_own_if_single(fitted, table, likelihood):
    """The same estimates, but a single client, whom the population tells nothing, keeps its own."""
    if table.n_clients > 1:
        return fitted
    single = likelihood.single_client(table, fitted.prior)
    return single._replace(mean=fitted.mean, mean_std=fitted.mean_std)


def with_prior(table, prior, senders, likelihood):
    """Posterior of the clients of a CountTable under a prior that those of `senders` gave."""
    mean, variance = prior.moments()
    std = likelihood.mean_std(senders, mean, variance)
    posterior = prior.posterior(table.successes, table.trials)
    return describe_fit(prior, (mean, variance), std, table, posterior, likelihood)


def with_estimated_prior(table, prior, senders, likelihood):
    """The same under an estimated prior, with errors averaged over conjugate priors."""
    # The distance of an estimate from the posterior under each of them counts as error.
    fitted = with_prior(table, prior, senders, likelihood)
    share, conjugate = averaging_share(senders.n_clients), prior
    pairs = table.successes, table.trials
    if not isinstance(prior, likelihood.conjugate):
        # A grid prior with a few spikes has no useful errors of its own; use those of a smooth one.
        conjugate = likelihood.conjugate().fit_counts(
            senders.successes, senders.trials, senders.counts, "ml"
        )
    priors = likelihood.from_prior(conjugate)
    mean_variance = fitted.mean_std**2
    if share:
        averaged = likelihood.from_counts(senders, fitted.mean)
        mean_variance = blend(share, averaged.mean_variance(senders, fitted.mean), mean_variance)
        priors = averaged.blended(share, priors)
    variances = priors.variances(*pairs, prior.posterior(*pairs)[0])
    return fitted._replace(
        mean_std=math.sqrt(mean_variance),
        stds=np.sqrt(table.per_client(variances)),
        priors=None if prior is conjugate and not share else priors,
    )


def describe_fit(prior, moments, mean_std, table, posterior, likelihood, exact=True):
    """FittedCounts from posterior means and variances (u,) of the pairs of a CountTable.

    `moments` are the mean and the variance of the population.
    """
    means, variances = (table.per_client(values) for values in posterior)
    icc = likelihood.icc(*moments)
    shrinkage = table.per_client(likelihood.shrinkage(*moments, table.trials))
    return FittedCounts(
        prior, moments[0], mean_std, icc, means, np.sqrt(variances), shrinkage, exact
    )


def central_intervals(table, prior, priors, level):
    """Bounds (m,) of central intervals of the clients of a CountTable.

    They are quantiles of posteriors under `prior`, or of averages over `priors`.
    """
    tails = (1 - level) / 2, (1 + level) / 2
    pairs = table.successes, table.trials
    bounds = (
        prior.posterior_quantiles(*pairs, tails)
        if priors is None  # the prior counts as known
        else priors.quantiles(*pairs, tails)
    )
    return tuple(table.per_client(bound) for bound in bounds)
