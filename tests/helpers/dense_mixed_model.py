"""Linear mixed models with the covariance of all rows written out: slow, and nothing to get wrong.

Columns of a design X (n, p) are in any order; `random` holds the positions of the q columns whose
coefficients vary by client, with the covariance S (q, q) between clients.
"""

from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize
from scipy.special import logsumexp
from scipy.stats import multivariate_normal

from pfl_sklearn._clients import EncodedClients
from pfl_sklearn.linear_model._mixed._normal_rows._profiled_likelihood import reduce_table
from pfl_sklearn.linear_model._mixed._reduction import OriginalRows, rotate

SHAPES = ("spherical", "diag", "full", "low_rank")


class Problem(NamedTuple):
    """Rows, and what is known: `mean` of the random coefficients (q,), or None."""

    X: np.ndarray  # (n, p)
    y: np.ndarray  # (n,)
    codes: np.ndarray  # (n,)
    random: np.ndarray  # (q,)
    weights: np.ndarray  # (n,)
    mean: np.ndarray | None = None

    @property
    def free(self):
        """Positions of the columns whose population coefficient is unknown."""
        every = np.arange(self.X.shape[1])
        return every if self.mean is None else np.setdiff1d(every, self.random)

    @property
    def target(self):
        if self.mean is None:
            return self.y
        return self.y - self.X[:, self.random] @ self.mean


def reduce_rows(columns, y, codes, n_clients, n_random, *, weights=None, **params):
    """Reduction of rows whose first `n_random` columns vary by client."""
    return reduce_table(rotated(columns, y, codes, n_clients, n_random, weights), **params)


def rotated(columns, y, codes, n_clients, n_random, weights=None):
    """Rotated table of such rows, without an intercept."""
    p = columns.shape[1]
    original = OriginalRows(columns, slice(0, p), [-1], y, weights, p)
    facts = n_random, None, [f"x{k}" for k in range(p)], False
    return rotate(original, EncodedClients(np.arange(n_clients), codes), facts)


class Fit(NamedTuple):
    """Generalized least squares at given variances."""

    population: np.ndarray  # (p,)
    population_covariance: np.ndarray  # (p, p)
    inverse: np.ndarray  # (n, n), of the covariance of the rows
    residuals: np.ndarray  # (n,)
    criterion: float  # minus twice the (restricted) log-likelihood


def draw_problem(rng, *, sizes=None, n_features=2, random="all", weighted=False, known=False):
    """Rows of clients of unequal size in random order, with an intercept; `random` are positions.

    One client has a feature that is always zero.
    """
    sizes = rng.integers(1, 8, 7) if sizes is None else np.asarray(sizes)
    codes = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    X = np.column_stack([np.ones(len(codes)), rng.normal(size=(len(codes), n_features))])
    X[codes == 1, -1] = 0.0
    p = X.shape[1]
    random = np.arange(p) if isinstance(random, str) else np.asarray(random)
    theta = np.tile(rng.normal(size=p), (len(sizes), 1))
    theta[:, random] += rng.normal(size=(len(sizes), len(random))) * np.exp(rng.normal(size=1))
    y = np.einsum("np,np->n", X, theta[codes]) + np.exp(rng.normal()) * rng.normal(size=len(codes))
    weights = rng.uniform(0.3, 3, len(codes)) if weighted else np.ones(len(codes))
    mean = theta[:, random].mean(axis=0) + 0.3 if known else None
    return Problem(X, y, codes, random, weights, mean)


def draw_covariance(rng, covariance_type, q):
    """Some covariance (q, q) of a shape."""
    size = n_parameters(covariance_type, q)
    return covariance_of(covariance_type, rng.normal(scale=0.7, size=size), q)


def rows_covariance(problem, S, noise):
    """Covariance (n, n) of the rows."""
    Z = problem.X[:, problem.random]
    same = problem.codes[:, None] == problem.codes
    return same * (Z @ S @ Z.T) + np.diag(noise / problem.weights)


def solve(problem, S, noise, restricted):
    """Fit at the variances S (q, q) and noise; Moore-Penrose where X has no full rank."""
    V = rows_covariance(problem, S, noise)
    inverse = np.linalg.inv(V)
    X, y, p = problem.X[:, problem.free], problem.target, problem.X.shape[1]
    normal = X.T @ inverse @ X
    pseudo = np.linalg.pinv(normal, rcond=1e-11, hermitian=True) if normal.size else normal
    beta = pseudo @ (X.T @ inverse @ y)
    residuals = y - X @ beta
    rows, log_det = len(y), np.linalg.slogdet(V)[1]
    if restricted and normal.size:
        values = np.linalg.eigvalsh(normal)
        values = values[values > 1e-11 * values.max()]
        rows, log_det = rows - len(values), log_det + np.log(values).sum()
    population, error = np.zeros(p), np.zeros((p, p))
    if problem.mean is not None:
        population[problem.random] = problem.mean
    population[problem.free] = beta
    error[np.ix_(problem.free, problem.free)] = pseudo
    value = rows * np.log(2 * np.pi) + log_det + residuals @ inverse @ residuals
    return Fit(population, error, inverse, residuals, float(value))


