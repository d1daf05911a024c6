"""Linear regressions under mixture priors: AdaMix for regression, and the model of FedEM."""

import warnings
from collections.abc import Iterable

import numpy as np
from scipy.optimize import minimize_scalar
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state

from pfl_sklearn.linear_model._algebra import square_root
from pfl_sklearn.linear_model._mixed._identification import check_noise_identified
from pfl_sklearn.linear_model._mixed._normal_rows import _regression_em as em
from pfl_sklearn.linear_model._mixed._normal_rows._profiled_likelihood import (
    ProfiledLikelihood,
    reduce_table,
)
from pfl_sklearn.linear_model._mixed._normal_rows._variance_search import search_ratio
from pfl_sklearn.linear_model._mixed._posterior import CovariancePosterior
from pfl_sklearn.linear_model._mixed._reduction import MixedModelEstimates, centred, uncentred

_TRIAL_STEPS, _TRIAL_TOLERANCE = 8, 1e-3  # enough to rank the starts, most of which lead nowhere
_START_RATIOS = 0.01, 10.0  # beyond them the likelihood is flat, and steps do not return
# Unknown noise variance under known components: in nats around the log mean square of the targets,
# which exceeds it unless the components are far off.
_NOISE_RANGE = -25.0, 2.0


def fit_mixture_prior(table, prior, options):
    """Population, components and clients by maximum marginal likelihood.

    Parameters
    ----------
    table : RegressionTable
    prior : GaussianMixturePrior or DiscretePrior
        Either all parameters are known, or we estimate all of them.
    options : FitParameters

    Returns
    -------
    MixedModelEstimates
    """
    covariance_type = getattr(prior, "covariance_type", "zero")
    if prior.is_known:
        return _fit_known_mixture(table, prior, covariance_type, options)
    _check_unknown(table, prior, options.noise_variance)
    table, *around = centred(table, None)
    common = covariance_type == "spherical"
    reduced = reduce_table(table, spectral=True, common_scale=common)
    model = em.MixtureModel(covariance_type, options.noise_variance)
    space, pooled = _start_space(reduced, options)
    if covariance_type in ("diag", "full"):
        reduced = reduce_table(table, spectral=False, scale=reduced.scale)
    sizes: Iterable[int] = [prior.n_components]
    if prior.n_components == "bic":
        sizes = range(1, min(prior.max_components, table.n_clients) + 1)
    best, best_bic, best_size = None, np.inf, 0
    for k in sizes:
        fit = _best_fit(reduced, model, space, pooled, k, prior.n_init, options)
        # Sizes differ by the prior's parameters alone.
        size = prior._shape().n_parameters(k, table.n_random)
        # Clients, not rows, are what the components are learned from.
        bic = size * np.log(table.n_clients) - 2 * fit.log_likelihood
        if best is None or bic < best_bic:
            best, best_bic, best_size = fit, bic, k
        elif k >= best_size + 2:  # one size too many may be worse where the next one is better
            break
    return _mixture_estimates(table, reduced, _components_by_weight(best), prior, *around)


def _check_unknown(table, prior, noise):
    """Raise ValueError if the data do not identify the unknown parameters."""
    parameters = prior.get_params(deep=False)
    names = ("means", "points", "covariances", "weights")
    known = [name for name in names if parameters.get(name) is not None]
    if known:
        raise ValueError(
            f"{type(prior).__name__} gives {', '.join(known)} only; PersonalizedLinearRegression "
            "needs all parameters of a mixture or none."
        )
    k = 1 if prior.n_components == "bic" else prior.n_components
    if table.n_clients < max(k, 2):
        raise ValueError(
            f"n_components={prior.n_components!r} of {type(prior).__name__} needs at least "
            f"{max(k, 2)} clients; got {table.n_clients}."
        )
    check_noise_identified(table, noise)


def _start_space(reduced, options):
    """Clients' deviations (m, q) under a single Gaussian, where starts look for groups; the fit.

    Shrunken deviations, as the clients' own coefficients would be noise where rows are few.
    """
    likelihood = ProfiledLikelihood(reduced, False, 0, options.noise_variance)
    pooled = search_ratio(likelihood, 50, 1e-4)
    return reduced.deviations(pooled.whitened.rows, pooled.residuals, pooled.ratio), pooled


def _best_fit(reduced, model, space, pooled, k, n_init, options):
    """Run a few steps from each start, and the best of them to the end."""
    rng = check_random_state(0)
    tried = []
    for attempt in range(n_init if k > 1 else 1):
        start = _grouped_start(reduced, model, space, pooled, k, attempt, rng)
        tried.append(em.run_regression_em(reduced, start, model, _TRIAL_STEPS, _TRIAL_TOLERANCE))
    best = max(tried, key=lambda fit: fit.log_likelihood)
    return em.run_regression_em(reduced, best.state, model, options.max_iter, options.tol)


