"""The algorithms of Ozkara et al. (2023, ICLR) for linear regression, as printed.

They work on point estimates of the clients. The joint objective has no lower bound in the
variances, and clusters of point estimates inherit the error of every client. We keep the algorithms
to reproduce the published figures; do not use them for analysis.
"""

from typing import Any, NamedTuple

import numpy as np
from scipy.special import softmax
from sklearn.mixture import GaussianMixture

from pfl_sklearn._warnings import warn_caller
from pfl_sklearn.linear_model._mixed._gaussian._closed_form import fit_without_pooling
from pfl_sklearn.linear_model._mixed._gaussian._profiled_likelihood import reduce_table
from pfl_sklearn.linear_model._mixed._reduction import centred, point_estimates
from pfl_sklearn.priors import GaussianPrior

_DIVERGED_LOSS = 1e8  # over the loss at zero: no step that is stable comes near it
_DIVERGED_NOISE = 10  # over the mean square of the targets, which it should be below
_DIVERGED_BETWEEN = 100.0  # variance between clients over the squared coefficients


class ClientGrams(NamedTuple):
    """Gram matrices of every client's rows; all columns are random."""

    normal: np.ndarray  # (m, q, q), X'X
    right: np.ndarray  # (m, q), X'y
    square: np.ndarray  # (m,), y'y
    n_rows: np.ndarray  # (m,)

    def gradient(self, theta):
        """X'(X theta - y), (m, q)."""
        return (self.normal @ theta[..., None])[..., 0] - self.right

    def residual_squares(self, theta):
        """Residual squares (m,)."""
        around = self.gradient(theta) - self.right
        return np.maximum(self.square + np.einsum("mq,mq->m", theta, around), 0.0)

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
    reduced = reduce_table(table, spectral=True, scale=np.ones(p))
    grams = np.zeros((table.n_clients, p + 1, p + 1))
    for stack in reduced.stacks:
        grams[stack.clients] = stack.rows.transpose(0, 2, 1) @ stack.rows
    left = reduced.remainder[0, 0] / len(grams)  # of the rows beyond q; their sum is what counts
    return ClientGrams(grams[:, :-1, :-1], grams[:, :-1, -1], grams[:, -1, -1] + left, table.sizes)


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
    table, offset, _ = centred(table, mean)
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
            _explain_divergence(n_iter, rate, grams, before, free[0])
        change = np.abs(state.theta - before.theta).max()
        done = n_iter > 1 and change <= options.tol * np.abs(state.theta).max()
    _explain_floor(state, free, options.variance_floor)
    covariance = state.between * np.eye(q)
    return point_estimates(
        offset + state.mu,
        state.theta + offset,
        prior.with_values(offset + state.mu, covariance),
        covariance,
        state.noise,
        n_iter,
        bool(done),
    )._replace(first=0 if mean is None else q)


def _gradient_step(grams, state, rate, free, floor):
    """One step of all parameters, and the loss before it.

    As in the listing, every update reads the values before the step, so their order is of no
    account.
    """
    theta, mu, noise, between = state
    q, distance = theta.shape[1], theta - mu
    residual_squares, squares = grams.residual_squares(theta), np.sum(distance**2, axis=1)
    loss = residual_squares.sum() / noise + squares.sum() / between
    moved = theta - rate * (grams.gradient(theta) / noise + distance / between)
    if free[0]:
        mu = mu + rate * np.mean(distance, axis=0) / between
    slope = np.mean(grams.n_rows / (2 * noise) - residual_squares / (2 * noise**2))
    new_noise = max(noise - rate * slope, floor) if free[1] else noise
    slope = np.mean(q / (2 * between) - squares / (2 * between**2))
    new_between = max(between - rate * slope, floor) if free[2] else between
    return DescentState(moved, mu, new_noise, new_between), loss


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


def _explain_divergence(n_iter, rate, grams, state, free_mean):
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


def _explain_floor(state, free, floor):
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


