"""Variances of a linear mixed model that the data leave plausible: points and their weights.

One variance ratio is integrated by quadrature, a covariance matrix by Gibbs sampling.
"""

from typing import NamedTuple

import numpy as np
from scipy.linalg.lapack import dpotrf, dtrtrs

from pfl_sklearn._variance_averaging import ratio_nodes
from pfl_sklearn.linear_model._algebra import invert_lower
from pfl_sklearn.linear_model._mixed._gaussian._profiled_likelihood import profile, whiten

_SMALL_RATIO = 0.3  # ratio, in sampling variances of a client, below which it is as good as zero
_SWEEPS, _FEWEST_SWEEPS, _SWEEPS_TIMES_CLIENTS = 1000, 250, 200_000
_FIRST_SWEEPS = 0.2  # share of the sweeps, on top, that finds the posterior
_LEAST_NOISE = 1e-10  # over that of the pooled fit; below it covariances are lost in rounding
_LEAST_VARIANCE = 1e-3  # least variance at the start, in squares of the prior's scale
_N_KEPT = 150  # draws at which posteriors are computed; neighbours are alike
_NO_WEIGHT = 1e-7  # of a node, whose posterior then need not be computed
_IDENTIFIED = 1e-9  # eigenvalue at columns of length 1, below which nothing is identified


class VariancePoints(NamedTuple):
    """Variances in the scale of the reduction."""

    factors: np.ndarray  # (k, q, r), roots of the covariance between clients over the noise
    noises: np.ndarray  # (k,), scales of the noise variance
    weights: np.ndarray  # (k,)
    dof: float  # degrees of freedom of the noise variance; infinite if it is that of the point
    kept: np.ndarray  # positions of those at which posteriors are computed

    @property
    def kept_weights(self):
        """Weights of these, which sum to 1."""
        return self.weights[self.kept] / self.weights[self.kept].sum()

    @property
    def larger(self):
        """Posterior mean of the noise variance over its scale."""
        return self.dof / max(self.dof - 2, 1) if np.isfinite(self.dof) else 1.0


def find_points(reduced, settings, family, estimate):
    """VariancePoints after the data, starting from a covariance over the noise (q, q)."""
    settings = settings._replace(restricted=True)  # the population is integrated out in any case
    if family.has_one_ratio:
        return _ratio_points(reduced, settings, family.varies, estimate)
    return _sampled_points(reduced, settings, family, estimate)


def _ratio_points(reduced, settings, varies, estimate):
    """Quadrature over the ratio; the noise variance is integrated out."""
    direction = varies.astype(float)
    lengths = _square_lengths(reduced) @ direction

    def at(ratio):
        factor = np.diag(np.sqrt(ratio) * direction)
        return profile(reduced, whiten(reduced, factor), settings)

    def likelihood(ratios):
        return np.array([-0.5 * at(ratio).criterion for ratio in ratios])

    # An estimate of zero is no size; the likelihood then falls from about this ratio on.
    likely = max(np.max(np.diag(estimate)), _SMALL_RATIO * reduced.n_clients / lengths)
    nodes = ratio_nodes(likelihood, lengths / reduced.n_rows, likely)
    points = [at(ratio) for ratio in nodes.values]
    rank = points[0].root.shape[1]
    return VariancePoints(
        np.sqrt(nodes.values)[:, None, None] * np.diag(direction),
        np.array([point.noise for point in points]),
        nodes.weights,
        np.inf if settings.noise is not None else float(max(reduced.n_rows - rank, 1)),
        np.flatnonzero(nodes.weights > _NO_WEIGHT),
    )


def _square_lengths(reduced):
    """Summed squares (q,) of the random columns."""
    q = reduced.n_random
    return sum(np.einsum("bkq,bkq->q", s.rows[..., :q], s.rows[..., :q]) for s in reduced.stacks)


