"""Mixtures of linear mixed models: EM on the marginal likelihood of the clients' rows.

Under component l a client's random coefficients are N(mu_l, noise * P_l). All components share the
fixed coefficients and the noise variance. Only the component is latent: with the coefficients
integrated out, variance steps are large even if clients have fewer rows than coefficients.
"""

from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize
from scipy.special import logsumexp

from pfl_sklearn.linear_model._algebra import factor_of, inverse_root
from pfl_sklearn.linear_model._mixed._normal_rows._profiled_likelihood import Whitened, whiten

_NO_CLIENTS = 1e-8  # sum of shares, below which a component has no clients to learn from
_STEP_HALVINGS = 10  # beyond them a step of Fisher scoring is as good as none
_FACTOR_STEPS = 4  # any increase makes EM converge; the optimum moves with the next E step anyway
_RATIO_RANGE = 1e-9, 1e14  # on the scale of the reduction: as good as zero, and as infinite


class MixtureState(NamedTuple):
    """Parameters of the mixture, in the scale of the reduction."""

    means: np.ndarray  # (k, q)
    fixed: np.ndarray  # (f,)
    factors: list  # (q, r) each, or numbers (spherical), of covariances over the noise variance
    noise: float
    weights: np.ndarray  # (k,)


class MixtureModel(NamedTuple):
    """What EM estimates."""

    covariance_type: str  # "spherical", "diag", "full", "zero", or "known"
    noise: float | None  # None if unknown


class EMFit(NamedTuple):
    """End of EM."""

    state: MixtureState
    shares: np.ndarray  # (m, k), responsibilities
    log_likelihood: float
    n_iter: int
    converged: bool


def whiten_component(reduced, factor):
    """Rows whitened under one component."""
    if np.ndim(factor) == 0 and factor == 0:  # without a copy of the rows for every component
        return Whitened(reduced.rows, [np.zeros(rows.shape[:2]) for rows in reduced.rows])
    return whiten(reduced, factor)


def client_squares(reduced, component, state, k):
    """Whitened residuals of every stack, and their squares (m,) by client."""
    coefficients = np.concatenate([state.means[k], state.fixed])
    residuals = [rows[:, :, -1] - rows[:, :, :-1] @ coefficients for rows in component.rows]
    return residuals, reduced.by_client([np.einsum("bk,bk->b", each, each) for each in residuals])


def _component_values(reduced, component, state, k):
    """Minus twice the clients' log-likelihoods (m,) under a component, up to what all share.

    Also the whitened residuals of every stack.
    """
    residuals, squares = client_squares(reduced, component, state, k)
    log_dets = reduced.by_client([2 * logs.sum(axis=1) for logs in component.logs])
    return log_dets + squares / state.noise, residuals


def regression_e_step(reduced, components, state):
    """Responsibilities (m, k) and log-likelihood."""
    values = [_component_values(reduced, each, state, k)[0] for k, each in enumerate(components)]
    joint = -0.5 * np.column_stack(values)
    with np.errstate(divide="ignore"):  # a component that lost all clients has weight 0
        joint += np.log(state.weights)
    each = logsumexp(joint, axis=1)
    constant = reduced.n_rows * np.log(2 * np.pi * state.noise) - reduced.log_weights
    left = reduced.remaining_square(state.fixed)
    return np.exp(joint - each[:, None]), float(each.sum() - 0.5 * (constant + left / state.noise))


def regression_m_step(reduced, components, state, shares, model):
    """Parameters with a larger expected log-likelihood under responsibilities (m, k).

    One block after the other, each given the ones before: no step lowers the likelihood.
    """
    known = model.covariance_type == "known"
    state = _solve_coefficients(reduced, components, state, shares, known)
    if known:
        return state
    state = state._replace(
        noise=_best_noise(reduced, components, state, shares, model), weights=shares.mean(axis=0)
    )
    if model.covariance_type == "zero":
        return state
    if model.covariance_type == "spherical":
        return _spherical_step(reduced, components, state, shares, model)
    factors = [
        _factor_step(reduced, state, k, shares[:, k], model.covariance_type)
        for k in range(len(components))
    ]
    return state._replace(factors=factors)


def _best_noise(reduced, components, state, shares, model):
    """Noise variance under the other parameters, unless it is known."""
    if model.noise is not None:
        return model.noise
    square = reduced.remaining_square(state.fixed)
    for k, component in enumerate(components):
        square += shares[:, k] @ client_squares(reduced, component, state, k)[1]
    return max(square, reduced.least_square) / reduced.n_rows


