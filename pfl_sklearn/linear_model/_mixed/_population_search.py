"""Population and between-client covariance of regressions with a link: which searches, and when.

A search begins with Laplace's approximation. Where clients have one effect it goes on with as many
points of the quadrature as the spread between clients needs. Where the likelihood has no credible
maximum, weak priors hold it.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from pfl_sklearn.linear_model._algebra import factor_of, inverse_root, square_root
from pfl_sklearn.linear_model._mixed._client_posterior import client_modes, penalized_information
from pfl_sklearn.linear_model._mixed._identification import varying_columns
from pfl_sklearn.linear_model._mixed._laplace_information import laplace_information
from pfl_sklearn.linear_model._mixed._likelihood import MarginalLikelihood
from pfl_sklearn.linear_model._mixed._quadrature import (
    DENSE,
    effect_stack,
    evaluate_quadrature,
    quadrature_information,
)
from pfl_sklearn.linear_model._mixed._search import (
    MarginalMaximum,
    WeakPriors,
    fit_pooled,
    maximize_marginal,
    natural_scale,
    observed_root,
)
from pfl_sklearn.linear_model._mixed._table import SharedStacks, varies_within_clients

_WEAK_SD = 2.5  # of the prior on separated slopes, in predictors per standard deviation of a column
_TIGHT_SD = 1.0  # of the prior on a factor that diverged, in predictors per size of a column
_AWAY = 10.0  # we check larger standard deviations of the predictors between clients
_HELD = 1 / 3  # if the tight prior leaves less than this share, the data do not support the rest
_POINTS, _MANY_POINTS = 15, 61  # of the quadrature, where one coefficient varies
# Logits (log rates) between clients. From 3 on, 15 points leave the standard deviation 5 to 10 %
# low; from _AWAY on, 61 miss the sharp edge of clients with one class, and DENSE points do not.
_WIDE_SPREAD = 3.0
_COARSE = 1.5  # times the spread by many points, or its inverse, from which a fit warns
_FAR_OUT = 10.0  # times the spread between clients, at which the likelihood must have fallen
_INTERVAL_FALL = 1.92  # nats to the end of a 95 % interval: half a quantile of chi-square(1)
_NOT_ZERO = 1e-2  # factor, in natural units, from which a second search may start
_HANDOVER_TOL = 1e-2  # nats per standard error: near enough for quadrature to go on
_CAUTIOUS_START = 0.3  # in natural units: a longer first step may skip the nearest maximum


def find_population(table, shared, family, prior, mean, covariance, options):
    """Population, factor and dispersion, the weak priors that this needed, and the search.

    `mean` (a, q) and `covariance` (q, q) are None where they are unknown. The search is None where
    nothing is.
    """
    q, p = table.n_random, table.columns.shape[1]
    n_known = 0 if mean is None else q
    population = np.zeros((family.n_outputs, p))
    if mean is not None:
        population[:, :q] = mean
    # Without common coefficients a known prior leaves nothing to search.
    if n_known == p and covariance is not None and not family.has_dispersion:
        maximum = MarginalMaximum(population, _covariance_root(covariance), family, 1, True)
        return maximum, WeakPriors(np.zeros(0), np.zeros(q)), None
    offset = table.predictors(population)
    pooled, precision, separated, family = _pooled_start(
        table, family, offset, n_known, options.population_penalty
    )
    population[:, n_known:] = pooled.coefficients
    if covariance is None:
        shape, scale = _free_covariance(table, prior, pooled.weight)
        factor = scale[:, None] * shape.matrix(shape.start)
    else:
        shape, scale, factor = None, None, _covariance_root(covariance)
    start = MarginalMaximum(population, factor, family, 0, False)
    # The search moves along the root of the inverse information at its start: its steps are in
    # standard errors.
    modes = client_modes(table, shared.stacks, start)
    root, _ = inverse_root(penalized_information(modes.rows, family.n_outputs, precision))
    start = start._replace(states=modes.states)
    search = _Search(table, shared, options, start, root, shape, scale)
    # Clients of one class each may be infinitely far apart.
    mixed = not family.bounded or varies_within_clients(table.y, table.codes, table.n_clients)
    unmixed = covariance is None and not mixed
    spread = _weak_spread(table.columns[:, :q], table.weights) if unmixed else np.zeros(q)
    weak = WeakPriors(precision, spread, separated=separated)
    maximum = search.at_least_limit(search(weak), weak)
    if covariance is None and not unmixed:
        maximum, weak = search.held_if_diverged(maximum, weak)
    return maximum, weak, search


def _pooled_start(table, family, offset, n_known, penalty):
    """As `pooled_fit`, and the family, with a plausible dispersion if it has one."""
    fit = pooled_fit(table, family.limit or family, offset, n_known, penalty)
    if not family.has_dispersion:
        return *fit, family
    mean = family.mean(offset + table.columns[:, n_known:] @ fit[0].coefficients.T)[:, 0]
    w = np.ones(len(mean)) if table.weights is None else table.weights
    family = family.with_dispersion(family.dispersion_by_moments(table.y, mean, w))
    family = family.with_dispersion(start_dispersion(table, family))
    return *pooled_fit(table, family, offset, n_known, penalty), family


def start_dispersion(table, family):
    """Dispersion from which a search starts; None if the family has none."""
    if not family.has_dispersion:
        return None
    mean = np.average(table.y, weights=table.weights)
    return max(family.dispersion, family.least_dispersion(mean))


def pooled_fit(table, family, offset, n_known, penalty):
    """Fit without differences between clients, its prior precision, and whether columns separate.

    The precision is `penalty`, or more where the columns separate the classes.
    """
    columns, intercept = table.columns[:, n_known:], table.intercept
    at = None if intercept is None or intercept < n_known else intercept - n_known
    requested = np.zeros(columns.shape[1])
    if penalty and len(requested):
        requested = _weak_slopes(columns, table.weights, at, penalty)
    start = np.zeros((family.n_outputs, columns.shape[1]))
    if at is not None:
        w = np.ones(len(table.y)) if table.weights is None else table.weights
        start[:, at] = family.intercept_start(table.y, w, offset[:, 0])
    pooled = fit_pooled(columns, table, family, offset, requested, start)
    if not pooled.separated:
        return pooled, requested, False
    # The penalty that the user asked for stands where it is the stronger one.
    precision = np.maximum(_weak_slopes(columns, table.weights, at), requested)
    pooled = fit_pooled(columns, table, family, offset, precision, start)
    return pooled, precision, True


def _free_covariance(table, prior, weight):
    """Shape of an unknown covariance, and the natural units (q,) of its factor's rows."""
    # These shapes have one variance for all columns, so their rows need one unit.
    common = prior.covariance_type in ("spherical", "low_rank")
    random = table.columns[:, : table.n_random]
    return covariance_shape(table, prior), natural_scale(random, weight, table.n_clients, common)


