"""Methods that mixture priors share: posteriors of components, estimation, checks of parameters."""

from numbers import Integral

import numpy as np
from scipy.special import logsumexp
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state

from pfl_sklearn._float_range import unit_near
from pfl_sklearn._warnings import warn_caller
from pfl_sklearn.priors._mixture_fit import Mixture, fit_mixture, in_order, select_components
from pfl_sklearn.priors._normal import (
    check_covariance,
    check_sampling,
    condition,
    diagonal_or_matrix,
    diagonals,
    log_density,
)
from pfl_sklearn.theory import own_weight

_ROUNDING = 1e-13  # of the largest value


class MixturePrior(BaseEstimator):
    """Methods of priors with components, on top of their ``known_mixture``."""

    def log_marginal(self, estimates, sampling_variances):
        """Log density of unbiased Gaussian estimates of the clients' parameters.

        Parameters
        ----------
        estimates : ndarray of shape (n_clients, d)
            One estimate per client.
        sampling_variances : ndarray of shape (n_clients, 1), (n_clients, d) or (n_clients, d, d)
            Variances or covariances of the estimates.

        Returns
        -------
        ndarray of shape (n_clients,), in nats
        """
        return logsumexp(joint_log_density(*self._against(estimates, sampling_variances)), axis=1)

    def responsibilities(self, estimates, sampling_variances):
        """Posterior probability of every component given unbiased Gaussian estimates.

        Parameters
        ----------
        estimates : ndarray of shape (n_clients, d)
            One estimate per client.
        sampling_variances : ndarray of shape (n_clients, 1), (n_clients, d) or (n_clients, d, d)
            Variances or covariances of the estimates.

        Returns
        -------
        ndarray of shape (n_clients, n_components)
        """
        return component_shares(*self._against(estimates, sampling_variances))

    def posterior(self, estimates, sampling_variances):
        r"""Posterior of the clients' parameters given unbiased Gaussian estimates of them.

        The mean is :math:`\sum_l r_{il} (A_{il} \bar x_i + (I - A_{il}) \mu_l)` with the
        responsibilities :math:`r_{il} \propto w_l N(\bar x_i; \mu_l, S_l + V_i)` and
        :math:`A_{il} = S_l (S_l + V_i)^{-1}`; points have :math:`S_l = 0` (Theorem 5 of the
        source).

        Parameters
        ----------
        estimates : ndarray of shape (n_clients, d)
            One estimate per client.
        sampling_variances : ndarray of shape (n_clients, 1), (n_clients, d) or (n_clients, d, d)
            Variances or covariances :math:`V_i` of the estimates.

        Returns
        -------
        mean : ndarray of shape (n_clients, d)
        variance : ndarray of shape (n_clients, d), or (n_clients, d, d) if covariances were given
        """
        against = self._against(estimates, sampling_variances)
        return mixture_posterior(against[0], component_shares(*against), *against[2:])

    def _against(self, estimates, sampling_variances):
        """Components and weights, and the checked estimates with their variances."""
        estimates, sampling = check_sampling(estimates, sampling_variances)
        means, covariances, weights = self.known_mixture(estimates.shape[1])
        return components_of(means, covariances), weights, estimates, sampling


def joint_log_density(components, weights, estimates, sampling):
    """Log of weight times marginal density (m, k); `components` pairs means and covariances."""
    columns = [log_density(*component, estimates, sampling) for component in components]
    with np.errstate(divide="ignore"):
        return np.column_stack(columns) + np.log(weights)


def component_shares(components, weights, estimates, sampling):
    """Responsibilities (m, k)."""
    joint = joint_log_density(components, weights, estimates, sampling)
    return np.exp(joint - logsumexp(joint, axis=1, keepdims=True))


def mixture_posterior(components, shares, estimates, sampling):
    """Posterior means (m, d) and variances, (m, d) or (m, d, d) as `sampling`, given shares."""
    parts = [condition(*component, estimates, sampling) for component in components]
    mean = sum(share[:, None] * part[0] for share, part in zip(shares.T, parts, strict=True))
    full = sampling.ndim == 3
    variance = 0.0
    for share, (centre, spread) in zip(shares.T, parts, strict=True):
        apart = centre - mean
        between = apart[:, :, None] * apart[:, None, :] if full else apart**2
        variance = variance + share.reshape(-1, *[1] * between[0].ndim) * (spread + between)
    return mean, variance


def own_shares(components, shares, sampling):
    """Weights (m, d) of the posterior means on the clients' own estimates, given shares (m, k).

    For full covariances this is the diagonal of the weight matrix. `sampling` is (m, 1).
    """
    own = 0.0
    for share, (_, covariance) in zip(shares.T, components, strict=True):
        if covariance.ndim == 1:
            weight = own_weight(covariance, sampling)
        else:
            values, vectors = np.linalg.eigh(covariance)
            weight = own_weight(np.maximum(values, 0.0), sampling) @ vectors.T**2
        own = own + share[:, None] * weight
    return own


def components_of(means, covariances):
    """Pairs of a mean (d,) and a covariance, (d,) if diagonal, else (d, d)."""
    return [
        (mean, diagonal_or_matrix(covariance))
        for mean, covariance in zip(means, covariances, strict=True)
    ]


