"""Averages and intervals of responses over the clients' posteriors, or the prior of new clients."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit, logsumexp, ndtr, ndtri, softmax

from pfl_sklearn.linear_model._algebra import row_slices
from pfl_sklearn.linear_model._mixed._families import bounded_exp
from pfl_sklearn.linear_model._mixed._marginal_likelihood import quadrature_nodes
from pfl_sklearn.linear_model._mixed._posterior import skewed_bounds

_AVERAGED_CELLS = 1 << 20  # rows times nodes at a time: 8 MB for each temporary array
_NODES = np.arange(-64, 65) / 8  # equally spaced, in standard deviations
_WEIGHTS = np.exp(-0.5 * _NODES**2) / np.exp(-0.5 * _NODES**2).sum()
_POINTS, _NEWTON_STEPS = 15, 20  # of quadrature around a mode, and to find it
_NODE_REACH = 0.5  # of the nodes' reach: a likelihood may move the posterior that far
_LARGEST_LOG = 600.0  # exponentials of 709 overflow
_LONGEST_STEP = 3.0  # of a predictor, as exponentials grow fast
_LARGEST_VARIANCE = 1e200  # of huge features; an infinite one would make NaN of a node at 0
_SOBOL = 256  # points, each used with both signs: odd moments are exact
_BOUND_SOBOL = 4096  # of intervals: 256 leave up to .02 too much in a tail
_WIDE = 100.0  # variance of a predictor over that of a response's threshold
_BOUND_TOLERANCE = 1e-9  # relative error of a bound that is no whole number


class PredictorLaw(NamedTuple):
    """Distribution of rows' predictors given the population and the variance between clients.

    Known clients have their posterior, new ones the prior. Errors of the population take no part:
    means with them would be too high where exponentials are averaged.
    """

    predictors: np.ndarray  # (n, c), at the client's mode, or the population's
    coding: np.ndarray  # (c, a), orthonormal
    effects: Any  # EffectPosterior; None without known clients
    z: np.ndarray  # (n, q), random columns
    codes: np.ndarray  # (n,), -1 for new clients
    # Covariances (b, a, a) of combinations (a, c) at rows (b,), by the curvature.
    covariances_of: Callable
    levels: Any = None  # codes (n,) of the levels of every grouping after the clients
    shifts: Any = 0.0  # (n,), of the means from the predictors at the modes of the levels

    def parts(self):
        """Rows that have nodes, and rows whose predictors are normal."""
        nodes = (self.codes >= 0) & (self.effects is not None and self.effects.has_nodes)
        return np.flatnonzero(nodes), np.flatnonzero(~nodes)

    def averages(self, values_of, rows):
        """Averages (b, ...) over the nodes of rows (b,), from ``values_of(predictors, at)``.

        Predictors are (b, k, c), and `at` are the places of their rows.
        """

        def values_at(part, deviations):
            at = rows[part]
            return values_of(self.predictors[at, None] + deviations @ self.coding.T, at)

        return self.effects.averages(values_at, self.z[rows], self.codes[rows])

    def normal_means(self, rows):
        """Means (b, c) of rows (b,)."""
        means, known = self.predictors[rows].copy(), self.codes[rows] >= 0
        if np.ndim(self.shifts):
            means += self.shifts[rows, None]
        if known.any():
            shifts = self.effects.mean_shifts(self.z[rows[known]], self.codes[rows[known]])
            means[known] += shifts @ self.coding.T
        return means

    def normal_variances(self, rows):
        """Variances (b,) of rows (b,), with one predictor."""
        variances = self.covariances_of(rows, np.ones((1, 1)))[:, 0, 0]
        known = self.codes[rows] >= 0
        if known.any():
            at = self.z[rows[known]], self.codes[rows[known]]
            added = self.effects.moments(*at, self.coding[0])[1]
            variances[known] = np.maximum(variances[known] + added, 0.0)
        return variances


class FittedRows(NamedTuple):
    """Predictors of the rows of a fit with several groupings, given the population."""

    predictors: np.ndarray  # (n,), at the mode
    shifts: np.ndarray  # (n,), of the posterior means from them
    variances: np.ndarray  # (n,)


def table_law(estimates, table):
    """PredictorLaw of the rows of a RegressionTable, whose clients are those of the estimates."""

    z, coding = table.columns[:, : table.n_random], estimates.family.coding
    predictors, fitted = predictors_at_modes(estimates, table), estimates.rows

    def covariances_of(rows, combinations):
        if fitted is not None:
            return fitted.variances[rows, None, None] * np.square(combinations)
        x = cross_outputs(combinations, table.columns[rows])
        return estimates.posterior.given_population(x, table.codes[rows])

    law = PredictorLaw(predictors, coding, estimates.effects, z, table.codes, covariances_of)
    if fitted is None:
        return law
    # The rows' own shifts hold those of their clients.
    return law._replace(effects=None, codes=np.full_like(table.codes, -1), shifts=fitted.shifts)


def predictors_at_modes(estimates, table):
    """Predictors (n, c) of the rows of a table, with the coefficients of their clients."""
    if estimates.rows is not None:
        return estimates.rows.predictors[:, None]
    predictors = np.einsum("np,ncp->nc", table.columns, estimates.coefficients[table.codes])
    return predictors if table.offset is None else predictors + table.offset[:, None]


def cross_outputs(combinations, x):
    """Combinations (n, a, c p) of coefficients (c, p) for combinations (a, c) at rows (n, p)."""
    (a, c), (n, p) = combinations.shape, x.shape
    return np.einsum("ac,np->nacp", combinations, x).reshape(n, a, c * p)


def averaged_responses(law, family):
    """Averages (n, 1) of a response's expectation, or (n, K) of class probabilities."""
    if family.link == "logit":
        return averaged_probabilities(law)
    return bounded_exp(averaged_exponentials(law))[:, None]


