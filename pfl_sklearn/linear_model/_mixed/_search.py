"""Searches for the population and the between-client covariance of regressions with a link."""

from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import LbfgsInvHessProduct, minimize

from pfl_sklearn.linear_model._algebra import inverse_root, snapped_to_zero, square_root
from pfl_sklearn.linear_model._mixed._likelihood import (
    damped_newton,
    step_share,
    weighted_products,
)

_MAX_POOLED_STEPS = 100  # separated data take about 30
_POOLED_DECREMENT = 1e-9  # nats; the step with this squared Newton decrement is the last
_OBJECTIVE_ROUNDING = 1e-13  # relative decrease of an objective that counts as rounding
_SEPARATED = (
    1e-6  # share of the information at the start below which a direction counts as separated
)
_ZERO_SPREAD = 1e-8  # squared parameter of a factor, in natural units, that counts as zero
_SNAPPING_LOSS = 1e-9  # nats per nat of the criterion: rounding of its sum over clients
_DISPERSION_STEP = 1e-3  # of its root, relative to the start, for a slope by differences
_FLAT_ENOUGH = 1e-3  # nats per standard error: rounding may end a search there
_DIFFERENCE = 1e-3  # of the dispersion's root, in standard errors, for second derivatives
# Information that counts as none, by the units of a search: standard errors of 100 of them.
_NO_INFORMATION = 1e-4
_MOST_DESCENTS = 4  # one is enough as a rule; more where curvatures change a lot on the way
_SHORTEST_LIMIT = 1e-3  # of the slope at which steps end, over the one before
_CURVATURES = 4  # directions whose curvature is measured at the end
_NEARBY = 0.03  # standard errors, over which a curvature is measured, well above rounding
_SMALL_REST = 1e-2  # squared share of the slope that need not be explained


class PooledFit(NamedTuple):
    """Maximum of the likelihood if all clients have the same coefficients."""

    coefficients: np.ndarray  # (a, f)
    normal: np.ndarray  # (a f, a f), information and precision
    root: np.ndarray  # (a f, rank), root of the inverse information
    weight: np.ndarray  # (n, a, a), information of the rows
    log_likelihood: float
    separated: bool
    n_iter: int
    converged: bool


class WeakPriors(NamedTuple):
    """Precisions of the normal priors that keep maxima finite; 0 where none is needed."""

    slopes: np.ndarray  # (f,), of the free population coefficients
    spread: np.ndarray  # (q,), of the rows of the factor
    runaway: bool = False  # because the differences between clients diverged
    coarse: bool = False  # the points of the quadrature are too few for so wide a spread
    separated: bool = False  # whether the free columns separate the classes


class MarginalMaximum(NamedTuple):
    """Maximum of a criterion."""

    population: np.ndarray  # (a, p)
    factor: np.ndarray  # (q, r)
    family: Any  # with its dispersion, if it has one
    n_iter: int
    converged: bool
    states: list | None = None  # of the criterion's clients, there or near there
    metric: np.ndarray | None = None  # (k, k), root of an inverse Hessian of the criterion
    value: float | None = None  # of the criterion, less penalties


def fit_pooled(columns, table, family, offset, precision, start):
    """Coefficients of `columns` (n, f) that all clients share, by damped Newton steps.

    `offset` (n, a) holds the part of the other coefficients; `precision` (f,) is that of a normal
    prior; the steps begin at `start` (a, f). On separated data the steps go on towards infinity and
    lose the information along some direction; that is how we recognize them.
    """
    w = np.ones(len(columns)) if table.weights is None else table.weights
    ends: list = []  # information at the first and the last step, and a root of its inverse
    decrements = []

    def evaluate(points):
        terms = family.terms(offset + columns @ points[0].T, table.y, w)
        return np.array([terms.value.sum() - 0.5 * np.sum(precision * points[0] ** 2)]), terms

    def newton_step(points, terms):
        (values,) = points
        normal = weighted_products(columns[None], terms.curvature[None])
        normal = normal.reshape(values.size, values.size)
        normal = normal + np.diag(np.tile(precision, len(values)))
        root, _ = inverse_root(normal)
        ends[1:] = [(normal, root)]
        slope = root.T @ (terms.score.T @ columns - precision * values).ravel()
        decrements.append(slope @ slope)
        step = (root @ slope).reshape(points.shape)
        share = step_share(family, np.abs(columns @ step[0].T).max())
        return step if share is None else share * step, np.array(decrements[-1:])

    points, _, terms, converged = damped_newton(
        start[None], evaluate, newton_step, _POOLED_DECREMENT, _MAX_POOLED_STEPS
    )
    (_, first_root), (normal, root) = ends[0], ends[-1]
    # The information that is left of that at the start, along every direction: with equal
    # predictors for all rows nothing was lost there.
    left = np.linalg.eigvalsh(first_root.T @ normal @ first_root)
    return PooledFit(
        points[0],
        normal,
        root,
        terms.curvature,
        float(terms.value.sum()) + float(w @ family.constants(table.y)),
        bool(left.size and left[0] < _SEPARATED),
        len(decrements),
        bool(converged[0]),
    )


