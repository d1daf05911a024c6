"""Gaussian mixture population prior."""

from __future__ import annotations

from typing import Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import clone
from sklearn.utils import check_array

from pfl_sklearn._compat import StrOptions
from pfl_sklearn._parameters import AT_LEAST_ONE, NOT_NEGATIVE, parameter, with_parameters
from pfl_sklearn._typing import RandomState, TableLike
from pfl_sklearn.priors._mixture import MixturePrior


@with_parameters
class GaussianMixturePrior(MixturePrior):
    r"""Several groups of clients, each with a Gaussian distribution of its own.

    .. math:: \theta_i \sim \sum_{l=1}^k w_l N(\mu_l, S_l), \qquad i = 1, \dots, m.

    Parameters
    ----------
    n_components : int, >= 1, "bic" or None, default=None
        Number k of components. "bic" chooses it from 1 to `max_components` by the smallest Bayesian
        information criterion. None is the number of given `means`, and 2 without them.
    means : array-like of shape (k, d), default=None
        Component means. None: estimated.
    covariances : float, array-like of shape (k,), (k, d) or (k, d, d), default=None
        Component covariances: one variance for all components, one for each, variances of the
        coordinates, or matrices. None: estimated.
    weights : array-like of shape (k,), default=None
        Component probabilities. None: estimated.
    covariance_type : {"spherical", "diag", "full"}, default="spherical"
        Shape of estimated covariances. Every component has a covariance of its own.
    n_init : int, >= 1, default=10
        Number of starts of EM; the result with the largest likelihood is kept.
    max_components : int, >= 1, default=8
        Largest number of components that "bic" tries.

    Notes
    -----
    The prior of AdaMix (Section 3.1 of Ozkara et al., 2023), whose equation 10 (ICLR) prints the
    density's :math:`(2 \pi \sigma^2)^{d/2}` without the square. Fits maximize the marginal
    likelihood by EM. Starts come from k-means on at most 20,000 clients, every second one on their
    k leading directions. Given means keep their order; estimated components are sorted by weight,
    ties by first coordinate.

    A component's variance plus the noise is at least a millionth of the clients' average spread per
    coordinate. Without means, only one number for all covariances may be given, because a fit finds
    components in any order.

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn.priors import GaussianMixturePrior
    >>> prior = GaussianMixturePrior(means=[[-1.0], [1.0]], covariances=0.1, weights=[0.6, 0.4])
    >>> theta = prior.sample(500, random_state=0)
    >>> GaussianMixturePrior(n_components="bic").fit(theta).means.round(1)
    array([[-1.],
           [ 1.]])
    """

    _estimated = ("means", "covariances", "weights")

    n_components: int | str | None = parameter(
        default=None,
        ranges=[AT_LEAST_ONE, StrOptions({"bic"}), None],
        kw_only=False,
    )
    means: ArrayLike | None = parameter(default=None, ranges=["array-like", None])
    covariances: ArrayLike | None = parameter(
        default=None, ranges=[NOT_NEGATIVE, "array-like", None]
    )
    weights: ArrayLike | None = parameter(default=None, ranges=["array-like", None])
    covariance_type: str = parameter(
        default="spherical", ranges=[StrOptions({"spherical", "diag", "full"})]
    )
    n_init: int = parameter(default=10, ranges=[AT_LEAST_ONE])
    max_components: int = parameter(default=8, ranges=[AT_LEAST_ONE])

    @property
    def is_known(self) -> bool:
        """Whether means, covariances and weights are all given."""
        # A fit finds components in any order: values of single ones could not be assigned.
        means, covariances, weights = self._components()
        if means is None and (weights is not None or np.ndim(covariances) > 0):
            raise ValueError(
                "GaussianMixturePrior without means takes neither weights nor more than one number "
                f"as covariances; got weights={weights!r}, covariances={covariances!r}."
            )
        return super().is_known

    def with_values(self, means: ArrayLike, covariances: ArrayLike, weights: ArrayLike) -> Self:
        """Copy of this prior with given components.

        Parameters
        ----------
        means, covariances, weights : array-like
            As in the constructor.
        """
        return clone(self).set_params(
            n_components=np.size(weights), means=means, covariances=covariances, weights=weights
        )

    with_mixture = with_values  # the name that all mixture priors share

    def fit(self, theta: TableLike, random_state: RandomState = None) -> Self:
        """Fit the prior by maximum likelihood to parameters observed without noise.

        Parameters
        ----------
        theta : array-like of shape (n_clients, d)
            One parameter vector per client.
        random_state : int, RandomState instance or None, default=None
            Seed of the starts. None is the seed 0.

        Raises
        ------
        ValueError
            If fewer vectors differ (by more than rounding) than there are components.
        """
        theta = check_array(theta, dtype=float)
        return self.fit_noisy(theta, np.zeros(len(theta)), random_state)

    def _log_prob(self, theta):
        covariances = self.known_mixture(theta.shape[1])[1]
        if np.linalg.eigvalsh(covariances).min() <= 0:
            raise ValueError(
                "this GaussianMixturePrior has no density: covariances must be positive definite."
            )
        return self.log_marginal(theta, np.zeros((len(theta), 1)))
