"""Errors of a regression with a link, averaged over the variance of its one varying coefficient.

The standard deviation between clients, in predictors, is half-Cauchy with a scale of 2.5; the
likelihood is that of the quadrature, with the population integrated out (Laplace's approximation).
Clients and population at every node are those that go best with its variance.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
from scipy.interpolate import PchipInterpolator
from scipy.special import chdtri

from pfl_sklearn._parallel import batch_mapper
from pfl_sklearn.linear_model._algebra import inverse_root
from pfl_sklearn.linear_model._mixed._averages import (
    ColumnScaling,
    LazyAverages,
    PointPosterior,
    WeightedPoints,
    averages_around,
)
from pfl_sklearn.linear_model._mixed._client_posterior import client_modes, penalized_information
from pfl_sklearn.linear_model._mixed._population_search import (
    criterion_of,
    predictor_spread,
    start_dispersion,
)
from pfl_sklearn.linear_model._mixed._search import MarginalMaximum, WeakPriors, maximize_marginal
from pfl_sklearn.linear_model._mixed._table import SharedStacks

_CAUCHY_SCALE = 2.5  # of the standard deviation between clients, in predictors
_SMALLEST, _LARGEST = 0.03, 12.0  # standard deviations of the nodes, unless the estimate is beyond
_TOLD_FROM_ZERO = 0.5  # nats by which the smallest node may be less likely than 0, if that is best
_LEAST = 1e-9  # of all nodes, whatever the likelihood
_N_NODES = 17
_FALL, _LEAST_FALL, _MOST_FALL = 8.0, 5.0, 14.0  # nats below the maximum at which nodes end
_FIRST_STEP = 4.0  # over the root of the number of clients: of a logarithm, to about that end
_MOST_STEPS = 20
_LOOSER = 100.0  # tolerance than that of the fit: a value is off by the square of 1e-2 nats


class EffectCase(NamedTuple):
    """A fit with one varying coefficient, for columns that may be centred."""

    table: Any
    stacks: list
    options: Any
    maximum: MarginalMaximum
    deviations: np.ndarray  # (m, 1, q), of the estimates
    root: np.ndarray  # (f, rank), in which the search moves the population
    weak: WeakPriors
    n_points: int
    frame: ColumnScaling
    direction: np.ndarray | None = None  # (q, 1), factor of a standard deviation of 1

    @property
    def unit(self):
        """Standard deviation of the predictors, per one of the coefficient."""
        random = self.table.columns[:, : self.table.n_random]
        return predictor_spread(random, self.table.weights, self.direction)

    def at(self, criterion, sd, start):
        """MarginalMaximum at a standard deviation of the coefficient, from that at another one."""
        start = start._replace(factor=sd * self.direction)
        dispersion = start_dispersion(self.table, start.family)
        tol = _LOOSER * self.options.tol
        return maximize_marginal(
            criterion, start, self.root, self.weak, self.options.max_iter, tol,
            dispersion=dispersion,
        )  # fmt: skip


class VarianceProfile(NamedTuple):
    """Log-likelihoods of standard deviations, with the population integrated out.

    Likelihood that maximizes over the population prefers small variances, which shows with few
    clients: its intervals cover .87 to .90 of the time with 6 to 13 clients, these .94 to .96.
    """

    sds: np.ndarray  # (k,), ascending
    values: np.ndarray  # (k,)
    at_zero: float
    estimate: float
    varying: int  # position of the coefficient among the random ones

    def interval(self, level):
        """Variances that a likelihood ratio test at 1 - `level` does not refuse."""
        highest, far = max(self.values.max(), self.at_zero), np.sqrt(chdtri(1, 1 - level) / 2)
        falls = np.sqrt(highest - self.values)
        # The roots of falls, with a sign, are about linear in the logarithm. Where the likelihood
        # has several maxima, the interval reaches from before the first to behind the last.
        distance = np.maximum.accumulate(
            np.where(np.arange(len(falls)) < falls.argmin(), -1, 1) * falls
        )
        distance, kept = np.unique(distance, return_index=True)
        ends = PchipInterpolator(distance, np.log(self.sds[kept]))
        lower, upper = self.sds[0], np.inf
        if highest - self.at_zero <= far**2:
            lower = 0.0
        elif distance[0] < -far:
            lower = float(np.exp(ends(-far)))
        if distance[-1] > far:
            upper = float(np.exp(ends(far)))
        return min(lower, self.estimate) ** 2, max(upper, self.estimate) ** 2


class _Solved(NamedTuple):
    """A node: its likelihood with the population integrated out, and what goes best with it."""

    value: float
    posterior: PointPosterior


class VarianceAverages(LazyAverages):
    """Averages over the variance of the one varying coefficient, and its profile."""

    def __init__(self, averages, profile=None):
        super().__init__(averages)
        self._profile = profile

    def get(self):
        """The averages."""
        if isinstance(self._averages, EffectCase):
            self._averages, self._profile = _average(self._averages)
        return self._averages

    @property
    def profile(self):
        """The VarianceProfile."""
        self.get()
        return self._profile

    def without_clients(self):
        """The same, but for what belongs to single clients."""
        return VarianceAverages(self.get().of_clients(slice(0, 0)), self._profile)

    def __reduce__(self):
        """Without the rows of the table, which a file of the model need not hold."""
        return VarianceAverages, (self.get(), self._profile)


def _average(case):
    """Averages and VarianceProfile of an EffectCase."""
    with batch_mapper(case.options.n_jobs) as run:
        return _averaged_at_nodes(case, SharedStacks(case.stacks, run))


def _averaged_at_nodes(case, shared):
    """As `_average`, by evaluations of the stacks that workers share."""
    maximum, table, unit = case.maximum, case.table, case.unit
    estimate = float(np.linalg.norm(maximum.factor))
    # What the fit's search learnt of the curvature is about other parameters.
    start = maximum._replace(factor=case.direction, metric=None)
    at = partial(case.at, criterion_of(table, shared, start, case.n_points))
    best = at(estimate, start)
    zero, smallest = at(0.0, best), _SMALLEST / unit
    if estimate > 0:
        smallest = min(smallest, estimate / 4)
    # With many rows a client, or large counts, the likelihood tells smaller ones from 0.
    while zero.value - at(smallest, best).value > _TOLD_FROM_ZERO and smallest * unit > _LEAST:
        smallest /= 4
    largest = max(_LARGEST / unit, 4 * estimate)
    centre, step = max(estimate, smallest), _FIRST_STEP / np.sqrt(table.n_clients)
    low, high = (
        _where_it_falls(lambda sd: best.value - at(sd, best).value, centre, sign * step, end)
        for sign, end in ((-1, smallest), (1, largest))
    )
    sds, nodes, here = np.geomspace(low, high, _N_NODES), [], best
    for sd in sds:
        here = at(sd, here)
        nodes.append(_solve(case, here))
    values = np.array([node.value for node in nodes])
    # Nodes are equally spaced in logarithms, so each stands for an interval as long as its size.
    logs = values + np.log(sds) - np.log1p((unit * sds / _CAUCHY_SCALE) ** 2)
    weights = np.exp(logs - logs.max())
    weights /= weights.sum()
    points = WeightedPoints([node.posterior for node in nodes], np.ones(len(nodes)), weights)
    covariances = sds[:, None] ** 2 * np.kron(case.direction, case.direction).T
    draws = np.column_stack([covariances, np.ones(len(sds))])
    population = maximum.population[0]
    averages = averages_around(
        case.frame, (population, case.deviations[:, 0]), np.zeros(len(population)), points, draws,
        weights,
    )  # fmt: skip
    varying = int(np.argmax(case.direction))
    return averages, VarianceProfile(sds, values, _solve(case, zero).value, estimate, varying)


def _where_it_falls(fall, centre, step, end):
    """Standard deviation at which a likelihood has fallen by about `_FALL`, or the `end`.

    The root of the fall is about linear in the logarithm, which begins with a `step`.
    """
    for _ in range(_MOST_STEPS):
        sd = centre * np.exp(step)
        sd = max(sd, end) if step < 0 else min(sd, end)
        fallen = fall(sd)
        if _LEAST_FALL <= fallen <= _MOST_FALL or (sd == end and fallen < _MOST_FALL):
            break
        step *= np.clip(np.sqrt(_FALL / max(fallen, _LEAST_FALL / _FALL)), 0.3, 3.0)
    return float(sd)


def _solve(case, maximum):
    """The node at the factor of a MarginalMaximum."""
    table, factor = case.table, maximum.factor
    q, p = table.n_random, table.columns.shape[1]
    modes = client_modes(table, case.stacks, maximum)
    information = penalized_information(modes.rows, 1, case.weak.slopes)
    free, log_det = inverse_root(information)
    root = np.zeros((p, free.shape[1]))
    root[p - len(information) :] = free
    ratio = factor @ factor.T
    pulled = (modes.rows[:, :, :q] @ ratio).transpose(0, 2, 1)
    own = ratio - pulled @ pulled.transpose(0, 2, 1)
    moved = root[:q] - pulled @ (modes.rows @ root)
    posterior = PointPosterior(
        maximum.population[0], root, modes.deviations[:, 0], own, moved, ratio
    )
    return _Solved(maximum.value - log_det / 2, posterior)