def natural_scale(random, weight, n_clients, common):
    """Standard deviations (q,) at which the prior and a client's rows have equal weight.

    `random` has shape (n, q); `weight` (n, a, a) is the information of the rows. With `common` all
    coefficients get the same one.
    """
    q = random.shape[1]
    # A client with fewer rows than coefficients informs on as many combinations as it has rows.
    share = min(len(random) / n_clients, q) / q
    typical = np.trace(weight, axis1=1, axis2=2) / weight.shape[-1]
    per_client = np.einsum("n,nq,nq->q", typical, random, random) / n_clients
    if common:
        per_client = np.full(q, per_client.mean())
    # A column of zeros has no scale; any will do.
    return np.sqrt(np.divide(share, per_client, out=np.ones(q), where=per_client > 0))


class _Objective(NamedTuple):
    """Minus a criterion and its penalties, in the parameters of a search.

    The first parameters move the population along `root`, then come those of `shape`, and last the
    root of a dispersion. A root, as a factor, may reach zero: a variance is its square.
    """

    criterion: Any
    start: MarginalMaximum
    root: np.ndarray  # (a f, rank)
    weak: WeakPriors
    shape: Any  # CovarianceFactor; None if the factor stays
    scale: Any  # (q,), natural units of the rows of the factor; None with it
    dispersion: float | None  # from which the search starts; None if the family stays

    @property
    def unit(self):
        """Size of one parameter of the factor, in natural units, and of the dispersion's root."""
        # In natural units prior and rows weigh alike, so a client's information on the log of a
        # standard deviation is 1/2. This unit is about a standard error then, as those of `root`.
        return np.sqrt(2 / (self.criterion.n_clients * len(self.start.population)))

    @property
    def _n_known(self):
        """Number of columns whose population coefficients are known; they come first."""
        return self.start.population.shape[1] - len(self.weak.slopes)

    def begin(self, factor_start):
        """Parameters at the start, with the factor at `factor_start` in natural units."""
        factor = [] if self.shape is None else factor_start * self.shape.start / self.unit
        dispersion = [] if self.dispersion is None else [1 / self.unit]
        return np.concatenate([np.zeros(self.root.shape[1]), factor, dispersion])

    def at_start(self):
        """Parameters of the start itself, and their units: 0 for those of variances of zero."""
        point, units = np.zeros(self.root.shape[1]), np.ones(self.root.shape[1])
        if self.shape is not None:
            factor = self.shape.parameters(self.start.factor / self.scale[:, None])
            sizes = self.shape.row_scales(factor)
            point = np.append(point, factor / self.unit)
            # Errors of large standard deviations grow with them.
            units = np.append(units, np.where(sizes > 0, np.maximum(sizes, 1.0), 0.0))
        if self.dispersion is not None:
            point, units = np.append(point, 1 / self.unit), np.append(units, 1.0)
        return point, units

    def exact_hessian(self):
        """Second derivatives at the start, but for those in the dispersion."""
        population, factor = self.start.population, self.start.factor
        directions = np.zeros((0, *factor.shape))
        if self.shape is not None:
            units = np.eye(len(self.shape.start))
            directions = np.array([self.scale[:, None] * self.shape.matrix(e) for e in units])
        information = self.criterion.information(population, factor, directions)
        (a, p), t, rank = population.shape, len(directions), self.root.shape[1]
        free = np.add.outer(p * np.arange(a), np.arange(self._n_known, p)).ravel()
        information[free, free] += np.tile(self.weak.slopes, a)
        back = np.zeros((a * p + t, rank + t))
        back[free, :rank], back[a * p :, rank:] = self.root, self.unit * np.eye(t)
        return back.T @ information @ back

    def models(self, parameters):
        """Population (a, p), factor (q, r) and family of a point."""
        rank, population = self.root.shape[1], self.start.population.copy()
        moved = (self.root @ parameters[:rank]).reshape(len(population), -1)
        population[:, population.shape[1] - moved.shape[1] :] += moved
        spread, factor, family = parameters[rank:] * self.unit, self.start.factor, None
        if self.dispersion is not None:
            spread, family = spread[:-1], self._family_at(spread[-1])
        if self.shape is not None:
            factor = self.scale[:, None] * self.shape.matrix(spread)
        return population, factor, family

    def _family_at(self, root):
        """The family at a root of the dispersion, relative to the start's."""
        return self.start.family.with_dispersion(self.dispersion * root**2)

    def __call__(self, parameters):
        """Value and slope at a point."""
        population, factor, family = self.models(parameters)
        value, by_population, by_factor = self.criterion(population, factor, family)
        weak, n_known = self.weak, self._n_known
        free, pull = population[:, n_known:], weak.spread[:, None] * factor
        slope = [self.root.T @ (by_population[:, n_known:] - weak.slopes * free).ravel()]
        if self.shape is not None:
            by_factor = self.scale[:, None] * (by_factor - pull)
            slope.append(self.unit * self.shape.pull_back(by_factor))
        if self.dispersion is not None:
            root = parameters[-1] * self.unit
            above, below = (
                self.criterion(population, factor, self._family_at(root + step))[0]
                for step in (_DISPERSION_STEP, -_DISPERSION_STEP)
            )
            slope.append([self.unit * (above - below) / (2 * _DISPERSION_STEP)])
        penalty = 0.5 * (np.sum(weak.slopes * free**2) + np.vdot(pull, factor))
        return penalty - value, -np.concatenate(slope)


