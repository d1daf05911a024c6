"""Linear regressions under mixture priors: AdaMix for regression, and the model of FedEM.

Under component l a client's random coefficients are N(mu_l, noise * P_l). All components share the
fixed coefficients and the noise variance. EM maximizes the marginal likelihood of the clients'
rows. Only the component is latent: with the coefficients integrated out, variance steps are large
even if clients have fewer rows than coefficients.
"""

from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize, minimize_scalar
from scipy.special import logsumexp
from sklearn.utils import check_random_state

from pfl_sklearn.linear_model._algebra import covariance_factor, inverse_root, square_root
from pfl_sklearn.linear_model._mixed._identifiability import check_noise_identified
from pfl_sklearn.linear_model._mixed._normal_rows._profiled_likelihood import (
    ProfiledLikelihood,
    Whitened,
    flat_rows,
    reduce_table,
    whiten,
)
from pfl_sklearn.linear_model._mixed._normal_rows._variance_search import search_ratio
from pfl_sklearn.linear_model._mixed._posterior import CovariancePosterior
from pfl_sklearn.linear_model._mixed._reduction import centre_table, point_estimates, uncentre
from pfl_sklearn.priors._mixture import posterior_moments
from pfl_sklearn.priors._mixture_fit import k_means, least_bic, weight_order

_TRIAL_STEPS, _TRIAL_TOLERANCE = 8, 1e-3  # enough to rank the starts, most of which lead nowhere
_START_RATIOS = 0.01, 10.0  # beyond them the likelihood is flat, and steps do not return
# Unknown noise variance under known components: in nats around the log mean square of the targets,
# which exceeds it unless the components are far off.
_NOISE_RANGE = -25.0, 2.0
_NO_CLIENTS = 1e-8  # sum of shares, below which a component has no clients to learn from
_STEP_HALVINGS = 10  # beyond them a step of Fisher scoring is as good as none
_FACTOR_STEPS = 4  # any increase makes EM converge; the optimum moves with the next E step anyway
_RATIO_RANGE = 1e-9, 1e14  # on the scale of the reduction: as good as zero, and as infinite


class MixtureState(NamedTuple):
    """Parameters of the mixture, in the scale of the reduction."""

    means: np.ndarray  # (k, q)
    fixed: np.ndarray  # (f,)
    factors: Any  # k of (q, r), or (k,) numbers (spherical): of covariances over the noise variance
    noise: float
    weights: np.ndarray  # (k,)


class MixtureModel(NamedTuple):
    """Shape of the components' covariances, and a known noise variance."""

    covariance_type: str  # "spherical", "diag", "full", "zero", or "known"
    noise: float | None  # None if unknown


class EMFit(NamedTuple):
    """End of EM."""

    state: MixtureState
    shares: np.ndarray  # (m, k), responsibilities
    log_likelihood: float
    n_iter: int
    converged: bool


def fit_mixture_prior(table, prior, options):
    """MixedModelEstimates by maximum marginal likelihood; the prior is known as a whole or not."""
    if prior.is_known:
        return _fit_known_mixture(table, prior, options)
    _check_unknown(table, prior, options.noise_variance)
    model = MixtureModel(getattr(prior, "covariance_type", "zero"), options.noise_variance)
    table, *location = centre_table(table, None)
    common = model.covariance_type == "spherical"
    reduced = reduce_table(table, spectral=True, common_scale=common)
    # Starts look for groups among the deviations under a single Gaussian. The clients' own
    # coefficients would be noise where rows are few.
    pooled = search_ratio(ProfiledLikelihood(reduced, False, 0, model.noise), 50, 1e-4)
    space = reduced.deviations(pooled.whitened.rows, pooled.residuals, pooled.ratio)
    if model.covariance_type in ("diag", "full"):
        reduced = reduce_table(table, spectral=False, scale=reduced.scale)

    def best_fit(k):
        """A few steps from each start, and the best of them to the end."""
        rng = check_random_state(0)
        tried = []
        for attempt in range(prior.n_init if k > 1 else 1):
            start = _start_from_groups(reduced, model, space, pooled, k, attempt, rng)
            tried.append(run_regression_em(reduced, start, model, _TRIAL_STEPS, _TRIAL_TOLERANCE))
        best = max(tried, key=lambda fit: fit.log_likelihood)
        return run_regression_em(reduced, best.state, model, options.max_iter, options.tol)

    sizes = [prior.n_components]
    if prior.n_components == "bic":
        sizes = list(range(1, min(prior.max_components, table.n_clients) + 1))
    # Sizes differ by the prior's parameters alone.
    best = least_bic(best_fit, sizes, prior._shape(), table.n_random, table.n_clients)
    return _mixture_estimates(table, reduced, _sort_components(best), prior, *location)


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


