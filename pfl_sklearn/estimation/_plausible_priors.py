"""Proportions of few clients: posteriors averaged over the plausible beta priors."""

from typing import NamedTuple

import numpy as np
from scipy.special import betainc, betaincinv, betaln, logsumexp, xlog1py, xlogy

from pfl_sklearn._typing import Floats
from pfl_sklearn._variance_averaging import quantiles_between, ratio_nodes
from pfl_sklearn.estimation._plausible_variances import LEAST_LIKELY_RATIO
from pfl_sklearn.estimation._proportion_reports import log_marginals
from pfl_sklearn.priors._beta import largest_concentration

# Values of the population mean for every ratio. Five locate the likely ratios; errors and quantiles
# need the tails of the mean.
_MEANS_PER_RATIO, _MEANS_TO_LOCATE = 15, 5
# Share of the trials that the proposal for the mean counts: its tails must be wider than those of
# the posterior, or a few nodes would have all the weight.
_TRIALS_OF_PROPOSAL = 0.6
_PAIRS_AT_ONCE = 256  # times some 900 priors: 2 MB
_TRIED_RATIOS = np.geomspace(1e-6, 1e4, 61)  # of variances, between clients over within
_LARGEST_RATIO = 1e8  # hardly any client is between 0 and 1 there: more would change nothing
_LEAST_WEIGHT_IN_QUANTILES = 1e-4  # relative to the largest; the rest moves no shown digit


class PlausiblePriors(NamedTuple):
    """Beta priors and their weights."""

    alphas: Floats  # (h,)
    betas: Floats  # (h,)
    weights: Floats  # (h,)

    def mean_variance(self, mean):
        """Variance of the population mean around an estimate."""
        return float(self.weights @ (self.alphas / (self.alphas + self.betas) - mean) ** 2)

    def variances(self, successes, trials, estimates):
        """Variances (u,) of proportions around estimates, given counts (u,)."""
        result = np.empty(len(trials))
        for start in range(0, len(trials), _PAIRS_AT_ONCE):
            part = slice(start, start + _PAIRS_AT_ONCE)
            total = trials[part, None] + self.alphas + self.betas
            means = (successes[part, None] + self.alphas) / total
            distance = (means - estimates[part, None]) ** 2
            result[part] = (means * (1 - means) / (total + 1) + distance) @ self.weights
        return result

    def quantiles(self, successes, trials, tails):
        """Quantiles (u,) of proportions given counts (u,), for each of the tails."""
        # Most priors have hardly any weight, and every step of the root finder costs all that stay.
        counted = self.weights > _LEAST_WEIGHT_IN_QUANTILES * self.weights.max()
        weights = self.weights[counted] / self.weights[counted].sum()
        alphas = successes[:, None] + self.alphas[counted]
        betas = (trials - successes)[:, None] + self.betas[counted]

        def distribution(values, at):
            return betainc(alphas[at], betas[at], values[:, None]) @ weights

        ends = np.zeros(len(trials)), np.ones(len(trials))
        return [quantiles_between(distribution, *ends, tail) for tail in tails]


def plausible_priors(table, mean):
    """PlausiblePriors after the counts of a CountTable, whose population mean was estimated.

    A priori the intraclass correlation is Beta(1/2, 1/2), and the population mean uniform.
    """

    def likelihood(ratios):
        return logsumexp(_log_weights(table, _grid(table, mean, ratios, _MEANS_TO_LOCATE)), axis=1)

    likely = max(
        _TRIED_RATIOS[int(np.argmax(likelihood(_TRIED_RATIOS)))],
        LEAST_LIKELY_RATIO / table.trials.max(),
    )
    ratios, weights = ratio_nodes(likelihood, 1.0, likely)
    grid = _grid(table, mean, ratios, _MEANS_PER_RATIO)
    inner = _log_weights(table, grid)
    joint = weights[:, None] * np.exp(inner - logsumexp(inner, axis=1, keepdims=True))
    return PlausiblePriors(grid.alphas.ravel(), grid.betas.ravel(), joint.ravel())


class _Grid(NamedTuple):
    """Beta priors (k, j): j means for every ratio, and log weights that integrate over the mean."""

    alphas: Floats
    betas: Floats
    log_steps: Floats


def _grid(table, mean, ratios, n_means):
    """Means at equal steps of a wide beta distribution around the estimate."""
    ratios = np.clip(ratios, 1 / largest_concentration(table.trials), _LARGEST_RATIO)[:, None]
    # Trials of a client are correlated, so they tell of the mean as fewer independent ones would.
    correlation = ratios / (1 + ratios)
    trials = np.sum(table.counts * table.trials / (1 + (table.trials - 1) * correlation), axis=1)
    trials = _TRIALS_OF_PROPOSAL * trials[:, None]
    a, b = 1 + trials * mean, 1 + trials * (1 - mean)
    means = betaincinv(a, b, (np.arange(n_means) + 0.5) / n_means)
    means = np.clip(means, 1e-12, 1 - 1e-12)  # alpha and beta must be above 0
    density = xlogy(a - 1, means) + xlog1py(b - 1, -means) - betaln(a, b)
    return _Grid(means / ratios, (1 - means) / ratios, -density - np.log(n_means))


def _log_weights(table, grid):
    """Log-likelihood (k, j) of the priors of a grid, with the log steps of the grid."""
    alphas, betas = grid.alphas.ravel(), grid.betas.ravel()
    value = table.counts @ log_marginals(table.successes, table.trials, alphas, betas)
    return value.reshape(grid.alphas.shape) + grid.log_steps