def maximize_marginal(
    criterion, start, root, weak, max_iter, tol, shape=None, scale=None, begin=1.0, dispersion=None
):
    """Maximize a criterion in the free population coefficients, the factor and the dispersion.

    Parameters
    ----------
    criterion : MarginalLikelihood
    start : MarginalMaximum
        Its population (a, p) has the free coefficients last. Without `shape` the search keeps its
        factor.
    root : ndarray of shape (a f, rank)
        Root of the inverse information of the f free coefficients. The search moves along it.
    weak : WeakPriors
    max_iter : int
    tol : float
        Largest gradient at the end, in nats per standard error.
    shape : CovarianceFactor or None
        Shape of the factor.
    scale : ndarray of shape (q,)
        Natural units of the factor's rows.
    begin : float
        Start of the search for the factor, in these units.
    dispersion : float or None
        Start of the search for it, above 0. None: the family stays.

    Returns
    -------
    MarginalMaximum
    """
    objective = _Objective(criterion, start, root, weak, shape, scale, dispersion)
    point = objective.begin(begin)
    descent, flat = _lowest_point(objective, point, start.metric, max_iter, tol)
    end = descent.point
    # A variance of zero is reached in the limit; exactly zero it costs no more than rounding.
    small = (np.arange(len(end)) >= root.shape[1]) & ((end * objective.unit) ** 2 < _ZERO_SPREAD)
    parameters = snapped_to_zero(
        end, small, objective, lambda best: _SNAPPING_LOSS * (1 + abs(best))
    )
    population, factor, family = objective.models(parameters)
    return MarginalMaximum(
        population,
        factor,
        family or start.family,
        descent.n_iter,
        flat and criterion.modes_found,
        criterion.states,
        descent.metric,
        -descent.value,
    )


def observed_root(criterion, maximum, root, weak, shape=None, scale=None, dispersion=None):
    """Root (a f, rank) of the covariance of the population at a maximum, or None.

    It belongs to the inverse of the observed information in all that was estimated: the population,
    the factor and the dispersion. The information given the factor alone leaves out that classes
    which are rarer, and slopes which are larger, go with clients who differ more. None where the
    criterion is not concave at the maximum. Parameters are those of `maximize_marginal`.
    """
    objective = _Objective(criterion, maximum, root, weak, shape, scale, dispersion)
    values, vectors = np.linalg.eigh(_hessian(objective))
    if not (values > -_NO_INFORMATION).all():  # NaN is not, either
        return None
    # Some shapes have more parameters than covariances; along those nothing changes.
    informed = values > _NO_INFORMATION
    covariance_root = vectors[: root.shape[1], informed] / np.sqrt(values[informed])
    return root @ square_root(covariance_root @ covariance_root.T)


