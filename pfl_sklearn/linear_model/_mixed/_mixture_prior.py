"""Linear regressions under mixture priors: AdaMix for regression, and the model of FedEM."""

import warnings

import numpy as np
from scipy.optimize import minimize_scalar
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state

from pfl_sklearn.linear_model._algebra import square_root
from pfl_sklearn.linear_model._mixed import _regression_em as em
from pfl_sklearn.linear_model._mixed._profile import Settings, client_deviations
from pfl_sklearn.linear_model._mixed._reduction import reduce_table
from pfl_sklearn.linear_model._mixed._variance_search import search_ratio
from pfl_sklearn.linear_model._posterior import CovariancePosterior
from pfl_sklearn.linear_model._table import Estimates, centred, uncentred

_START_STEPS = 8
_START_TOLERANCE = 1e-3
_START_RATIOS = 0.01, 10.0  # beyond them the likelihood is flat, and steps do not return


def fit_mixture_prior(table, prior, options):
    """Population, components and clients by maximum marginal likelihood.

    Parameters
    ----------
    table : Table
    prior : GaussianMixturePrior or DiscretePrior
        Either all parameters are known, or we estimate all of them.
    options : Options

    Returns
    -------
    Estimates
    """
    covariance_type = getattr(prior, "covariance_type", "zero")
    if prior.is_known:
        return _fit_known_mixture(table, prior, covariance_type, options)
    _check_unknown(table, prior, options.noise_variance)
    table, *around = centred(table, None)
    common = covariance_type == "spherical"
    reduced = reduce_table(table, spectral=True, common_scale=common, n_jobs=options.n_jobs)
    model = em.MixtureModel(covariance_type, options.noise_variance)
    space, pooled = _start_space(reduced, options)
    if covariance_type in ("diag", "full"):
        reduced = reduce_table(table, spectral=False, scale=reduced.scale, n_jobs=options.n_jobs)
    sizes = [prior.n_components]
    if prior.n_components == "bic":
        sizes = range(1, min(prior.max_components, table.n_clients) + 1)
    best = None
    for k in sizes:
        fit = _best_fit(reduced, model, space, pooled, k, prior.n_init, options)
        size = model.n_parameters(k, table.n_random, len(reduced.remainder) - 1)
        bic = size * np.log(table.n_clients) - 2 * fit[2]
        if best is None or bic < best[0]:
            best = bic, k, fit
        elif k >= best[1] + 2:
            break
    return _mixture_estimates(table, reduced, _components_by_weight(best[2]), prior, *around)


def _check_unknown(table, prior, noise):
    """Raise ValueError if the data do not identify the unknown parameters."""
    parameters = prior.get_params(deep=False)
    names = ("means", "points", "covariances", "weights")
    given = [name for name in names if parameters.get(name) is not None]
    if given:
        raise ValueError(
            f"{type(prior).__name__} gives {', '.join(given)} only; PersonalizedLinearRegression "
            "needs all parameters of a mixture or none."
        )
    k = 1 if prior.n_components == "bic" else prior.n_components
    if table.n_clients < max(k, 2):
        raise ValueError(
            f"n_components={prior.n_components!r} of {type(prior).__name__} needs at least "
            f"{max(k, 2)} clients; got {table.n_clients}."
        )
    if noise is None and len(table.y) == table.n_clients:
        raise ValueError(
            f"each of the {table.n_clients} clients has one row, so the data cannot separate the "
            "noise variance from the variance between clients; give noise_variance."
        )


def _start_space(reduced, options):
    """Clients' deviations (m, q) under a single Gaussian, where starts look for groups; the fit."""
    found = search_ratio(reduced, Settings(False, 0, options.noise_variance), 50, 1e-4)
    deviations = client_deviations(reduced, found.whitened, found.point, found.ratio)
    return deviations, found


def _best_fit(reduced, model, space, pooled, k, n_init, options):
    """Run a few steps from each start, and the best of them to the end."""
    rng = check_random_state(0)
    tried = []
    for attempt in range(n_init if k > 1 else 1):
        start = _grouped_start(reduced, model, space, pooled, k, attempt, rng)
        tried.append(em.run_regression_em(reduced, start, model, _START_STEPS, _START_TOLERANCE))
    best = max(tried, key=lambda fit: fit[2])
    return em.run_regression_em(reduced, best[0], model, options.max_iter, options.tol)


