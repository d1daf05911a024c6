"""Searches for the population and the between-client covariance of logistic regressions."""

from typing import NamedTuple

import numpy as np
from scipy.optimize import LbfgsInvHessProduct, minimize

from pfl_sklearn.linear_model._algebra import inverse_root, snapped_to_zero

_MAX_POOLED_STEPS = 100  # separated data take about 30
_POOLED_DECREMENT = 1e-9  # nats; the step with this squared Newton decrement is the last
_OBJECTIVE_ROUNDING = 1e-13  # relative decrease of an objective that counts as rounding
_SHORTEST_STEP = 1e-9  # share of Newton's step; a shorter one changes nothing
_SEPARATED = 1e-6  # share of the information at 0 below which a direction counts as separated
_ZERO_SPREAD = 1e-8  # squared parameter of a factor, in natural units, that counts as zero
_SNAPPING_LOSS = 1e-9  # nats per nat of the criterion: rounding of its sum over clients
_FLAT_ENOUGH = 1e-3  # nats per standard error: rounding may end a search there


class Pooled(NamedTuple):
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
    separating: tuple = ()  # positions of the free columns that do most to separate the classes


class Maximum(NamedTuple):
    """Maximum of a criterion."""

    population: np.ndarray  # (a, p)
    factor: np.ndarray  # (q, r)
    n_iter: int
    converged: bool
    states: list | None = None  # of the criterion's clients, there or near there
    metric: np.ndarray | None = None  # (k, k), root of an inverse Hessian of the criterion
    value: float | None = None  # of the criterion, less penalties


def fit_pooled(columns, table, outcome, offset, precision):
    """Coefficients of `columns` (n, f) that all clients share, by damped Newton steps.

    `offset` (n, a) holds the part of the other coefficients; `precision` (f,) is that of a normal
    prior. On separated data the steps go on towards infinity and lose the information along some
    direction; that is how we recognize them.
    """
    shape = outcome.n_outputs, columns.shape[1]
    w = np.ones(len(columns)) if table.weights is None else table.weights

    def evaluate(values):
        terms = outcome.terms(offset + columns @ values.T, table.y, w)
        return values, terms, terms.value.sum() - 0.5 * np.sum(precision * values**2)

    # At zero every row has its largest information, so nothing is lost yet.
    values, terms, objective = evaluate(np.zeros(shape))
    first_root, last, n_iter = np.zeros((0, 0)), False, 0
    while not last and n_iter < _MAX_POOLED_STEPS:
        n_iter += 1
        normal = information(columns, terms.weight) + np.diag(np.tile(precision, shape[0]))
        root, _ = inverse_root(normal)
        first_root = root if n_iter == 1 else first_root
        slope = root.T @ (terms.score.T @ columns - precision * values).ravel()
        last = slope @ slope < _POOLED_DECREMENT
        step = (root @ slope).reshape(shape)
        # The longest of the steps 1, 1/2, 1/4, ... that lowers the objective by rounding at most.
        least, size = objective - _OBJECTIVE_ROUNDING * (1 + abs(objective)), 1.0
        moved = evaluate(values + step)
        while not (moved[2] >= least or size < _SHORTEST_STEP):
            size /= 2
            moved = evaluate(values + size * step)
        values, terms, objective = moved
    # The information that is left of that at zero, along every direction.
    left = np.linalg.eigvalsh(first_root.T @ normal @ first_root)
    return Pooled(
        values,
        normal,
        root,
        terms.weight,
        float(terms.value.sum()),
        bool(left.size and left[0] < _SEPARATED),
        n_iter,
        bool(last),
    )


def information(columns, weight):
    """Sum over rows of weight (n, a, a) (x) x x', as a matrix (a f, a f)."""
    a, f = weight.shape[-1], columns.shape[1]
    result = np.empty((a, f, a, f))
    for k in range(a):
        for c in range(k + 1):
            block = columns.T @ (weight[:, k, c, None] * columns)
            result[k, :, c, :] = result[c, :, k, :] = block
    return result.reshape(a * f, a * f)


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


