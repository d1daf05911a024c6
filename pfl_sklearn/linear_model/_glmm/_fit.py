"""Logistic regressions of clients under a Gaussian prior: from a table of rows to estimates."""

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from pfl_sklearn._parallel import map_batches
from pfl_sklearn.linear_model._algebra import estimable, factor_of, inverse_root, square_root
from pfl_sklearn.linear_model._glmm._guards import (
    AWAY,
    HELD,
    centred_columns,
    check_known_spread,
    check_spread_identified,
    check_weights,
    is_unmixed,
    predictor_spread,
    separating_columns,
    weak_slopes,
    weak_spread,
)
from pfl_sklearn.linear_model._glmm._likelihood import (
    CLOSE_ENOUGH,
    MarginalLikelihood,
    RowStack,
    find_mode,
    form_of,
    population_predictors,
    stack_rows,
    start_state,
    whiten_information,
    whitened_rows,
)
from pfl_sklearn.linear_model._glmm._quadrature import (
    DENSE,
    evaluate_quadrature,
    information_at_zero,
    turned_stack,
)
from pfl_sklearn.linear_model._glmm._search import (
    Maximum,
    WeakPriors,
    fit_pooled,
    maximize_marginal,
    natural_scale,
)
from pfl_sklearn.linear_model._posterior import CovariancePosterior, RowPosterior
from pfl_sklearn.linear_model._table import check_squares, is_centred, uncentred, varying_columns

_POINTS, _MANY_POINTS = 15, 61  # of the quadrature, where one coefficient varies
_WIDE = 3.0  # logits, from which we take many points; from AWAY we take DENSE ones
_FAR = 10.0  # times the spread between clients, at which the likelihood must have fallen
_FALL = 1.92  # nats, to the end of a 95 % interval
_NOT_ZERO = 1e-2  # factor, in natural units, from which a second search may start
_NEAR = 1e-2  # nats per standard error, near enough for a search that quadrature goes on with
_NEARER = 0.3  # start of the second search, in natural units, so that it skips no maximum


class LogitOptions(NamedTuple):
    """Parameters of a fit besides those of the prior."""

    penalty: float  # on the population's slopes, per standard deviation of a column
    max_iter: int
    tol: float
    n_jobs: int | None = None
    quadrature: str | int = "auto"  # points, "laplace", or as many as go with the model


class LogitEstimates(NamedTuple):
    """Fitted population and clients. c is 1 for two classes, else K; random columns come first."""

    population: np.ndarray  # (c, p)
    population_covariance: np.ndarray  # (c p, c p)
    estimable: np.ndarray  # (c, p), bool: whether the data identify the population coefficient
    coefficients: np.ndarray  # (m, c, p)
    posterior: RowPosterior | CovariancePosterior  # of the c p coefficients
    prior: object  # with the fitted values
    covariance: np.ndarray  # (q, q)
    log_likelihood: float
    n_iter: int
    converged: bool
    modes_found: bool  # for all clients
    separating: tuple  # positions of the columns that do most to separate the classes, if any do
    unmixed: bool  # no client has rows of two classes
    runaway: bool  # the differences between clients have no credible maximum
    centre: np.ndarray | None = None  # (p,), at which the covariance has its shape


class _ClientModes(NamedTuple):
    """All clients, at given population values."""

    deviations: np.ndarray  # (m, a, q)
    rows: np.ndarray  # (m, k, a p), whitened: their Gram matrix is the information on B
    log_likelihood: float
    found: bool


