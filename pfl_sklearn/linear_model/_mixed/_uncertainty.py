"""Errors of a mixed model, averaged over the variances that it estimates.

The averages are the same for normal rows and for rows with a link, and so are the posteriors at one
covariance. Which covariances the data leave plausible depends on the likelihood: this module finds
them for rows with a link, of which one coefficient varies, and `_normal_rows/_variance_points.py`
for normal rows.

Behind a link the standard deviation between clients, in predictors, is half-Cauchy with a scale of
2.5; the likelihood is that of the quadrature, with the population integrated out (Laplace's
approximation). Clients and population at every node are those that go best with its variance.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
from scipy.interpolate import PchipInterpolator
from scipy.special import chdtri

from pfl_sklearn._parallel import batch_mapper
from pfl_sklearn._variance_averaging import Mixture
from pfl_sklearn.linear_model._algebra import inverse_root
from pfl_sklearn.linear_model._mixed._client_posterior import client_modes, penalized_information
from pfl_sklearn.linear_model._mixed._marginal_likelihood import MarginalLikelihood
from pfl_sklearn.linear_model._mixed._marginal_maximum import (
    MarginalMaximum,
    Objective,
    WeakPriors,
    maximize,
)
from pfl_sklearn.linear_model._mixed._population_fit import start_dispersion
from pfl_sklearn.linear_model._mixed._posterior import ColumnScaling, client_products, scale_to_unit
from pfl_sklearn.linear_model._mixed._table import SharedStacks

_NOISE_LEVELS = (np.arange(200) + 0.5) / 200  # probabilities, of draws of the noise at a point
_CAUCHY_SCALE = 2.5  # of the standard deviation between clients, in predictors
# Standard deviations of the nodes, unless the estimate lies beyond.
_LOWEST_NODE, _HIGHEST_NODE = 0.03, 12.0
_LESS_LIKELY = 0.5  # nats by which the smallest node may be less likely than 0, if that is best
_SMALLEST_NODE = 1e-9  # of all nodes, whatever the likelihood
_N_NODES = 17
_NODE_FALL, _LEAST_FALL, _MOST_FALL = 8.0, 5.0, 14.0  # nats below the maximum at which nodes end
_FIRST_STEP = 4.0  # over the root of the number of clients: of a logarithm, to about that end
_MOST_STEPS = 20
_LOOSER = 100.0  # tolerance than that of the fit: a value is off by the square of 1e-2 nats


class Averages(NamedTuple):
    """Posterior averaged over the variances; for the columns of the data unless it says scaled."""

    frame: ColumnScaling
    population_covariance: np.ndarray  # (p, p), around the estimates
    new_covariance: np.ndarray  # (p, p), scaled: of the coefficients of a client not seen
    population: Mixture  # (1, p, k)
    components: Any  # VarianceDraws, or the VarianceProfile of a regression with a link
    blocks: np.ndarray  # (m, q, p), scaled: of a client's random coefficients with all
    clients: Mixture  # (m, q, k), of the random coefficients
    deviations: np.ndarray  # (m, q), variances of these less the population's

    def of_clients(self, clients):
        """The averages of some clients alone."""
        return self._replace(
            blocks=self.blocks[clients],
            clients=self.clients.of_clients(clients),
            deviations=self.deviations[clients],
        )

    def variances(self, x, codes):
        """Variance (n,) of x' theta for rows x (n, p) of known clients."""
        (rows, squares), q = scale_to_unit(self.frame.rows(x)), self.blocks.shape[1]
        random_part = client_products(rows[:, :q], self.blocks, codes, _doubled(rows, q))
        shared = rows[:, q:] @ self.new_covariance[q:, q:]
        return (
            np.maximum(random_part + np.einsum("nf,nf->n", shared, rows[:, q:]), 0.0)
            * squares[:, 0]
        )

    def new_variances(self, x):
        """Variance (n,) of x' theta for rows x (n, p) of clients that were not seen."""
        rows = self.frame.rows(x)
        return np.einsum("np,np->n", rows @ self.new_covariance, rows)

    def coefficient_variances(self):
        """Variances (m, p) of the coefficients."""
        q = self.blocks.shape[1]
        return client_variances(self.frame.back, self.blocks, self.new_covariance[q:, q:])

    def deviation_variances(self):
        """Variances (m, p) of the clients' deviations from the population."""
        fixed = len(self.new_covariance) - self.deviations.shape[1]
        return np.pad(self.deviations, ((0, 0), (0, fixed)))