def maximize_marginal(
    criterion, start, root, weak, max_iter, tol, family=None, scale=None, begin=1.0
):
    """Maximize a criterion in the free population coefficients and the factor.

    Parameters
    ----------
    criterion : MarginalLikelihood
    start : Maximum
        Its population (a, p) has the free coefficients last. Without `family` the search keeps its
        factor.
    root : ndarray of shape (a f, rank)
        Root of the inverse information of the f free coefficients. The search moves along it.
    weak : WeakPriors
    max_iter : int
    tol : float
        Largest gradient at the end, in nats per standard error.
    family : Factor or None
        Shape of the factor.
    scale : ndarray of shape (q,)
        Natural units of the factor's rows.
    begin : float
        Start of the search for the factor, in these units.

    Returns
    -------
    Maximum
    """
    rank, n_known = root.shape[1], start.population.shape[1] - len(weak.slopes)
    # In natural units prior and rows weigh alike, so a client's information on the log of a
    # standard deviation is 1/2. This unit is about a standard error then, as those of `root` are.
    unit = np.sqrt(2 / (criterion.n_clients * len(start.population)))

    def unpack(parameters):
        population = start.population.copy()
        population[:, n_known:] += (root @ parameters[:rank]).reshape(len(population), -1)
        if family is None:
            return population, start.factor
        return population, scale[:, None] * family.matrix(parameters[rank:] * unit)

    def objective(parameters):
        population, factor = unpack(parameters)
        value, by_population, by_factor = criterion(population, factor)
        free, pull = population[:, n_known:], weak.spread[:, None] * factor
        slope = [root.T @ (by_population[:, n_known:] - weak.slopes * free).ravel()]
        if family is not None:
            slope.append(unit * family.pull_back(scale[:, None] * (by_factor - pull)))
        penalty = 0.5 * (np.sum(weak.slopes * free**2) + np.vdot(pull, factor))
        return penalty - value, -np.concatenate(slope)

    factor_start = np.zeros(0) if family is None else begin * family.start / unit
    first_point = np.concatenate([np.zeros(rank), factor_start])
    result, metric, length = _search(objective, first_point, start.metric, max_iter, tol)
    end = first_point + metric @ result.x
    # A variance of zero is reached in the limit; exactly zero it costs no more than rounding.
    of_factor = np.arange(len(end)) >= rank
    small = of_factor & ((end * unit) ** 2 < _ZERO_SPREAD)
    parameters = snapped_to_zero(
        end, small, objective, lambda best: _SNAPPING_LOSS * (1 + abs(best))
    )
    # Rounding may end the line search where no step improves; it has converged if it is flat there.
    steep = np.abs(result.jac).max() > max(tol, _FLAT_ENOUGH) * length
    population, factor = unpack(parameters)
    return Maximum(
        population,
        factor,
        int(result.nit),
        bool(result.success or not steep) and criterion.modes_found,
        criterion.states,
        metric @ _root_of(result.hess_inv, length) / length,
        -float(result.fun),
    )


def _search(objective, first_point, metric, max_iter, tol):
    """L-BFGS from a point, in steps along a metric (k, k) scaled to a Newton step.

    Returns the result of the search, the scaled metric, and the scale.
    """
    first_value, slope = objective(first_point)
    metric = np.eye(len(slope)) if metric is None else metric
    # L-BFGS takes a first step of length 1. In steps of this unit that is a Newton step.
    length = np.linalg.norm(metric.T @ slope) or 1.0
    metric = length * metric

    def measured(step):
        if not step.any():  # the search evaluates its start, as we did for the length
            return first_value, metric.T @ slope
        value, gradient = objective(first_point + metric @ step)
        return value, metric.T @ gradient

    result = minimize(
        measured,
        np.zeros(len(slope)),
        jac=True,
        method="L-BFGS-B",
        # The slope alone ends the search: a small gain is no sign of a maximum where it is flat.
        options={"maxiter": max_iter, "maxcor": 30, "ftol": 1e-16, "gtol": tol * length},
    )
    return result, metric, length


def _root_of(hess_inv, length):
    """Root (k, k) of the inverse Hessian of a search, for steps of unit length."""
    inverse = LbfgsInvHessProduct(hess_inv.sk * length, hess_inv.yk / length).todense()
    values, vectors = np.linalg.eigh(inverse)
    return vectors * np.sqrt(values)