def fit_logistic(table, prior, outcome, options):
    """Fit population and clients by maximum marginal likelihood, in Laplace's approximation.

    Parameters
    ----------
    table : Table
        With labels 0 to K - 1 as `y`.
    prior : GaussianPrior
        We estimate the parameters that it leaves None.
    outcome : BinaryLogit or SoftmaxLogit
    options : LogitOptions

    Returns
    -------
    LogitEstimates
    """
    q = table.n_random
    _check_fitted_to_several(prior)
    check_squares(table)
    check_weights(table.weights)
    mean, covariance = coded_mean(prior, outcome, q), prior.known_covariance(q)
    if covariance is None:
        if table.n_clients == 1:
            free = table.intercept is not None
            return _fit_single(*_centred(table, None, free), prior, outcome, options)
        check_spread_identified(table, prior)
    elif np.isinf(covariance).any():
        raise ValueError(
            "covariance of GaussianPrior must be finite for PersonalizedLogisticRegression; got "
            f"{prior.covariance!r}. Alone, many clients have no finite estimate."
        )
    else:
        check_known_spread(table, square_root(covariance))
    shaped = covariance is None and is_centred(table, prior)
    table, centre = _centred(table, mean, shaped)
    if mean is not None and shaped:
        mean = mean.copy()
        mean[:, table.intercept] += mean @ centre[:q]
    stacks = stack_rows(table.columns, table.y, table.weights, table.codes, table.n_clients)
    found, weak = _population(table, stacks, outcome, prior, mean, covariance, options)
    summary = _client_modes(table, stacks, outcome, found, options.n_jobs)
    spread = predictor_spread(table.columns[:, :q], table.weights, found.factor)
    n_points = n_points_of(options.quadrature, outcome, found.factor, spread)
    if n_points > 1:
        criterion = _criterion(
            table, stacks, outcome, found.factor, options, n_points, found.states
        )
        summary = summary._replace(log_likelihood=criterion(found.population, found.factor)[0])
    told = _estimable(summary.rows, outcome, weak, table.intercept, centre)
    error = _population_error(summary.rows, outcome.n_outputs, weak)
    return _logit_estimates(
        outcome,
        prior,
        *_uncentred_fit(found, summary, *error, table.intercept, centre),
        told,
        weak,
        centre if shaped else None,
    )


def _check_fitted_to_several(prior):
    """Raise ValueError for the `prior_` of a fit of one client, which has no covariance."""
    if prior.covariance is not None and np.isnan(np.asarray(prior.covariance, dtype=float)).any():
        raise ValueError(
            "covariance of GaussianPrior holds NaN; expected numbers or None. A fit of a single "
            "client leaves NaN there, as it cannot estimate the spread between clients. Set the "
            "covariance to None to estimate it."
        )


def _centred(table, mean, random_too):
    """The table with centred columns, and the centres (p,).

    A free intercept of the population absorbs the means of fixed columns. With `random_too` random
    columns are centred, whose intercept varies.
    """
    p, q = table.columns.shape[1], table.n_random
    free = table.intercept is not None and (mean is None or table.intercept >= q)
    some = slice(0 if random_too else q, p if free else q)
    if some.start >= some.stop:
        return table, np.zeros(p)
    return centred_columns(table, some)


def _uncentred_fit(found, summary, error, root, intercept, centre):
    """Fit for the columns before centring: Maximum, _ClientModes, population error and its root.

    The error is a covariance (a p, a p); its root (a p, rank) is None if nothing was centred.
    """
    if not centre.any():
        return found, summary, error, None
    a, p, q = *found.population.shape, summary.deviations.shape[2]
    rows = summary.rows.reshape(*summary.rows.shape[:2], a, p)
    rows = (rows + rows[..., intercept, None] * centre).reshape(summary.rows.shape)
    deviations, factor = summary.deviations, found.factor
    if centre[:q].any():
        deviations = uncentred(deviations, intercept, centre[:q])
        factor = uncentred(factor.T, intercept, centre[:q]).T
    half = uncentred(error.reshape(a * p, a, p), intercept, centre).reshape(a * p, a * p)
    error = uncentred(half.T.reshape(a * p, a, p), intercept, centre).reshape(a * p, a * p)
    root = uncentred(root.T.reshape(-1, a, p), intercept, centre).reshape(-1, a * p).T
    population = uncentred(found.population, intercept, centre)
    return (
        found._replace(population=population, factor=factor),
        summary._replace(deviations=deviations, rows=rows),
        error,
        root,
    )


def coded_mean(prior, outcome, q):
    """The prior's mean as population coefficients (a, q), or None.

    For K > 2 classes the prior gives one number, or K q numbers class by class.
    """
    coding = outcome.coding
    mean = prior.known_mean(len(coding) * q)
    return None if mean is None else coding.T @ mean.reshape(len(coding), q)


def _fit_single(table, centre, prior, outcome, options):
    """Maximum of a single client's own likelihood; the spread between clients is unknown."""
    q, p = table.n_random, table.columns.shape[1]
    offset = np.zeros((len(table.y), outcome.n_outputs))
    pooled, _, separating = _pooled(table, outcome, offset, 0, options.penalty)
    back = uncentred(np.eye(p), table.intercept, centre).T
    coding = np.kron(outcome.coding, back)
    root = coding @ pooled.root
    error, population = root @ root.T, outcome.coding @ pooled.coefficients @ back.T
    spread = np.tile(np.append(np.full(q, np.inf), np.zeros(p - q)), len(population))
    covariance = np.full((q, q), np.nan)
    return LogitEstimates(
        population,
        error,
        estimable(pooled.normal, coding).reshape(population.shape),
        population[None],
        CovariancePosterior(error[None], spread),
        prior.with_values(population[:, :q].ravel(), covariance),
        covariance,
        pooled.log_likelihood,
        pooled.n_iter,
        pooled.converged,
        True,
        separating,
        False,
        False,
    )


