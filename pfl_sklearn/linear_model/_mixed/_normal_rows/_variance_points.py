"""Variances of a linear mixed model that the data leave plausible: points, weights and tests.

One variance ratio is integrated by quadrature, a covariance matrix by Gibbs sampling. Points say
nothing of zero, since under their prior no variance is zero: that takes a likelihood ratio test.
"""

from math import comb

import numpy as np
from scipy.linalg.lapack import dpotrf, dtrtrs
from scipy.special import chdtrc

from pfl_sklearn._variance_averaging import LEAST_LIKELY_RATIO, ratio_nodes
from pfl_sklearn.linear_model._algebra import covariance_factor, invert_lower, uncorrelating
from pfl_sklearn.linear_model._mixed._normal_rows._variance_search import search_factor
from pfl_sklearn.linear_model._mixed._uncertainty import (
    PointPosterior,
    VariancePoints,
    averages_around,
    deviation_blocks,
    random_blocks,
)

_SWEEPS, _FEWEST_SWEEPS, _SWEEPS_TIMES_CLIENTS = 1000, 250, 200_000
_FIRST_SWEEPS = 0.2  # share of the sweeps, on top, that finds the posterior
_LEAST_NOISE = 1e-10  # over that of the pooled fit; below it covariances are lost in rounding
_LEAST_VARIANCE = 1e-3  # least variance at the start, in squares of the prior's scale
_N_COMPUTED = 150  # draws at which posteriors are computed; neighbours are alike
_NO_WEIGHT = 1e-7  # of a node, whose posterior then need not be computed
_IDENTIFIED = 1e-9  # eigenvalue at columns of length 1, below which nothing is identified
_NULL_MAX_ITER, _NULL_TOL = 500, 1e-6  # of the search without the variance
_ABSENT = 1e-8  # share of a combination of coefficients, of one that rounding errors put there


def posterior_means(case):
    """ScaledFit at posterior means, its Averages, and mean covariance (q, q) and noise."""
    # They replace a maximum where the clients' own coefficients fit all rows exactly. With a full
    # covariance, restricted likelihood is then largest at a noise variance of zero, if bounded at
    # all; with simpler covariances it often is.
    points = _find_points(case)
    solved = (_posterior_at(case.likelihood, points.factors[at]) for at in points.computed)
    means = zip(*[(point.population, point.deviations) for point in solved], strict=True)
    population, deviations = (np.tensordot(points.computed_weights, values, 1) for values in means)
    case = case._replace(population=population, deviations=deviations)
    covariances = points.factors @ points.factors.transpose(0, 2, 1) * points.noises[:, None, None]
    covariance = np.tensordot(points.weights, covariances, 1)
    return case, average(case, points), covariance, float(points.weights @ points.noises)


def average(case, points=None):
    """Averages of a ScaledFit, over given VariancePoints or those that it finds."""
    points = _find_points(case) if points is None else points
    posteriors = (_posterior_at(case.likelihood, points.factors[at]) for at in points.computed)
    return averages_around(case, points, posteriors)


def _posterior_at(likelihood, factor):
    """PointPosterior at a factor (q, r) of the covariance over the noise."""
    reduced, point = likelihood.reduced, likelihood.at(factor)
    rows, ratio, root = point.whitened.rows, point.ratio, point.root
    blocks, spreads = (
        reduced.by_client([of(block[:, :, :-1], ratio, root) for block in rows])
        for of in (random_blocks, deviation_blocks)
    )
    deviations = reduced.deviations(rows, point.residuals, ratio)
    return PointPosterior(point.coefficients, root, deviations, blocks, ratio, spreads)


def _find_points(case):
    """VariancePoints after the data, starting from the estimate of a ScaledFit."""
    # The population is integrated out in any case.
    likelihood = case.likelihood._replace(restricted=True)
    find = _ratio_points if case.shape.has_one_ratio else _sampled_points
    return find(likelihood, case.shape, case.ratio)