class VarianceDraws(NamedTuple):
    """Plausible covariances between clients, each flat with its noise variance behind."""

    values: np.ndarray  # (n, q q + 1)
    weights: np.ndarray  # (n,)

    def bounds(self, level, covariance, noise, zero_p_values):
        """Bounds around a covariance between clients (q, q) and a noise variance."""
        # Quantiles, extended to the estimate; 0 for a variance that a likelihood ratio test at 1 -
        # level does not reject as 0.
        # The estimate maximizes the likelihood; it may lie outside of the posterior's quantiles.
        estimates = np.append(covariance, noise)
        lower = np.minimum(self._quantiles((1 - level) / 2), estimates)
        upper = np.maximum(self._quantiles((1 + level) / 2), estimates)
        variances = np.arange(len(covariance)) * (len(covariance) + 1)
        # Under the prior no variance is 0, so quantiles alone would never cover a true 0.
        lower[variances] = np.where(zero_p_values > 1 - level, 0.0, lower[variances])
        matrices = tuple(bound[:-1].reshape(covariance.shape) for bound in (lower, upper))
        return matrices, (lower[-1], upper[-1])

    def _quantiles(self, tail):
        order = np.argsort(self.values, axis=0)
        values, weights = np.take_along_axis(self.values, order, axis=0), self.weights[order]
        # Each draw stands in the middle of its weight, or medians of symmetric draws would be off.
        below = np.cumsum(weights, axis=0) - weights / 2
        return np.array([np.interp(tail, *curve) for curve in zip(below.T, values.T, strict=True)])


def client_variances(x, blocks, fixed):
    """Variances (m, k) of rows x (k, p) of every client, from `blocks` (m, q, p) and `fixed`."""
    q = blocks.shape[1]
    random_part = np.einsum("kq,mqp,kp->mk", x[:, :q], blocks, _doubled(x, q), optimize=True)
    return np.maximum(random_part + np.einsum("kf,kf->k", x[:, q:] @ fixed, x[:, q:]), 0.0)


def _doubled(x, q):
    """Rows x (n, p) with twice the fixed columns, as a square has each product twice."""
    return np.hstack([x[:, :q], 2 * x[:, q:]])


class VariancePoints(NamedTuple):
    """Variances that the data leave plausible, in the scale of a fit's columns."""

    factors: np.ndarray  # (k, q, r), roots of the covariance between clients over the noise
    noises: np.ndarray  # (k,), scales of the noise variance; 1 without one
    weights: np.ndarray  # (k,)
    dof: float  # degrees of freedom of the noise variance; infinite if it is that of the point
    computed: np.ndarray  # positions of those at which posteriors are computed

    @property
    def computed_weights(self):
        """Weights of these, which sum to 1."""
        return self.weights[self.computed] / self.weights[self.computed].sum()

    def components(self, back):
        """VarianceDraws; `back` (q, q) leads to random coefficients of the data's columns."""
        ratios = back @ (self.factors @ self.factors.transpose(0, 2, 1)) @ back.T
        noises = self.noises[:, None]
        if np.isfinite(self.dof):  # the noise is known up to a scaled inverse chi-square
            noises = noises * self.dof / chdtri(self.dof, _NOISE_LEVELS)
        relative = np.column_stack([ratios.reshape(len(ratios), -1), np.ones(len(ratios))])
        draws = noises[:, :, None] * relative[:, None]
        weights = np.repeat(self.weights / noises.shape[1], noises.shape[1])
        return VarianceDraws(draws.reshape(len(weights), -1), weights)


class PointPosterior(NamedTuple):
    """Population and clients at one covariance, relative to the noise variance."""

    population: np.ndarray  # (p,)
    root: np.ndarray  # (p, rank), of the population's error
    deviations: np.ndarray  # (m, q)
    blocks: np.ndarray  # (m, q, p), covariances of a client's random coefficients with all
    ratio: np.ndarray  # (q, q)
    spreads: np.ndarray  # (m, q, q), covariances of the deviations


def deviation_blocks(rows, ratio, root):
    """`spreads` (b, q, q) of the PointPosterior of clients with whitened rows (b, k, p)."""
    q = len(ratio)
    pulled = (rows[:, :, :q] @ ratio).transpose(0, 2, 1)
    errors = pulled @ (rows @ root)
    return ratio - pulled @ pulled.transpose(0, 2, 1) + errors @ errors.transpose(0, 2, 1)


def random_blocks(rows, ratio, root):
    """`blocks` (b, q, p) of the PointPosterior of clients with whitened rows (b, k, p)."""
    q = len(ratio)
    pulled = (rows[:, :, :q] @ ratio).transpose(0, 2, 1)
    errors = root[:q] - pulled @ (rows @ root)  # of clients, by that of the population
    covariances = ratio - pulled @ pulled.transpose(0, 2, 1) + errors @ errors.transpose(0, 2, 1)
    return np.concatenate([covariances, errors @ root[q:].T], axis=2)


