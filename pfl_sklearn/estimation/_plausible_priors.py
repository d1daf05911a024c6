"""Proportions of few clients: posteriors averaged over the plausible beta priors."""

import math
from typing import NamedTuple

import numpy as np
from scipy.special import betainc, betaincinv, betaln, gammaln, logsumexp, softmax, xlog1py, xlogy

from pfl_sklearn._typing import Floats
from pfl_sklearn._variance_averaging import LEAST_LIKELY_RATIO, quantiles_between, ratio_nodes
from pfl_sklearn.priors._beta import largest_concentration

# Values of the population mean for every ratio. Five locate the likely ratios; errors and quantiles
# need the tails of the mean.
_MEANS_PER_RATIO, _MEANS_TO_LOCATE = 15, 5
# Share of the trials that the proposal for the mean counts: its tails must be wider than those of
# the posterior, or a few nodes would have all the weight.
_TRIALS_OF_PROPOSAL = 0.6
_PAIRS_AT_ONCE = 256  # of counts, times 900 to 2,500 priors: 2 to 5 MB for each array
_LONGEST_PRODUCT = 1000  # trials, up to which a table of sums of logarithms takes 20 MB
_TRIED_RATIOS = np.geomspace(1e-6, 1e4, 61)  # of variances, between clients over within
_LARGEST_RATIO = 1e8  # hardly any client is between 0 and 1 there: more would change nothing
_LEAST_WEIGHT_IN_QUANTILES = 1e-4  # relative to the largest; the rest moves no shown digit


class BetaPriors(NamedTuple):
    """Beta priors and their weights, which sum to 1."""

    alphas: Floats  # (h,)
    betas: Floats  # (h,)
    weights: Floats  # (h,)

    def mean(self):
        """Mean and standard deviation of the population mean."""
        mean = float(self.weights @ (self.alphas / (self.alphas + self.betas)))
        return mean, math.sqrt(self.mean_variance(mean))

    def mean_variance(self, mean):
        """Mean square of the population mean's distance from an estimate."""
        return float(self.weights @ (self.alphas / (self.alphas + self.betas) - mean) ** 2)

    def moments(self):
        """Mean and variance of the proportion of a client without trials."""
        means, variances = self._given(np.zeros(1), np.zeros(1))
        mean = self.weights @ means[0]
        return float(mean), float(self.weights @ (variances + (means - mean) ** 2)[0])

    def posterior(self, successes, trials):
        """Mean and variance (u,) of the clients' proportions given their own exact counts."""

        def posterior_of(successes, trials):
            # The weights are those before the client's own counts, which tell priors apart, too.
            log_joint = log_marginals(successes, trials, self.alphas, self.betas)
            joint = softmax(log_joint + np.log(self.weights), axis=1)
            means, variances = self._given(successes, trials)
            mean = np.einsum("uh,uh->u", joint, means)
            squares = variances + (means - mean[:, None]) ** 2
            return np.stack([mean, np.einsum("uh,uh->u", joint, squares)])

        return _by_blocks(posterior_of, successes, trials)

    def variances(self, successes, trials, estimates):
        """Mean squares (u,) of the distance of proportions from estimates, given counts (u,)."""

        def variances_of(successes, trials, estimates):
            # The weights come from these clients' counts already.
            means, variances = self._given(successes, trials)
            return (variances + (means - estimates[:, None]) ** 2) @ self.weights

        return _by_blocks(variances_of, successes, trials, estimates)

    def on_grid(self, support):
        """Mass of the averaged prior in the cells around the points of `support` (K,)."""
        edges = np.concatenate([[0.0], (support[1:] + support[:-1]) / 2, [1.0]])
        below = betainc(self.alphas[:, None], self.betas[:, None], edges)
        mass = self.weights @ np.diff(below, axis=1)
        return mass / mass.sum()

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

    def _given(self, successes, trials):
        """Posterior means and variances (u, h) of proportions under each prior."""
        total = trials[:, None] + (self.alphas + self.betas)
        means = (successes[:, None] + self.alphas) / total
        return means, means * (1 - means) / (total + 1)


def _by_blocks(function, *columns):
    """Call a function of columns (u,) for a block of clients at a time, which bounds its memory."""
    starts = range(0, len(columns[0]), _PAIRS_AT_ONCE)
    parts = [function(*(column[i : i + _PAIRS_AT_ONCE] for column in columns)) for i in starts]
    return np.concatenate(parts, axis=-1)


def log_marginals(successes, trials, alphas, betas):
    """Beta-binomial log-probabilities (u, h) of sequences with these counts, up to rounding.

    Without the binomial coefficient, which is the same for all priors.
    """
    failures = trials - successes
    return (
        _log_rising(alphas, successes)
        + _log_rising(betas, failures)
        - _log_rising(alphas + betas, trials)
    )


def _log_rising(values, steps):
    """Log of values (values + 1) ... (values + steps - 1): (u, h) for steps (u,), values (h,)."""
    highest = int(steps.max(initial=0))
    if highest > _LONGEST_PRODUCT:
        return gammaln(steps[:, None] + values) - gammaln(values)
    table = np.zeros((highest + 1, len(values)))
    np.cumsum(np.log(np.arange(highest)[:, None] + values), axis=0, out=table[1:])
    return table[steps]


def plausible_priors(table, mean):
    """BetaPriors after the counts of a CountTable, whose population mean was estimated.

    A priori the intraclass correlation is Beta(1/2, 1/2), and the population mean uniform.
    """

    def likelihood(ratios):
        return logsumexp(_grid(table, mean, ratios, _MEANS_TO_LOCATE)[2], axis=1)

    likely = max(
        _TRIED_RATIOS[int(np.argmax(likelihood(_TRIED_RATIOS)))],
        LEAST_LIKELY_RATIO / table.trials.max(),
    )
    ratios, weights = ratio_nodes(likelihood, 1.0, likely)
    alphas, betas, log_weights = _grid(table, mean, ratios, _MEANS_PER_RATIO)
    log_weights -= logsumexp(log_weights, axis=1, keepdims=True)
    joint = weights[:, None] * np.exp(log_weights)
    return BetaPriors(alphas.ravel(), betas.ravel(), joint.ravel())


def _grid(table, mean, ratios, n_means):
    """Alphas, betas and log weights (k, n_means) of priors for each of the ratios (k,).

    Their means are at equal steps of a wide beta distribution around the estimate. Weights are
    likelihoods, with the steps that integrate over the mean.
    """
    ratios = np.clip(ratios, 1 / largest_concentration(table.trials), _LARGEST_RATIO)[:, None]
    # Trials of a client are correlated, so they tell of the mean as fewer independent ones would.
    correlation = ratios / (1 + ratios)
    trials = np.sum(table.counts * table.trials / (1 + (table.trials - 1) * correlation), axis=1)
    trials = _TRIALS_OF_PROPOSAL * trials[:, None]
    a, b = 1 + trials * mean, 1 + trials * (1 - mean)
    means = betaincinv(a, b, (np.arange(n_means) + 0.5) / n_means)
    means = np.clip(means, 1e-12, 1 - 1e-12)  # alpha and beta must be above 0
    density = xlogy(a - 1, means) + xlog1py(b - 1, -means) - betaln(a, b)
    alphas, betas = means / ratios, (1 - means) / ratios
    likelihoods = log_marginals(table.successes, table.trials, alphas.ravel(), betas.ravel())
    value = (table.counts @ likelihoods).reshape(alphas.shape)
    return alphas, betas, value + (-density - np.log(n_means))
