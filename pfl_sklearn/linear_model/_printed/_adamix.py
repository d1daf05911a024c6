"""AdaMix for linear regression: Algorithms 1 and 6 of Ozkara et al. (2023, ICLR).

Clusters of point estimates inherit the error of every client. We keep the algorithms to reproduce
the published figures; do not use them for analysis.
"""

from typing import Any

import numpy as np
from scipy.special import softmax

from pfl_sklearn._warnings import warn_caller
from pfl_sklearn.linear_model._mixed._normal_rows._closed_form import fit_without_pooling
from pfl_sklearn.linear_model._mixed._reduction import centre_table, point_estimates
from pfl_sklearn.linear_model._printed._gradient_descent import client_grams
from pfl_sklearn.priors import GaussianPrior


def check_noise_is_given(noise_variance):
    """Raise ValueError without a noise variance: the listings take it as known, without a step."""
    if noise_variance is None:
        raise ValueError(
            "method='printed' needs noise_variance, which the published algorithms take as "
            "known; got noise_variance=None. Give a number (1 is the squared loss without a "
            "scale), or let method='reml' estimate it."
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
    table, offset, _ = centre_table(table, None)
    grams, noise = client_grams(table), options.noise_variance
    # The paper starts at the pseudo-inverse fits of the clients alone.
    no_pooling = np.diag(np.full(table.n_random, np.inf))
    theta = fit_without_pooling(table, GaussianPrior(), options, no_pooling).coefficients
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
        round_rate = min(rate, 1 / (sharpest + 1 / state[1].min())) if spread else rate
        smallest = min(smallest, round_rate)
        new, shares = step(grams, theta, state, noise, round_rate)
        change = np.abs(new - theta).max() / max(np.abs(new).max(), 1e-300)
        theta = new
    if options.learning_rate and smallest < rate:  # a rate of our own is no promise
        _warn_rate_cut(rate, smallest)
    means, variances, weights = state
    covariances = variances[:, None, None] * np.eye(len(offset))
    fitted = prior.with_mixture(means + offset, covariances, weights)
    mean, covariance = fitted.moments()
    done = bool(change <= options.tol)
    return point_estimates(mean, theta + offset, fitted, covariance, noise, n_iter, done, shares)


def _warn_rate_cut(rate, smallest):
    """Warn that a given learning rate was not used as given."""
    warn_caller(
        f"learning_rate={rate:g} of method='printed' was cut to {smallest:.3g} in at least one "
        "round: a longer step may diverge where a component's variance is small. The fit differs "
        "from the published algorithm at that rate; give a learning_rate no larger than this.",
        UserWarning,
    )


def _cluster(theta, prior, state):
    """Means (k, q), variances (k,) and weights (k,) of clusters of point estimates."""
    # Slow to import, and nothing but a printed fit needs them.
    from sklearn.cluster import KMeans
    from sklearn.mixture import GaussianMixture

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