def _ratio_points(likelihood, shape, estimate):
    """Quadrature over the ratio; the noise variance is integrated out."""
    reduced, direction = likelihood.reduced, shape.varies.astype(float)
    lengths = reduced.n_clients * np.diag(reduced.random_moments()) @ direction

    def at(ratio):
        return likelihood.at(np.sqrt(ratio) * direction)

    def log_likelihoods(ratios):
        return np.array([-0.5 * at(ratio).criterion for ratio in ratios])

    # An estimate of zero is no size; the likelihood then falls from about this ratio on.
    likely = max(np.max(np.diag(estimate)), LEAST_LIKELY_RATIO * reduced.n_clients / lengths)
    nodes = ratio_nodes(log_likelihoods, lengths / reduced.n_rows, likely)
    # A point holds whitened rows, so there is one at a time.
    ends = ((point.noise, point.n_free) for point in map(at, nodes.values))
    noises, n_free = zip(*ends, strict=True)
    return VariancePoints(
        np.sqrt(nodes.values)[:, None, None] * np.diag(direction),
        np.array(noises),
        nodes.weights,
        np.inf if likelihood.noise is not None else float(max(n_free[0], 1)),
        np.flatnonzero(nodes.weights > _NO_WEIGHT),
    )


def _sampled_points(likelihood, shape, estimate):
    """Draws of the covariance and the noise variance by Gibbs sampling."""
    # The standard deviations of the response that the coefficients explain are half-Cauchy
    # ("diag"), or half-t with 2 degrees of freedom and uniform correlations ("full": Huang and
    # Wand, 2013), in units of the residual of the pooled fit; that of the noise is half-Cauchy. A
    # client's deviations are scales times effects, with normal scales (parameter expansion).
    sampler = _Sampler(likelihood, shape, estimate)
    # With more clients a sweep takes longer, and averages matter less.
    n_sweeps = _SWEEPS_TIMES_CLIENTS // likelihood.reduced.n_clients
    n_sweeps = int(np.clip(n_sweeps, _FEWEST_SWEEPS, _SWEEPS))
    for _ in range(int(_FIRST_SWEEPS * n_sweeps)):
        sampler.sweep()
    factors, noises = [], []
    for _ in range(n_sweeps):
        sampler.sweep()
        factors.append(sampler.factor() / np.sqrt(sampler.noise))
        noises.append(sampler.noise)
    computed = np.unique(np.linspace(0, n_sweeps - 1, _N_COMPUTED).astype(int))
    weights = np.full(n_sweeps, 1 / n_sweeps)
    return VariancePoints(np.array(factors), np.array(noises), weights, np.inf, computed)