def covariance_shape(table, prior):
    """CovarianceFactor of an unknown covariance."""
    varies = varying_columns(table, prior)
    varies = varies if varies.any() else None  # columns of zeros alone: any variance will do
    return factor_of(prior.covariance_type, table.n_random, prior.rank, varies)


class _Search(NamedTuple):
    """Search for the population and the factor: by Laplace's approximation, then by quadrature."""

    table: Any
    shared: SharedStacks
    options: Any  # FitParameters
    start: MarginalMaximum
    root: np.ndarray  # (a f, rank)
    shape: Any  # CovarianceFactor; None if the covariance is known
    scale: np.ndarray | None  # (q,), natural units of the factor's rows

    def __call__(self, weak, begin=1.0):
        """The MarginalMaximum under weak priors, from a factor at `begin` in natural units."""
        needed, tol = self._n_points(self.start.factor), self.options.tol
        # Quadrature moves the maximum, so the search before it may stop early.
        rough = tol if needed == 1 else max(tol, _HANDOVER_TOL)
        n_points, maximum = 1, self._maximum(1, self.start, weak, rough, begin)
        while needed > n_points:
            n_points, maximum = needed, self._refined(needed, maximum, weak)
            needed = self._n_points(maximum.factor, self._spread(maximum))
        family = maximum.family
        if family.has_dispersion and family.dispersion == 0:
            # The likelihood is flat in a dispersion near 0, and the search ended anywhere there.
            fixed = maximum._replace(family=family.limit, metric=None)
            maximum = self._refined(n_points, fixed, weak)._replace(family=family)
        return maximum

    def at_least_limit(self, maximum, weak):
        """The maximum, or a higher one that lies near that of the family's limit."""
        family = self.start.family
        if family.limit is None:
            return maximum
        # Large counts tell a dispersion from 0 so well that a search from elsewhere may get lost.
        start = self.start._replace(family=family.limit, states=None)
        plain = self._replace(start=start)(weak)
        if maximum.value >= plain.value:
            return maximum
        plain = plain._replace(family=family.with_dispersion(0.0))
        n_points = self._n_points(plain.factor, self._spread(plain))
        near = self._refined(n_points, plain._replace(metric=None), weak)
        return max(plain, near, key=lambda found: found.value)

    def held_if_diverged(self, maximum, weak):
        """The maximum if the data support its spread, otherwise that under a tight prior.

        Returns the weak priors that were used as well.
        """
        spread = self._spread(maximum)
        if spread <= _AWAY:
            return maximum, weak
        exact = self._exact(maximum, weak)
        if self._is_credible(maximum, exact, weak):
            wrong = max(spread / self._spread(exact), self._spread(exact) / spread)
            return maximum, weak._replace(coarse=wrong > _COARSE)
        random = self.table.columns[:, : self.table.n_random]
        precision = _weak_spread(random, self.table.weights, tight=True)
        tight = weak._replace(spread=precision, runaway=True)
        held = self(tight, _CAUTIOUS_START)
        # So weak a prior hardly moves a spread that the data support.
        return (held, tight) if self._spread(held) < _HELD * spread else (maximum, weak)

    def observed_root(self, maximum, weak):
        """Root (a f, rank) of the population's covariance by the observed information, or None."""
        # Under a weak prior the likelihood has no maximum, so its curvature says nothing; nor does
        # that where a search ended before it.
        if weak.separated or weak.spread.any() or not maximum.converged:
            return None
        criterion = self._criterion(self._n_points(maximum.factor, self._spread(maximum)), maximum)
        # A dispersion of 0, as a variance of 0, takes no part.
        dispersion = maximum.family.dispersion or None
        return observed_root(
            criterion, maximum, self.root, weak, self.shape, self.scale, dispersion
        )

    def _exact(self, maximum, weak):
        """The maximum by many points: so far apart a few err by much, which the user may choose."""
        n_points = self._n_points(maximum.factor, self._spread(maximum))
        if n_points in (1, DENSE):
            return maximum
        return self._refined(DENSE, maximum._replace(metric=None), weak)

    def _is_credible(self, maximum, exact, weak):
        """Whether a maximum far away is one of the integrated likelihood, within its error."""
        if exact is maximum:
            return self._falls_beyond(maximum, weak)
        least = exact.value - _INTERVAL_FALL
        return self._value_at(maximum, weak) >= least and self._falls_beyond(exact, weak)

    def _falls_beyond(self, maximum, weak):
        """Whether the integrated likelihood falls where clients differ much more.

        Laplace's approximation is no judge of that: with few rows it may rise without end, or to a
        false maximum far away.
        """
        if self._n_points(self.start.factor) == 1:
            return False
        far = maximum._replace(factor=_FAR_OUT * maximum.factor)
        # Where the likelihood is flat, the best population grows with the spread.
        scaled = maximum.population.copy()
        scaled[:, scaled.shape[1] - len(weak.slopes) :] *= _FAR_OUT
        least = self._value_at(maximum, weak) - _INTERVAL_FALL
        starts = (far._replace(population=scaled), far)
        return all(self._value_at(start, weak) < least for start in starts)

    def _value_at(self, start, weak):
        """Integrated likelihood, less penalties, of the best population at a start's factor."""
        # What a search learnt of the curvature elsewhere is of no use here.
        start, options = start._replace(metric=None), self.options
        criterion = self._criterion(DENSE, start)
        return maximize_marginal(
            criterion, start, self.root, weak, options.max_iter, options.tol
        ).value

    def _refined(self, n_points, maximum, weak):
        """The MarginalMaximum with more points, from that with fewer."""
        begin = 1.0
        if self.shape is not None:
            # Zero is a stationary point of the factor: a search from there would stay.
            size = np.abs(maximum.factor).max() / np.abs(self.start.factor).max()
            begin = size if size > _NOT_ZERO else _CAUTIOUS_START
        refined = self._maximum(n_points, maximum, weak, self.options.tol, begin)
        return refined._replace(n_iter=maximum.n_iter + refined.n_iter)

    def _maximum(self, n_points, start, weak, tol, begin):
        """The MarginalMaximum of the criterion with so many points."""
        dispersion = start_dispersion(self.table, start.family)
        return maximize_marginal(
            self._criterion(n_points, start), start, self.root, weak, self.options.max_iter, tol,
            self.shape, self.scale, begin, dispersion,
        )  # fmt: skip

    def _criterion(self, n_points, start):
        """MarginalLikelihood with so many points; clients begin where those of `start` are."""
        return criterion_of(self.table, self.shared, start, n_points)

    def _n_points(self, factor, spread=0.0):
        """Points that the options ask for."""
        return n_points_of(self.options.quadrature, self.start.family, factor, spread)

    def _spread(self, maximum):
        """Standard deviation between clients of the predictors."""
        random = self.table.columns[:, : self.table.n_random]
        return predictor_spread(random, self.table.weights, maximum.factor)


