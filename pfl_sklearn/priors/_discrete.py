"""Discrete population prior."""

from __future__ import annotations

from typing import Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import clone
from sklearn.utils import check_array, check_random_state

from pfl_sklearn._compat import StrOptions
from pfl_sklearn._parameters import AT_LEAST_ONE, parameter, with_parameters
from pfl_sklearn._typing import RandomState, TableLike
from pfl_sklearn.priors._mixture import MixturePrior, sizes_to_try
from pfl_sklearn.priors._mixture_fit import Shape, k_means, weight_order

# Variance around the points, of the clients' spread, at which more points explain nothing: BIC
# would go on to one point per client otherwise.
_EXPLAINED = 1e-12


@with_parameters
class DiscretePrior(MixturePrior):
    r"""Several groups of clients; the clients of a group are equal.

    .. math:: P(\theta_i = \mu_l) = w_l, \qquad l = 1, \dots, k.

    Parameters
    ----------
    n_components : int, >= 1, "bic" or None, default=None
        Number k of points. "bic" chooses it from 1 to `max_components` by the smallest Bayesian
        information criterion. None is the number of given `points`, and 2 without them.
    points, weights : array-like of shape (k, d) and (k,), default=None
        Points :math:`\mu_l` and their probabilities. Give both (known) or neither (estimated).
    n_init : int, >= 1, default=10
        Number of starts; the best result is kept.
    max_components : int, >= 1, default=8
        Largest number of points that "bic" tries.

    Notes
    -----
    This is the prior of Appendix D of Ozkara et al. (2023) and the model of FedEM (Marfoq et al.,
    2021). Estimated points are sorted by weight, ties by first coordinate.

    References
    ----------
    Marfoq, O., Neglia, G., Bellet, A., Kameni, L. and Vidal, R. (2021). Federated multi-task
    learning under a mixture of distributions. NeurIPS.

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn.priors import DiscretePrior
    >>> prior = DiscretePrior(points=[[0.0], [1.0]], weights=[0.5, 0.5])
    >>> prior.posterior(np.array([[0.5], [0.9]]), np.array([[0.1], [0.1]]))[0].round(2)
    array([[0.5 ],
           [0.98]])
    """

    _estimated = ("points", "weights")
    _all_or_none = True

    n_components: int | str | None = parameter(
        default=None,
        ranges=[AT_LEAST_ONE, StrOptions({"bic"}), None],
        kw_only=False,
    )
    points: ArrayLike | None = parameter(default=None, ranges=["array-like", None])
    weights: ArrayLike | None = parameter(default=None, ranges=["array-like", None])
    n_init: int = parameter(default=10, ranges=[AT_LEAST_ONE])
    max_components: int = parameter(default=8, ranges=[AT_LEAST_ONE])

    def with_values(self, points: ArrayLike, weights: ArrayLike) -> Self:
        """Copy of this prior with given points and weights.

        Parameters
        ----------
        points, weights : array-like
            As in the constructor.
        """
        return clone(self).set_params(n_components=np.size(weights), points=points, weights=weights)

    @property
    def means(self) -> ArrayLike | None:
        """The points, under the name that all mixture priors share."""
        return self.points

    @property
    def covariances(self) -> float:
        """Zero, under the name that all mixture priors share."""
        return 0.0

    def with_mixture(self, means: ArrayLike, covariances: ArrayLike, weights: ArrayLike) -> Self:
        """Copy of this prior from the parts that all mixture priors share.

        Parameters
        ----------
        means, weights : array-like
            The points and their probabilities.
        covariances : object
            Ignored: points have no spread.
        """
        return self.with_values(means, weights)

    def fit(self, theta: TableLike, random_state: RandomState = None) -> Self:
        """Fit points and weights by k-means to parameters observed without noise.

        "bic" treats the clients as normal around the points, with one variance of at least 1e-12
        times the spread.

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
        self._validate_params()
        theta = check_array(theta, dtype=float)
        if self.is_known:
            return self.with_values(*self.known_mixture(theta.shape[1])[::2])
        rng = check_random_state(0 if random_state is None else random_state)
        sizes = sizes_to_try(self, theta)
        fits = [k_means(theta, k, rng, n_init=self.n_init) for k in sizes]
        points, labels = min(fits, key=lambda fit: _hard_bic(theta, *fit))
        weights = np.bincount(labels, minlength=len(points)) / len(theta)
        order = weight_order(points, weights)
        return self.with_values(points[order], weights[order])

    def _log_prob(self, theta):
        points, _, weights = self.known_mixture(theta.shape[1])
        mass = sum(
            weight * (theta == point).all(axis=1)
            for point, weight in zip(points, weights, strict=True)
        )
        with np.errstate(divide="ignore"):  # elsewhere than at a point
            return np.log(mass)

    def _draw(self, n_samples, rng):
        points, _, weights = self.known_mixture()
        return points[rng.choice(len(points), size=n_samples, p=weights)]

    def _shape(self):
        return Shape("fixed")


def _hard_bic(x, centres, labels):
    """BIC of normal vectors with one variance around their centres, up to a constant."""
    m, d = x.shape
    variance = np.sum((x - centres[labels]) ** 2) / (m * d)
    # Of clients that are all alike the variance is 0, which has no log.
    variance = max(variance, _EXPLAINED * float(np.mean(np.var(x, axis=0))), 1e-300)
    shares = np.bincount(labels) / m
    entropy = -np.sum(shares[shares > 0] * np.log(shares[shares > 0]))
    size = len(centres) * (d + 1)
    return m * d * np.log(variance) + 2 * m * entropy + size * np.log(m)