def _grouped_start(reduced, model, space, pooled, k, attempt, rng):
    """One EM step from groups of clients in the leading directions of their deviations."""
    labels = np.zeros(len(space), dtype=int)
    if k > 1:
        n_directions = min(space.shape[1], k - 1 + attempt // 2)
        vectors = np.linalg.eigh(space.T @ space)[1][:, -n_directions:]
        with warnings.catch_warnings():  # if clients are identical, any groups will do
            warnings.simplefilter("ignore", ConvergenceWarning)
            means = KMeans(k, n_init=1, max_iter=50, random_state=rng)
            labels = means.fit_predict(space @ vectors)
    q, f = reduced.n_random, len(reduced.remainder) - 1
    shares = np.full((len(space), k), 0.1 / k) + 0.9 * (labels[:, None] == np.arange(k))
    shares /= shares.sum(axis=1, keepdims=True)
    factor = np.sqrt(np.clip(pooled.ratio[0, 0], *_START_RATIOS))
    if model.covariance_type == "zero":
        factor = 0.0
    if model.covariance_type in ("diag", "full"):
        factor = factor * np.eye(q)
    state = em.MixtureState(
        np.zeros((k, q)), np.zeros(f), [factor] * k, pooled.point.noise, np.ones(k)
    )
    parts = [em.whiten_component(reduced, factor)] * k
    return em.regression_m_step(reduced, parts, state, shares, model)


def _components_by_weight(fit):
    """Order components by weight, ties by their first coefficient."""
    state, shares, value, n_iter, done = fit
    order = np.lexsort((state.means[:, 0], -state.weights))
    state = state._replace(
        means=state.means[order],
        factors=[state.factors[k] for k in order],
        weights=state.weights[order],
    )
    return state, shares[:, order], value, n_iter, done


def _fit_known_mixture(table, prior, covariance_type, options):
    """Clients, fixed coefficients and an unknown noise variance, under a known mixture."""
    means, covariances, weights = prior.known_mixture(table.n_random)
    table, *around = centred(table, weights @ means)
    means = means - around[0][: table.n_random]
    reduced = reduce_table(table, spectral=False, common_scale=False, n_jobs=options.n_jobs)
    scale = reduced.scale[: table.n_random]
    roots = [square_root(matrix) for matrix in covariances / np.multiply.outer(scale, scale)]

    def at(noise):
        factors = [root / np.sqrt(noise) for root in roots]
        fixed = np.zeros(len(reduced.remainder) - 1)
        state = em.MixtureState(means / scale, fixed, factors, noise, weights)
        return _solve_fixed(reduced, state, options)

    noise = options.noise_variance
    if noise is None:
        centre = np.log(reduced.sum_of_squares / reduced.n_rows)
        bounds = (centre - 25.0, centre + 2.0)
        found = minimize_scalar(
            lambda log_noise: -at(np.exp(log_noise))[2],
            bounds=bounds,
            method="bounded",
            options={"xatol": 1e-8},
        )
        noise = float(np.exp(found.x))
    return _mixture_estimates(table, reduced, at(noise), prior, *around)


def _solve_fixed(reduced, state, options):
    """EM for the fixed coefficients only."""
    parts = [em.whiten_component(reduced, factor) for factor in state.factors]
    shares, value = em.regression_e_step(reduced, parts, state)
    if not len(state.fixed):
        return state, shares, value, 1, True
    for n_iter in range(1, options.max_iter + 1):
        state = em.solve_fixed(reduced, parts, state, shares)
        shares, new = em.regression_e_step(reduced, parts, state)
        gained, value = new - value, new
        if gained < options.tol * reduced.n_clients:
            return state, shares, value, n_iter, True
    return state, shares, value, options.max_iter, False


def _mixture_estimates(table, reduced, fit, prior, offset, centre):
    """Estimates in the units of the data."""
    state, shares, value, n_iter, done = fit
    q, p, scale = table.n_random, table.columns.shape[1], reduced.scale
    ratios = np.array([_square(factor, q) for factor in state.factors])
    centres, spreads = _component_posteriors(reduced, state, ratios)
    average, posterior = _mixed_posterior(centres, spreads, shares, state.noise)
    squares = np.multiply.outer(scale, scale)
    fixed = np.tile(state.fixed, (table.n_clients, 1))
    coefficients = uncentred(np.hstack([average, fixed]) * scale, table.intercept, centre) + offset
    covariances = np.zeros((table.n_clients, p, p))
    covariances[:, :q, :q] = posterior * squares[:q, :q]
    fixed = np.tile(state.fixed, (len(ratios), 1))
    means = uncentred(np.hstack([state.means, fixed]) * scale, table.intercept, centre) + offset
    fitted = prior
    if not prior.is_known:
        covariances_of = state.noise * squares[:q, :q] * ratios
        fitted = prior.with_mixture(means[:, :q], covariances_of, state.weights)
    mean, covariance = fitted.moments()
    return Estimates(
        np.concatenate([mean, coefficients[0, q:]]),
        np.full((p, p), np.nan),
        coefficients,
        CovariancePosterior(covariances, np.append(np.diag(covariance), np.zeros(p - q))),
        fitted,
        covariance,
        state.noise,
        value,
        n_iter,
        done,
        shares,
    )


def _component_posteriors(reduced, state, ratios):
    """Posterior means (k, m, q) and covariances over the noise variance (k, m, q, q)."""
    k, m, q = len(ratios), reduced.n_clients, reduced.n_random
    centres = np.tile(state.means[:, None, :], (1, m, 1))
    spreads = np.tile(ratios[:, None], (1, m, 1, 1))
    for j in range(k):
        part = em.whiten_component(reduced, state.factors[j])
        residuals = em.client_squares(reduced, part, state, j)[0]
        for stack, rows, residual in zip(reduced.stacks, part.rows, residuals, strict=True):
            pulled = rows[:, :, :q] @ ratios[j]
            centres[j, stack.clients] += (residual[:, None, :] @ pulled)[:, 0]
            spreads[j, stack.clients] -= pulled.transpose(0, 2, 1) @ pulled
    return centres, spreads


def _mixed_posterior(centres, spreads, shares, noise):
    """Means (m, q) and covariances (m, q, q) over the components."""
    average = np.einsum("mk,kmq->mq", shares, centres)
    covariances = np.zeros(spreads.shape[1:])
    for share, centre, spread in zip(shares.T, centres, spreads, strict=True):
        apart = centre - average
        total = noise * spread + apart[:, :, None] * apart[:, None, :]
        covariances += share[:, None, None] * total
    return average, covariances


def _square(factor, q):
    """Covariance (q, q) of a factor, a number or a matrix."""
    return factor @ factor.T if np.ndim(factor) else factor**2 * np.eye(q)