def _start_from_groups(reduced, model, space, pooled, k, attempt, rng):
    """One EM step from groups of clients in the leading directions of their deviations."""
    labels = np.zeros(len(space), dtype=int)
    if k > 1:
        # k centres span k - 1 directions; where noise hides one of them, later starts add some.
        n_directions = min(space.shape[1], k - 1 + attempt // 2)
        vectors = np.linalg.eigh(space.T @ space)[1][:, -n_directions:]
        labels = k_means(space @ vectors, k, rng, n_steps=50)[1]
    q, f = reduced.n_random, len(reduced.remainder) - 1
    # A tenth of every client is spread over all groups, or a wrong group could not lose anybody.
    shares = np.full((len(space), k), 0.1 / k) + 0.9 * (labels[:, None] == np.arange(k))
    shares /= shares.sum(axis=1, keepdims=True)
    root = np.sqrt(np.clip(pooled.ratio[0, 0], *_START_RATIOS))
    factor = {"zero": 0.0, "spherical": root}.get(model.covariance_type, root * np.eye(q))
    state = MixtureState(np.zeros((k, q)), np.zeros(f), [factor] * k, pooled.noise, np.ones(k))
    components = [_whiten_component(reduced, factor)] * k
    return _m_step(reduced, components, state, shares, model)[0]


def _sort_components(fit):
    """Order components by weight, ties by their first coefficient, whatever the start was."""
    state = fit.state
    order = weight_order(state.means, state.weights)
    state = state._replace(
        means=state.means[order],
        factors=np.asarray(state.factors)[order],
        weights=state.weights[order],
    )
    return fit._replace(state=state, shares=fit.shares[:, order])


def _fit_known_mixture(table, prior, options):
    """Clients, fixed coefficients and an unknown noise variance, under a known mixture."""
    means, covariances, weights = prior.known_mixture(table.n_random)
    table, *location = centre_table(table, weights @ means)
    means = means - location[0][: table.n_random]
    reduced = reduce_table(table, spectral=False, common_scale=False)
    scale = reduced.scale[: table.n_random]
    roots = [square_root(matrix) for matrix in covariances / np.multiply.outer(scale, scale)]

    def at(noise):
        factors = [root / np.sqrt(noise) for root in roots]
        fixed = np.zeros(len(reduced.remainder) - 1)
        state = MixtureState(means / scale, fixed, factors, noise, weights)
        model = MixtureModel("known", noise)
        max_iter = options.max_iter if len(fixed) else 0
        return run_regression_em(reduced, state, model, max_iter, options.tol)

    noise = options.noise_variance
    if noise is None:
        best = minimize_scalar(
            lambda log_noise: -at(np.exp(log_noise)).log_likelihood,
            bounds=np.log(reduced.mean_square) + _NOISE_RANGE,
            method="bounded",
            options={"xatol": 1e-8},
        )
        noise = float(np.exp(best.x))
    return _mixture_estimates(table, reduced, at(noise), prior, *location)


def _mixture_estimates(table, reduced, fit, prior, offset, centre):
    """Estimates in the units of the data."""
    state, shares, value, n_iter, done = fit
    q, p, scale = table.n_random, table.n_columns, reduced.scale
    ratios = np.array(
        [f @ f.T if np.ndim(f) else f**2 * np.eye(q) for f in state.factors]  # or one number
    )
    average, posterior = posterior_moments(shares, _component_posteriors(reduced, state, ratios))
    squares = np.multiply.outer(scale, scale)
    fixed = np.tile(state.fixed, (table.n_clients, 1))
    coefficients = uncentre(np.hstack([average, fixed]) * scale, table.intercept, centre) + offset
    covariances = np.zeros((table.n_clients, p, p))
    covariances[:, :q, :q] = posterior * squares[:q, :q]
    fixed = np.tile(state.fixed, (len(ratios), 1))
    means = uncentre(np.hstack([state.means, fixed]) * scale, table.intercept, centre) + offset
    fitted = prior
    if not prior.is_known:
        fitted_covariances = state.noise * squares[:q, :q] * ratios
        fitted = prior.with_mixture(means[:, :q], fitted_covariances, state.weights)
    mean, covariance = fitted.moments()
    population = np.concatenate([mean, coefficients[0, q:]])
    variances = np.append(np.diag(covariance), np.zeros(p - q))
    # EM gives no errors of the population.
    return point_estimates(
        population, coefficients, fitted, covariance, state.noise, n_iter, done, shares
    )._replace(
        posterior=CovariancePosterior(covariances, variances),
        log_likelihood=value,
        first=q if prior.is_known else 0,
    )


def _component_posteriors(reduced, state, ratios):
    """Posterior means (m, q) and covariances (m, q, q) under each component."""
    q, posteriors = reduced.n_random, []
    for k, ratio in enumerate(ratios):
        component = _whiten_component(reduced, state.factors[k])
        deviations = reduced.deviations(component.rows, _residuals(component, state, k), ratio)
        pulled = (rows[:, :, :q] @ ratio for rows in component.rows)
        spread = reduced.by_client([ratio - rows.transpose(0, 2, 1) @ rows for rows in pulled])
        posteriors.append((state.means[k] + deviations, state.noise * spread))
    return posteriors


def run_regression_em(reduced, state, model, max_iter, tol):
    """EM until a step gains less than `tol` nats per client; none at all if `max_iter` is 0."""
    components = [_whiten_component(reduced, factor) for factor in state.factors]
    shares, value = _e_step(reduced, components, state)
    n_iter, converged = 0, max_iter == 0  # then nothing is unknown
    while not converged and n_iter < max_iter:
        n_iter += 1
        state, components = _m_step(reduced, components, state, shares, model)
        before = value
        shares, value = _e_step(reduced, components, state)
        converged = value - before < tol * reduced.n_clients
    return EMFit(state, shares, value, max(n_iter, 1), converged)


def _whiten_component(reduced, factor):
    """Rows whitened under one component."""
    if np.ndim(factor) == 0 and factor == 0:  # without a copy of the rows for every component
        return Whitened(reduced.rows, [np.zeros(rows.shape[:2]) for rows in reduced.rows])
    return whiten(reduced, factor)


def _residuals(component, state, k):
    """Whitened residuals (b, k) of every stack under component k."""
    coefficients = np.concatenate([state.means[k], state.fixed])
    return [rows[:, :, -1] - rows[:, :, :-1] @ coefficients for rows in component.rows]


def _log_dets(reduced, components):
    """Log determinants (m, k) of the clients' covariances over the noise variance."""
    return np.column_stack(
        [reduced.by_client([2 * x.sum(axis=1) for x in whitened.logs]) for whitened in components]
    )


def _squares(reduced, components, state):
    """Squares (m, k) of the clients' whitened residuals under every component."""
    return np.column_stack(
        [_squared(reduced, _residuals(rows, state, k)) for k, rows in enumerate(components)]
    )


def _squared(reduced, residuals):
    """Squared lengths (m,) of the clients' residuals (b, k) of every stack."""
    return reduced.by_client([np.einsum("bk,bk->b", residual, residual) for residual in residuals])


def _e_step(reduced, components, state):
    """Responsibilities (m, k) and log-likelihood."""
    squares = _squares(reduced, components, state) / state.noise
    joint = -0.5 * (_log_dets(reduced, components) + squares)
    with np.errstate(divide="ignore"):  # a component that lost all clients has weight 0
        joint += np.log(state.weights)
    log_densities = logsumexp(joint, axis=1)
    constant = reduced.n_rows * np.log(2 * np.pi * state.noise) - reduced.log_weights
    constant += reduced.remaining_square(state.fixed) / state.noise
    return np.exp(joint - log_densities[:, None]), float(log_densities.sum() - 0.5 * constant)


def _m_step(reduced, components, state, shares, model):
    """Parameters with a larger expected log-likelihood under responsibilities (m, k)."""
    # One block after the other, given the ones before: no step lowers the likelihood. Also returns
    # the rows whitened under the new components.
    state = _solve_coefficients(reduced, components, state, shares, model)
    if model.covariance_type == "known":
        return state, components
    state = state._replace(weights=shares.mean(axis=0))
    state, criterion = _update_noise(reduced, components, state, shares, model)
    if model.covariance_type == "zero":
        return state, components
    if model.covariance_type == "spherical":
        return _spherical_step(reduced, components, state, shares, model, criterion)
    kind = model.covariance_type
    factors = [_factor_step(reduced, state, k, share, kind) for k, share in enumerate(shares.T)]
    return state._replace(factors=factors), [whiten(reduced, factor) for factor in factors]


def _solve_coefficients(reduced, components, state, shares, model):
    """Generalized least squares for unknown means (k, q) and the fixed coefficients (f,)."""
    k, q = state.means.shape
    gram = np.zeros((k * q + len(reduced.remainder),) * 2)  # of all means, fixed columns, target
    gram[k * q :, k * q :] = reduced.remainder
    for j, component in enumerate(components):
        at = np.r_[j * q : (j + 1) * q, k * q : len(gram)]
        for stack, rows in zip(reduced.stacks, component.rows, strict=True):
            flat = flat_rows(rows)
            weights = np.repeat(shares[stack.clients, j], rows.shape[1])
            gram[np.ix_(at, at)] += (flat * weights[:, None]).T @ flat
    known = state.means.ravel() if model.covariance_type == "known" else np.zeros(0)
    first = len(known)
    root, _ = inverse_root(gram[first:-1, first:-1])
    solution = root @ (root.T @ (gram[first:-1, -1] - gram[first:-1, :first] @ known))
    if first:
        return state._replace(fixed=solution)
    # A component without clients stays where it is; least squares would put it at 0.
    has_clients = shares.sum(axis=0)[:, None] > _NO_CLIENTS
    means = np.where(has_clients, solution[: k * q].reshape(k, q), state.means)
    return state._replace(means=means, fixed=solution[k * q :])


def _update_noise(reduced, components, state, shares, model):
    """The state with the best noise variance, unless known, and its criterion (-2 log L + c)."""
    square = reduced.remaining_square(state.fixed)
    square += np.vdot(shares, _squares(reduced, components, state))
    noise = model.noise
    if noise is None:
        noise = max(square, reduced.least_square) / reduced.n_rows
    log_dets = np.vdot(shares, _log_dets(reduced, components))
    criterion = reduced.n_rows * np.log(noise) + log_dets + square / noise
    return state._replace(noise=noise), criterion


def _spherical_step(reduced, components, state, shares, model, criterion):
    """Fisher scoring step for all variance ratios, noise profiled out, halved until it improves."""
    ratios = np.square(state.factors)
    slope, first, second = (np.zeros(len(components)) for _ in range(3))
    for k, component in enumerate(components):
        for stack, residual in zip(reduced.stacks, _residuals(component, state, k), strict=True):
            weight = stack.eigenvalues / (1 + ratios[k] * stack.eigenvalues)
            share = shares[stack.clients, k]
            slope[k] += share @ np.sum(weight * (1 - residual**2 / state.noise), axis=1)
            first[k] += share @ np.sum(weight, axis=1)
            second[k] += share @ np.sum(weight**2, axis=1)
    information = np.diag(np.maximum(second, 1e-300))  # 0 for a component without clients
    if model.noise is None:
        information -= np.multiply.outer(first, first) / reduced.n_rows
    step = np.linalg.lstsq(information, slope)[0]
    # Fisher scoring is for points near the maximum; farther off a step goes at most tenfold.
    target = np.clip(ratios - step, ratios / 10, ratios * 10)
    for _ in range(_STEP_HALVINGS):
        factors = np.sqrt(np.clip(target, *_RATIO_RANGE))
        tried = [_whiten_component(reduced, factor) for factor in factors]
        tried_state, after = _update_noise(
            reduced, tried, state._replace(factors=factors), shares, model
        )
        if after <= criterion:
            return tried_state, tried
        target = (target + ratios) / 2
    return state, components


def _factor_step(reduced, state, k, share, covariance_type):
    """A few quasi-Newton steps on the factor of a component's covariance."""
    q, factor = reduced.n_random, covariance_factor(covariance_type, reduced.n_random)
    if share.sum() <= _NO_CLIENTS:
        return state.factors[k]

    def objective(parameters):
        lower = factor.matrix(parameters)
        tried = whiten(reduced, lower)
        residuals = _residuals(tried, state, k)
        squares = _squared(reduced, residuals) / state.noise
        value = share @ (_log_dets(reduced, [tried])[:, 0] + squares)
        slope = np.zeros((q, q))
        for stack, rows, residual in zip(reduced.stacks, tried.rows, residuals, strict=True):
            weights, random = share[stack.clients], rows[:, :, :q]
            weighted = (random * weights[:, None, None]).reshape(-1, q)
            pulled = (residual[:, None, :] @ random)[:, 0]
            slope += weighted.T @ random.reshape(-1, q)
            slope -= (pulled * weights[:, None]).T @ pulled / state.noise
        return value, factor.pull_back(2 * slope @ lower)

    start = state.factors[k].ravel()[factor.positions]
    best: Any = minimize(
        objective, start, jac=True, method="L-BFGS-B", options={"maxiter": _FACTOR_STEPS}
    )
    return factor.matrix(best.x)
