"""Population and between-client covariance of regressions with a link, where they have a maximum.

A fit without differences between clients comes first. From there a search begins with Laplace's
approximation. Where clients have one effect it goes on with as many points of the quadrature as the
spread between clients needs. Where the likelihood has no credible maximum, weak priors hold it.
"""

from typing import Any, NamedTuple

import numpy as np

from pfl_sklearn.linear_model._algebra import (
    covariance_factor,
    inverse_root,
    row_slices,
    square_root,
)
from pfl_sklearn.linear_model._mixed._client_posterior import client_modes, penalized_information
from pfl_sklearn.linear_model._mixed._families import RowTerms
from pfl_sklearn.linear_model._mixed._identifiability import varying_columns
from pfl_sklearn.linear_model._mixed._laplace import damped_newton, shorten_steps, weighted_products
from pfl_sklearn.linear_model._mixed._marginal_likelihood import (
    DENSE,
    FAR_APART,
    MarginalLikelihood,
    choose_n_points,
)
from pfl_sklearn.linear_model._mixed._marginal_maximum import (
    KNOWN,
    MarginalMaximum,
    Objective,
    WeakPriors,
    maximize,
    observed_root,
)
from pfl_sklearn.linear_model._mixed._reduction import CACHED_CELLS
from pfl_sklearn.linear_model._mixed._table import SharedStacks, varies_within_clients

_MAX_POOLED_STEPS = 100  # separated data take about 30
_POOLED_DECREMENT = 1e-9  # nats; the step with this squared Newton decrement is the last
# Share of the information at the start below which a direction counts as separated.
_SEPARATED = 1e-6
WEAK_SD = 2.5  # of the prior on separated slopes, in predictors per standard deviation of a column
TIGHT_SD = 1.0  # of the prior on a factor that diverged, in predictors per size of a column
# If the tight prior leaves a smaller share of the spread, the data do not support the rest.
SUPPORTED_SHARE = 1 / 3
_COARSE_RATIO = 1.5  # times the spread by many points, or its inverse, from which a fit warns
_FAR_FACTOR = 10.0  # times the spread between clients, at which the likelihood must have fallen
_INTERVAL_FALL = 1.92  # nats to the end of a 95 % interval: half a quantile of chi-square(1)
_NOT_ZERO = 1e-2  # factor, in natural units, from which a second search may start
_HANDOVER_TOL = 1e-2  # nats per standard error: near enough for quadrature to go on
_CAUTIOUS_START = 0.3  # in natural units: a longer first step may skip the nearest maximum


class PooledFit(NamedTuple):
    """Maximum of the likelihood if all clients have the same coefficients."""

    coefficients: np.ndarray  # (a, f)
    normal: np.ndarray  # (a f, a f), information and precision
    root: np.ndarray  # (a f, rank), root of the inverse information
    curvature: np.ndarray  # (n, a, a), information of the rows
    log_likelihood: float
    precision: np.ndarray  # (f,), of the normal prior on the coefficients
    separated: bool
    n_iter: int
    converged: bool


def fit_pooled(columns, table, family, offset, precision, start):
    """Coefficients of `columns` (n, f) that all clients share, by damped Newton steps.

    `offset` (n, a) is the part of the other coefficients, `precision` (f,) that of a normal prior,
    and `start` (a, f). On separated data steps go on to infinity and lose the information along
    some direction, by which we recognize them.
    """
    w = table.row_weights
    # Products of all rows at once would take as much memory as the table.
    parts = row_slices(len(w), columns.shape[1], CACHED_CELLS)
    ends: list = []  # information at the first and the last step, and a root of its inverse
    decrements = []

    def evaluate(points):
        coefficients, a = points[0], len(points[0])
        terms = RowTerms(*(np.empty((len(w), *shape)) for shape in ((), (a,), (a, a))))
        for part in parts:
            predictors = offset[part] + columns[part] @ coefficients.T
            found = family.terms(predictors, table.y[part], w[part])
            for values, block in zip(terms, found, strict=True):
                values[part] = block
        return np.array([terms.value.sum() - 0.5 * np.sum(precision * points[0] ** 2)]), terms

    def newton_step(points, terms):
        (values,) = points
        normal = np.diag(np.tile(precision, len(values)))
        for part in parts:
            products = weighted_products(columns[None, part], terms.curvature[None, part])
            normal += products.reshape(normal.shape)
        root, _ = inverse_root(normal)
        ends[1:] = [(normal, root)]
        slope = root.T @ (terms.score.T @ columns - precision * values).ravel()
        decrements.append(slope @ slope)
        step = (root @ slope).reshape(points.shape)
        shift = np.abs(columns @ step[0].T).max(keepdims=True)
        return shorten_steps(family, step, shift[0]), np.array(decrements[-1:])

    points, _, terms, converged = damped_newton(
        start[None], evaluate, newton_step, _POOLED_DECREMENT, _MAX_POOLED_STEPS
    )
    (_, first_root), (normal, root) = ends[0], ends[-1]
    # The information that is left of that at the start, along every direction: with equal
    # predictors for all rows nothing was lost there.
    retained = np.linalg.eigvalsh(first_root.T @ normal @ first_root)
    return PooledFit(
        points[0],
        normal,
        root,
        terms.curvature,
        float(terms.value.sum()) + table.constant(family),
        precision,
        bool(retained.size and retained[0] < _SEPARATED),
        len(decrements),
        bool(converged[0]),
    )