def estimate_mixture(prior, x, s, shape, known, random_state):
    """Mixture fitted to vectors (m, d) with sampling variances (m,); warns unless EM converged."""
    unit = _unit(x, s)
    if unit != 1:
        scaled = x / unit, s / unit**2, shape, lambda k: known(k).times(1 / unit)
        return estimate_mixture(prior, *scaled, random_state).times(unit)
    rng = check_random_state(0 if random_state is None else random_state)
    if shape.means and prior.n_components in (1, "bic") and count_distinct(x, 2) == 1:
        return all_alike(x, known(1), shape)
    if prior.n_components == "bic":
        largest = count_distinct(x, prior.max_components)
        fit = select_components(x, s, largest, shape, n_init=prior.n_init, rng=rng, known=known)
    else:
        check_distinct(x, prior.n_components)
        k = prior.n_components
        fit = fit_mixture(x, s, k, shape, n_init=prior.n_init, rng=rng, known=known(k))
    if not fit.converged:
        warn_caller(
            f"EM of {type(prior).__name__} did not converge: the components overlap too much. Take "
            "fewer components or a simpler covariance_type.",
            ConvergenceWarning,
        )
    return in_order(fit.mixture) if shape.means else fit.mixture


def _unit(x, s):
    """Unit in which the numbers are near 1, or can do without."""
    size = max(np.abs(x - x.mean(axis=0)).max(), np.sqrt(s.max()))
    return unit_near(size)


def all_alike(x, known, shape):
    """Mixture of clients that do not differ: one component, with a known spread or none."""
    values = known.values if shape.covariance_type == "fixed" else np.zeros((1, x.shape[1]))
    return Mixture(x.mean(axis=0)[None], values, None, np.ones(1))


def check_distinct(x, k):
    """Raise ValueError if there are fewer different vectors than components."""
    found = count_distinct(x, k)
    if found < k:
        raise ValueError(
            f"n_components={k} needs at least {k} clients with different values; got {found}."
        )


def count_distinct(x, enough):
    """Number of different rows, or `enough` if there are at least that many.

    Rows that differ by less than the rounding of a mean count as the same.
    """
    tolerance = _ROUNDING * np.abs(x).max(axis=0)
    left, found = x, 0
    while len(left) and found < enough:
        left = left[np.any(np.abs(left - left[0]) > tolerance, axis=1)]
        found += 1
    return found


def check_variances(estimates, sampling_variances):
    """Vectors (m, d) and their sampling variances (m,), one for all coordinates."""
    x = np.asarray(estimates, dtype=float)
    s = np.asarray(sampling_variances, dtype=float)
    if x.ndim != 2 or s.shape not in ((len(x),), (len(x), 1)):
        raise ValueError(
            "estimates must have shape (n_clients, d) and sampling_variances (n_clients,); got "
            f"{x.shape} and {s.shape}."
        )
    if not (np.isfinite(x).all() and np.isfinite(s).all() and (s >= 0).all()):
        raise ValueError(
            "estimates and sampling_variances must be finite, the variances not below 0."
        )
    return x, s.ravel()


def known_points(prior, name, d=None):
    """Given component means (k, d), checked."""
    points = np.asarray(getattr(prior, name), dtype=float)
    if points.ndim != 2 or points.shape[1] != (points.shape[1] if d is None else d):
        wanted = "(n_components, d)" if d is None else f"(n_components, {d})"
        raise ValueError(
            f"{name} of {type(prior).__name__} must have shape {wanted}; got {points.shape}."
        )
    if not np.isfinite(points).all():
        raise ValueError(f"{name} of {type(prior).__name__} must be finite; got {points.tolist()}.")
    if not isinstance(prior.n_components, Integral) or len(points) != prior.n_components:
        raise ValueError(
            f"n_components of {type(prior).__name__} must be the number of given {name}, "
            f"{len(points)}; got {prior.n_components!r}."
        )
    return points


def known_weights(prior):
    """Given weights (k,), checked."""
    weights = np.asarray(prior.weights, dtype=float)
    valid = weights.shape == (prior.n_components,) and np.all(weights >= 0)
    if not valid or abs(weights.sum() - 1) > 1e-8:
        raise ValueError(
            f"weights of {type(prior).__name__} must be {prior.n_components} non-negative numbers "
            f"that sum to 1; got {prior.weights!r}."
        )
    return weights


def known_covariances(prior, k, d):
    """Given covariances as matrices (k, d, d), checked."""
    given = np.asarray(prior.covariances, dtype=float)
    name = "covariances of GaussianMixturePrior"
    if given.ndim <= 2 and given.shape in ((), (k,), (k, d)):
        rows = given[:, None] if given.ndim == 1 else given
        given = diagonals(np.broadcast_to(rows, (k, d)))
    if given.shape != (k, d, d) or not np.isfinite(given).all():
        raise ValueError(
            f"{name} must be finite, a number or of shape ({k},), ({k}, {d}) or ({k}, {d}, {d}); "
            f"got {prior.covariances!r}."
        )
    return np.stack([check_covariance(name, covariance) for covariance in given])
