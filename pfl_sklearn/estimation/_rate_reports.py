"""Rates from private reports of counts that were sorted into public cells.

Cells are in equal steps of the root, where a Poisson count has the same error everywhere. Fewer of
them than counts blur a report less: a gamma population has only two parameters. The last cell is
"cap or more", so cutting counts costs information and biases nothing that the prior describes.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from scipy.special import betainc, gammaincc, gammaincinv
from sklearn.base import clone

from pfl_sklearn._client_means import participation
from pfl_sklearn._typing import Floats, Integers
from pfl_sklearn._warnings import warn_caller
from pfl_sklearn.estimation._count_estimates import (
    LEAST_PRIOR_WEIGHT,
    estimate_from_reports,
    histogram_log_likelihood,
    histogram_release,
    refined_weights,
    subset_log_likelihood,
    subset_release,
)
from pfl_sklearn.estimation._plausible_gammas import GammaPriors
from pfl_sklearn.priors import GammaPrior
from pfl_sklearn.privacy._mechanisms._noise import noise_generator

# With 6 to 12 cells reports of 200 to 1,000 clients gave the best estimates at an epsilon up to 1;
# then up to exp(epsilon) + 1 of them are free. A histogram has hardly any use of more than 16.
_LEAST_CELLS, _MOST_CELLS = 8, 16
# Exposures that differ by less than 5 % share their probabilities, if there are many of them.
_MOST_EXACT_EXPOSURES, _EXPOSURE_STEP = 32, math.log(1.05)
# The grid of gamma priors: roots of the mean over the cap, up to 9 caps, and logarithms of shapes.
# Each pass lays it over what the last one left plausible; steps of the third may be a hundredth of
# those of the first.
_MEANS, _SHAPES, _PASSES = 33, 21, 3
_ROOTS, _LOG_SHAPES = (1e-3, 3.0), (math.log(1e-2), math.log(1e3))
# Weak: within two deviations lie means up to twice the cap, and coefficients of variation from .13
# to 2.6. A cap that most counts exceed shows neither, so that clients then keep their own rates.
_ROOT_STD, _TYPICAL_SHAPE, _LOG_SHAPE_STD = 0.7, 3.0, 1.5
_GRID_END = 4.0  # of a grid prior without `high`, in caps: above it clients could not keep a rate
# Share of counts at the cap or above it from which on a fit warns, if the reports leave no doubt.
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


class RateRelease(NamedTuple):
    """What the clients released, and its log-likelihood under gamma priors, a function of both."""

    cells: CountCells
    mechanism: Any
    messages: Any
    log_likelihood: Any
    epsilon_under: tuple[Any, ...] = ()


def local_release(events, exposure, params, rng):
    """Release of subsets of the cells, one by every client."""
    free = int(math.exp(min(params.epsilon, _MOST_CELLS))) + 1
    cells = CountCells.of(exposure, params.cap, min(max(_LEAST_CELLS, free), _MOST_CELLS))
    mechanism, subsets = subset_release(
        cells.positions(events), cells.level, len(cells.starts), params.epsilon, rng
    )

    def log_likelihood(shapes, rates):
        return subset_log_likelihood(mechanism, subsets, cells.under_gammas(shapes, rates))

    return RateRelease(cells, mechanism, subsets, log_likelihood)


def central_release(events, exposure, params, rng):
    """Release of one noisy histogram of the cells, whatever the exposures are."""
    cells = CountCells.of(exposure, params.cap, _MOST_CELLS)
    histogram = np.bincount(cells.positions(events), minlength=len(cells.starts)).astype(float)
    mechanism, noisy, under = histogram_release(histogram, params.epsilon, params.delta, rng)
    clients = np.bincount(cells.level)

    def log_likelihood(shapes, rates):
        tables = zip(clients, cells.under_gammas(shapes, rates), strict=True)
        expected = sum(n * table for n, table in tables)
        return histogram_log_likelihood(noisy, mechanism.noise_variance, expected)

    return RateRelease(cells, mechanism, noisy, log_likelihood, under)


RELEASES = {"local": local_release, "central": central_release}


def rates_from_release(table, senders, sends, prior, params):
    """FittedCounts of the clients from randomized counts of `senders`, and entries of the report.

    Parameters
    ----------
    table, senders : CountTable
        Of all clients, and of those that send something.
    sends : ndarray of shape (n_clients,) of bool
        Who sends something.
    prior : GammaPrior or GridPrior
    params : PoissonMean
    """
    rng, _ = noise_generator(params.random_state)
    events, exposure = (senders.per_client(each) for each in (senders.successes, senders.trials))
    release = RELEASES[params.trust](events, exposure, params, rng)
    cap = params.cap
    entries = {
        "facts": release.mechanism.facts(),
        "epsilon_under": release.epsilon_under,
        "assumptions": (
            "the exposure of each client is public",
            "counts are whole, from 0 to 1e9 in a row: others are rounded and cut, as exposure "
            "is to 1e-60 and 1e60",
            f"cap={cap} was chosen without the data; counts above it count as {cap}, so that "
            "beyond it the population has the shape of the prior, not of the clients",
            *participation(sends),
        ),
    }
    return _fitted_to_release(table, senders, prior, release), entries


def _fitted_to_release(table, senders, prior, release):
    """Estimates of the clients of a CountTable, after a release of `senders`."""
    average = plausible_gammas(release.log_likelihood, release.cells.rate_at_cap)
    _warn_if_cut(average, release.cells)
    refined = None if isinstance(prior, GammaPrior) else refined_grid(prior, average, release)
    return estimate_from_reports(table, average, refined, senders)


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


def plausible_gammas(log_likelihood, rate_at_cap):
    """Gamma priors weighted by the likelihood of the reports and the hyperprior."""
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
        log_weights = log_likelihood(shapes, rates) - 0.5 * sum(each**2 for each in distances)
        weights = np.exp(log_weights - log_weights.max())
        plausible = weights > LEAST_PRIOR_WEIGHT
        # The next pass also reaches the neighbours that were not plausible.
        steps = np.array([[axis[1] - axis[0]] for axis in axes])
        kept = points[:, plausible]
        ends = np.column_stack([kept.min(axis=1), kept.max(axis=1)]) + steps * [-1, 1]
        ends = np.clip(ends, bounds[:, :1], bounds[:, 1:])
    weights = weights[plausible]
    return GammaPriors(shapes[plausible], rates[plausible], weights / weights.sum())


def refined_grid(prior, average, release):
    """Grid prior: the averaged gamma prior, then EM steps on the likelihood of the subsets."""
    low = 0.0 if prior.low is None else prior.low
    end = float(max(low, _GRID_END * release.cells.rate_at_cap))
    high = end if prior.high is None else prior.high
    ranged = clone(prior).set_params(low=low, high=high)
    weights = average.on_grid(ranged.support)
    probabilities = release.cells.at_rates(ranged.support)
    return ranged.with_weights(
        refined_weights(weights, release.mechanism, release.messages, probabilities)
    )


def matched_quantiles(means, stds, tails):
    """Quantiles of the gamma distributions with these means and deviations."""
    shapes = (means / stds) ** 2
    return tuple(gammaincinv(shapes, tail) * means / shapes for tail in tails)
