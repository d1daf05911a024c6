"""Logistic regressions of clients under a Gaussian prior: from a table of rows to estimates."""

from functools import partial
from typing import NamedTuple

import numpy as np

from pfl_sklearn._parallel import map_batches
from pfl_sklearn.linear_model._covariance import factor_of
from pfl_sklearn.linear_model._laplace_likelihood import (
    CLOSE_ENOUGH,
    LaplaceCriterion,
    Stack,
    find_mode,
    form_of,
    population_predictors,
    stack_rows,
    start_state,
)
from pfl_sklearn.linear_model._laplace_search import (
    Found,
    Weak,
    fit_pooled,
    inverse_root,
    natural_scale,
    search,
    weak_slopes,
    weak_spread,
)
from pfl_sklearn.linear_model._posterior import CovariancePosterior, RowPosterior


class LogitEstimates(NamedTuple):
    """Fitted population and clients; c is 1 for two classes, else K. Random columns come first."""

    population: np.ndarray  # (c, p)
    population_covariance: np.ndarray  # (c p, c p)
    coefficients: np.ndarray  # (m, c, p)
    posterior: RowPosterior | CovariancePosterior  # of the c p coefficients
    prior: object  # with the fitted values
    covariance: np.ndarray  # (q, q)
    log_likelihood: float
    n_iter: int
    converged: bool
    separated: bool  # by a combination of the columns
    unmixed: bool  # no client has rows of two classes


class _Summary(NamedTuple):
    """All clients at given population values."""

    deviations: np.ndarray  # (m, a, q)
    rows: np.ndarray  # (m, k, a p), whitened: their squares are the information on B
    log_likelihood: float
    found: bool


def fit_logistic(table, prior, outcome, max_iter, tol, n_jobs=None):
    """Population and clients by maximizing the Laplace-approximate marginal likelihood.

    Parameters
    ----------
    table : Table
        With labels 0 to K - 1 as `y`.
    prior : GaussianPrior
        What it leaves None is estimated.
    outcome : BinaryLogit or SoftmaxLogit
    max_iter : int
    tol : float
    n_jobs : int or None

    Returns
    -------
    LogitEstimates
    """
    q = table.n_random
    mean, covariance = known_mean(prior, outcome, q), prior.known_covariance(q)
    if covariance is None:
        if table.n_clients == 1:
            return _fit_single(table, prior, outcome)
        check_identified(table, prior.covariance_type)
    elif np.isinf(covariance).any():
        raise ValueError(
            "covariance of GaussianPrior must be finite for PersonalizedLogisticRegression; got "
            f"{prior.covariance!r}. Many clients have no finite estimate of their own."
        )
    stacks = stack_rows(table.columns, table.y, table.weights, table.codes, table.n_clients)
    found, weak = _population(
        table, stacks, outcome, prior, mean, covariance, max_iter, tol, n_jobs
    )
    summary = _summarize(table, stacks, outcome, found, n_jobs)
    found = found._replace(converged=found.converged and summary.found)
    return _estimates(table, outcome, prior, found, summary, weak)


def known_mean(prior, outcome, q):
    """The prior's mean as population coefficients (a, q), or None.

    For K > 2 classes it is a number, or K q numbers, class by class.
    """
    coding = outcome.coding
    mean = prior.known_mean(len(coding) * q)
    return None if mean is None else coding.T @ mean.reshape(len(coding), q)


def check_identified(table, covariance_type):
    """Raise ValueError if the data cannot tell the covariance between clients."""
    m, q = table.n_clients, table.n_random
    if len(table.y) == m:
        raise ValueError(
            f"every one of the {m} clients has one row, so the variance between clients cannot be "
            "told from chance; give a prior with a known covariance."
        )
    if covariance_type == "spherical":
        return
    if covariance_type == "full" and m < q:
        raise ValueError(
            f"covariance_type='full' needs at least as many clients as random coefficients; got "
            f"{m} clients and {q} coefficients. Use 'diag' or 'spherical', or fewer in random."
        )
    constant = np.ptp(table.columns[:, :q], axis=0) == 0
    has_intercept = table.intercept is not None and table.intercept < q
    for k in np.flatnonzero(constant):
        if k == table.intercept or (not has_intercept and table.columns[0, k] != 0):
            continue
        raise ValueError(
            f"the column {table.names[k]!r} is constant over all rows, so its coefficient cannot "
            "vary by client beside the intercept's; leave it out of random or of X."
        )