def response_sums(table, estimates):
    """Weighted sums of the responses, or of each class, and of their predictions."""
    # With a canonical link the two agree at the maximum, up to the error of the integration.
    weights = np.ones(len(table.y)) if table.weights is None else table.weights
    expected = averaged_responses(table_law(estimates, table), estimates.family)
    return estimates.family.response_sums(table.y, weights), weights @ expected


def averaged_probabilities(law):
    """Probabilities (n, K) averaged over a PredictorLaw."""
    # Two classes: the trapezoidal rule on 129 nodes, with an error below 1e-6 up to a standard
    # deviation of 10. K classes: 256 points of a Sobol sequence and their mirror images in the K -
    # 1 contrasts, with errors of about 1e-3, below 1e-2 in all our trials.
    (n, c), (nodes, others) = law.predictors.shape, law.parts()
    result = np.empty((n, max(c, 2)))
    if len(nodes):
        result[nodes] = law.averages(lambda logits, _: _probabilities(logits), nodes)
    if not len(others):
        return result
    means = law.normal_means(others)
    if c == 1:
        variances = law.normal_variances(others)
        for k, sign in enumerate((-1, 1)):
            result[others, k] = normal_average(lambda _, u: expit(u), sign * means[:, 0], variances)
        return result

    def covariances_of(block):  # without nodes, they are those of the curvature
        return law.covariances_of(others[block], law.coding.T)

    for block, chances in node_probabilities(means, law.coding, covariances_of):
        result[others[block]] = chances.mean(axis=1)
    return result


def _probabilities(logits):
    """Probabilities (..., K) from logits (..., K), or (..., 1) of the second of two classes."""
    if logits.shape[-1] > 1:
        return softmax(logits, axis=-1)
    small = np.exp(-np.abs(logits))
    large = 1 / (1 + small)
    # Neither is 1 less the other, which would lose the digits of a small one.
    small *= large
    likely = logits > 0
    return np.concatenate([np.where(likely, small, large), np.where(likely, large, small)], axis=-1)


def averaged_exponentials(law, power=1.0):
    """Logs (n,) of averages of exp(power u) over a PredictorLaw with one predictor u."""
    result, (nodes, others) = np.empty(len(law.codes)), law.parts()
    if len(nodes):
        result[nodes] = _log_average(law, lambda u, at: power * u[..., 0], nodes)
    if len(others):
        means = law.normal_means(others)
        variances = np.minimum(law.normal_variances(others), _LARGEST_VARIANCE)
        result[others] = power * means[:, 0] + power**2 * variances / 2
    return result


def _log_average(law, logs_of, rows):
    """Logs (b,) of averages over the nodes of rows (b,), from logs (b, k) at the nodes."""
    # Relative to the mode, whose node has a share: exponentials would overflow or all be 0.
    at_mode = logs_of(law.predictors[rows, None], rows)
    relative = np.empty(len(law.codes))
    relative[rows] = at_mode[:, 0]

    def values_of(predictors, at):
        logs = logs_of(predictors, at) - relative[at, None]
        return np.exp(np.minimum(logs, _LARGEST_LOG))

    averages = law.averages(values_of, rows)
    return at_mode[:, 0] + np.log(np.maximum(averages, np.finfo(float).tiny))