def _pooled(table, outcome, offset, first, penalty):
    """Fit without differences between clients, and the prior precision of its slopes.

    Last come the positions of the columns that need more than the `penalty` asked for.
    """
    columns, intercept = table.columns[:, first:], table.intercept
    at = None if intercept is None or intercept < first else intercept - first
    asked = np.zeros(columns.shape[1])
    if penalty and len(asked):
        asked = weak_slopes(columns, table.weights, at, penalty)
    pooled = fit_pooled(columns, table, outcome, offset, asked)
    if not pooled.separated:
        return pooled, asked, ()
    slopes = np.maximum(weak_slopes(columns, table.weights, at), asked)
    separating = separating_columns(columns, table.weights, pooled.coefficients)
    return fit_pooled(columns, table, outcome, offset, slopes), slopes, separating


def _population(table, stacks, outcome, prior, mean, covariance, options):
    """Population and factor, given or estimated, and the weak priors that this needed."""
    q, p, a = table.n_random, table.columns.shape[1], outcome.n_outputs
    first = 0 if mean is None else q
    population = np.zeros((a, p))
    population[:, :first] = mean if first else 0.0
    if first == p and covariance is not None:
        return Maximum(population, _root(covariance), 1, True), WeakPriors(np.zeros(0), np.zeros(q))
    offset = population_predictors(table.columns, population)
    pooled, slopes, separating = _pooled(table, outcome, offset, first, options.penalty)
    population[:, first:] = pooled.coefficients
    family = scale = None
    spread = np.zeros(q)
    if covariance is None:
        random = table.columns[:, :q]
        spread = weak_spread(random, table.weights) if is_unmixed(table) else spread
        common = prior.covariance_type in ("spherical", "low_rank")
        scale = natural_scale(random, pooled.weight, table.n_clients, common)
        varies = varying_columns(table, prior)
        varies = varies if varies.any() else None  # columns of zeros alone: any variance will do
        family = factor_of(prior.covariance_type, q, prior.rank, varies)
    factor = _root(covariance) if family is None else scale[:, None] * family.matrix(family.start)
    start = Maximum(population, factor, 0, False)
    begun = _information_at(start, table, stacks, outcome, first, options.n_jobs)
    root, _ = inverse_root(begun + np.diag(np.tile(slopes, a)))
    size = partial(predictor_spread, table.columns[:, :q], table.weights)
    search = _Search(
        partial(_criterion, table, stacks, outcome, factor, options),
        n_points_of(options.quadrature, outcome, factor),
        lambda factor: n_points_of(options.quadrature, outcome, factor, size(factor)),
        start,
        root,
        family,
        scale,
        options,
    )
    weak = WeakPriors(slopes, spread, separating=separating)
    found = search(weak)
    if family is None or spread.any():
        return found, weak
    if size(found.factor) <= AWAY or search.falls_beyond(found, weak):
        return found, weak
    precision = weak_spread(table.columns[:, :q], table.weights, tight=True)
    tight = weak._replace(spread=precision, runaway=True)
    held = search(tight, _NEARER)
    away = size(held.factor) < HELD * size(found.factor)
    return (held, tight) if away else (found, weak)


