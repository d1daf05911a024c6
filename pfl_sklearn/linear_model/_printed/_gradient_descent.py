"""Joint gradient descent for linear regression: Algorithm 4 of Ozkara et al. (2023, ICLR).

The joint objective has no lower bound in the variances. We keep the algorithm to reproduce the
published figures; do not use it for analysis.
"""

from typing import NamedTuple

import numpy as np

from pfl_sklearn._warnings import warn_caller
from pfl_sklearn.linear_model._mixed._reduction import centre_table, point_estimates

_DIVERGED_LOSS = 1e8  # over the loss at zero: no step that is stable comes near it
_DIVERGED_NOISE = 10  # over the mean square of the targets, which it should be below
_DIVERGED_BETWEEN = 100.0  # variance between clients over the squared coefficients


class ClientGrams(NamedTuple):
    """Gram matrices of every client's rows; all columns are random.

    A step on them costs the same however many rows a client has.
    """

    normal: np.ndarray  # (m, q, q), X'X
    right: np.ndarray  # (m, q), X'y
    square: np.ndarray  # (m,), y'y
    n_rows: np.ndarray  # (m,)

    def gradient(self, theta):
        """X'(X theta - y), (m, q)."""
        return (self.normal @ theta[..., None])[..., 0] - self.right

    def residual_squares(self, theta):
        """Residual squares (m,)."""
        gradient_less_right = self.gradient(theta) - self.right
        return np.maximum(self.square + np.einsum("mq,mq->m", theta, gradient_less_right), 0.0)

    def curvature(self):
        """Largest eigenvalue of all clients' X'X."""
        return float(np.linalg.eigvalsh(self.normal)[:, -1].max())


def client_grams(table):
    """Gram matrices of every client; ValueError if there are fixed coefficients."""
    p = table.n_columns
    if table.n_random < p:
        raise ValueError(
            "in the printed algorithms all coefficients vary by client; expected random='all'."
        )
    grams = np.empty((table.n_clients, p + 1, p + 1))
    for clients, rows in table.moved_batches():
        grams[clients] = rows.transpose(0, 2, 1) @ rows
    return ClientGrams(grams[:, :-1, :-1], grams[:, :-1, -1], grams[:, -1, -1], table.sizes)


class DescentState(NamedTuple):
    """State of the gradient descent."""

    theta: np.ndarray  # (m, q)
    mu: np.ndarray  # (q,)
    noise: float
    between: float


def fit_by_gradient(table, prior, options):
    """Joint gradient descent (Algorithm 4, ICLR).

    Unknown variances take gradient steps too, down to `variance_floor`.
    """
    q = table.n_random
    mean, covariance = prior.known_mean(q), prior.known_covariance(q)
    _check_descent(prior, covariance, options)
    table, offset, _ = centre_table(table, mean)
    grams = client_grams(table)
    # Start from the whole variance as noise; targets of zeros have none to divide by.
    noise = options.noise_variance or max(grams.square.sum() / grams.n_rows.sum(), 1e-300)
    between = 1.0 if covariance is None else float(covariance[0, 0])
    state = DescentState(np.zeros_like(grams.right), np.zeros(q), noise, between)
    # The inverse curvature of the sharpest client, at which no client's step overshoots.
    rate = options.learning_rate or 1 / (grams.curvature() / noise + 1 / between)
    free = mean is None, options.noise_variance is None, covariance is None
    with np.errstate(over="ignore"):
        largest_loss = _DIVERGED_LOSS * (grams.square.sum() / noise + 1)
    n_iter, done = 0, False
    while n_iter < options.max_iter and not done:
        n_iter, before = n_iter + 1, state
        with np.errstate(over="ignore", invalid="ignore"):
            state, loss = _gradient_step(grams, state, rate, free, options.variance_floor)
        # The variance explains the coefficients that it was computed from.
        between = _DIVERGED_BETWEEN * max(1.0, float(np.max(before.theta**2)))
        in_bounds = loss < largest_loss and state.noise <= _DIVERGED_NOISE * noise
        if not (in_bounds and state.between <= between):  # also where one of them is NaN
            _raise_divergence(n_iter, rate, grams, before, free[0])
        change = np.abs(state.theta - before.theta).max()
        done = n_iter > 1 and change <= options.tol * np.abs(state.theta).max()
    _warn_floor(state, free, options.variance_floor)
    population, covariance = offset + state.mu, state.between * np.eye(q)
    fitted = prior.with_values(population, covariance)
    estimates = point_estimates(
        population, state.theta + offset, fitted, covariance, state.noise, n_iter, bool(done)
    )
    return estimates._replace(first=0 if mean is None else q)


def _gradient_step(grams, state, rate, free, floor):
    """One step of all parameters from the values before it, as in the listing, and their loss."""
    theta, mu, noise, between = state
    q, distance = theta.shape[1], theta - mu
    residual_squares, squares = grams.residual_squares(theta), np.sum(distance**2, axis=1)
    loss = residual_squares.sum() / noise + squares.sum() / between
    new_theta = theta - rate * (grams.gradient(theta) / noise + distance / between)
    if free[0]:
        mu = mu + rate * np.mean(distance, axis=0) / between
    slope = np.mean(grams.n_rows / (2 * noise) - residual_squares / (2 * noise**2))
    new_noise = max(noise - rate * slope, floor) if free[1] else noise
    slope = np.mean(q / (2 * between) - squares / (2 * between**2))
    new_between = max(between - rate * slope, floor) if free[2] else between
    return DescentState(new_theta, mu, new_noise, new_between), loss


def _check_descent(prior, covariance, options):
    """Raise ValueError if the descent has no lower bound or no common variance."""
    unknown = covariance is None or options.noise_variance is None
    if unknown and options.variance_floor is None:
        raise ValueError(
            "the objective of solver='gd' has no lower bound in unknown variances; give the "
            "prior's covariance and noise_variance, or a variance_floor."
        )
    if covariance is None:
        common = prior.covariance_type == "spherical"
    else:
        variance = covariance[0, 0]
        common = 0 < variance < np.inf
        common = common and np.array_equal(covariance, variance * np.eye(len(covariance)))
    if not common:
        raise ValueError(
            "solver='gd' needs one positive, finite variance for all coefficients; got "
            f"covariance_type={prior.covariance_type!r}, covariance={prior.covariance!r}."
        )


def _raise_divergence(n_iter, rate, grams, state, free_mean):
    """Raise ValueError with a learning rate below which the descent is stable."""
    # The pull towards a mean that moves at the same time has at most twice the curvature.
    pull = (2 if free_mean else 1) / state.between
    largest = 2 / (grams.curvature() / state.noise + pull)
    raise ValueError(
        f"solver='gd' diverged after {n_iter} iterations at learning_rate={rate:.3g}. At the last "
        f"variances (noise {state.noise:.3g}, between clients {state.between:.3g}) it is stable "
        f"below {largest:.3g}, and steps of unknown variances must be small compared with the "
        "variances. Lower learning_rate, raise variance_floor, or use solver='auto'."
    )


def _warn_floor(state, free, floor):
    """Warn about variances that the descent drove to their floor."""
    names = []
    if free[1] and state.noise == floor:
        names.append("the noise variance")
    if free[2] and state.between == floor:
        names.append("the variance between clients")
    if names:
        warn_caller(
            f"solver='gd' drove {' and '.join(names)} to variance_floor={floor:g}: the joint "
            "objective has no minimum. Use solver='auto', which maximizes the marginal likelihood.",
            UserWarning,
        )