def pooled_fit(table, family, offset, n_known, penalty):
    """PooledFit of the columns after the first `n_known`, under a penalty on slopes."""
    # If they separate the classes, the prior is as tight as finite slopes need.
    columns, intercept = table.columns[:, n_known:], table.intercept
    at = None if intercept is None or intercept < n_known else intercept - n_known
    requested = _slope_precision(columns, table.weights, at, penalty)
    start = np.zeros((family.n_outputs, columns.shape[1]))
    if at is not None:
        start[:, at] = family.intercept_start(table.y, table.row_weights, offset[:, 0])
    pooled = fit_pooled(columns, table, family, offset, requested, start)
    if not pooled.separated:
        return pooled
    # The penalty that the user asked for stands where it is the stronger one.
    weak = _slope_precision(columns, table.weights, at, WEAK_SD**-2)
    pooled = fit_pooled(columns, table, family, offset, np.maximum(weak, requested), start)
    return pooled._replace(separated=True)


def _slope_precision(columns, weights, intercept, penalty):
    """Precision (f,) of a normal prior on slopes: `penalty` at a standard deviation of 1."""
    if not (penalty and columns.shape[1]):
        return np.zeros(columns.shape[1])
    mean = np.average(columns, axis=0, weights=weights)
    spread = np.average((columns - mean) ** 2, axis=0, weights=weights)
    # A constant column has its size for a unit.
    precision = np.where(spread > 1e-12 * mean**2, spread, mean**2) * penalty
    if intercept is not None:
        precision[intercept] = 0.0
    return precision


def find_population(table, shared, family, prior, mean, covariance, options):
    """MarginalMaximum of population, factor and dispersion, and the PopulationSearch that found it.

    `mean` (a, q) and `covariance` (q, q) are None where they are unknown.
    """
    q, p = table.n_random, table.columns.shape[1]
    n_known = 0 if mean is None else q
    population = np.zeros((family.n_outputs, p))
    if mean is not None:
        population[:, :q] = mean
    # Without common coefficients a known prior leaves nothing to search.
    if n_known == p and covariance is not None and not family.has_dispersion:
        maximum = MarginalMaximum(population, _covariance_root(covariance), family, 1, True)
        weak, root = WeakPriors(np.zeros(0), np.zeros(q)), np.zeros((0, 0))
        return maximum, PopulationSearch(table, shared, options, maximum, root, weak)
    pooled, family = pooled_start(table, family, population, n_known, options.population_penalty)
    population[:, n_known:] = pooled.coefficients
    if covariance is None:
        shape, scale = _free_covariance(table, prior, pooled.curvature)
        factor = scale * shape.matrix(shape.start)
    else:
        shape, scale, factor = KNOWN, 1.0, _covariance_root(covariance)
    start = MarginalMaximum(population, factor, family, 0, False)
    # The search moves along the root of the inverse information at its start: its steps are in
    # standard errors.
    modes = client_modes(table, shared.stacks, start)
    root, _ = inverse_root(penalized_information(modes.rows, family.n_outputs, pooled.precision))
    # Clients of one class each may be infinitely far apart.
    mixed = not family.bounded or varies_within_clients(table.y, table.codes, table.n_clients)
    unmixed = covariance is None and not mixed
    spread = _factor_precision(table, WEAK_SD) if unmixed else np.zeros(q)
    weak = WeakPriors(pooled.precision, spread, separated=pooled.separated)
    start = start._replace(states=modes.states)
    del modes  # its rows are as many as those of the table
    search = PopulationSearch(table, shared, options, start, root, weak, shape, scale)
    maximum = search.at_least_limit(search.maximum())
    if covariance is None and not unmixed:
        return search.regularize_if_diverged(maximum)
    return maximum, search


