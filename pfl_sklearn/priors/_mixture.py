"""Base of mixture priors: posteriors of components, estimation, checks of parameters."""

from __future__ import annotations

from numbers import Integral
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import logsumexp
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state

from pfl_sklearn._columns import unit_near
from pfl_sklearn._typing import Floats, RandomState, TableLike
from pfl_sklearn._warnings import warn_caller
from pfl_sklearn.priors import _mixture_fit as fits, _normal as normal
from pfl_sklearn.priors._mixture_fit import NormalMixture, Shape
from pfl_sklearn.priors._prior import Prior, is_distribution
from pfl_sklearn.theory import own_weight

# Values that differ by less than this share of the largest differ by the rounding of a mean.
_SAME_VALUE = 1e-13


class MixturePrior(Prior):
    """Methods of priors with components: `means`, `covariances`, `weights` and `n_components`."""

    n_components: Any
    covariance_type: str

    @property
    def _size(self) -> Any:
        """Number of components, or "bic"; without one, that of the given means, or 2."""
        if self.n_components is not None:
            return self.n_components
        means, *_ = self._components()
        return 2 if means is None else len(means)

    def with_mixture(self, means: ArrayLike, covariances: ArrayLike, weights: ArrayLike) -> Self:
        """Copy of this prior with given components."""
        raise NotImplementedError

    def n_parameters(self, d: int) -> int:
        """Number of free parameters; `n_components` must be a number.

        Parameters
        ----------
        d : int
            Dimension of the components.
        """
        return self._shape().n_parameters(self._size, d)

    def known_mixture(self, d: int | None = None) -> tuple[Floats, Floats, Floats]:
        """Means (k, d), covariances (k, d, d) and weights (k,) of a known prior.

        Covariances of points are zero. Raises ValueError if the prior is not known, or its
        parameters have wrong shapes or values.

        Parameters
        ----------
        d : int or None, default=None
            Dimension that the means must have. None accepts any.
        """
        self._require_known()
        means = self._known_means(d)
        return means, known_covariances(self, *means.shape), known_weights(self)

    def moments(self) -> tuple[Floats, Floats]:
        """Mean (d,) and covariance (d, d) of a known prior."""
        self._require_known()
        # Unchecked: the weights of a single client are NaN.
        means, covariances, weights = (np.asarray(part, dtype=float) for part in self._components())
        mean = weights @ means
        deviations = means - mean
        within = np.einsum("k,kde->de", weights, as_matrices(covariances, *means.shape))
        return mean, within + (weights * deviations.T) @ deviations

    def fit_noisy(
        self,
        estimates: TableLike,
        sampling_variances: TableLike,
        random_state: RandomState = None,
    ) -> Self:
        """Fit the prior by maximum likelihood to parameters seen with known normal noise.

        Parameters
        ----------
        estimates : array-like of shape (n_clients, d)
            Unbiased estimates of the clients' parameters.
        sampling_variances : array-like of shape (n_clients,) or (n_clients, 1)
            Variance of each estimate, the same in every coordinate.
        random_state : int, RandomState instance or None, default=None
            Seed of the starts; None is 0.

        Raises
        ------
        ValueError
            If fewer vectors differ (by more than rounding) than there are components.
        """
        self._validate_params()
        x, s = check_variances(estimates, sampling_variances)
        d = x.shape[1]
        if self.is_known:
            return self.with_mixture(*self.known_mixture(d))
        means, covariances, _ = self._components()
        if means is not None:  # before the fit
            self._known_means(d)
        fitted = estimate_mixture(self, x, s, random_state)
        matrices = fitted.covariances
        if covariances is not None:  # as given, not turned into eigenvalues and back
            matrices = known_covariances(self, len(fitted.weights), d)
        return self.with_mixture(fitted.means, matrices, fitted.weights)

    def log_marginal(self, estimates: Floats, sampling_variances: Floats) -> Floats:
        """Log density (n_clients,), in nats, of unbiased Gaussian estimates of the parameters.

        Parameters
        ----------
        estimates, sampling_variances : ndarrays
            As in :meth:`posterior`.
        """
        return logsumexp(
            joint_log_density(*self._components_and_estimates(estimates, sampling_variances)),
            axis=1,
        )

    def responsibilities(self, estimates: Floats, sampling_variances: Floats) -> Floats:
        """Posterior probabilities (n_clients, n_components) of the components given estimates.

        Parameters
        ----------
        estimates, sampling_variances : ndarrays
            As in :meth:`posterior`.
        """
        return component_shares(*self._components_and_estimates(estimates, sampling_variances))

    def posterior(self, estimates: Floats, sampling_variances: Floats) -> tuple[Floats, Floats]:
        r"""Posterior of the clients' parameters given unbiased Gaussian estimates of them.

        The mean is :math:`\sum_l r_{il} (A_{il} \bar x_i + (I - A_{il}) \mu_l)` with the
        responsibilities :math:`r_{il} \propto w_l N(\bar x_i; \mu_l, S_l + V_i)` and
        :math:`A_{il} = S_l (S_l + V_i)^{-1}`; points have :math:`S_l = 0` (Theorem 6, ICLR).

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
        against = self._components_and_estimates(estimates, sampling_variances)
        return mixture_posterior(against[0], component_shares(*against), *against[2:])

    def _draw(self, n_samples, rng):
        means, covariances, weights = self.known_mixture()
        labels = rng.choice(len(weights), size=n_samples, p=weights)
        theta = rng.standard_normal((n_samples, means.shape[1]))
        for k, (mean, covariance) in enumerate(components_of(means, covariances)):
            theta[labels == k] = normal.draw(mean, covariance, theta[labels == k])
        return theta

    def _components(self) -> tuple[Any, ...]:
        """Means, covariances and weights as given, each None if it is to be estimated."""
        return tuple(getattr(self, name) for name in ("means", "covariances", "weights"))

    def _known_means(self, d=None):
        """Given component means (k, d), checked."""
        name, prior = self._estimated[0], type(self).__name__  # the means or the points
        points = np.asarray(getattr(self, name), dtype=float)
        if points.ndim != 2 or d not in (None, points.shape[1]):
            wanted = "(n_components, d)" if d is None else f"(n_components, {d})"
            raise ValueError(f"{name} of {prior} must have shape {wanted}; got {points.shape}.")
        if not np.isfinite(points).all():
            raise ValueError(f"{name} of {prior} must be finite; got {points.tolist()}.")
        if not isinstance(self._size, Integral) or len(points) != self._size:
            raise ValueError(
                f"n_components of {prior} must be the number of given {name}, {len(points)}; got "
                f"{self.n_components!r}."
            )
        return points

    def _shape(self) -> Shape:
        """Parts of the mixture to estimate."""
        means, covariances, weights = self._components()
        kind = self.covariance_type if covariances is None else "fixed"
        return Shape(kind, means is None, weights is None)

    def _given_parts(self, k: int, d: int) -> NormalMixture:
        """The given parts as a mixture; the other parts are placeholders."""
        means, covariances, weights = self._components()
        # Placeholders are numbers, as the fit reads them before it replaces them.
        means = np.zeros((k, d)) if means is None else self._known_means(d)
        weights = np.full(k, 1 / k) if weights is None else known_weights(self)
        if covariances is None:
            return NormalMixture(means, np.ones((k, d)), None, weights)
        return fits.from_covariances(means, known_covariances(self, k, d), weights)

    def _components_and_estimates(self, estimates, sampling_variances):
        """Components and weights, and the checked estimates with their variances."""
        estimates, sampling = normal.check_sampling(estimates, sampling_variances)
        means, covariances, weights = self.known_mixture(estimates.shape[1])
        return components_of(means, covariances), weights, estimates, sampling


def joint_log_density(components, weights, estimates, sampling):
    """Log of weight times marginal density (m, k); `components` pairs means and covariances."""
    columns = [
        normal.log_density(mean, covariance, estimates, sampling) for mean, covariance in components
    ]
    with np.errstate(divide="ignore"):  # a weight of 0
        return np.column_stack(columns) + np.log(weights)


def component_shares(components, weights, estimates, sampling):
    """Responsibilities (m, k) of the components for the clients."""
    joint = joint_log_density(components, weights, estimates, sampling)
    return np.exp(joint - logsumexp(joint, axis=1, keepdims=True))


def mixture_posterior(components, shares, estimates, sampling):
    """Posterior means (m, d) and variances, (m, d) or (m, d, d) as `sampling`, given shares."""
    posteriors = [
        normal.condition(mean, covariance, estimates, sampling) for mean, covariance in components
    ]
    return posterior_moments(shares, posteriors)


def posterior_moments(shares, posteriors):
    """Means (m, d) and variances, (m, d) or (m, d, d), over components with shares (m, k).

    `posteriors` are the means and the variances under each component.
    """
    weighted = list(zip(shares.T, posteriors, strict=True))
    mean = sum(share[:, None] * centre for share, (centre, _) in weighted)
    variance = 0.0
    for share, (centre, within) in weighted:
        deviations = centre - mean  # not knowing the component adds to the error
        full = within.ndim == 3
        between = deviations[:, :, None] * deviations[:, None, :] if full else deviations**2
        variance = variance + share.reshape(-1, *[1] * between[0].ndim) * (within + between)
    return mean, variance


def own_shares(components, shares, sampling):
    """Weights (m, d) of the posterior means on the clients' own estimates, given shares (m, k).

    For full covariances this is the diagonal of the weight matrix. `sampling` is (m, 1).
    """
    weights = 0.0
    for share, (_, covariance) in zip(shares.T, components, strict=True):
        if covariance.ndim == 1:  # else along the axes of the covariance
            weight = own_weight(covariance, sampling)
        else:
            values, vectors = np.linalg.eigh(covariance)
            values = np.maximum(values, 0.0)  # rounding
            weight = own_weight(values, sampling) @ vectors.T**2
        weights = weights + share[:, None] * weight
    return weights


def components_of(means, covariances):
    """Pairs of a mean (d,) and a covariance, (d,) if diagonal, else (d, d)."""
    return [
        (mean, normal.diagonal_or_matrix(covariance))
        for mean, covariance in zip(means, covariances, strict=True)
    ]


def estimate_mixture(prior, x, s, random_state) -> NormalMixture:
    """Mixture fitted to vectors (m, d) with sampling variances (m,); warns unless EM converged."""
    # 1, unless fourth powers of such values are too large or too small for floats.
    unit = unit_near(max(np.abs(x - x.mean(axis=0)).max(), np.sqrt(s.max())))
    x, s, shape = x / unit, s / unit**2, prior._shape()

    def known(k):
        return prior._given_parts(k, x.shape[1]).times(1 / unit)

    # The same seed for everybody: two fits of one table must not differ by their starts.
    rng = check_random_state(0 if random_state is None else random_state)
    if shape.means and prior._size in (1, "bic") and count_distinct(x, 2) == 1:
        return mixture_of_equal_clients(x, known(1), shape).times(unit)
    fit = fits.fit_mixture(
        x, s, sizes_to_try(prior, x), shape, n_init=prior.n_init, rng=rng, known=known
    )
    if not fit.converged:
        warn_caller(
            f"EM of {type(prior).__name__} did not converge: the components overlap too much. Take "
            "fewer components or a simpler covariance_type.",
            ConvergenceWarning,
        )
    # Given means keep their order.
    mixture = fits.heaviest_first(fit.mixture) if shape.means else fit.mixture
    return mixture.times(unit)


def mixture_of_equal_clients(x, known, shape):
    """Mixture of clients that do not differ: one component, with a known spread or none."""
    values = known.values if shape.covariance_type == "fixed" else np.zeros((1, x.shape[1]))
    return NormalMixture(x.mean(axis=0)[None], values, None, np.ones(1))


def sizes_to_try(prior: MixturePrior, x: Floats) -> list[int]:
    """Numbers of components that a fit to vectors (m, d) compares, in ascending order."""
    if prior._size == "bic":
        return list(range(1, count_distinct(x, prior.max_components) + 1))
    check_distinct_estimates(x, prior._size)
    return [prior._size]


def check_distinct_estimates(x: Floats, k: int) -> None:
    """Raise ValueError if there are fewer different vectors than components."""
    n_distinct = count_distinct(x, k)
    if n_distinct < k:
        raise ValueError(
            f"n_components={k} needs at least {k} clients with different values; got {n_distinct}."
        )


def count_distinct(x: Floats, enough: int) -> int:
    """Number of different rows, or `enough` if there are at least that many."""
    # Rows that differ by less than the rounding error of a mean count as equal.
    tolerance = _SAME_VALUE * np.abs(x).max(axis=0)
    # Not np.unique: neighbours within the tolerance have no order.
    others, n_distinct = x, 0
    while len(others) and n_distinct < enough:
        others = others[np.any(np.abs(others - others[0]) > tolerance, axis=1)]
        n_distinct += 1
    return n_distinct


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


def known_weights(prior):
    """Given weights (k,), checked."""
    weights = np.asarray(prior.weights, dtype=float)
    if weights.shape != (prior._size,) or not is_distribution(weights):
        raise ValueError(
            f"weights of {type(prior).__name__} must be {prior._size} non-negative numbers "
            f"that sum to 1; got {prior.weights!r}."
        )
    return weights


def as_matrices(covariances: Floats, k: int, d: int) -> Floats:
    """Covariances as matrices (k, d, d): from one number, (k,), (k, d); others as they are."""
    if covariances.shape not in ((), (k,), (k, d)):
        return covariances
    rows = covariances[:, None] if covariances.ndim == 1 else covariances
    return normal.diagonals(np.broadcast_to(rows, (k, d)))


def known_covariances(prior, k, d):
    """Given covariances as matrices (k, d, d), checked."""
    matrices = as_matrices(np.asarray(prior.covariances, dtype=float), k, d)
    name = f"covariances of {type(prior).__name__}"
    if matrices.shape != (k, d, d) or not np.isfinite(matrices).all():
        raise ValueError(
            f"{name} must be finite, a number or of shape ({k},), ({k}, {d}) or ({k}, {d}, {d}); "
            f"got {prior.covariances!r}."
        )
    return np.stack([normal.check_covariance(name, covariance) for covariance in matrices])