def _hessian(objective):
    """Second derivatives of an objective at its start.

    Those in variances of zero are left out: there the slope in the root of a variance is 0 whatever
    the population is, so that its errors add nothing to those of the population.
    """
    (point, units), exact = objective.at_start(), objective.exact_hessian()
    n = len(point)
    hessian = np.zeros((n, n))
    hessian[: len(exact), : len(exact)] = exact
    if n > len(exact):  # a dispersion, in which there are differences alone
        step = _DIFFERENCE * np.eye(n)[-1]
        row = (objective(point + step)[1] - objective(point - step)[1]) / (2 * _DIFFERENCE)
        hessian[-1] = hessian[:, -1] = row
    kept = units > 0
    return (units[:, None] * hessian * units)[np.ix_(kept, kept)]


class _Descent(NamedTuple):
    """End of quasi-Newton steps."""

    point: np.ndarray
    value: float
    slope: np.ndarray  # there
    metric: np.ndarray  # (k, k), root of an inverse Hessian, as far as the steps have learnt it
    n_iter: int


def _lowest_point(objective, start, metric, max_iter, tol):
    """Minimum of an objective from a start, by quasi-Newton steps in a metric (k, k), or None.

    Returns the last _Descent, and whether the objective is flat there.
    """
    value, slope = objective(start)
    metric = np.eye(len(start)) if metric is None else metric
    descent = _Descent(start, value, slope, metric, 0)
    # Steps end where the slope is small in the metric that they began with. Standard errors may be
    # others by then, above all those of a large spread: what counts is the distance by the
    # curvature at the end.
    limit = tol
    for _ in range(_MOST_DESCENTS):
        before = descent.value
        descent = _descend(objective, descent, max_iter, limit)
        distance = _newton_distance(objective, descent)
        gained = before - descent.value > _OBJECTIVE_ROUNDING * (1 + abs(descent.value))
        if distance <= tol or descent.n_iter >= max_iter or not gained:
            break
        limit *= max(0.5 * tol / distance, _SHORTEST_LIMIT)
    # Rounding may end the line search where no step improves; it has converged if it is flat there.
    return descent, distance <= max(tol, _FLAT_ENOUGH)


def _newton_distance(objective, descent):
    """Distance to the minimum in standard errors, by the curvature at the end of a descent.

    It is the square root of slope' inverse(Hessian) slope, by conjugate gradients in the metric
    of the descent: one step where that metric is right, and a few where it is not. Each takes a
    slope nearby.
    """
    root = descent.metric
    residual = root.T @ descent.slope
    direction, square, left = residual, 0.0, residual @ residual
    for _ in range(min(_CURVATURES, len(residual))):
        if left == 0:
            break
        step = _NEARBY / np.sqrt(direction @ direction)
        _, slope = objective(descent.point + step * (root @ direction))
        product = root.T @ (slope - descent.slope) / step
        curvature = direction @ product
        if not curvature > 0:  # no minimum along this direction: the slope in the metric is left
            return float(max(np.sqrt(square), np.abs(root.T @ descent.slope).max()))
        share = left / curvature
        square += share * left
        residual = residual - share * product
        if residual @ residual < _SMALL_REST * left:
            break
        direction = residual + (residual @ residual / left) * direction
        left = residual @ residual
    return float(np.sqrt(square))


def _descend(objective, begin, max_iter, tol):
    """The _Descent from the end of another one, which had more iterations left than it took."""
    start, metric = begin.point, begin.metric
    # L-BFGS takes a first step of length 1. In steps of this unit that is a Newton step.
    length = np.linalg.norm(metric.T @ begin.slope) or 1.0
    metric = length * metric
    slopes = {}

    def measured(step):
        if not step.any():  # the search evaluates its start, as we did for the length
            value, slope = begin.value, begin.slope
        else:
            value, slope = objective(start + metric @ step)
        slopes[step.tobytes()] = slope
        return value, metric.T @ slope

    result = minimize(
        measured,
        np.zeros(len(start)),
        jac=True,
        method="L-BFGS-B",
        # The slope alone ends the search: a small gain is no sign of a maximum where it is flat.
        options={
            "maxiter": max_iter - begin.n_iter, "maxcor": 30, "ftol": 1e-16, "gtol": tol * length
        },
    )  # fmt: skip
    # The inverse Hessian is in steps of `length`; the root is in those of the metric that came.
    inverse: Any = result.hess_inv
    inverse = LbfgsInvHessProduct(inverse.sk * length, inverse.yk / length).todense()
    values, vectors = np.linalg.eigh(inverse)
    # The symmetric root: rounding chooses among eigenvectors of equal values.
    root = (vectors * np.sqrt(values)) @ vectors.T
    return _Descent(
        start + metric @ result.x,
        float(result.fun),
        slopes[result.x.tobytes()],
        metric @ root / length,
        begin.n_iter + int(result.nit),
    )
