"""Maximum of a marginal likelihood in the population, the factor of a covariance and a dispersion.

Quasi-Newton steps go on until the slope is small by the curvature at their end. Second derivatives
there are the observed information on the population.
"""

from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import LbfgsInvHessProduct, minimize

from pfl_sklearn._parallel import note_iteration
from pfl_sklearn.linear_model._algebra import CovarianceFactor, snap_to_zero, square_root

_NOTHING = np.zeros(0, dtype=np.intp)
KNOWN = CovarianceFactor((0, 0), _NOTHING, _NOTHING, np.zeros(0))  # shape of a factor that stays
_OBJECTIVE_ROUNDING = 1e-13  # relative decrease of an objective that counts as rounding
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


class WeakPriors(NamedTuple):
    """Precisions of the normal priors that keep maxima finite; 0 where none is needed."""

    slopes: np.ndarray  # (f,), of the free population coefficients
    spread: np.ndarray  # (q,), of the rows of the factor
    runaway: bool = False  # because the differences between clients diverged
    coarse: bool = False  # the points of the quadrature are too few for so wide a spread
    separated: bool = False  # whether the free columns separate the classes
    pure: tuple = ()  # names of groupings whose levels have one class each
    far_apart: tuple = ()  # names of those whose differences between levels diverged


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


class Objective(NamedTuple):
    """Minus a criterion and its penalties, in the parameters of a search.

    These move the population along `root`, then come those of `shape`, then the root of a
    dispersion: a root, as a factor, may reach zero, and a variance is its square.
    """

    criterion: Any  # MarginalLikelihood
    start: MarginalMaximum  # its population (a, p) has the f free coefficients last
    root: np.ndarray  # (a f, rank), of the inverse information of these
    weak: WeakPriors
    shape: Any = KNOWN  # CovarianceFactor
    scale: Any = 1.0  # (q, 1), natural units of the rows of the factor
    dispersion: float | None = None  # from which the search starts; None: the family stays

    @property
    def unit(self):
        """Size of one parameter of the factor, in natural units, and of the dispersion's root."""
        # In natural units prior and rows weigh alike, so a client's information on the log of a
        # standard deviation is 1/2. This unit is about a standard error then, as those of `root`.
        return np.sqrt(2 / (self.criterion.table.n_clients * len(self.start.population)))

    @property
    def _n_known(self):
        """Number of columns whose population coefficients are known; they come first."""
        return self.start.population.shape[1] - len(self.weak.slopes)

    def point(self, factor):
        """Parameters at the start's population and dispersion, for parameters of the factor."""
        dispersion = [] if self.dispersion is None else [1.0]
        spread = np.concatenate([factor, dispersion]) / self.unit
        return np.append(np.zeros(self.root.shape[1]), spread)

    def exact_hessian(self):
        """Second derivatives at the start, but for those in the dispersion."""
        population, factor = self.start.population, self.start.factor
        (a, p), t, rank = population.shape, len(self.shape.start), self.root.shape[1]
        directions = np.zeros((t, *factor.shape))
        for k, unit in enumerate(np.eye(t)):
            directions[k] = self.scale * self.shape.matrix(unit)
        information = self.criterion.information(population, factor, directions)
        free = np.add.outer(p * np.arange(a), np.arange(self._n_known, p)).ravel()
        information[free, free] += np.tile(self.weak.slopes, a)
        back = np.zeros((a * p + t, rank + t))
        back[free, :rank], back[a * p :, rank:] = self.root, self.unit * np.eye(t)
        return back.T @ information @ back

    def models(self, parameters):
        """Population (a, p), factor (q, r) and family of a point."""
        rank, population = self.root.shape[1], self.start.population.copy()
        step = self.root @ parameters[:rank]
        population[:, self._n_known :] += step.reshape(len(population), -1)
        spread, factor, family = parameters[rank:] * self.unit, self.start.factor, self.start.family
        if self.dispersion is not None:
            spread, family = spread[:-1], self._family_at(spread[-1])
        if len(spread):
            factor = self.scale * self.shape.matrix(spread)
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
        by_free = (by_population[:, n_known:] - weak.slopes * free).ravel()
        by_shape = self.shape.pull_back(self.scale * (by_factor - pull))
        slope = np.append(self.root.T @ by_free, self.unit * by_shape)
        if self.dispersion is not None:
            root = parameters[-1] * self.unit
            above, below = (
                self.criterion(population, factor, self._family_at(root + step))[0]
                for step in (_DISPERSION_STEP, -_DISPERSION_STEP)
            )
            slope = np.append(slope, self.unit * (above - below) / (2 * _DISPERSION_STEP))
        penalty = 0.5 * (np.sum(weak.slopes * free**2) + np.vdot(pull, factor))
        return penalty - value, -slope