def averaged_log_likelihoods(family, law, y):
    """Logs (n,) of likelihoods of responses (n,) averaged over a PredictorLaw."""
    if family.n_outputs > 1:
        chances = averaged_probabilities(law)
        return np.log(np.maximum(chances[np.arange(len(y)), y], np.finfo(float).tiny))
    rows = np.arange(len(y))
    means, variances = law.normal_means(rows), law.normal_variances(rows)
    score = family.terms(means, y, np.ones(len(y))).score[:, 0]
    # Nodes reach a few standard deviations; a large count may be likely only further away, and then
    # the posterior is close to normal.
    far = _NODE_REACH * quadrature_nodes(law.effects.n_points)[0].max()
    result, nodes = np.empty(len(y)), law.parts()[0]
    nodes = nodes[family.bounded | (score**2 * variances <= far**2)[nodes]]
    if len(nodes):
        result[nodes] = _log_average(
            law, lambda u, at: family.log_likelihood(u, y[at, None]), nodes
        )
    others = np.setdiff1d(rows, nodes)
    result[others] = _normal_log_likelihoods(family, means[others, 0], y[others], variances[others])
    return result + family.constants(y)


def _normal_log_likelihoods(family, means, y, variances):
    """Logs (n,) of likelihoods averaged over normal predictors, without the `constants`."""
    # Adaptive quadrature around the mode of the product: large counts have a narrow likelihood, far
    # away.
    ones, spread = np.ones(len(y)), np.sqrt(np.clip(variances, 0.0, _LARGEST_VARIANCE))
    z = np.zeros(len(y))  # standard deviations of the predictor from its mean
    for _ in range(_NEWTON_STEPS):
        terms = family.terms((means + spread * z)[:, None], y, ones)
        curvature = 1 + spread**2 * terms.curvature[:, 0, 0]
        step = (spread * terms.score[:, 0] - z) / curvature
        z += step * np.minimum(1, _LONGEST_STEP / np.maximum(spread * np.abs(step), _LONGEST_STEP))
    size = curvature[:, None] ** -0.5
    nodes, log_weights = quadrature_nodes(_POINTS)
    effects = z[:, None] + size * nodes
    inside = family.log_likelihood((means + spread * effects.T).T[..., None], y[:, None])
    # exp(x^2 / 2) undoes the weight of the rule, which is for a normal density.
    logs = inside - effects**2 / 2 + (log_weights + nodes**2 / 2) + np.log(size)
    return logsumexp(logs, axis=1)


def normal_average(function, means, variances):
    """Averages (n,) of ``function(rows, predictors)`` (b, k) over normal predictors."""
    result = np.empty(len(means))
    # A variance is a difference, which rounding may leave below 0.
    spread = np.sqrt(np.clip(variances, 0.0, _LARGEST_VARIANCE))
    for block in row_slices(len(means), len(_NODES), _AVERAGED_CELLS):
        predictors = means[block, None] + spread[block, None] * _NODES
        # A product of a matrix would round by how many rows there are.
        result[block] = np.einsum("bk,k->b", function(block, predictors), _WEIGHTS)
    return result


def node_probabilities(logits, contrasts, covariances_of, n_points=_SOBOL):
    """Blocks of rows and their probabilities (b, 2 n_points, K) at nodes of equal weight, K > 2."""
    nodes = _normal_nodes(contrasts.shape[1], n_points)
    for block in row_slices(len(logits), len(nodes) * logits.shape[1], _AVERAGED_CELLS):
        deviations = nodes @ (contrasts @ _symmetric_roots(covariances_of(block))).transpose(
            0, 2, 1
        )
        yield block, softmax(logits[block, None] + deviations, axis=2)


def contrast_covariances(contrasts, variances_of):
    """Covariances (n, a, a) of the contrasts of the logits, from the variances of sums."""
    # cov(u, v) = (var(u + v) - var(u) - var(v)) / 2: posteriors give variances alone.
    sums = np.array([[variances_of(u + v) for u in contrasts.T] for v in contrasts.T])
    variances = np.einsum("kkn->kn", sums) / 4
    return 0.5 * (sums - variances - variances[:, None]).transpose(2, 0, 1)


def _symmetric_roots(covariances):
    """Symmetric square roots (n, a, a)."""
    values, vectors = np.linalg.eigh(covariances)
    return (vectors * np.sqrt(np.maximum(values, 0.0))[:, None, :]) @ vectors.transpose(0, 2, 1)