def _solve_coefficients(reduced, components, state, shares, known_means):
    """Generalized least squares for unknown means (k, q) and the fixed coefficients (f,)."""
    k, q = state.means.shape
    f = len(state.fixed)
    normal, right = np.zeros((k * q + f, k * q + f)), np.zeros(k * q + f)
    normal[k * q :, k * q :] = reduced.remainder[:-1, :-1]
    right[k * q :] = reduced.remainder[:-1, -1]
    for j, component in enumerate(components):
        gram = np.zeros((q + f + 1, q + f + 1))
        for stack, rows in zip(reduced.stacks, component.rows, strict=True):
            flat = rows.reshape(-1, q + f + 1)
            weights = np.repeat(shares[stack.clients, j], rows.shape[1])
            gram += (flat * weights[:, None]).T @ flat
        at = np.concatenate([np.arange(j * q, (j + 1) * q), np.arange(k * q, k * q + f)])
        normal[np.ix_(at, at)] += gram[:-1, :-1]
        right[at] += gram[:-1, -1]
    if known_means:
        right = right[k * q :] - normal[k * q :, : k * q] @ state.means.ravel()
        return state._replace(fixed=np.linalg.lstsq(normal[k * q :, k * q :], right)[0])
    root, _ = inverse_root(normal)
    solution = root @ (root.T @ right)
    # A component without clients stays where it is; least squares would put it at 0.
    has_clients = shares.sum(axis=0)[:, None] > _NO_CLIENTS
    means = np.where(has_clients, solution[: k * q].reshape(k, q), state.means)
    return state._replace(means=means, fixed=solution[k * q :])


def _expected_criterion(reduced, components, state, shares):
    """Minus twice the expected log-likelihood, up to a constant; residuals of all components."""
    value, residuals = reduced.n_rows * np.log(state.noise), []
    value += reduced.remaining_square(state.fixed) / state.noise
    for k, component in enumerate(components):
        values, left = _component_values(reduced, component, state, k)
        value += shares[:, k] @ values
        residuals.append(left)
    return value, residuals


def _spherical_step(reduced, components, state, shares, model):
    """Fisher scoring step for all variance ratios, with the noise variance profiled out.

    We halve the step until it does not lower the likelihood.
    """
    ratios = np.array(state.factors) ** 2
    before, residuals = _expected_criterion(reduced, components, state, shares)
    slope, first, second = (np.zeros(len(components)) for _ in range(3))
    for k in range(len(components)):
        for stack, residual in zip(reduced.stacks, residuals[k], strict=True):
            weight = stack.eigenvalues / (1 + ratios[k] * stack.eigenvalues)
            own = shares[stack.clients, k]
            slope[k] += own @ np.sum(weight * (1 - residual**2 / state.noise), axis=1)
            first[k] += own @ np.sum(weight, axis=1)
            second[k] += own @ np.sum(weight**2, axis=1)
    information = np.diag(np.maximum(second, 1e-300))  # 0 for a component without clients
    if model.noise is None:
        information -= np.multiply.outer(first, first) / reduced.n_rows
    step = np.linalg.lstsq(information, slope)[0]
    # Fisher scoring is for points near the maximum; farther off a step goes at most tenfold.
    target = np.clip(ratios - step, ratios / 10, ratios * 10)
    for _ in range(_STEP_HALVINGS):
        bounded = np.clip(target, *_RATIO_RANGE)
        tried = [whiten_component(reduced, factor) for factor in np.sqrt(bounded)]
        moved = state._replace(factors=list(np.sqrt(bounded)))
        moved = moved._replace(noise=_best_noise(reduced, tried, moved, shares, model))
        if _expected_criterion(reduced, tried, moved, shares)[0] <= before:
            return moved
        target = (target + ratios) / 2
    return state


def _factor_step(reduced, state, k, share, covariance_type):
    """A few quasi-Newton steps on the factor of a component's covariance."""
    q, factor = reduced.n_random, factor_of(covariance_type, reduced.n_random)
    if share.sum() <= _NO_CLIENTS:
        return state.factors[k]

    def objective(parameters):
        lower = factor.matrix(parameters)
        tried = whiten_component(reduced, lower)
        values, residuals = _component_values(reduced, tried, state, k)
        slope = np.zeros((q, q))
        for stack, rows, residual in zip(reduced.stacks, tried.rows, residuals, strict=True):
            own, random = share[stack.clients], rows[:, :, :q]
            weighted = (random * own[:, None, None]).reshape(-1, q)
            pulled = (residual[:, None, :] @ random)[:, 0]
            slope += weighted.T @ random.reshape(-1, q)
            slope -= (pulled * own[:, None]).T @ pulled / state.noise
        return share @ values, factor.pull_back(2 * slope @ lower)

    start = state.factors[k].ravel()[factor.positions]
    best: Any = minimize(
        objective, start, jac=True, method="L-BFGS-B", options={"maxiter": _FACTOR_STEPS}
    )
    return factor.matrix(best.x)


def run_regression_em(reduced, state, model, max_iter, tol):
    """EM until a step gains less than `tol` nats per client; none at all if `max_iter` is 0."""
    components = [whiten_component(reduced, factor) for factor in state.factors]
    shares, value = regression_e_step(reduced, components, state)
    if max_iter == 0:  # nothing is unknown
        return EMFit(state, shares, value, 1, True)
    for n_iter in range(1, max_iter + 1):
        factors = state.factors
        state = regression_m_step(reduced, components, state, shares, model)
        if state.factors is not factors:  # whitening costs more than the rest of a step
            components = [whiten_component(reduced, factor) for factor in state.factors]
        shares, new_value = regression_e_step(reduced, components, state)
        gain, value = new_value - value, new_value
        if gain < tol * reduced.n_clients:
            return EMFit(state, shares, value, n_iter, True)
    return EMFit(state, shares, value, max_iter, False)