class _Search(NamedTuple):
    """Search for the population and the factor: by Laplace's approximation, then by quadrature."""

    make: Any  # the MarginalLikelihood of a number of points
    n_points: int
    n_points_at: Any  # that number at a factor
    start: Maximum
    root: np.ndarray
    family: Any
    scale: np.ndarray | None
    options: LogitOptions

    def __call__(self, weak, begin=1.0):
        if self.n_points == 1:
            return self._maximum(1, self.start, weak, self.options.tol, begin)
        found = self._maximum(1, self.start, weak, max(self.options.tol, _NEAR), begin)
        n_points, needed = 1, self.n_points
        while needed > n_points:
            n_points, found = needed, self._refined(needed, found, weak)
            needed = self.n_points_at(found.factor)
        return found

    def falls_beyond(self, found, weak):
        """Whether the integrated likelihood falls where clients differ much more than found.

        Laplace's approximation is no judge of that: with few rows it may rise without end, or to a
        false maximum far away.
        """
        if self.n_points == 1:
            return False
        far = found._replace(factor=_FAR * found.factor)
        scaled = found.population.copy()  # it grows with the spread where the likelihood is flat
        scaled[:, scaled.shape[1] - len(weak.slopes) :] *= _FAR
        least = self._value_at(found, weak) - _FALL
        starts = (far._replace(population=scaled), far)
        return all(self._value_at(start, weak) < least for start in starts)

    def _value_at(self, start, weak):
        """Integrated likelihood, less penalties, of the best population at a start's factor."""
        start, options = start._replace(metric=None), self.options
        criterion = self.make(DENSE, start.states)
        return maximize_marginal(
            criterion, start, self.root, weak, options.max_iter, options.tol
        ).value

    def _refined(self, n_points, found, weak):
        begin = 1.0
        if self.family is not None:
            unit = self.scale[:, None] * self.family.matrix(self.family.start)
            at = np.abs(found.factor).max() / np.abs(unit).max()
            begin = at if at > _NOT_ZERO else _NEARER
        refined = self._maximum(n_points, found, weak, self.options.tol, begin)
        return refined._replace(n_iter=found.n_iter + refined.n_iter)

    def _maximum(self, n_points, start, weak, tol, begin):
        return maximize_marginal(
            self.make(n_points, start.states), start, self.root, weak, self.options.max_iter, tol,
            self.family, self.scale, begin,
        )  # fmt: skip


def _information_at(start, table, stacks, outcome, first, n_jobs):
    """Information (a f, a f) on the free coefficients, near the modes of a starting point."""
    if _has_one_effect(outcome, start.factor):
        turned = [turned_stack(stack) for stack in stacks]
        return information_at_zero(turned, start.population, start.factor)[first:, first:]
    begun = _client_modes(table, stacks, outcome, start, n_jobs)
    return _information(begun.rows, outcome.n_outputs, first)


def _criterion(table, stacks, outcome, factor, options, n_points, states=None):
    """MarginalLikelihood for factors as `factor`, with so many points per client."""
    evaluate = None
    if _has_one_effect(outcome, factor):
        stacks = [turned_stack(stack) for stack in stacks]
        evaluate = partial(evaluate_quadrature, n_points=n_points)
    return MarginalLikelihood(stacks, outcome, table.n_clients, options.n_jobs, evaluate, states)


def _has_one_effect(outcome, factor):
    return outcome.n_outputs == 1 and factor.shape[1] == 1


def n_points_of(quadrature, outcome, factor, spread=0.0):
    """Points of the quadrature over a client's effect; 1 is Laplace's approximation.

    `spread` is the standard deviation between clients of the predictors.
    """
    one = _has_one_effect(outcome, factor)
    if quadrature == "laplace":
        return 1
    if quadrature == "auto":
        if not one:
            return 1
        return _POINTS if spread <= _WIDE else _MANY_POINTS if spread <= AWAY else DENSE
    if quadrature > 1 and not one:
        raise ValueError(
            f"quadrature={quadrature} needs two classes and one coefficient that varies; got "
            f"{outcome.n_outputs + 1} classes and {factor.shape[1]} varying coefficients. Take "
            "'auto' or 'laplace', or let one coefficient vary (random)."
        )
    return quadrature


def _root(covariance):
    """Factor (q, r) of a covariance, r >= 1."""
    variances = np.diag(covariance)
    if np.array_equal(covariance, np.diag(variances)):
        kept = np.flatnonzero(variances)
        return np.eye(len(variances))[:, kept if len(kept) else [0]] * np.sqrt(
            variances[kept if len(kept) else [0]]
        )
    root = square_root(covariance)
    kept = root.any(axis=0)
    return root[:, kept]


def _information(rows, a, first):
    """Information (a f, a f) on the free coefficients, from whitened rows (m, k, a p)."""
    m, k, p = *rows.shape[:2], rows.shape[2] // a
    free = rows.reshape(-1, a, p)[:, :, first:].reshape(m * k, a * (p - first))
    return free.T @ free


def _held_information(rows, a, weak):
    """Information on the free coefficients, with the precision of the weak prior on the slopes."""
    first = rows.shape[2] // a - len(weak.slopes)
    return _information(rows, a, first) + np.diag(np.tile(weak.slopes, a))