def _sampled_points(reduced, settings, family, estimate):
    """Draws of the covariance and the noise variance.

    The standard deviations of the response that the coefficients explain are half-Cauchy ("diag"),
    or half-t with 2 degrees of freedom beside uniform correlations ("full": Huang and Wand, 2013),
    in units of the residual of the pooled fit. So is that of the noise, half-Cauchy. We write the
    deviations of a client as scales times effects, with normal scales (parameter expansion), and
    draw in turn effects with population, scales with population, variances of the effects, noise.
    """
    sampler = _Sampler(reduced, settings, family, estimate)
    m = reduced.n_clients
    # With more clients a sweep takes longer, and averages matter less.
    n_sweeps = int(np.clip(_SWEEPS_TIMES_CLIENTS // m, _FEWEST_SWEEPS, _SWEEPS))
    for _ in range(int(_FIRST_SWEEPS * n_sweeps)):
        sampler.sweep()
    factors, noises = [], []
    for _ in range(n_sweeps):
        sampler.sweep()
        factors.append(sampler.factor() / np.sqrt(sampler.noise))
        noises.append(sampler.noise)
    kept = np.unique(np.linspace(0, n_sweeps - 1, _N_KEPT).astype(int))
    weights = np.full(n_sweeps, 1 / n_sweeps)
    return VariancePoints(np.array(factors), np.array(noises), weights, np.inf, kept)


class _Sampler:
    """State of the Gibbs sampler: scales and variances of the effects, and the noise.

    Draws depend on the rows through their products alone, so not on their order.
    """

    def __init__(self, reduced, settings, family, estimate):
        self.reduced, self.shape = reduced, family.shape
        self.rng = np.random.default_rng(0)  # the same table has the same errors
        self.at = at = np.flatnonzero(family.varies)
        q, m, first = reduced.n_random, reduced.n_clients, settings.first
        longest = max(stack.rows.shape[1] for stack in reduced.stacks)
        rows = np.zeros((m, longest, reduced.n_columns + 1))
        for stack in reduced.stacks:
            rows[stack.clients, : stack.rows.shape[1]] = stack.rows
        self.random = np.ascontiguousarray(rows[:, :, at])
        self.columns = np.ascontiguousarray(rows[:, :, first:])  # of the population, target
        self.left = np.zeros((self.columns.shape[2],) * 2)
        self.left[q - first :, q - first :] = reduced.remainder
        flat = self.columns.reshape(m * longest, -1)
        self.gram = flat.T @ flat + self.left
        across = self.random.transpose(0, 2, 1)
        self.within, self.across = across @ self.random, across @ self.columns
        pooled = profile(reduced, whiten(reduced, np.zeros((q, 1))), settings._replace(noise=None))
        self.unit, self.known_noise = np.sqrt(pooled.noise), settings.noise
        self.noise = pooled.noise if settings.noise is None else settings.noise
        lengths = np.sqrt(np.einsum("mqq->q", self.within) / reduced.n_rows)
        wider = 2**0.5 if family.shape == "full" else 1.0
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
        system = factor.T @ self.within @ factor
        system[:, np.arange(len(factor)), np.arange(len(factor))] += 1.0
        lower = np.linalg.cholesky(system)
        inverse = invert_lower(lower)
        pulled = inverse @ (factor.T @ self.across) / np.sqrt(self.noise)
        flat = pulled.reshape(-1, pulled.shape[2])
        gram = self.gram / self.noise - flat.T @ flat
        population = self._draw_normal(gram[:-1, :-1], gram[:-1, -1])
        moved = pulled[:, :, -1] - pulled[:, :, :-1] @ population
        moved += self.rng.standard_normal(moved.shape)
        return (moved[:, None, :] @ inverse)[:, 0] @ self.root.T

    def _draw_scales(self, effects):
        """Draw the scales together with the population; the residual square of all rows."""
        width = len(self.gram) - 1
        across = np.einsum("mqp,mq->qp", self.across, effects)
        squares = np.sum(self.within * (effects[:, :, None] * effects[:, None, :]), axis=0)
        precision = np.empty((width + len(squares),) * 2)
        precision[:width, :width], precision[:width, width:] = self.gram[:-1, :-1], across[:, :-1].T
        precision[width:, :width] = across[:, :-1]
        precision[width:, width:] = squares + self.noise * np.diag(self.width**-2)
        slope = np.append(self.gram[:-1, -1], across[:, -1])
        drawn = self._draw_normal(precision / self.noise, slope / self.noise)
        self.scales = drawn[width:]
        direction = np.append(-drawn[:width], 1.0)
        residual = self.columns @ direction
        residual -= (self.random @ (effects * self.scales)[..., None])[..., 0]
        return np.vdot(residual, residual) + direction @ self.left @ direction

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
        """Draw (p,) from a normal distribution; what is not identified is 0."""
        normal = self.rng.standard_normal(len(slope))
        # Ranks should not depend on the units of columns, as in a fit.
        lengths = np.sqrt(np.maximum(precision.diagonal(), 0.0))
        lengths[lengths == 0] = 1.0
        scaled = precision / lengths / lengths[:, None]
        # The shift shows a singular matrix; LAPACK directly, as this runs a thousand times.
        lower, singular = dpotrf(scaled - _IDENTIFIED * np.eye(len(scaled)), lower=1)
        if singular:
            values, vectors = np.linalg.eigh(scaled)
            free = values > _IDENTIFIED
            root = vectors[:, free] / np.sqrt(values[free])
            return root @ (root.T @ (slope / lengths) + normal[free]) / lengths
        half = dtrtrs(lower, slope / lengths, lower=1)[0] + normal
        return dtrtrs(lower, half, lower=1, trans=1)[0] / lengths
