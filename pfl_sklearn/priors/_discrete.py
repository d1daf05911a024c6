"""Discrete population prior."""

from numbers import Integral

import numpy as np
from sklearn.base import clone
from sklearn.utils import check_array, check_random_state

from pfl_sklearn._compat import Interval, StrOptions
from pfl_sklearn.priors import _mixture as mixture
from pfl_sklearn.priors._mixture_fit import Shape, fixed_variance, k_means

_RELATIVE = 1e-12


class DiscretePrior(mixture.MixturePrior):
    r"""Several groups of clients; the clients of a group are equal.

    .. math:: P(\theta_i = \mu_l) = w_l, \qquad l = 1, \dots, k.

    Parameters
    ----------
    n_components : int, >= 1, or "bic", default=2
        Number k of points. "bic" chooses it from 1 to `max_components` by the smallest Bayesian
        information criterion. If `points` are given, it must be their number.
    points, weights : array-like of shape (k, d) and (k,), default=None
        Points :math:`\mu_l` and their probabilities. Give both (known) or neither (estimated).
    n_init : int, >= 1, default=10
        Number of starts; the best result is kept.
    max_components : int, >= 1, default=8
        Largest number of points that "bic" tries.

    See Also
    --------
    GaussianMixturePrior : The clients of a group differ.

    Notes
    -----
    This is the prior of Section 2.3 of Ozkara et al. (2023) and the model of FedEM (Marfoq et al.,
    2021). Estimated points are sorted by weight, ties by first coordinate.

    References
    ----------
    Ozkara, K., Girgis, A. M., Data, D. and Diggavi, S. (2023). A statistical framework for
    personalized federated learning and estimation: theory, algorithms, and privacy. ICLR.

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

    _parameter_constraints = {
        "n_components": [Interval(Integral, 1, None, closed="left"), StrOptions({"bic"})],
        "points": ["array-like", None],
        "weights": ["array-like", None],
        "n_init": [Interval(Integral, 1, None, closed="left")],
        "max_components": [Interval(Integral, 1, None, closed="left")],
    }

    def __init__(self, n_components=2, *, points=None, weights=None, n_init=10, max_components=8):
        self.n_components = n_components
        self.points = points
        self.weights = weights
        self.n_init = n_init
        self.max_components = max_components

    @property
    def is_known(self):
        """Whether points and weights are given."""
        if (self.points is None) != (self.weights is None):
            raise ValueError(
                "DiscretePrior needs both points and weights or neither; got points="
                f"{self.points!r}, weights={self.weights!r}."
            )
        return self.points is not None

    def with_values(self, points, weights):
        """Copy of this prior with given points and weights.

        Parameters
        ----------
        points : array-like of shape (k, d)
            One point per row.
        weights : array-like of shape (k,)
            Probabilities of the points; they sum to 1.

        Returns
        -------
        DiscretePrior
        """
        return clone(self).set_params(n_components=len(weights), points=points, weights=weights)

    @property
    def means(self):
        """The points, under the name that all mixture priors share."""
        return self.points

    @property
    def covariances(self):
        """Zero, under the name that all mixture priors share."""
        return 0.0

    def with_mixture(self, means, covariances, weights):
        """Copy of this prior from the parts that all mixture priors share.

        Parameters
        ----------
        means : array-like of shape (k, d)
            The points.
        covariances : object
            Ignored: points have no spread.
        weights : array-like of shape (k,)
            Probabilities of the points; they sum to 1.

        Returns
        -------
        DiscretePrior
        """
        return self.with_values(means, weights)

    def n_parameters(self, d):
        """Number of free parameters; `n_components` must be a number.

        Parameters
        ----------
        d : int
            Dimension of the points.

        Returns
        -------
        int
        """
        return Shape("fixed").n_parameters(self.n_components, d)

    def known_mixture(self, d=None):
        """Points of a known prior as components without spread.

        Parameters
        ----------
        d : int or None, default=None
            Dimension that the points must have. None accepts any.

        Returns
        -------
        means : ndarray of shape (k, d)
            The points.
        covariances : ndarray of shape (k, d, d)
            Zero.
        weights : ndarray of shape (k,)
            Probabilities of the points.

        Raises
        ------
        ValueError
            If the prior is not known, or its points have another dimension.
        """
        if not self.is_known:
            raise ValueError(
                "this DiscretePrior is not known yet; give points and weights, or fit it."
            )
        points = mixture.known_points(self, "points", d)
        size = points.shape[1]
        return points, np.zeros((len(points), size, size)), mixture.known_weights(self)

    def moments(self):
        """Mean (d,) and covariance (d, d) of a known prior."""
        if not self.is_known:
            self.known_mixture()
        points, weights = np.asarray(self.points), np.asarray(self.weights)
        mean = weights @ points  # NaN if there was a single client
        return mean, (weights * (points - mean).T) @ (points - mean)

    def fit(self, theta, random_state=None):
        """Fit points and weights by k-means to parameters observed without noise.

        Parameters
        ----------
        theta : array-like of shape (n_clients, d)
            One parameter vector per client.
        random_state : int, RandomState instance or None, default=None
            Seed of the starts. None is the seed 0.

        Returns
        -------
        DiscretePrior
            A new, known prior; this prior does not change. A known prior is copied.

        Raises
        ------
        ValueError
            If fewer vectors differ (by more than rounding) than there are components.

        Notes
        -----
        "bic" treats the clients as normal around the points, with one variance of at least 1e-12
        times the spread.
        """
        self._validate_params()
        theta = check_array(theta, dtype=float)
        if self.is_known:
            return self.with_values(*self.known_mixture(theta.shape[1])[::2])
        rng = check_random_state(0 if random_state is None else random_state)
        if self.n_components == "bic":
            sizes = range(1, mixture.count_distinct(theta, self.max_components) + 1)
        else:
            mixture.check_distinct(theta, self.n_components)
            sizes = [self.n_components]
        found = [k_means(theta, k, rng, n_init=self.n_init) for k in sizes]
        points, labels = min(found, key=lambda fit: _hard_bic(theta, *fit))
        weights = np.bincount(labels, minlength=len(points)) / len(theta)
        order = np.lexsort((points[:, 0], -weights))
        return self.with_values(points[order], weights[order])

    def fit_noisy(self, estimates, sampling_variances, random_state=None):
        """Fit the prior by maximum likelihood to parameters seen with known normal noise.

        Parameters
        ----------
        estimates : array-like of shape (n_clients, d)
            Unbiased estimates of the clients' parameters.
        sampling_variances : array-like of shape (n_clients,) or (n_clients, 1)
            Variance of each estimate, the same in every coordinate.
        random_state : int, RandomState instance or None, default=None
            Seed of the starts. None is the seed 0.

        Returns
        -------
        DiscretePrior
            A new, known prior; this prior does not change. A known prior is copied.

        Raises
        ------
        ValueError
            If fewer vectors differ (by more than rounding) than there are components.
        """
        self._validate_params()
        x, s = mixture.check_variances(estimates, sampling_variances)
        d = x.shape[1]
        if self.is_known:
            return self.with_values(*self.known_mixture(d)[::2])
        found = mixture.estimate_mixture(
            self, x, s, Shape("fixed"), lambda k: fixed_variance(k, d, 0.0), random_state
        )
        return self.with_values(found.means, found.weights)

    def log_prob(self, theta):
        """Log probability of parameter vectors under a known prior.

        Parameters
        ----------
        theta : array-like of shape (n_clients, d)
            One parameter vector per row.

        Returns
        -------
        ndarray of shape (n_clients,), in nats
            Log weight at a point of the prior, minus infinity elsewhere.
        """
        theta = check_array(theta, dtype=float)
        points, _, weights = self.known_mixture(theta.shape[1])
        mass = sum(
            weight * (theta == point).all(axis=1)
            for point, weight in zip(points, weights, strict=True)
        )
        with np.errstate(divide="ignore"):
            return np.log(mass)

    def sample(self, n_samples=1, random_state=None):
        """Draw parameter vectors from a known prior.

        Parameters
        ----------
        n_samples : int, default=1
            Number of draws.
        random_state : int, RandomState instance or None, default=None
            Seed of the draws.

        Returns
        -------
        ndarray of shape (n_samples, d)
        """
        points, _, weights = self.known_mixture()
        labels = check_random_state(random_state).choice(len(points), size=n_samples, p=weights)
        return points[labels]


def _hard_bic(x, centres, labels):
    """BIC of normal vectors with one variance around their centres, up to a constant."""
    m, d = x.shape
    variance = np.sum((x - centres[labels]) ** 2) / (m * d)
    variance = max(variance, _RELATIVE * float(np.mean(np.var(x, axis=0))), 1e-300)
    shares = np.bincount(labels) / m
    entropy = -np.sum(shares[shares > 0] * np.log(shares[shares > 0]))
    size = len(centres) * (d + 1)
    return m * d * np.log(variance) + 2 * m * entropy + size * np.log(m)