def _fit_single(table, prior, outcome):
    """One client: its own maximum of the likelihood, and nothing on the spread between clients."""
    q, p = table.n_random, table.columns.shape[1]
    offset = np.zeros((len(table.y), outcome.n_outputs))
    pooled, slopes = _pooled(table, outcome, offset, 0)
    coding = np.kron(outcome.coding, np.eye(p))
    root = coding @ pooled.root
    error, population = root @ root.T, outcome.coding @ pooled.coefficients
    spread = np.tile(np.append(np.full(q, np.inf), np.zeros(p - q)), len(population))
    covariance = np.full((q, q), np.nan)
    return LogitEstimates(
        population,
        error,
        population[None],
        CovariancePosterior(error[None], spread),
        prior.with_values(population[:, :q].ravel(), covariance),
        covariance,
        pooled.log_likelihood,
        pooled.n_iter,
        pooled.converged,
        slopes.any(),
        False,
    )


def _pooled(table, outcome, offset, first):
    """Fit without differences between clients, and the precision that its slopes needed."""
    columns = table.columns[:, first:]
    none = np.zeros(columns.shape[1])
    pooled = fit_pooled(columns, table, outcome, offset, none)
    if not pooled.separated:
        return pooled, none
    intercept = table.intercept
    at = None if intercept is None or intercept < first else intercept - first
    slopes = weak_slopes(columns, table.weights, at)
    return fit_pooled(columns, table, outcome, offset, slopes), slopes


def _population(table, stacks, outcome, prior, mean, covariance, max_iter, tol, n_jobs):
    """Population and factor that were given or found, and the weak priors that this needed."""
    q, p, a = table.n_random, table.columns.shape[1], outcome.n_outputs
    first = 0 if mean is None else q
    population = np.zeros((a, p))
    population[:, :first] = mean if first else 0.0
    if first == p and covariance is not None:
        return Found(population, _root(covariance), 1, True), Weak(np.zeros(0), np.zeros(q))
    offset = population_predictors(table.columns, population)
    pooled, slopes = _pooled(table, outcome, offset, first)
    population[:, first:] = pooled.coefficients
    family = scale = None
    spread = np.zeros(q)
    if covariance is None:
        random = table.columns[:, :q]
        spread = weak_spread(random, table.weights) if is_unmixed(table) else spread
        common = prior.covariance_type in ("spherical", "low_rank")
        scale = natural_scale(random, pooled.weight, table.n_clients, common)
        family = factor_of(prior.covariance_type, q, prior.rank)
    factor = _root(covariance) if family is None else scale[:, None] * family.matrix(family.start)
    start = Found(population, factor, 0, False)
    begun = _summarize(table, stacks, outcome, start, n_jobs)
    root = inverse_root(_information(begun.rows, a, first) + np.diag(np.tile(slopes, a)))
    criterion = LaplaceCriterion(stacks, outcome, table.n_clients, n_jobs)
    weak = Weak(slopes, spread)
    return search(criterion, start, root, weak, max_iter, tol, family, scale), weak


def is_unmixed(table):
    """Whether no client has rows of two classes."""
    some = np.empty(table.n_clients, dtype=table.y.dtype)
    some[table.codes] = table.y
    return bool(np.all(some[table.codes] == table.y))


def _root(covariance):
    """Factor (q, r) of a covariance, r >= 1."""
    variances = np.diag(covariance)
    if np.array_equal(covariance, np.diag(variances)):
        kept = np.flatnonzero(variances)
        return np.eye(len(variances))[:, kept if len(kept) else [0]] * np.sqrt(
            variances[kept if len(kept) else [0]]
        )
    values, vectors = np.linalg.eigh(covariance)
    kept = values > 1e-14 * values[-1]
    return vectors[:, kept] * np.sqrt(values[kept])


def _information(rows, a, first):
    """Information (a f, a f) on the free coefficients, from whitened rows (m, k, a p)."""
    p = rows.shape[2] // a
    free = rows.reshape(-1, a, p)[:, :, first:].reshape(-1, a * (p - first))
    return free.T @ free


def _summarize(table, stacks, outcome, found, n_jobs):
    """Modes, criterion and information of all clients at given population values."""
    a, factor = outcome.n_outputs, found.factor
    function = partial(
        _summarize_stack, outcome=outcome, population=found.population, factor=factor
    )
    batches = [(*stack, start_state(stack, factor, a)) for stack in stacks]
    parts = map_batches(function, batches, n_jobs)
    m, q = table.n_clients, table.n_random
    deviations = np.empty((m, a, q))
    longest = max(part[1].shape[1] for part in parts)
    rows = np.zeros((m, longest, a * table.columns.shape[1]))
    for stack, (moved, whitening, _, _) in zip(stacks, parts, strict=True):
        deviations[stack.clients] = moved
        rows[stack.clients, : whitening.shape[1]] = whitened_rows(whitening, stack.x)
    value = float(sum(part[2] for part in parts))
    return _Summary(deviations, rows, value, all(part[3] for part in parts))


