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
        Number k of components. "bic" chooses it from 1 to `max_components` by the smallest Bayesian
        information criterion. If `means` are given, it must be their number.
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

    See Also
    --------
    DiscretePrior : The clients of a group are equal.
    GaussianPrior : One group.

    Notes
    -----
    This is the prior of AdaMix (Section 3 of Ozkara et al., 2023). Fits maximize the marginal
    likelihood by EM. Starts come from k-means on the clients, every second one on their k leading
    directions, with at most 20,000 clients drawn at random. Given means keep their order; estimated
    components are sorted by weight, ties by first coordinate.

    The variance of a component plus the noise may not fall below a millionth of the clients'
    average spread per coordinate. A start that ends at this floor is kept only if all do.

    Without means you can give nothing but one number for all covariances, because other values
    could not be assigned to components.

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
        """Copy of this prior with given components.

        Parameters
        ----------
        means : array-like of shape (k, d)
            One mean per component.
        covariances : float or array-like of shape (k,), (k, d) or (k, d, d)
            Variances of the components, or their covariances. One number holds for all.
        weights : array-like of shape (k,)
            Probabilities of the components; they sum to 1.

        Returns
        -------
        GaussianMixturePrior
        """
        return clone(self).set_params(
            n_components=len(weights), means=means, covariances=covariances, weights=weights
        )

    def with_mixture(self, means, covariances, weights):
        """The same as :meth:`with_values`, under the name that all mixture priors share.

        Parameters
        ----------
        means : array-like of shape (k, d)
            One mean per component.
        covariances : float or array-like of shape (k,), (k, d) or (k, d, d)
            Variances of the components, or their covariances. One number holds for all.
        weights : array-like of shape (k,)
            Probabilities of the components; they sum to 1.

        Returns
        -------
        GaussianMixturePrior
        """
        return self.with_values(means, covariances, weights)

    def n_parameters(self, d):
        """Number of free parameters; `n_components` must be a number.

        Parameters
        ----------
        d : int
            Dimension of the components.

        Returns
        -------
        int
        """
        return self._shape().n_parameters(self.n_components, d)

    def known_mixture(self, d=None):
        """Given means, covariances and weights of a known prior.

        Parameters
        ----------
        d : int or None, default=None
            Dimension that the means must have. None accepts any.

        Returns
        -------
        means : ndarray of shape (k, d)
            One mean per component.
        covariances : ndarray of shape (k, d, d)
            One matrix per component.
        weights : ndarray of shape (k,)
            Probabilities of the components.

        Raises
        ------
        ValueError
            If the prior is not known, or its parameters have wrong shapes or values.
        """
        if not self.is_known:
            raise ValueError(
                "this GaussianMixturePrior is not known yet; give means, covariances and weights, "
                "or fit it."
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
        """Fit the prior by maximum likelihood to parameters observed without noise.

        Parameters
        ----------
        theta : array-like of shape (n_clients, d)
            One parameter vector per client.
        random_state : int, RandomState instance or None, default=None
            Seed of the starts. None is the seed 0.

        Returns
        -------
        GaussianMixturePrior
            A new, known prior. Given parameters are kept; this prior does not change.

        Raises
        ------
        ValueError
            If fewer vectors differ (by more than rounding) than there are components.
        """
        theta = check_array(theta, dtype=float)
        return self.fit_noisy(theta, np.zeros(len(theta)), random_state)

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
        GaussianMixturePrior
            A new, known prior. Given parameters are kept; this prior does not change.

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
            If a covariance is singular, because there is no density then.
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
        """Parts of the mixture to estimate."""
        fixed = self.covariances is not None
        return Shape(
            "fixed" if fixed else self.covariance_type, self.means is None, self.weights is None
        )

    def _given(self, k, d):
        """The given parts as a Mixture; the other parts are placeholders."""
        if self.means is None:
            variance = 1.0 if self.covariances is None else float(self.covariances)
            return fixed_variance(k, d, variance)
        weights = np.full(k, 1 / k) if self.weights is None else mixture.known_weights(self)
        means = mixture.known_points(self, "means", d)
        if self.covariances is None:
            return Mixture(means, np.ones((k, d)), None, weights)
        return from_covariances(means, mixture.known_covariances(self, k, d), weights)