def pooled_start(table, family, population, n_known, penalty):
    """PooledFit at a known population, and the family, with a plausible dispersion if any."""
    offset = table.predictors(population)
    pooled = pooled_fit(table, family.limit or family, offset, n_known, penalty)
    if not family.has_dispersion:
        return pooled, family
    mean = family.mean(offset + table.columns[:, n_known:] @ pooled.coefficients.T)[:, 0]
    dispersion = family.dispersion_by_moments(table.y, mean, table.row_weights)
    family = family.with_dispersion(dispersion)
    family = family.with_dispersion(start_dispersion(table, family))
    return pooled_fit(table, family, offset, n_known, penalty), family


def start_dispersion(table, family):
    """Dispersion from which a search starts; None if the family has none."""
    if not family.has_dispersion:
        return None
    mean = np.average(table.y, weights=table.weights)
    return max(family.dispersion, family.least_dispersion(mean))


def _free_covariance(table, prior, curvature):
    """Shape of an unknown covariance, and the natural units (q, 1) of its factor's rows.

    At these standard deviations the prior and a client's rows, with `curvature` (n, a, a), weigh
    alike.
    """
    varies = varying_columns(table, prior)
    varies = varies if varies.any() else None  # columns of zeros alone: any variance will do
    shape = covariance_factor(prior.covariance_type, table.n_random, prior.rank, varies)
    (n, q), m = table.random.shape, table.n_clients
    # A client with fewer rows than coefficients informs on as many combinations as it has rows.
    share = min(n / m, q) / q
    typical = np.trace(curvature, axis1=1, axis2=2) / curvature.shape[-1]
    per_client = np.einsum("n,nq,nq->q", typical, table.random, table.random) / m
    # These shapes have one variance for all columns, so their rows need one unit.
    if prior.covariance_type in ("spherical", "low_rank"):
        per_client = np.full(q, per_client.mean())
    # A column of zeros has no scale; any will do.
    scale = np.sqrt(np.divide(share, per_client, out=np.ones(q), where=per_client > 0))
    return shape, scale[:, None]


def _covariance_root(covariance):
    """Factor (q, r) of a covariance, r >= 1."""
    variances = np.diag(covariance)
    diagonal = np.array_equal(covariance, np.diag(variances))
    root = np.diag(np.sqrt(variances)) if diagonal else square_root(covariance)
    # Without columns of zeros one variance above 0 is one effect, which quadrature integrates.
    positive = np.flatnonzero(root.any(axis=0))
    return root[:, positive if len(positive) else [0]]


def _factor_precision(table, sd):
    """Precision (q,) of the prior that keeps the differences between clients finite."""
    return np.average(table.random**2, axis=0, weights=table.weights) / sd**2