def maximize(objective, max_iter, tol, begin=1.0):
    """MarginalMaximum of the criterion of an Objective, from a factor of `begin` natural units.

    `tol` is the largest gradient at the end, in nats per standard error.
    """
    criterion, start = objective.criterion, objective.start
    point = objective.point(begin * objective.shape.start)
    descent, flat = _lowest_point(objective, point, start.metric, max_iter, tol)
    # A variance of zero is reached in the limit; exactly zero it costs no more than rounding.
    small = (descent.point * objective.unit) ** 2 < _ZERO_SPREAD
    small[: objective.root.shape[1]] = False
    parameters = snap_to_zero(
        descent.point, small, objective, lambda best: _SNAPPING_LOSS * (1 + abs(best))
    )
    population, factor, family = objective.models(parameters)
    return MarginalMaximum(
        population,
        factor,
        family,
        descent.n_iter,
        flat and criterion.modes_found,
        criterion.states,
        descent.metric,
        -descent.value,
    )


def observed_root(objective):
    """Root (a f, rank) of the population's covariance at the start of an Objective, or None.

    The start is a maximum, and the covariance the inverse of the observed information in
    population, factor and dispersion. Given the factor, the information would miss that rarer
    classes and larger slopes go with clients who differ more. None if the criterion is not concave
    at the start.
    """
    values, vectors = np.linalg.eigh(_hessian(objective))
    if not (values > -_NO_INFORMATION).all():  # NaN is not, either
        return None
    # Some shapes have more parameters than covariances; along those nothing changes.
    informed = values > _NO_INFORMATION
    root = objective.root
    covariance_root = vectors[: root.shape[1], informed] / np.sqrt(values[informed])
    return root @ square_root(covariance_root @ covariance_root.T)


def _hessian(objective):
    """Second derivatives of an objective at its start, without those in variances of zero."""
    # There the slope in the root of a variance is 0 for every population.
    factor = objective.shape.parameters(objective.start.factor / objective.scale)
    point, exact = objective.point(factor), objective.exact_hessian()
    first, n = objective.root.shape[1], len(point)
    # Errors of large standard deviations grow with them.
    units, sizes = np.ones(n), objective.shape.row_scales(factor)
    units[first : first + len(sizes)] = np.where(sizes > 0, np.maximum(sizes, 1.0), 0.0)
    hessian = np.zeros((n, n))
    hessian[: len(exact), : len(exact)] = exact
    if n > len(exact):  # a dispersion, in which there are differences alone
        step = _DIFFERENCE * np.eye(n)[-1]
        row = (objective(point + step)[1] - objective(point - step)[1]) / (2 * _DIFFERENCE)
        hessian[-1] = hessian[:, -1] = row
    informative = units > 0
    return (units[:, None] * hessian * units)[np.ix_(informative, informative)]


class _Descent(NamedTuple):
    """End of quasi-Newton steps."""

    point: np.ndarray
    value: float
    slope: np.ndarray  # there
    metric: np.ndarray  # (k, k), root of an inverse Hessian, as far as the steps have learnt it
    n_iter: int


def _lowest_point(objective, start, metric, max_iter, tol):
    """Last _Descent of quasi-Newton steps from a start, and whether the objective is flat there."""
    metric = np.eye(len(start)) if metric is None else metric
    value, slope = objective(start)
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
    """Distance to the minimum in standard errors, by the curvature at the end of a descent."""
    # It is the square root of slope' inverse(Hessian) slope, by conjugate gradients in the metric
    # of the descent: one step if that metric is right, each from a slope nearby.
    root = descent.metric
    residual = root.T @ descent.slope
    direction, square, remaining = residual, 0.0, residual @ residual
    for _ in range(min(_CURVATURES, len(residual))):
        if remaining == 0:
            break
        step = _NEARBY / np.sqrt(direction @ direction)
        _, slope = objective(descent.point + step * (root @ direction))
        product = root.T @ (slope - descent.slope) / step
        curvature = direction @ product
        if not curvature > 0:  # no minimum along this direction: the slope in the metric is left
            return float(max(np.sqrt(square), np.abs(root.T @ descent.slope).max()))
        share = remaining / curvature
        square += share * remaining
        residual = residual - share * product
        if residual @ residual < _SMALL_REST * remaining:
            break
        direction = residual + (residual @ residual / remaining) * direction
        remaining = residual @ residual
    return float(np.sqrt(square))


def _descend(objective, begin, max_iter, tol):
    """The _Descent from the end of another one, which had more iterations left than it took."""
    start, metric = begin.point, begin.metric
    # L-BFGS takes a first step of length 1. In steps of this unit that is a Newton step.
    length = np.linalg.norm(metric.T @ begin.slope) or 1.0
    metric = length * metric

    def measured(step):
        if not step.any():  # the search evaluates its start, as we did for the length
            return begin.value, metric.T @ begin.slope
        value, slope = objective(start + metric @ step)
        return value, metric.T @ slope

    result = minimize(
        measured,
        np.zeros(len(start)),
        jac=True,
        method="L-BFGS-B",
        callback=lambda point: note_iteration(),
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
        # The search has slopes in its own steps; a metric of lower rank takes none elsewhere.
        np.linalg.lstsq(metric.T, result.jac)[0],
        metric @ root / length,
        begin.n_iter + int(result.nit),
    )
