"""Posteriors of clients' effects by brute force: a fine grid around the mode."""

import numpy as np
from scipy.optimize import minimize
from scipy.special import gammaln, logsumexp
from scipy.stats import nbinom

_REACH, _STEP = {1: 16.0, 2: 13.0, 3: 11.0}, {1: 0.1, 2: 0.25, 3: 0.5}


def row_log_likelihood(model, y):
    """Function from predictors (k, n) or logits (k, n, K) of rows to log-likelihoods (k, n)."""
    if hasattr(model, "classes_"):
        labels = np.searchsorted(model.classes_, y)
        if len(model.classes_) == 2:
            return lambda u: -np.logaddexp(0, np.where(labels == 1, -u, u))

        def categorical(u):
            chosen = np.take_along_axis(u, np.broadcast_to(labels, u.shape[:2])[..., None], axis=2)
            return chosen[..., 0] - logsumexp(u, axis=2)

        return categorical
    if model.dispersion_ > 0:
        size = 1 / model.dispersion_
        return lambda u: nbinom.logpmf(y, size, size / (size + np.exp(u)))
    return lambda u: y * u - np.exp(np.minimum(u, 600.0)) - gammaln(y + 1)


def exact_posterior(log_likelihood, d):
    """Effects (k, d) on a grid and their weights (k,), for a standard normal prior.

    ``log_likelihood`` takes effects (k, d) to log-likelihoods (k,).
    """

    def minus(u):
        return float(u @ u / 2 - log_likelihood(u[None])[0])

    mode = minimize(minus, np.zeros(d), method="Nelder-Mead", options={"xatol": 1e-6}).x
    eye, step = np.eye(d), 1e-3
    hessian = np.array(
        [
            [
                sum(s * t * minus(mode + step * (s * a + t * b)) for s in (-1, 1) for t in (-1, 1))
                for b in eye
            ]
            for a in eye
        ]
    ) / (4 * step**2)
    axis = np.arange(-_REACH[d], _REACH[d] + 1e-9, _STEP[d])
    grid = np.stack(np.meshgrid(*[axis] * d, indexing="ij"), axis=-1).reshape(-1, d)
    effects = mode + grid @ np.linalg.inv(np.linalg.cholesky(hessian))
    logs = log_likelihood(effects) - np.sum(effects**2, axis=1) / 2
    weights = np.exp(logs - logs.max())
    return effects, weights / weights.sum()


def client_posterior(model, X, y, offset=0.0, weights=1.0):
    """Coefficients (k, p), or (k, K, p), of a client with these rows, and their weights (k,).

    They are those at the estimates of the model.
    """
    random, p = model._design.random, len(model._design.names)
    covariance = model._between[np.ix_(random, random)]
    values, vectors = np.linalg.eigh(covariance)
    kept = values > 1e-12 * values.max()
    factor = np.zeros((p, kept.sum()))
    factor[random] = vectors[:, kept] * np.sqrt(values[kept])
    coding = model._row_family.coding
    population = model._design.vectors(model.population_coef_, model.population_intercept_)
    population = population.reshape(-1, p)
    design, likelihood = model._design.matrix(X), row_log_likelihood(model, y)
    d = factor.shape[1] * coding.shape[1]

    def coefficients(effects):
        per_contrast = effects.reshape(len(effects), factor.shape[1], -1)
        return population + np.einsum("pr,kra,ca->kcp", factor, per_contrast, coding)

    def log_likelihood(effects):
        predictors = np.einsum("kcp,np->knc", coefficients(effects), design)
        if predictors.shape[2] == 1:
            predictors = predictors[..., 0] + offset
        return np.sum(weights * likelihood(predictors), axis=1)

    effects, shares = exact_posterior(log_likelihood, d)
    found = coefficients(effects)
    return (found[:, 0] if found.shape[1] == 1 else found), shares