def _grouped_start(reduced, model, space, pooled, k, attempt, rng):
    """One EM step from groups of clients in the leading directions of their deviations."""
    from sklearn.cluster import KMeans  # 45 ms that only mixtures need

    labels = np.zeros(len(space), dtype=int)
    if k > 1:
        # k centres span k - 1 directions; where noise hides one of them, later starts add some.
        n_directions = min(space.shape[1], k - 1 + attempt // 2)
        vectors = np.linalg.eigh(space.T @ space)[1][:, -n_directions:]
        with warnings.catch_warnings():  # if clients are identical, any groups will do
            warnings.simplefilter("ignore", ConvergenceWarning)
            means = KMeans(k, n_init=1, max_iter=50, random_state=rng)
            labels = means.fit_predict(space @ vectors)
    q, f = reduced.n_random, len(reduced.remainder) - 1
    # A tenth of every client is spread over all groups, or a wrong group could not lose anybody.
    shares = np.full((len(space), k), 0.1 / k) + 0.9 * (labels[:, None] == np.arange(k))
    shares /= shares.sum(axis=1, keepdims=True)
    factor = np.sqrt(np.clip(pooled.ratio[0, 0], *_START_RATIOS))
    if model.covariance_type == "zero":
        factor = 0.0
    if model.covariance_type in ("diag", "full"):
        factor = factor * np.eye(q)
    state = em.MixtureState(np.zeros((k, q)), np.zeros(f), [factor] * k, pooled.noise, np.ones(k))
    components = [em.whiten_component(reduced, factor)] * k
    return em.regression_m_step(reduced, components, state, shares, model)


def _components_by_weight(fit):
    """Order components by weight, ties by their first coefficient, whatever the start was."""
    state = fit.state
    order = np.lexsort((state.means[:, 0], -state.weights))
    state = state._replace(
        means=state.means[order],
        factors=[state.factors[k] for k in order],
        weights=state.weights[order],
    )
    return fit._replace(state=state, shares=fit.shares[:, order])


def _fit_known_mixture(table, prior, covariance_type, options):
    """Clients, fixed coefficients and an unknown noise variance, under a known mixture."""
    means, covariances, weights = prior.known_mixture(table.n_random)
    table, *around = centred(table, weights @ means)
    means = means - around[0][: table.n_random]
    reduced = reduce_table(table, spectral=False, common_scale=False)
    scale = reduced.scale[: table.n_random]
    roots = [square_root(matrix) for matrix in covariances / np.multiply.outer(scale, scale)]

    def at(noise):
        factors = [root / np.sqrt(noise) for root in roots]
        fixed = np.zeros(len(reduced.remainder) - 1)
        state = em.MixtureState(means / scale, fixed, factors, noise, weights)
        model = em.MixtureModel("known", noise)
        max_iter = options.max_iter if len(fixed) else 0
        return em.run_regression_em(reduced, state, model, max_iter, options.tol)

    noise = options.noise_variance
    if noise is None:
        best = minimize_scalar(
            lambda log_noise: -at(np.exp(log_noise)).log_likelihood,
            bounds=np.log(reduced.mean_square) + _NOISE_RANGE,
            method="bounded",
            options={"xatol": 1e-8},
        )
        noise = float(np.exp(best.x))
    return _mixture_estimates(table, reduced, at(noise), prior, *around)


def _mixture_estimates(table, reduced, fit, prior, offset, centre):
    """Estimates in the units of the data."""
    state, shares, value, n_iter, done = fit
    q, p, scale = table.n_random, table.n_columns, reduced.scale
    ratios = np.array(
        [f @ f.T if np.ndim(f) else f**2 * np.eye(q) for f in state.factors]  # or one number
    )
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
        fitted_covariances = state.noise * squares[:q, :q] * ratios
        fitted = prior.with_mixture(means[:, :q], fitted_covariances, state.weights)
    mean, covariance = fitted.moments()
    return MixedModelEstimates(
        np.concatenate([mean, coefficients[0, q:]]),
        np.full((p, p), np.nan),  # EM gives no errors of the population
        coefficients,
        CovariancePosterior(covariances, np.append(np.diag(covariance), np.zeros(p - q))),
        fitted,
        covariance,
        state.noise,
        value,
        n_iter,
        done,
        shares,
        first=q if prior.is_known else 0,
    )


def _component_posteriors(reduced, state, ratios):
    """Posterior means (k, m, q) and covariances over the noise variance (k, m, q, q)."""
    q, centres, spreads = reduced.n_random, [], []
    for k, ratio in enumerate(ratios):
        component = em.whiten_component(reduced, state.factors[k])
        residuals = em.client_squares(reduced, component, state, k)[0]
        centres.append(state.means[k] + reduced.deviations(component.rows, residuals, ratio))
        pulled = (rows[:, :, :q] @ ratio for rows in component.rows)
        spreads.append(
            reduced.by_client([ratio - each.transpose(0, 2, 1) @ each for each in pulled])
        )
    return np.array(centres), np.array(spreads)


def _mixed_posterior(centres, spreads, shares, noise):
    """Means (m, q) and covariances (m, q, q) over the components."""
    average = np.einsum("mk,kmq->mq", shares, centres)
    covariances = np.zeros(spreads.shape[1:])
    for share, centre, spread in zip(shares.T, centres, spreads, strict=True):
        distance = centre - average  # not knowing the component adds to the error
        total = noise * spread + distance[:, :, None] * distance[:, None, :]
        covariances += share[:, None, None] * total
    return average, covariances
