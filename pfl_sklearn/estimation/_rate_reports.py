"""Rates from private reports of counts that are sorted into public cells.

Cells have equal steps in the root of the count, where a Poisson count has the same error
everywhere. A gamma population has only two parameters, so few cells suffice, and they blur a report
less than a cell for every count. The last cell is "cap or more": cutting counts costs information,
but biases nothing that the prior describes.
"""

import math
from typing import NamedTuple

import numpy as np
from scipy.special import betainc, gammaincc
from sklearn.base import clone

from pfl_sklearn._client_means import participation_assumption
from pfl_sklearn._typing import Floats, Integers
from pfl_sklearn._warnings import warn_caller
from pfl_sklearn.estimation._category_reports import (
    estimate_from_reports,
    grid_weights_from_subsets,
    plausible_weights,
    report_histogram,
    report_subsets,
)
from pfl_sklearn.estimation._plausible_gammas import GammaPriors
from pfl_sklearn.priors import GammaPrior
from pfl_sklearn.privacy._mechanisms._noise import noise_generator

# Up to an epsilon of 1, 6 to 12 cells gave the best estimates from 200 to 1,000 clients; above it,
# up to exp(epsilon) + 1 cells cost nothing. A histogram gains little from more than 16.
_LEAST_CELLS, _MOST_CELLS = 8, 16
# Exposures that differ by less than 5 % share their probabilities, if there are many of them.
_MOST_EXACT_EXPOSURES, _EXPOSURE_STEP = 32, math.log(1.05)
# The grid of gamma priors: roots of the mean over the cap, up to 9 caps, and logarithms of shapes.
# Each pass lays it over what the last one left plausible; steps of the third may be a hundredth of
# those of the first.
_MEANS, _SHAPES, _PASSES = 33, 21, 3
_ROOTS, _LOG_SHAPES = (1e-3, 3.0), (math.log(1e-2), math.log(1e3))
# Weak: means up to twice the cap, and coefficients of variation from .13 to 2.6, lie within two
# deviations. If most counts exceed the cap, reports show neither; clients keep their own rates.
_ROOT_STD, _TYPICAL_SHAPE, _LOG_SHAPE_STD = 0.7, 3.0, 1.5
_GRID_END = 4.0  # of a grid prior without `high`, in caps: above it clients could not keep a rate
# A fit warns if this share of counts is at the cap or above, with this posterior probability.
_MUCH_CUT, _NO_DOUBT = 0.25, 0.95


class CountCells(NamedTuple):
    """Public cells of the counts of m clients, and their exposures, of which l differ."""

    starts: Integers  # (k,), of which the first is 0 and the last is the cap
    exposures: Floats  # (l,)
    level: Integers  # (m,), position of every client's exposure
    typical: float

    @classmethod
    def of(cls, exposure, cap, n_cells):
        """At most `n_cells` cells up to a cap, for clients with this exposure (m,)."""
        n_cells = min(n_cells, cap + 1)
        starts = np.rint(np.linspace(0, math.sqrt(cap), n_cells) ** 2).astype(np.int64)
        if n_cells == cap + 1:  # a cell for every count
            starts = np.arange(n_cells)
        starts[-1] = cap  # the square of its root may be off by one
        levels, level = np.unique(exposure, return_inverse=True)
        if len(levels) > _MOST_EXACT_EXPOSURES:
            steps = np.rint(np.log(exposure) / _EXPOSURE_STEP)
            levels, level = np.unique(steps, return_inverse=True)
            levels = np.exp(_EXPOSURE_STEP * levels)
        # The median: one client of huge exposure moves the range of rates no more than any other.
        return cls(np.unique(starts), levels, level, float(np.median(exposure)))

    @property
    def rate_at_cap(self):
        """Rate at which a client of typical exposure is expected at the cap."""
        return self.starts[-1] / self.typical

    def positions(self, events):
        """Cells (m,) of the clients' counts, those above the cap in the last."""
        return np.searchsorted(self.starts, events, side="right") - 1

    def under_gammas(self, shapes, rates):
        """Probabilities (k, H) of the cells under gamma priors (H,), for every exposure."""
        return [
            self._cells(betainc(shapes, self.starts[1:, None], 1 / (1 + exposure / rates)))
            for exposure in self.exposures
        ]

    def at_rates(self, rates):
        """The same for clients of known rates (K,)."""
        return [
            self._cells(gammaincc(self.starts[1:, None], exposure * rates))
            for exposure in self.exposures
        ]

    @staticmethod
    def _cells(below):
        """Probabilities of cells from those of counts below their starts (k - 1, H)."""
        return np.maximum(np.diff(below, axis=0, prepend=0.0, append=1.0), 0.0)


