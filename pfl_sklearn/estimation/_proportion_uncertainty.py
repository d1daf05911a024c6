"""Proportions of few clients: their posteriors averaged over beta priors."""

from typing import NamedTuple

import numpy as np
from scipy.special import betainc, betaincinv, betaln, logsumexp, xlog1py, xlogy

from pfl_sklearn._variance_averaging import quantiles_between, ratio_nodes
from pfl_sklearn.estimation._proportion_reports import log_marginals
from pfl_sklearn.priors._beta import largest_concentration

_MEANS, _FEW_MEANS = 15, 5  # values of the population mean for every ratio
_WIDER = 0.6  # of the trials that a proposal for the mean counts, so that its tails are heavy
_PAIRS = 256  # at a time
_TRIED = np.geomspace(1e-6, 1e4, 61)  # ratios of variances, between clients over within
_LARGEST_RATIO = 1e8
_SMALL = 0.3  # ratio, in sampling variances of the largest client, below which it is as good as 0
_NEGLIGIBLE = 1e-4  # weight, relative to the largest, where quantiles are concerned


class PlausiblePriors(NamedTuple):
    """Beta priors and their weights."""

    alphas: np.ndarray  # (h,)
    betas: np.ndarray  # (h,)
    weights: np.ndarray  # (h,)

    def mean_variance(self, mean):
        """Variance of the population mean around an estimate."""
        return float(self.weights @ (self.alphas / (self.alphas + self.betas) - mean) ** 2)

    def variances(self, successes, trials, estimates):
        """Variances (u,) of proportions around estimates, given counts (u,)."""
        result = np.empty(len(trials))
        for start in range(0, len(trials), _PAIRS):
            part = slice(start, start + _PAIRS)
            total = trials[part, None] + self.alphas + self.betas
            means = (successes[part, None] + self.alphas) / total
            off = (means - estimates[part, None]) ** 2
            result[part] = (means * (1 - means) / (total + 1) + off) @ self.weights
        return result

    def quantiles(self, successes, trials, tails):
        """Quantiles (u,) of proportions given counts (u,), for each of the tails."""
        kept = self.weights > _NEGLIGIBLE * self.weights.max()
        weights = self.weights[kept] / self.weights[kept].sum()
        alphas = successes[:, None] + self.alphas[kept]
        betas = (trials - successes)[:, None] + self.betas[kept]

        def distribution(values, at):
            return betainc(alphas[at], betas[at], values[:, None]) @ weights

        ends = np.zeros(len(trials)), np.ones(len(trials))
        return [quantiles_between(distribution, *ends, tail) for tail in tails]


def plausible_priors(table, mean):
    """PlausiblePriors after the counts of a CountTable, whose population mean was estimated.

    A priori the intraclass correlation is Beta(1/2, 1/2), and the population mean uniform.
    """

    def likelihood(ratios):
        return logsumexp(_log_weights(table, _grid(table, mean, ratios, _FEW_MEANS)), axis=1)

    likely = max(_TRIED[int(np.argmax(likelihood(_TRIED)))], _SMALL / table.trials.max())
    ratios, weights = ratio_nodes(likelihood, 1.0, likely)
    grid = _grid(table, mean, ratios, _MEANS)
    inner = _log_weights(table, grid)
    joint = weights[:, None] * np.exp(inner - logsumexp(inner, axis=1, keepdims=True))
    return PlausiblePriors(grid.alphas.ravel(), grid.betas.ravel(), joint.ravel())


class _Grid(NamedTuple):
    """Beta priors (k, j): j means for every ratio, and log weights that integrate over the mean."""

    alphas: np.ndarray
    betas: np.ndarray
    log_steps: np.ndarray


def _grid(table, mean, ratios, n_means):
    """Means at equal steps of a wide beta distribution around the estimate."""
    ratios = np.clip(ratios, 1 / largest_concentration(table.trials), _LARGEST_RATIO)[:, None]
    correlation = ratios / (1 + ratios)
    trials = np.sum(table.counts * table.trials / (1 + (table.trials - 1) * correlation), axis=1)
    trials = _WIDER * trials[:, None]
    a, b = 1 + trials * mean, 1 + trials * (1 - mean)
    means = betaincinv(a, b, (np.arange(n_means) + 0.5) / n_means)
    means = np.clip(means, 1e-12, 1 - 1e-12)
    density = xlogy(a - 1, means) + xlog1py(b - 1, -means) - betaln(a, b)
    return _Grid(means / ratios, (1 - means) / ratios, -density - np.log(n_means))


def _log_weights(table, grid):
    """Log-likelihood (k, j) of the priors of a grid, with the log steps of the grid."""
    alphas, betas = grid.alphas.ravel(), grid.betas.ravel()
    value = table.counts @ log_marginals(table.successes, table.trials, alphas, betas)
    return value.reshape(grid.alphas.shape) + grid.log_steps