def fit_clustered(table, prior, options):
    """Alternate point estimates and clusters of them (Algorithms 1 and 6, ICLR)."""
    if table.n_clients < (2 if prior.n_components == "bic" else prior.n_components):
        raise ValueError(
            f"n_components={prior.n_components!r} of {type(prior).__name__} needs at least as many "
            f"clients; got {table.n_clients} clients."
        )
    if prior.is_known or prior.n_components == "bic":
        raise ValueError(
            f"method='printed' estimates a {type(prior).__name__} with a given number of "
            "components; got a known prior or n_components='bic'."
        )
    table, offset, _ = centred(table, None)
    grams, noise = client_grams(table), options.noise_variance
    # The paper starts at the pseudo-inverse fits of the clients alone.
    unpooled = np.diag(np.full(table.n_random, np.inf))
    theta = fit_without_pooling(table, GaussianPrior(), options, unpooled).coefficients
    spread = "covariances" in prior.get_params(deep=False)
    step = _step_of_mixture if spread else _step_of_points
    sharpest = grams.curvature() / noise
    rate = options.learning_rate or 1 / (sharpest + 1.0)
    state: Any = None
    n_iter, change, smallest = 0, np.inf, rate
    while n_iter < options.max_iter and change > options.tol:
        n_iter += 1
        state = _cluster(theta, prior, state)
        # A longer step overshoots where a cluster is narrower than it was in earlier rounds.
        used = min(rate, 1 / (sharpest + 1 / state[1].min())) if spread else rate
        smallest = min(smallest, used)
        new, shares = step(grams, theta, state, noise, used)
        change = np.abs(new - theta).max() / max(np.abs(new).max(), 1e-300)
        theta = new
    if options.learning_rate and smallest < rate:  # a rate of our own is no promise
        _explain_cap(rate, smallest)
    means, variances, weights = state
    covariances = variances[:, None, None] * np.eye(len(offset))
    fitted = prior.with_mixture(means + offset, covariances, weights)
    mean, covariance = fitted.moments()
    done = bool(change <= options.tol)
    return point_estimates(mean, theta + offset, fitted, covariance, noise, n_iter, done, shares)


def _explain_cap(rate, smallest):
    """Warn that a given learning rate was not used as given."""
    warn_caller(
        f"learning_rate={rate:g} of method='printed' was cut to {smallest:.3g} in at least one "
        "round: a longer step may diverge where a component's variance is small. The fit differs "
        "from the published algorithm at that rate; give a learning_rate no larger than this.",
        UserWarning,
    )


def _cluster(theta, prior, state):
    """Means (k, q), variances (k,) and weights (k,) of clusters of point estimates."""
    from sklearn.cluster import KMeans  # 45 ms that only mixtures need

    k = prior.n_components
    # From the second round on clusters start where they were, or they would swap names.
    start = None if state is None else state[0]
    if "covariances" not in prior.get_params(deep=False):
        init, n_init = ("k-means++", prior.n_init) if state is None else (start, 1)
        groups = KMeans(k, n_init=n_init, init=init, random_state=0).fit(theta)
        weights = np.bincount(groups.labels_, minlength=k) / len(theta)
        return groups.cluster_centers_, np.zeros(k), weights
    mixture = GaussianMixture(k, covariance_type="spherical", means_init=start, random_state=0)
    mixture.fit(theta)
    return mixture.means_, mixture.covariances_, mixture.weights_


def _step_of_mixture(grams, theta, state, noise, rate):
    """One gradient step of every client under the mixture (Algorithm 1, ICLR, line 5)."""
    means, variances, weights = state
    q = theta.shape[1]
    distance = theta[:, None, :] - means
    with np.errstate(divide="ignore"):
        joint = np.log(weights) - 0.5 * (
            q * np.log(variances) + np.sum(distance**2, axis=2) / variances
        )
    shares = softmax(joint, axis=1)
    pull = np.einsum("mk,mkq->mq", shares / variances, distance)
    return theta - rate * (grams.gradient(theta) / noise + pull), shares


def _step_of_points(grams, theta, state, noise, rate):
    """Posterior mean of every client over the points (Algorithm 6, ICLR, line 6)."""
    means, _, weights = state
    squares = np.stack(
        [grams.residual_squares(np.broadcast_to(mean, theta.shape)) for mean in means], axis=1
    )
    with np.errstate(divide="ignore"):
        joint = np.log(weights) - squares / (2 * noise)
    shares = softmax(joint, axis=1)
    return shares @ means, shares