def predict(problem, fit, S, x, client):
    """Mean and variance of x' theta for a row x (p,) of the design and one client (-1: a new one).

    The best linear unbiased prediction and its error, with that of the population coefficients.
    """
    random = problem.random
    shared = (problem.codes == client) * (problem.X[:, random] @ S @ x[random])
    mean = x @ fit.population + shared @ fit.inverse @ fit.residuals
    moved = x - problem.X.T @ fit.inverse @ shared
    own = x[random] @ S @ x[random] - shared @ fit.inverse @ shared
    return mean, own + moved @ fit.population_covariance @ moved


def coefficients(problem, fit, S):
    """Best linear unbiased predictions (m, p) of all clients' coefficients."""
    clients, units = range(problem.codes.max() + 1), np.eye(problem.X.shape[1])
    return np.array([[predict(problem, fit, S, x, k)[0] for x in units] for k in clients])


def profiled(problem, S, restricted):
    """Criterion with the noise variance at its best for the *ratio* S (q, q) to it."""
    unit = solve(problem, S, 1.0, restricted)
    square = unit.residuals @ unit.inverse @ unit.residuals
    rank = np.linalg.matrix_rank(problem.X[:, problem.free]) if restricted else 0
    rows = len(problem.y) - rank
    return unit.criterion - square + rows * (1 + np.log(square / rows))


def n_parameters(covariance_type, q):
    """Free parameters of a covariance; "low_rank" is of rank 1."""
    return {"spherical": 1, "diag": q, "full": q * (q + 1) // 2, "low_rank": q + 1}[covariance_type]


def covariance_of(covariance_type, parameters, q):
    """Covariance (q, q) of a shape from unbounded parameters."""
    if covariance_type in ("spherical", "diag"):
        return np.diag(np.exp(2 * np.broadcast_to(parameters, q)))
    if covariance_type == "full":
        lower = np.zeros((q, q))
        lower[np.tril_indices(q)] = parameters
        return lower @ lower.T
    return np.outer(parameters[:-1], parameters[:-1]) + np.exp(2 * parameters[-1]) * np.eye(q)


def brute_force(problem, covariance_type, restricted, noise=None, n_starts=4, seed=0):
    """Smallest criterion found by simplex searches from several starts."""
    q = len(problem.random)
    size = n_parameters(covariance_type, q)

    def objective(parameters):
        ratio = covariance_of(covariance_type, np.clip(parameters, -12, 12), q)
        if noise is None:
            return profiled(problem, ratio, restricted)
        return solve(problem, noise * ratio, noise, restricted).criterion

    rng = np.random.default_rng(seed)
    starts = [np.full(size, -10.0), np.full(size, 0.5)]
    starts += [rng.normal(scale=2, size=size) for _ in range(n_starts - 2)]
    options = {"xatol": 1e-6, "fatol": 1e-9, "maxfev": 300 * size}
    return min(minimize(objective, x, method="Nelder-Mead", options=options).fun for x in starts)


class Mixed(NamedTuple):
    """A mixture of mixed models at given parameters."""

    log_likelihood: float
    responsibilities: np.ndarray  # (m, k)
    means: np.ndarray  # (m, q), of the random coefficients
    covariances: np.ndarray  # (m, q, q)


def mixture(problem, means, covariances, weights, noise, fixed):
    """Densities and posteriors under a known mixture, client by client.

    `fixed` (p - q,) are the coefficients of the columns that are not random.
    """
    m, k, q = problem.codes.max() + 1, len(weights), len(problem.random)
    joint, centres, spreads = np.empty((m, k)), np.empty((m, k, q)), np.empty((m, k, q, q))
    others = np.setdiff1d(np.arange(problem.X.shape[1]), problem.random)
    for i in range(m):
        own = problem.codes == i
        Z = problem.X[own][:, problem.random]
        y = problem.y[own] - problem.X[own][:, others] @ fixed
        for j in range(k):
            V = Z @ covariances[j] @ Z.T + np.diag(noise / problem.weights[own])
            joint[i, j] = np.log(weights[j]) + multivariate_normal(Z @ means[j], V).logpdf(y)
            gain = covariances[j] @ Z.T @ np.linalg.inv(V)
            centres[i, j] = means[j] + gain @ (y - Z @ means[j])
            spreads[i, j] = covariances[j] - gain @ Z @ covariances[j]
    total = logsumexp(joint, axis=1, keepdims=True)
    shares = np.exp(joint - total)
    mean = np.einsum("mk,mkq->mq", shares, centres)
    apart = centres - mean[:, None]
    spread = np.einsum("mk,mkqr->mqr", shares, spreads)
    spread += np.einsum("mk,mkq,mkr->mqr", shares, apart, apart)
    return Mixed(float(total.sum()), shares, mean, spread)