def criterion_of(table, shared, start, n_points):
    """MarginalLikelihood for factors of the width of that of `start`, with so many points each."""
    evaluate, family = None, start.family
    inform = shared, laplace_information
    if has_one_effect(family, start.factor):
        # With one point this is Laplace's approximation as well, in a faster form.
        shared = shared.by_effect(partial(effect_stack, family=family))
        evaluate = partial(evaluate_quadrature, n_points=n_points)
        if n_points > 1:
            inform = shared, partial(quadrature_information, n_points=n_points)
    return MarginalLikelihood(shared, family, table.n_clients, evaluate, start.states, inform)


def n_points_of(quadrature, family, factor, spread=0.0):
    """Points of the quadrature over a client's effect; 1 is Laplace's approximation.

    `spread` is the standard deviation between clients of the predictors.
    """
    one_effect = has_one_effect(family, factor)
    if quadrature == "laplace":
        return 1
    if quadrature == "auto":
        if not one_effect:
            return 1
        return _POINTS if spread <= _WIDE_SPREAD else _MANY_POINTS if spread <= _AWAY else DENSE
    if quadrature > 1 and not one_effect:
        classes = f" and {family.n_outputs + 1} classes" if family.n_outputs > 1 else ""
        raise ValueError(
            f"quadrature={quadrature} needs one coefficient that varies (of two classes); got "
            f"{factor.shape[1]} varying coefficients{classes}. Take "
            "'auto' or 'laplace', or let one coefficient vary (random)."
        )
    return quadrature