def averages_around(case, points, posteriors, profile=None):
    """Averages around estimates that stay: their distance from each point's counts as error.

    `case` (ScaledFit or EffectCase) has the estimates in the scale of its frame; `posteriors`
    iterates over the PointPosteriors of `points.computed`; a `profile` replaces the points'
    variances.
    """
    frame, back = case.frame, case.frame.back
    (m, q), p = case.deviations.shape, len(case.population)
    covariance, new_covariance = np.zeros((p, p)), np.zeros((p, p))
    blocks, deviations = np.zeros((m, q, p)), np.zeros((m, q))
    located, spread, centres, errors = [], [], [], []
    # Posterior mean of the noise variance over its scale.
    larger = points.dof / max(points.dof - 2, 1) if np.isfinite(points.dof) else 1.0
    computed = points.noises[points.computed], points.computed_weights
    for point, noise, weight in zip(posteriors, *computed, strict=True):
        root, distance, share = point.root, point.population - case.population, weight * larger
        covariance += share * noise * root @ root.T + weight * np.outer(distance, distance)
        new_covariance[:q, :q] += share * noise * point.ratio
        blocks += share * noise * point.blocks
        own_distance = point.deviations - case.deviations
        own_variances = client_variances(back[:q, :q], point.spreads, np.zeros((0, 0)))
        deviations += share * noise * own_variances + weight * (own_distance @ back[:q, :q].T) ** 2
        client_distance = own_distance + distance[:q]
        blocks[:, :, :q] += weight * client_distance[:, :, None] * client_distance[:, None, :]
        blocks[:, :, q:] += weight * client_distance[:, :, None] * distance[q:]
        centre = back @ point.population + case.offset
        centres.append(centre)
        errors.append(np.sqrt(noise * np.sum((back @ root) ** 2, axis=1)))
        located.append(point.deviations @ back[:q, :q].T + centre[:q])
        variances = client_variances(back[:q], point.blocks, root[q:] @ root[q:].T)
        spread.append(np.sqrt(noise * variances))
    weights, dof = points.computed_weights, points.dof
    return Averages(
        frame,
        back @ covariance @ back.T,
        new_covariance + covariance,
        Mixture(weights, np.array(centres).T[None], np.array(errors).T[None], dof),
        points.components(back[:q, :q]) if profile is None else profile,
        blocks,
        Mixture(weights, np.stack(located, axis=-1), np.stack(spread, axis=-1), dof),
        deviations,
    )


class EffectCase(NamedTuple):
    """A fit with one varying coefficient, for columns that may be centred."""

    table: Any
    stacks: list
    options: Any
    maximum: MarginalMaximum
    deviations: np.ndarray  # (m, q), of the estimates
    root: np.ndarray  # (f, rank), in which the search moves the population
    weak: WeakPriors
    n_points: int
    frame: ColumnScaling
    direction: np.ndarray  # (q, 1), factor of a standard deviation of 1
    offset: float = 0.0  # nothing was subtracted from the population's coefficients

    @property
    def population(self):
        """Coefficients (p,) of the estimates."""
        return self.maximum.population[0]

    def at(self, criterion, sd, start):
        """MarginalMaximum at a standard deviation of the coefficient, from that at another one."""
        start = start._replace(factor=sd * self.direction)
        dispersion = start_dispersion(self.table, start.family)
        objective = Objective(criterion, start, self.root, self.weak, dispersion=dispersion)
        return maximize(objective, self.options.max_iter, _LOOSER * self.options.tol)


class VarianceProfile(NamedTuple):
    """Log-likelihoods of standard deviations, with the population integrated out.

    A likelihood maximized over the population prefers small variances: with 6 to 13 clients its
    intervals cover .87 to .90 of the time, these .94 to .96.
    """

    sds: np.ndarray  # (k,), ascending
    values: np.ndarray  # (k,)
    at_zero: float
    estimate: float
    varying: int  # position of the coefficient among the random ones

    def bounds(self, level, covariance, *_):
        """Covariances (q, q) with the variances that a test at 1 - `level` just does not refuse."""
        highest, far = max(self.values.max(), self.at_zero), np.sqrt(chdtri(1, 1 - level) / 2)
        falls = np.sqrt(highest - self.values)
        # The roots of falls, with a sign, are about linear in the logarithm. Where the likelihood
        # has several maxima, the interval reaches from before the first to behind the last.
        signs = np.where(np.arange(len(falls)) < falls.argmin(), -1, 1)
        distance, first = np.unique(np.maximum.accumulate(signs * falls), return_index=True)
        ends = PchipInterpolator(distance, np.log(self.sds[first]))
        low, high = self.sds[0], np.inf
        if highest - self.at_zero <= far**2:
            low = 0.0
        elif distance[0] < -far:
            low = float(np.exp(ends(-far)))
        if distance[-1] > far:
            high = float(np.exp(ends(far)))
        at, lower, upper = self.varying, covariance.copy(), covariance.copy()
        lower[at, at], upper[at, at] = min(low, self.estimate) ** 2, max(high, self.estimate) ** 2
        return (lower, upper), None