def _summarize_stack(clients, x, y, w, state, *, outcome, population, factor):
    """Deviations (b, a, q), whitening, summed criterion, and whether all modes were found."""
    stack = Stack(clients, x, y, w)
    form = form_of(x, factor)
    offset = population_predictors(x, population)
    mode = find_mode(form, outcome, offset, stack, state, CLOSE_ENOUGH)
    deviations = (factor @ form.effects(mode.state)).transpose(0, 2, 1)
    whitening, log_det = whiten(form, outcome.roots(mode.predictors, w), x)
    return deviations, whitening, float(np.sum(mode.value) - 0.5 * log_det), bool(mode.found.all())


def whitened_rows(whitening, x):
    """Rows T (b, k, a p) with T'T = X' (W^-1 + Z L L' Z')^-1 X, from columns x (b, n, p)."""
    if whitening.ndim == 3:
        return whitening
    b, k, a, n = whitening.shape
    return (whitening.reshape(b, k * a, n) @ x).reshape(b, k, -1)


def whiten(form, roots, x):
    """What `whitened_rows` takes, and the summed log det H, for roots (b, n, a, c) of W.

    Many effects: a small matrix (b, k, a, n), to be multiplied by x where memory for the product
    is at hand. Few: the rows themselves.
    """
    features = form.features
    b, n, a, c = roots.shape
    r, p = features.shape[2], x.shape[2]
    if n * c < r * a:
        system = np.einsum("bjac,bjk,bkad->bjckd", roots, form.gram(), roots)
        lower = np.linalg.cholesky(system.reshape(b, n * c, n * c) + np.eye(n * c))
        log_det = 2 * np.log(np.einsum("bkk->bk", lower)).sum()
        inverse = invert_lower(lower).reshape(b, n * c, n, c)
        return np.einsum("bmjc,bjac->bmaj", inverse, roots), log_det
    across = roots.transpose(0, 1, 3, 2)[..., None]
    stacked = np.zeros((b, n * c + r * a, (r + p) * a))
    stacked[:, : n * c, : r * a] = (across * features[:, :, None, None, :]).reshape(b, n * c, -1)
    stacked[:, : n * c, r * a :] = (across * x[:, :, None, None, :]).reshape(b, n * c, -1)
    stacked[:, n * c :, : r * a] = np.eye(r * a)
    triangle = np.linalg.qr(stacked, mode="r")
    log_det = 2 * np.log(np.abs(np.einsum("bkk->bk", triangle[:, : r * a, : r * a]))).sum()
    return triangle[:, r * a :, r * a :], log_det


def invert_lower(lower):
    """Inverses (b, n, n) of lower triangles: all clients at a time, since n is small."""
    rows = np.ascontiguousarray(lower.transpose(1, 2, 0))
    inverse = np.zeros_like(rows)
    for j, row in enumerate(rows):
        inverse[j, j] = 1 / row[j]
        if j:
            inverse[j, :j] = -np.sum(row[:j, None] * inverse[:j, :j], axis=0) * inverse[j, j]
    return np.ascontiguousarray(inverse.transpose(2, 0, 1))


def _estimates(table, outcome, prior, found, summary, weak):
    """Everything in the coding of the classes."""
    (m, a, q), p, coding = summary.deviations.shape, table.columns.shape[1], outcome.coding
    first = p - len(weak.slopes)
    error = np.zeros((a, p, a, p))
    if first < p:
        root = inverse_root(_information(summary.rows, a, first) + np.diag(np.tile(weak.slopes, a)))
        error[:, first:, :, first:] = (root @ root.T).reshape(a, p - first, a, p - first)
    coded = np.kron(coding, np.eye(p))
    error = coded @ error.reshape(a * p, a * p) @ coded.T
    covariance = found.factor @ found.factor.T
    population = coding @ found.population
    coefficients = np.tile(population, (m, 1, 1))
    coefficients[:, :, :q] += coding @ summary.deviations
    rows = summary.rows if a == 1 else summary.rows @ coded.T
    return LogitEstimates(
        population,
        error,
        coefficients,
        _posterior(rows, np.kron(coding @ coding.T, _embedded(covariance, p)), error),
        prior.with_values(population[:, :q].ravel(), covariance),
        covariance,
        summary.log_likelihood,
        found.n_iter,
        found.converged,
        weak.slopes.any(),
        weak.spread.any(),
    )


def _embedded(covariance, p):
    """Covariance (p, p) of all coefficients; the fixed ones do not vary."""
    between = np.zeros((p, p))
    between[: len(covariance), : len(covariance)] = covariance
    return between


def _posterior(rows, between, error):
    """Posterior of the clients, in columns of a common scale where the population has an error."""
    scale = np.sqrt(np.diag(error))
    if not (scale > 0).all():
        scale = np.ones(len(scale))
    outer = np.multiply.outer(scale, scale)
    scaled = rows if (scale == 1).all() else rows * scale
    return RowPosterior(scaled, between / outer, 1.0, error / outer, scale)
