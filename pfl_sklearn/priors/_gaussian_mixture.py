"""Gaussian mixture population prior."""

from numbers import Integral, Real

import numpy as np
from sklearn.base import clone
from sklearn.utils import check_array, check_random_state

from pfl_sklearn._compat import Interval, StrOptions
from pfl_sklearn.priors import _mixture as mixture
from pfl_sklearn.priors._mixture_fit import Mixture, Shape, fixed_variance, from_covariances
from pfl_sklearn.priors._normal import draw


class GaussianMixturePrior(mixture.MixturePrior):
    r"""Several groups of clients, each with a Gaussian distribution of its own.

    .. math:: \theta_i \sim \sum_{l=1}^k w_l N(\mu_l, S_l), \qquad i = 1, \dots, m.

    Parameters
    ----------
    n_components : int, >= 1, or "bic", default=2
        Number k of components; "bic" takes the one, of 1 to `max_components`, with the smallest
        Bayesian information criterion. Where `means` are given, their number.
    means : array-like of shape (k, d), default=None
        Component means. None: estimated.
    covariances : float, array-like of shape (k,), (k, d) or (k, d, d), default=None
        Component covariances: one variance for all, one for each component, variances of the
        coordinates, or matrices. None: estimated.
    weights : array-like of shape (k,), default=None
        Component probabilities. None: estimated.
    covariance_type : {"spherical", "diag", "full"}, default="spherical"
        Shape of estimated covariances; every component has its own.
    n_init : int, >= 1, default=10
        Starts of EM; the likeliest end is kept.
    max_components : int, >= 1, default=8
        Where "bic" stops.

    See Also
    --------
    DiscretePrior : Clients of a group are all alike.
    GaussianPrior : One group.

    Notes
    -----
    The prior of AdaMix (Section 3 of Ozkara et al., 2023). Fits maximize the marginal likelihood
    by EM from k-means on the clients, every second time on their k leading directions; starts use
    at most 20,000 clients, drawn at random. Given means keep their order; estimated components
    are sorted by weight, ties by first coordinate. No variance of a component, with the noise, may
    fall below a millionth of the clients' average spread per coordinate, and a start that ends
    there is kept only if all do.

    Without given means the only other thing that may be given is one number for all covariances,
    because nothing else would say which component it belongs to.

    References
    ----------
    Ozkara, K., Girgis, A. M., Data, D. and Diggavi, S. (2023). A statistical framework for
    personalized federated learning and estimation: theory, algorithms, and privacy. ICLR.

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn.priors import GaussianMixturePrior
    >>> prior = GaussianMixturePrior(means=[[-1.0], [1.0]], covariances=0.1, weights=[0.6, 0.4])
    >>> theta = prior.sample(500, random_state=0)
    >>> GaussianMixturePrior(n_components="bic").fit(theta).means.round(1)
    array([[-1.],
           [ 1.]])
    >>> prior.posterior(np.array([[0.9]]), np.array([[0.1]]))[0].round(2)
    array([[0.95]])
    """

    _parameter_constraints = {
        "n_components": [Interval(Integral, 1, None, closed="left"), StrOptions({"bic"})],
        "means": ["array-like", None],
        "covariances": [Interval(Real, 0, None, closed="left"), "array-like", None],
        "weights": ["array-like", None],
        "covariance_type": [StrOptions({"spherical", "diag", "full"})],
        "n_init": [Interval(Integral, 1, None, closed="left")],
        "max_components": [Interval(Integral, 1, None, closed="left")],
    }

    def __init__(
        self,
        n_components=2,
        *,
        means=None,
        covariances=None,
        weights=None,
        covariance_type="spherical",
        n_init=10,
        max_components=8,
    ):
        self.n_components = n_components
        self.means = means
        self.covariances = covariances
        self.weights = weights
        self.covariance_type = covariance_type
        self.n_init = n_init
        self.max_components = max_components

    @property
    def is_known(self):
        """Whether means, covariances and weights are all given."""
        given = [value is not None for value in (self.means, self.covariances, self.weights)]
        if not given[0] and (given[2] or (given[1] and np.ndim(self.covariances) > 0)):
            raise ValueError(
                "GaussianMixturePrior without means takes neither weights nor more than one number "
                f"as covariances; got weights={self.weights!r}, covariances={self.covariances!r}."
            )
        return all(given)

    def with_values(self, means, covariances, weights):
        """Copy of this prior that holds `means` (k, d), `covariances` (k, d, d), `weights` (k,)."""
        return clone(self).set_params(
            n_components=len(weights), means=means, covariances=covariances, weights=weights
        )

    def with_mixture(self, means, covariances, weights):
        """The same as :meth:`with_values`: what all mixture priors have."""
        return self.with_values(means, covariances, weights)

    def n_parameters(self, d):
        """Free parameters in d dimensions, of a number of components."""
        return self._shape().n_parameters(self.n_components, d)

    def known_mixture(self, d=None):
        """Given means (k, d), covariances (k, d, d) and weights (k,) of a known prior."""
        if not self.is_known:
            raise ValueError(
                "this GaussianMixturePrior is not known yet: means, covariances and weights must "
                "be given or fitted."
            )
        means = mixture.known_points(self, "means", d)
        return means, mixture.known_covariances(self, *means.shape), mixture.known_weights(self)

    def moments(self):
        """Mean (d,) and covariance (d, d) of a known prior."""
        if np.ndim(self.covariances) == 3:  # as fitted: NaN if there was a single client
            means, covariances, weights = self.means, self.covariances, np.asarray(self.weights)
        else:
            means, covariances, weights = self.known_mixture()
        mean = weights @ means
        apart = means - mean
        return mean, np.einsum("k,kde->de", weights, covariances) + (weights * apart.T) @ apart

    def fit(self, theta, random_state=None):
        """Maximum-likelihood prior of parameters that are observed without noise.

        Parameters
        ----------
        theta : array-like of shape (n_clients, d)
            One parameter vector per client.
        random_state : int, RandomState instance or None, default=None
            For the starts. None is the seed 0.

        Returns
        -------
        GaussianMixturePrior
            A new, known prior (given parts are kept); this one is left as it is.

        Raises
        ------
        ValueError
            If fewer vectors differ (by more than rounding) than there are components.
        """
        theta = check_array(theta, dtype=float)
        return self.fit_noisy(theta, np.zeros(len(theta)), random_state)

    def fit_noisy(self, estimates, sampling_variances, random_state=None):
        """Maximum-likelihood prior of parameters that are seen with known normal noise.

        Parameters
        ----------
        estimates : array-like of shape (n_clients, d)
            Unbiased estimates of the clients' parameters.
        sampling_variances : array-like of shape (n_clients,) or (n_clients, 1)
            Their variance in every coordinate.
        random_state : int, RandomState instance or None, default=None
            For the starts. None is the seed 0.

        Returns
        -------
        GaussianMixturePrior
            A new, known prior (given parts are kept); this one is left as it is.

        Raises
        ------
        ValueError
            If fewer vectors differ (by more than rounding) than there are components.
        """
        self._validate_params()
        x, s = mixture.check_variances(estimates, sampling_variances)
        d = x.shape[1]
        if self.is_known:
            return self.with_values(*self.known_mixture(d))
        if self.means is not None:
            mixture.known_points(self, "means", d)
        found = mixture.estimate_mixture(
            self, x, s, self._shape(), lambda k: self._given(k, d), random_state
        )
        covariances = found.covariances
        if self.covariances is not None:
            covariances = mixture.known_covariances(self, len(found.weights), d)
        return self.with_values(found.means, covariances, found.weights)

    def log_prob(self, theta):
        """Log density of parameter vectors under a known prior.

        Parameters
        ----------
        theta : array-like of shape (n_clients, d)
            One parameter vector per row.

        Returns
        -------
        ndarray of shape (n_clients,), in nats

        Raises
        ------
        ValueError
            If a covariance is singular, so that there is no density.
        """
        theta = check_array(theta, dtype=float)
        covariances = self.known_mixture(theta.shape[1])[1]
        if np.linalg.eigvalsh(covariances).min() <= 0:
            raise ValueError(
                "this GaussianMixturePrior has no density: covariances must be positive definite."
            )
        return self.log_marginal(theta, np.zeros((len(theta), 1)))

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
        means, covariances, weights = self.known_mixture()
        rng = check_random_state(random_state)
        labels = rng.choice(len(weights), size=n_samples, p=weights)
        theta = rng.standard_normal((n_samples, means.shape[1]))
        for k, component in enumerate(mixture.components_of(means, covariances)):
            theta[labels == k] = draw(*component, theta[labels == k])
        return theta

    def _shape(self):
        """What is to be estimated."""
        fixed = self.covariances is not None
        return Shape(
            "fixed" if fixed else self.covariance_type, self.means is None, self.weights is None
        )

    def _given(self, k, d):
        """Mixture (internal) of what is given; the rest is a placeholder."""
        if self.means is None:
            variance = 1.0 if self.covariances is None else float(self.covariances)
            return fixed_variance(k, d, variance)
        weights = np.full(k, 1 / k) if self.weights is None else mixture.known_weights(self)
        means = mixture.known_points(self, "means", d)
        if self.covariances is None:
            return Mixture(means, np.ones((k, d)), None, weights)
        return from_covariances(means, mixture.known_covariances(self, k, d), weights)