def has_one_effect(family, factor):
    """Whether clients have one effect, so that a product grid needs no second dimension."""
    return family.n_outputs == 1 and factor.shape[1] == 1


def _covariance_root(covariance):
    """Factor (q, r) of a covariance, r >= 1."""
    variances = np.diag(covariance)
    diagonal = np.array_equal(covariance, np.diag(variances))
    root = np.diag(np.sqrt(variances)) if diagonal else square_root(covariance)
    # Without columns of zeros one variance above 0 is one effect, which quadrature integrates.
    positive = np.flatnonzero(root.any(axis=0))
    return root[:, positive if len(positive) else [0]]


def _weak_slopes(columns, weights, intercept, penalty=_WEAK_SD**-2):
    """Precision (f,) of a normal prior on slopes; 0 for the intercept.

    It is `penalty` for a column with a standard deviation of 1, by default enough to keep separated
    slopes finite.
    """
    square = np.average(columns**2, axis=0, weights=weights)
    spread = _column_variances(columns, weights)
    unit = np.where(spread > 1e-12 * square, spread, square)
    precision = unit * penalty
    if intercept is not None:
        precision[intercept] = 0.0
    return precision


def _column_variances(columns, weights):
    """Weighted variances (f,) of columns (n, f)."""
    mean = np.average(columns, axis=0, weights=weights)
    return np.average((columns - mean) ** 2, axis=0, weights=weights)


def _weak_spread(random, weights, tight=False):
    """Precision (q,) of the prior that keeps the differences between clients finite."""
    sd = _TIGHT_SD if tight else _WEAK_SD
    return np.average(random**2, axis=0, weights=weights) / sd**2


def predictor_spread(random, weights, factor):
    """Standard deviation between clients of the linear predictors, for random columns (n, q).

    We take the root mean square over the rows, under a factor (q, r).
    """
    # By second moments: predictors of all rows would be as large as the table.
    weighted = random if weights is None else weights[:, None] * random
    total = len(random) if weights is None else weights.sum()
    square = np.vdot(factor, (random.T @ weighted) @ factor) / total
    return float(np.sqrt(max(square, 0.0)))  # rounding may leave it below 0