@cache
def _normal_nodes(n_dimensions, n_points=_SOBOL):
    """Quasi-random normal nodes (2 n_points, a), symmetric about 0 and the same in every call."""
    from scipy.stats.qmc import Sobol

    # The first point of the sequence is 0, whose normal quantile is infinite: half a cell further.
    points = Sobol(n_dimensions, scramble=False).random(n_points) + 0.5 / n_points
    nodes = ndtri(points)
    return np.concatenate([nodes, -nodes])


def probability_bounds(logits, moments_of, coding, level):
    """Bounds (n, K) of class probabilities, from logits (n, c) at the modes.

    Two classes: quantiles of the log odds. K classes: quantiles over quasi-random nodes; tails of
    2.5 % are exact to .001 or so, to .004 in all our trials. ``moments_of`` gives the shift of the
    mean, the variance and the third central moment (n,) of a combination (c,); `coding` (c, a) is
    orthonormal.
    """
    if logits.shape[1] == 1:
        bounds = skewed_bounds(logits[:, 0], moments_of(np.ones(1)), level)
        # Of both signs: 1 less the second would lose the digits of a small one.
        both = [np.column_stack([-second, first]) for first, second in (bounds, bounds[::-1])]
        return tuple(expit(bound) for bound in both)
    shifts = [moments_of(contrast)[0] for contrast in coding.T]
    means = logits + np.column_stack(shifts) @ coding.T
    result = np.empty((2, *logits.shape))
    tails = (1 - level) / 2, (1 + level) / 2
    covariances = contrast_covariances(coding, lambda g: moments_of(g)[1])
    nodes = node_probabilities(means, coding, lambda block: covariances[block], _BOUND_SOBOL)
    for block, chances in nodes:
        # Each node stands in the middle of its share.
        result[:, block] = np.quantile(chances, tails, axis=1, method="hazen")
    return tuple(result)


def response_bounds(family, means, variances, level):
    """Bounds (n,) of new responses: the least with a tail of (1 - level) / 2 at or below, or above.

    `means` and `variances` (n,) are those of the normal predictors of a LogLink family.
    """
    tail = (1 - level) / 2
    variances = np.maximum(variances, 0.0)  # differences, which rounding may leave below 0
    # The predictor exceeds this in a quarter of the tail. So does a response its mean by `far`
    # standard deviations at most (Cantelli's inequality).
    mean = family.mean(means - ndtri(tail / 4) * np.sqrt(variances))
    far = np.sqrt(4 / tail)
    with np.errstate(over="ignore"):
        high = np.ceil(mean + far * np.sqrt(family.variance(mean)))
    high = np.minimum(high, np.finfo(float).max)

    def share(name, rows, y):
        return average_tail(family, name, y, means[rows], variances[rows])

    # Each from its own side, where a small share has all its digits.
    lower = _bisect_least(lambda rows, y: share("cdf", rows, y) >= tail, high, family.discrete)
    return lower, _bisect_least(lambda rows, y: share("sf", rows, y) <= tail, high, family.discrete)


def average_tail(family, name, y, means, variances):
    """Probabilities (n,) of responses up to ("cdf") or above ("sf") `y`, over normal predictors."""
    # A response is at most y if its predictor is below a random threshold. A threshold that is
    # narrow relative to the predictor's spread would fall between two nodes; there we take the
    # difference of the two for normal, which for counts is exact to 1e-4.
    centre, width = family.threshold(y)
    sign, result = 1.0 if name == "cdf" else -1.0, np.empty(len(means))
    wide = variances > _WIDE * width
    result[wide] = ndtr(sign * (centre - means)[wide] / np.sqrt(variances + width)[wide])
    narrow = np.flatnonzero(~wide)

    def tails(block, predictors):
        law = family.distribution(family.mean(predictors))
        return getattr(law, name)(y[narrow[block], None])

    result[narrow] = normal_average(tails, means[narrow], variances[narrow])
    return result


def _bisect_least(reached, high, discrete):
    """Least responses (n,), up to `high`, for which ``reached(rows, y)`` is true."""
    low, high = np.full(len(high), -1.0 if discrete else 0.0), high.copy()
    while True:
        middle = low / 2 + high / 2
        if discrete:
            middle = np.floor(middle)
        wide = discrete | (high - low > _BOUND_TOLERANCE * high)
        rows = np.flatnonzero((low < middle) & (middle < high) & wide)
        if not len(rows):
            return high
        middle = middle[rows]
        enough = reached(rows, middle)
        high[rows[enough]] = middle[enough]
        low[rows[~enough]] = middle[~enough]
