"""Proportions and rates of few clients: posteriors averaged over the plausible conjugate priors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from scipy.special import logsumexp

from pfl_sklearn._typing import Floats
from pfl_sklearn._variance_averaging import LEAST_LIKELY_RATIO, quantiles_between, ratio_nodes

# Values of the population mean for every ratio. Five locate the likely ratios; errors and quantiles
# need the tails of the mean.
_MEANS_PER_RATIO, _MEANS_TO_LOCATE = 15, 5
_PAIRS_AT_ONCE = 256  # of counts, times 900 to 2,500 priors: 2 to 5 MB for each array
_TRIED_RATIOS = np.geomspace(1e-6, 1e4, 61)  # of variances, between clients over within
_LEAST_WEIGHT_IN_QUANTILES = 1e-4  # relative to the largest; the rest moves no shown digit
# Share of the counts that the proposal for the mean uses: its tails must be wider than those of the
# posterior, or a few nodes would have all the weight.
SHARE_OF_PROPOSAL = 0.6


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
