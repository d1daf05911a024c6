"""Gaussian population prior."""

from numbers import Real

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils import check_array, check_random_state

from pfl_sklearn._compat import StrOptions


class GaussianPrior(BaseEstimator):
    r"""Gaussian distribution of the clients' parameters.

    .. math:: \theta_i \sim N(\mu, S), \qquad i = 1, \dots, m.

    Parameters
    ----------
    mean : float or array-like of shape (d,), default=None
        Population mean :math:`\mu`. None: estimated.
    covariance : float, array-like of shape (d,) or (d, d), default=None
        Population covariance :math:`S`; a number stands for that variance in every coordinate,
        a vector for a diagonal; infinity leaves every client its own estimate. None: estimated.
    covariance_type : {"spherical", "diag"}, default="spherical"
        Shape of an estimated covariance: one variance for all coordinates, or one each.

    See Also
    --------
    pfl_sklearn.estimation.GaussianMean : Clients' means under this prior.

    Notes
    -----
    The population model of Section 2.1 of Ozkara et al. (2023).

    References
    ----------
    Ozkara, K., Girgis, A. M., Data, D. and Diggavi, S. (2023). A statistical framework for
    personalized federated learning and estimation: theory, algorithms, and privacy. ICLR.

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn.priors import GaussianPrior
    >>> prior = GaussianPrior(mean=[0.0], covariance=1.0)
    >>> mean, variance = prior.posterior(np.array([[2.0]]), np.array([[1.0]]))
    >>> float(mean[0, 0]), float(variance[0, 0])
    (1.0, 0.5)
    """

    _parameter_constraints = {
        "mean": [Real, "array-like", None],
        "covariance": [Real, "array-like", None],
        "covariance_type": [StrOptions({"spherical", "diag"})],
    }

    def __init__(self, mean=None, covariance=None, covariance_type="spherical"):
        self.mean = mean
        self.covariance = covariance
        self.covariance_type = covariance_type

    def known_mean(self, d):
        """The given mean as an array (d,), or None."""
        if self.mean is None:
            return None
        mean = np.asarray(self.mean, dtype=float)
        if mean.shape not in ((), (1,), (d,)) or not np.isfinite(mean).all():
            raise ValueError(
                f"mean of GaussianPrior must be finite, a number or of shape ({d},); got "
                f"{self.mean!r}."
            )
        return np.broadcast_to(mean, (d,)).copy()

    def known_variances(self, d):
        """Variances (d,) of the given covariance, or None; it must be diagonal."""
        if self.covariance is None:
            return None
        covariance = np.asarray(self.covariance, dtype=float)
        if covariance.shape == (d, d) and d > 1:
            if np.any(covariance[~np.eye(d, dtype=bool)] != 0):
                raise ValueError(
                    "covariance of GaussianPrior must be diagonal here; got a matrix with non-zero "
                    "off-diagonal entries."
                )
            covariance = np.diag(covariance)
        if covariance.shape not in ((), (1,), (1, 1), (d,)) or not np.all(covariance >= 0):
            raise ValueError(
                f"covariance of GaussianPrior must be non-negative, a number or of shape ({d},) or "
                f"({d}, {d}); got {self.covariance!r}."
            )
        return np.broadcast_to(covariance.ravel(), (d,)).copy()

    def fit(self, theta):
        """Maximum-likelihood prior of parameters that are observed without noise.

        Parameters
        ----------
        theta : array-like of shape (n_clients, d)
            One parameter vector per client.

        Returns
        -------
        GaussianPrior
            A new prior whose parameters hold the estimates (given ones are kept); this one is
            left as it is.
        """
        self._validate_params()
        theta = check_array(theta, dtype=float)
        d = theta.shape[1]
        mean = self.known_mean(d)
        mean = theta.mean(axis=0) if mean is None else mean
        variances = self.known_variances(d)
        if variances is None:
            variances = np.mean((theta - mean) ** 2, axis=0)
            if self.covariance_type == "spherical":
                variances = np.full(d, variances.mean())
        return self.with_values(mean, variances)

    def with_values(self, mean, variances):
        """Copy of this prior that holds `mean` (d,) and a diagonal of `variances` (d,)."""
        return type(self)(mean, np.diag(variances), self.covariance_type)

    def log_prob(self, theta):
        """Log density of parameter vectors under a known prior.

        Parameters
        ----------
        theta : array-like of shape (n_clients, d)

        Returns
        -------
        ndarray of shape (n_clients,), in nats
        """
        theta = check_array(theta, dtype=float)
        mean, variances = self._known(theta.shape[1])
        z = (theta - mean) ** 2 / variances
        return -0.5 * np.sum(z + np.log(2 * np.pi * variances), axis=1)

    def sample(self, n_samples=1, random_state=None):
        """Draw parameter vectors from a known prior.

        Parameters
        ----------
        n_samples : int, default=1
        random_state : int, RandomState instance or None, default=None

        Returns
        -------
        ndarray of shape (n_samples, d)
        """
        d = max(np.size(self.mean), np.shape(np.atleast_1d(self.covariance))[0])
        mean, variances = self._known(d)
        normal = check_random_state(random_state).standard_normal((n_samples, d))
        return mean + np.sqrt(variances) * normal

    def posterior(self, estimates, sampling_variances):
        r"""Posterior of the clients' parameters given unbiased Gaussian estimates of them.

        With :math:`a_i = S / (S + s_i^2)` coordinate by coordinate, the mean is
        :math:`a_i \bar x_i + (1 - a_i) \mu` and the variance :math:`a_i s_i^2`.

        Parameters
        ----------
        estimates : ndarray of shape (n_clients, d)
        sampling_variances : ndarray of shape (n_clients, 1) or (n_clients, d)
            Variances :math:`s_i^2` of the estimates.

        Returns
        -------
        mean, variance : ndarrays of shape (n_clients, d)
        """
        mean, variances = self._known(estimates.shape[1])
        own = own_weight(variances, sampling_variances)
        return own * estimates + (1 - own) * mean, own * sampling_variances

    def _known(self, d):
        mean, variances = self.known_mean(d), self.known_variances(d)
        if mean is None or variances is None:
            raise ValueError(
                "this GaussianPrior is not known yet: mean and covariance must be given or fitted."
            )
        return mean, variances


def own_weight(prior_variance, sampling_variance):
    """Weight on the client's own estimate; 0 where both variances are 0 (nothing differs)."""
    total = prior_variance + sampling_variance
    finite = (total > 0) & (total < np.inf)
    return np.divide(prior_variance, total, out=np.isinf(total).astype(float), where=finite)