class PopulationSearch(NamedTuple):
    """Search for the population and the factor: by Laplace's approximation, then by quadrature."""

    table: Any
    shared: SharedStacks
    options: Any  # FitParameters
    start: MarginalMaximum
    root: np.ndarray  # (a f, rank)
    weak: WeakPriors
    shape: Any = KNOWN  # CovarianceFactor
    scale: Any = 1.0  # (q, 1), natural units of the factor's rows

    def maximum(self, begin=1.0):
        """The MarginalMaximum, from a factor at `begin` in natural units."""
        needed, tol = self._n_points(self.start.factor), self.options.tol
        # Quadrature moves the maximum, so the search before it may stop early.
        rough = tol if needed == 1 else max(tol, _HANDOVER_TOL)
        n_points, maximum = 1, self._maximum(1, self.start, rough, begin)
        while needed > n_points:
            n_points, maximum = needed, self._refined(needed, maximum)
            needed = self.n_points(maximum)
        family = maximum.family
        if family.has_dispersion and family.dispersion == 0:
            # The likelihood is flat in a dispersion near 0, and the search ended anywhere there.
            fixed = maximum._replace(family=family.limit, metric=None)
            maximum = self._refined(n_points, fixed)._replace(family=family)
        return maximum

    def at_least_limit(self, maximum):
        """The maximum, or a higher one that lies near that of the family's limit."""
        family = self.start.family
        if family.limit is None:
            return maximum
        # Large counts tell a dispersion from 0 so well that a search from elsewhere may get lost.
        start = self.start._replace(family=family.limit, states=None)
        plain = self._replace(start=start).maximum()
        if maximum.value >= plain.value:
            return maximum
        plain = plain._replace(family=family.with_dispersion(0.0))
        near = self._refined(self.n_points(plain), plain._replace(metric=None))
        return max(plain, near, key=lambda maximum: maximum.value)

    def regularize_if_diverged(self, maximum):
        """The maximum and the search, under a tight prior if the data do not support the spread."""
        spread = self.table.predictor_spread(maximum.factor)
        if spread <= FAR_APART:
            return maximum, self
        exact = maximum
        if self.n_points(maximum) not in (1, DENSE):
            # So far apart a few points, which the user may choose, err by much.
            exact = self._refined(DENSE, maximum._replace(metric=None))
        least = exact.value - _INTERVAL_FALL
        # A maximum counts if it is one of the integrated likelihood, within its error.
        if self._falls_beyond(exact) and self._value_at(maximum) >= least:
            exact_spread = self.table.predictor_spread(exact.factor)
            wrong = max(spread / exact_spread, exact_spread / spread)
            return maximum, self._replace(weak=self.weak._replace(coarse=wrong > _COARSE_RATIO))
        precision = _factor_precision(self.table, TIGHT_SD)
        tight = self._replace(weak=self.weak._replace(spread=precision, runaway=True))
        regularized = tight.maximum(_CAUTIOUS_START)
        # So weak a prior hardly moves a spread that the data support.
        supported = self.table.predictor_spread(regularized.factor) >= SUPPORTED_SHARE * spread
        return (maximum, self) if supported else (regularized, tight)

    def observed_root(self, maximum):
        """Root (a f, rank) of the population's covariance by the observed information, or None."""
        # Under a weak prior the likelihood has no maximum, so its curvature means nothing, nor does
        # that where a search ended early. A known population has no error.
        regularized = self.weak.separated or self.weak.spread.any()
        if regularized or not maximum.converged or not self.root.size:
            return None
        # A dispersion of 0, as a variance of 0, takes no part.
        dispersion = maximum.family.dispersion or None
        return observed_root(self._objective(self.n_points(maximum), maximum, dispersion))

    def _falls_beyond(self, maximum):
        """Whether the integrated likelihood falls where clients differ much more."""
        # Laplace's approximation cannot show this: with few rows it may rise without end.
        if self._n_points(self.start.factor) == 1:
            return False
        far = maximum._replace(factor=_FAR_FACTOR * maximum.factor)
        # Where the likelihood is flat, the best population grows with the spread.
        scaled = maximum.population.copy()
        scaled[:, scaled.shape[1] - len(self.weak.slopes) :] *= _FAR_FACTOR
        least = self._value_at(maximum) - _INTERVAL_FALL
        return all(self._value_at(at) < least for at in (far._replace(population=scaled), far))

    def _value_at(self, start):
        """Integrated likelihood, less penalties, of the best population at a start's factor."""
        # The curvature learnt elsewhere is of no use here.
        criterion = MarginalLikelihood(self.table, self.shared, start, DENSE)
        objective = Objective(criterion, start._replace(metric=None), self.root, self.weak)
        return maximize(objective, self.options.max_iter, self.options.tol).value

    def _refined(self, n_points, maximum):
        """The MarginalMaximum with more points, from that with fewer."""
        begin = 1.0
        if self.shape is not KNOWN:
            # Zero is a stationary point of the factor: a search from there would stay.
            size = np.abs(maximum.factor).max() / np.abs(self.start.factor).max()
            begin = size if size > _NOT_ZERO else _CAUTIOUS_START
        refined = self._maximum(n_points, maximum, self.options.tol, begin)
        return refined._replace(n_iter=maximum.n_iter + refined.n_iter)

    def _maximum(self, n_points, start, tol, begin):
        """The MarginalMaximum of the criterion with so many points."""
        objective = self._objective(n_points, start, start_dispersion(self.table, start.family))
        return maximize(objective, self.options.max_iter, tol, begin)

    def _objective(self, n_points, start, dispersion):
        """Objective with so many points; clients begin where those of `start` are."""
        criterion = MarginalLikelihood(self.table, self.shared, start, n_points)
        others = self.root, self.weak, self.shape, self.scale
        return Objective(criterion, start, *others, dispersion)

    def n_points(self, maximum):
        """Points that the options ask for at a maximum."""
        return self._n_points(maximum.factor, self.table.predictor_spread(maximum.factor))

    def _n_points(self, factor, spread=0.0):
        return choose_n_points(self.options.quadrature, self.start.family, factor, spread)