class _Sampler:
    """State of the Gibbs sampler: scales and variances of the effects, and the noise.

    Draws depend on the rows through their products alone, so not on their order.
    """

    def __init__(self, likelihood, shape, estimate):
        self.reduced, self.shape = likelihood.reduced, shape.name
        self.rng = np.random.default_rng(0)  # the same table has the same errors
        self.at = at = np.flatnonzero(shape.varies)
        reduced, first = likelihood.reduced, likelihood.first
        rows = reduced.padded(reduced.rows)
        self.random = np.ascontiguousarray(rows[:, :, at])
        self.columns = np.ascontiguousarray(rows[:, :, first:])  # of the population, target
        self.gram = reduced.gram(reduced.rows, first)
        # Positions of fixed coefficients among the free ones of the population.
        self.fixed = slice(reduced.n_random - first, reduced.n_columns - first)
        across = self.random.transpose(0, 2, 1)
        self.within, self.across = across @ self.random, across @ self.columns
        pooled = likelihood._replace(noise=None).at(np.zeros(reduced.n_random)).noise
        self.unit, self.known_noise = np.sqrt(pooled), likelihood.noise
        self.noise = pooled if likelihood.noise is None else likelihood.noise
        lengths = np.sqrt(np.einsum("mqq->q", self.within) / reduced.n_rows)
        wider = 2**0.5 if shape.name == "full" else 1.0
        self.width = wider * self.unit / lengths  # of the prior of the scales
        covariance = estimate[np.ix_(at, at)] * self.noise
        # A sampler that starts at a variance of zero would leave it only slowly.
        covariance += _LEAST_VARIANCE * np.diag(self.width**2)
        self.scales = np.sqrt(np.diag(covariance))
        correlation = covariance / self.scales / self.scales[:, None]
        self.root = np.linalg.cholesky(correlation)  # of the effects' covariance

    def factor(self):
        """Root (q, r) of the covariance between clients."""
        factor = np.zeros((self.reduced.n_random, len(self.at)))
        factor[self.at] = self.scales[:, None] * self.root
        return factor

    def sweep(self):
        """One draw of everything."""
        effects = self._draw_effects()
        square = self._draw_scales(effects)
        self._draw_effect_variances(effects)
        if self.known_noise is None:
            self._draw_noise(square)

    def _draw_effects(self):
        """Effects (m, r) of the clients, with the population integrated out and then drawn."""
        factor = self.scales[:, None] * self.root / np.sqrt(self.noise)
        system = factor.T @ self.within @ factor + np.eye(len(factor))
        inverse = invert_lower(np.linalg.cholesky(system))
        pulled = inverse @ (factor.T @ self.across) / np.sqrt(self.noise)
        flat = pulled.reshape(-1, pulled.shape[2])
        gram = self.gram / self.noise - flat.T @ flat
        population = self._draw_normal(gram[:-1, :-1], gram[:-1, -1])
        residual = pulled[:, :, -1] - pulled[:, :, :-1] @ population
        residual += self.rng.standard_normal(residual.shape)
        return (residual[:, None, :] @ inverse)[:, 0] @ self.root.T

    def _draw_scales(self, effects):
        """Draw the scales together with the population; the residual square of all rows."""
        width = len(self.gram) - 1
        across = np.einsum("mqp,mq->qp", self.across, effects)
        squares = np.sum(self.within * (effects[:, :, None] * effects[:, None, :]), axis=0)
        squares += self.noise * np.diag(self.width**-2)
        both = across[:, :-1]
        precision = np.block([[self.gram[:-1, :-1], both.T], [both, squares]])
        slope = np.append(self.gram[:-1, -1], across[:, -1])
        drawn = self._draw_normal(precision / self.noise, slope / self.noise)
        self.scales = drawn[width:]
        direction = np.append(-drawn[:width], 1.0)
        residual = self.columns @ direction
        residual -= (self.random @ (effects * self.scales)[..., None])[..., 0]
        remaining = self.reduced.remaining_square(drawn[self.fixed])
        return np.vdot(residual, residual) + remaining

    def _draw_effect_variances(self, effects):
        m, r = effects.shape
        if self.shape == "diag":
            rate = 0.5 + 0.5 * np.sum(effects**2, axis=0)
            self.root = np.diag(np.sqrt(rate / self.rng.gamma(0.5 + 0.5 * m, size=r)))
            return
        # A draw from an inverse Wishart distribution by Bartlett's decomposition.
        lower = np.linalg.cholesky(np.eye(r) + effects.T @ effects)
        bartlett = np.tril(self.rng.standard_normal((r, r)), -1)
        shape = 0.5 * (r + 1 + m - np.arange(r))
        bartlett[np.arange(r), np.arange(r)] = np.sqrt(2 * self.rng.gamma(shape))
        self.root = dtrtrs(bartlett, lower.T, lower=1)[0].T

    def _draw_noise(self, square):
        # A half-Cauchy standard deviation is a mixture of inverse gammas: draw the mixing, then it.
        mixing = (self.unit**-2 + 1 / self.noise) / self.rng.gamma(1.0)
        rate = 1 / mixing + 0.5 * square
        drawn = float(rate / self.rng.gamma(0.5 + 0.5 * self.reduced.n_rows))
        self.noise = max(drawn, _LEAST_NOISE * self.unit**2)

    def _draw_normal(self, precision, slope):
        """Draw (p,) from a normal distribution; 0 for directions that are not identified."""
        normal = self.rng.standard_normal(len(slope))
        # Ranks should not depend on the units of columns, as in a fit.
        lengths = np.sqrt(np.maximum(precision.diagonal(), 0.0))
        lengths[lengths == 0] = 1.0
        scaled = precision / lengths / lengths[:, None]
        # The shift shows a singular matrix; LAPACK directly, as this runs a thousand times.
        lower, singular = dpotrf(scaled - _IDENTIFIED * np.eye(len(scaled)), lower=1)
        if singular or not len(slope):  # LAPACK complains of systems without equations
            values, vectors = np.linalg.eigh(scaled)
            free = values > _IDENTIFIED
            root = vectors[:, free] / np.sqrt(values[free])
            return root @ (root.T @ (slope / lengths) + normal[free]) / lengths
        half = dtrtrs(lower, slope / lengths, lower=1)[0] + normal
        return dtrtrs(lower, half, lower=1, trans=1)[0] / lengths