def release_cells(events, exposure, params, rng):
    """CountCells of the clients' counts, and CategoryReports of which cells these are in."""
    n_cells, report = _MOST_CELLS, report_histogram
    if params.trust == "local":
        free = int(math.exp(min(params.epsilon, _MOST_CELLS))) + 1
        n_cells, report = min(max(_LEAST_CELLS, free), _MOST_CELLS), report_subsets
    cells = CountCells.of(exposure, params.cap, n_cells)
    reports = report(cells.positions(events), cells.level, len(cells.starts), params, rng)
    return cells, reports


def rates_from_release(table, senders, sends, prior, params):
    """FittedCounts from randomized counts of `senders`, and entries of the report.

    `table` and `senders` are CountTables of all clients, and of those that the mask `sends` (m,)
    selects; `params` is a PoissonMean.
    """
    rng, _ = noise_generator(params.random_state)
    events, exposure = map(senders.per_client, (senders.successes, senders.trials))
    cells, reports = release_cells(events, exposure, params, rng)

    def log_likelihood(shapes, rates):
        return reports.log_likelihood(cells.under_gammas(shapes, rates))

    average = average_of_gammas(log_likelihood, cells.rate_at_cap)
    _warn_if_cut(average, cells)
    grid = (
        None if isinstance(prior, GammaPrior) else grid_from_reports(prior, average, cells, reports)
    )
    entries = {
        "facts": reports.mechanism.facts(),
        "epsilon_under": reports.epsilon_under,
        "assumptions": (
            "the exposure of each client is public",
            "counts are whole, from 0 to 1e9 in a row: others are rounded and cut, as exposure "
            "is to 1e-60 and 1e60",
            f"cap={params.cap} was chosen without the data; counts above it count as {params.cap}, "
            "so that beyond it the population has the shape of the prior, not of the clients",
            *participation_assumption(sends),
        ),
    }
    return estimate_from_reports(table, average, grid, senders), entries


def _warn_if_cut(average, cells):
    """Warn if the released population has much of a client's count at the cap or above it."""
    cut = 1 - betainc(average.a, cells.starts[-1], 1 / (1 + cells.typical / average.b))
    if average.weights @ (cut > _MUCH_CUT) > _NO_DOUBT:
        share, cap = average.weights @ cut, cells.starts[-1]
        warn_caller(
            f"The released population has {share:.0%} of the counts at cap={cap} or above, where "
            "only the shape of the prior says how large they are; choose a larger cap.",
            UserWarning,
        )


def average_of_gammas(log_likelihood, rate_at_cap):
    """Gamma priors weighted by the likelihood of the reports and the hyperprior.

    `log_likelihood` is a function of shapes (H,) and rates (H,).
    """
    bounds: Floats = np.array([_ROOTS, _LOG_SHAPES])
    ends = bounds
    for _ in range(_PASSES):
        axes = [
            np.linspace(low, high, n)
            for (low, high), n in zip(ends, (_MEANS, _SHAPES), strict=True)
        ]
        points = np.stack([axis.ravel() for axis in np.meshgrid(*axes, indexing="ij")])
        shapes = np.exp(points[1])
        rates = shapes / (rate_at_cap * points[0] ** 2)
        distances = points[0] / _ROOT_STD, (points[1] - math.log(_TYPICAL_SHAPE)) / _LOG_SHAPE_STD
        log_hyperprior = -0.5 * sum(distance**2 for distance in distances)
        weights, plausible = plausible_weights(log_likelihood(shapes, rates) + log_hyperprior)
        # The next pass also reaches the neighbours that were not plausible.
        steps = np.array([[axis[1] - axis[0]] for axis in axes])
        points = points[:, plausible]
        ends = np.column_stack([points.min(axis=1), points.max(axis=1)]) + steps * [-1, 1]
        ends = np.clip(ends, bounds[:, :1], bounds[:, 1:])
    return GammaPriors(shapes[plausible], rates[plausible], weights)


def grid_from_reports(prior, average, cells, reports):
    """Grid prior: the averaged gamma prior, then EM steps on the likelihood of the subsets."""
    low = 0.0 if prior.low is None else prior.low
    end = float(max(low, _GRID_END * cells.rate_at_cap))
    high = end if prior.high is None else prior.high
    grid = clone(prior).set_params(low=low, high=high)
    weights = average.on_grid(grid.support)
    return grid.with_weights(
        grid_weights_from_subsets(weights, reports, cells.at_rates(grid.support))
    )