def average_effects(case):
    """Averages of an EffectCase over the variance of its one coefficient."""
    with batch_mapper(case.options.n_jobs) as run:
        return _averaged_at_nodes(case, SharedStacks(case.stacks, run))


def _averaged_at_nodes(case, shared):
    """As `average_effects`, by evaluations of the stacks that workers share."""
    maximum, table = case.maximum, case.table
    # Standard deviation of the predictors, per one of the coefficient.
    unit = table.predictor_spread(case.direction)
    estimate = float(np.linalg.norm(maximum.factor))
    # The curvature that the fit learnt is that of other parameters.
    start = maximum._replace(factor=case.direction, metric=None)
    at = partial(case.at, MarginalLikelihood(table, shared, start, case.n_points))
    best = at(estimate, start)
    zero, smallest = at(0.0, best), _LOWEST_NODE / unit
    if estimate > 0:
        smallest = min(smallest, estimate / 4)
    # With many rows per client, or large counts, the likelihood separates smaller ones from 0.
    while zero.value - at(smallest, best).value > _LESS_LIKELY and smallest * unit > _SMALLEST_NODE:
        smallest /= 4
    largest = max(_HIGHEST_NODE / unit, 4 * estimate)
    centre, step = max(estimate, smallest), _FIRST_STEP / np.sqrt(table.n_clients)
    low, high = (
        _find_fall(lambda sd: best.value - at(sd, best).value, centre, sign * step, end)
        for sign, end in ((-1, smallest), (1, largest))
    )
    sds, nodes, nearest = np.geomspace(low, high, _N_NODES), [], best
    for sd in sds:
        nearest = at(sd, nearest)
        nodes.append(_solve_at_factor(case, nearest))
    values = np.array([value for value, _ in nodes])
    # Nodes are equally spaced in logarithms, so each stands for an interval as long as its size.
    logs = values + np.log(sds) - np.log1p((unit * sds / _CAUCHY_SCALE) ** 2)
    weights = np.exp(logs - logs.max())
    weights /= weights.sum()
    factors, every = sds[:, None, None] * case.direction, np.arange(len(sds))
    points = VariancePoints(factors, np.ones(len(sds)), weights, np.inf, every)
    varying = int(np.argmax(case.direction))
    profile = VarianceProfile(sds, values, _solve_at_factor(case, zero)[0], estimate, varying)
    return averages_around(case, points, (posterior for _, posterior in nodes), profile)


def _find_fall(fall, centre, step, end):
    """Standard deviation at which a likelihood has fallen by about `_NODE_FALL`, or the `end`."""
    for _ in range(_MOST_STEPS):
        sd = centre * np.exp(step)
        sd = max(sd, end) if step < 0 else min(sd, end)
        fallen = fall(sd)
        if _LEAST_FALL <= fallen <= _MOST_FALL or (sd == end and fallen < _MOST_FALL):
            break
        step *= np.clip(np.sqrt(_NODE_FALL / max(fallen, _LEAST_FALL / _NODE_FALL)), 0.3, 3.0)
    return float(sd)


def _solve_at_factor(case, maximum):
    """Likelihood at a MarginalMaximum's factor, population integrated out, and PointPosterior."""
    table, factor = case.table, maximum.factor
    p = table.columns.shape[1]
    modes = client_modes(table, case.stacks, maximum)
    information = penalized_information(modes.rows, 1, case.weak.slopes)
    free, log_det = inverse_root(information)
    root = np.zeros((p, free.shape[1]))
    root[p - len(information) :] = free
    ratio = factor @ factor.T
    blocks, spreads = (of(modes.rows, ratio, root) for of in (random_blocks, deviation_blocks))
    population, deviations = maximum.population[0], modes.deviations[:, 0]
    posterior = PointPosterior(population, root, deviations, blocks, ratio, spreads)
    return maximum.value - log_det / 2, posterior