def zero_p_values(case):
    """P-values (q,) of the hypotheses that a coefficient of the data's columns does not vary."""
    q = case.reduced.n_random
    combinations = case.frame.back[:q, :q] * case.shape.varies
    largest = np.abs(combinations).max(axis=1, keepdims=True)
    combinations[np.abs(combinations) <= _ABSENT * largest] = 0.0
    best = case.likelihood.at_ratio(case.ratio).criterion
    # Each hypothesis is a search, so equal ones are tested once.
    unlike, back = np.unique(combinations, axis=0, return_inverse=True)
    p_values = [
        _p_value(case.likelihood, case.shape, row, best) if row.any() else 1.0 for row in unlike
    ]
    return np.array(p_values)[back.ravel()]


def _p_value(likelihood, shape, row, best):
    """P-value of the hypothesis that a combination (q,) of the coefficients does not vary."""
    # A variance cannot be negative, so the statistic is a mixture of chi-squares (Self and Liang,
    # 1987; Stram and Lee, 1994).
    n_variances, n_covariances = 1, 0
    if shape.has_one_ratio:  # without it nothing varies
        factor = None
    elif shape.name == "full":
        factor, n_covariances = _full_without(likelihood.reduced, row), len(row) - 1
    else:
        # An intercept of uncentred columns combines several coefficients: none of them may vary.
        varying, n_variances = shape.varies & (row == 0), int(np.count_nonzero(row))
        factor = covariance_factor("diag", len(row), varies=varying) if varying.any() else None
    if factor is None:
        smaller = likelihood.at(np.zeros(len(row)))
    else:
        smaller = search_factor(likelihood, factor, _NULL_MAX_ITER, _NULL_TOL)
    statistic = smaller.criterion - best
    if not statistic > 0:  # the estimate is zero itself
        return 1.0
    tails = [
        comb(n_variances, s) * chdtrc(s + n_covariances, statistic)
        for s in range(n_variances + 1)
        if s + n_covariances
    ]
    return sum(tails) / 2**n_variances


def _full_without(reduced, row):
    """Factor of the covariances (q, q) under which a combination (q,) does not vary."""
    n_free = len(row) - 1
    across = np.linalg.qr(row[:, None], mode="complete")[0][:, 1:]
    across = across @ uncorrelating(across.T @ reduced.random_moments() @ across)
    free = covariance_factor("full", n_free)
    # No parameter stands in the first row of the factor, which is that of the combination.
    return free._replace(
        shape=(n_free + 1, n_free),
        positions=free.positions + n_free,
        n_transformed=n_free,
        basis=np.column_stack([row, across]),
    )