def _population_error(rows, a, weak):
    """Covariance (a p, a p) of the population coefficients, 0 where known, and its root."""
    p = rows.shape[2] // a
    first = p - len(weak.slopes)
    error, root = np.zeros((a, p, a, p)), np.zeros((a, p, 0))
    if first < p:
        free, _ = inverse_root(_held_information(rows, a, weak))
        error[:, first:, :, first:] = (free @ free.T).reshape(a, p - first, a, p - first)
        root = np.zeros((a, p, free.shape[1]))
        root[:, first:] = free.reshape(a, p - first, -1)
    return error.reshape(a * p, a * p), root.reshape(a * p, -1)


def _estimable(rows, outcome, weak, intercept, centre):
    """Whether the data identify the coefficients (c, p) of the columns before centring."""
    a, p, c = outcome.n_outputs, len(centre), len(outcome.coding)
    first = p - len(weak.slopes)
    back = uncentred(np.eye(p), intercept, centre).T[:, first:]
    told = estimable(_held_information(rows, a, weak), np.kron(outcome.coding, back))
    return told.reshape(c, p)


def _client_modes(table, stacks, outcome, found, n_jobs):
    """Modes, criterion and information of all clients at given population values."""
    a, factor = outcome.n_outputs, found.factor
    function = partial(_stack_modes, outcome=outcome, population=found.population, factor=factor)
    states = found.states or [start_state(stack, factor, a) for stack in stacks]
    batches = [(*stack, state) for stack, state in zip(stacks, states, strict=True)]
    parts = map_batches(function, batches, n_jobs)
    m, q = table.n_clients, table.n_random
    deviations = np.empty((m, a, q))
    longest = max(part[1].shape[1] for part in parts)
    rows = np.zeros((m, longest, a * table.columns.shape[1]))
    for stack, (moved, whitening, _, _) in zip(stacks, parts, strict=True):
        deviations[stack.clients] = moved
        rows[stack.clients, : whitening.shape[1]] = whitened_rows(whitening, stack.x)
    value = float(sum(part[2] for part in parts))
    return _ClientModes(deviations, rows, value, all(part[3] for part in parts))


def _stack_modes(clients, x, y, w, state, *, outcome, population, factor):
    """Deviations (b, a, q), whitening, summed criterion, and whether the search found all modes."""
    stack = RowStack(clients, x, y, w)
    form = form_of(x, factor)
    offset = population_predictors(x, population)
    mode = find_mode(form, outcome, offset, stack, state, CLOSE_ENOUGH)
    deviations = (factor @ form.effects(mode.state)).transpose(0, 2, 1)
    whitening, log_det = whiten_information(form, outcome.roots(mode.predictors, w), x)
    return deviations, whitening, float(np.sum(mode.value) - 0.5 * log_det), bool(mode.found.all())


def _logit_estimates(outcome, prior, found, summary, error, root, told, weak, centre):
    """Estimates in the coding of the classes."""
    (m, a, q), p, coding = summary.deviations.shape, found.population.shape[1], outcome.coding
    coded = np.kron(coding, np.eye(p))
    error = coded @ error @ coded.T
    root = None if root is None else coded @ root
    covariance = found.factor @ found.factor.T
    population = coding @ found.population
    coefficients = np.tile(population, (m, 1, 1))
    coefficients[:, :, :q] += coding @ summary.deviations
    rows = summary.rows if a == 1 else summary.rows @ coded.T
    return LogitEstimates(
        population,
        error,
        told,
        coefficients,
        _scaled_posterior(rows, np.kron(coding @ coding.T, _embedded(covariance, p)), error, root),
        prior.with_values(population[:, :q].ravel(), covariance),
        covariance,
        summary.log_likelihood,
        found.n_iter,
        found.converged,
        summary.found,
        tuple(p - len(weak.slopes) + k for k in weak.separating),
        weak.spread.any() and not weak.runaway,
        weak.runaway,
        centre,
    )


def _embedded(covariance, p):
    """Covariance (p, p) of all coefficients between clients; the fixed ones do not vary."""
    between = np.zeros((p, p))
    between[: len(covariance), : len(covariance)] = covariance
    return between


def _scaled_posterior(rows, between, error, root):
    """Posterior of the clients, with all columns scaled to the population's standard errors."""
    scale = np.sqrt(np.diag(error))
    if not (scale > 0).all():
        scale = np.ones(len(scale))
    outer = np.multiply.outer(scale, scale)
    scaled = rows if (scale == 1).all() else rows * scale
    root = None if root is None else root / scale[:, None]
    return RowPosterior(scaled, between / outer, 1.0, error / outer, scale, error_root=root)
