"""Laplace population prior."""

from numbers import Real

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils import check_array, check_random_state

from pfl_sklearn._compat import Interval
from pfl_sklearn.priors._normal import known_vector


class LaplacePrior(BaseEstimator):
    r"""Laplace distribution of the clients' parameters, with independent coordinates.

    .. math:: p(\theta_i) = \prod_{j=1}^d \frac{1}{2 b_j} e^{-|\theta_{ij} - \mu_j| / b_j}.

    Under this prior, maximum a posteriori estimates leave most coordinates of a client at the
    population's value.

    Parameters
    ----------
    location : float or array-like of shape (d,), default=None
        Population median :math:`\mu`. None: estimated.
    scale : float or array-like of shape (d,), > 0, default=None
        Mean absolute deviation b from the median, for all coordinates or for each. None: one
        number for all coordinates is estimated, as in the paper.

    See Also
    --------
    GaussianPrior : Clients differ in every coordinate.

    Notes
    -----
    Case 2 of Section 3 of Ozkara et al. (2023). Their negative log density leaves out the constant
    :math:`d \log 2b`; without that constant b could not be estimated. There is no conjugate
    posterior.

    References
    ----------
    Ozkara, K., Girgis, A. M., Data, D. and Diggavi, S. (2023). A statistical framework for
    personalized federated learning and estimation: theory, algorithms, and privacy. ICLR.

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn.priors import LaplacePrior
    >>> prior = LaplacePrior(location=[0.0, 1.0], scale=0.5)
    >>> prior.prox(np.array([[0.3, 4.0]]), step=0.5)
    array([[0., 3.]])
    """

    _parameter_constraints = {
        "location": [Real, "array-like", None],
        "scale": [Interval(Real, 0, None, closed="neither"), "array-like", None],
    }

    def __init__(self, location=None, scale=None):
        self.location = location
        self.scale = scale

    @property
    def is_known(self):
        """Whether location and scale are given."""
        return self.location is not None and self.scale is not None

    def known_location(self, d):
        """Given location, or None if it is to be estimated.

        Parameters
        ----------
        d : int
            Number of coordinates. A location given as a number is repeated for all of them.

        Returns
        -------
        ndarray of shape (d,) or None
        """
        return known_vector(self, "location", d)

    def known_scale(self, d):
        """Given scale, or None if it is to be estimated.

        Parameters
        ----------
        d : int
            Number of coordinates. A scale given as a number is repeated for all of them.

        Returns
        -------
        ndarray of shape (d,) or None

        Raises
        ------
        ValueError
            If the scale has another shape, or is not finite and above 0.
        """
        if self.scale is None:
            return None
        scale = np.asarray(self.scale, dtype=float)
        valid = np.isfinite(scale).all() and (scale > 0).all()
        if scale.shape not in ((), (1,), (d,)) or not valid:
            raise ValueError(
                f"scale of LaplacePrior must be finite and above 0, a number or of shape ({d},); "
                f"got {self.scale!r}."
            )
        return np.broadcast_to(scale, (d,)).copy()

    def fit(self, theta):
        """Fit the prior by maximum likelihood to parameters observed without noise.

        The location is the median of every coordinate. The scale is the mean absolute deviation
        from it over all clients and coordinates.

        Parameters
        ----------
        theta : array-like of shape (n_clients, d)
            One parameter vector per client.

        Returns
        -------
        LaplacePrior
            A new prior whose parameters hold the estimates. Given parameters are kept; this prior
            does not change.

        Raises
        ------
        ValueError
            If all clients are equal. The likelihood is unbounded then, as b falls to 0.
        """
        self._validate_params()
        theta = check_array(theta, dtype=float)
        d = theta.shape[1]
        location = self.known_location(d)
        location = np.median(theta, axis=0) if location is None else location
        if self.scale is not None:
            self.known_scale(d)
            return self.with_values(location, self.scale)
        scale = float(np.mean(np.abs(theta - location)))
        if scale == 0:
            raise ValueError("theta does not vary, so no scale of a LaplacePrior fits it.")
        return self.with_values(location, scale)

    def with_values(self, location, scale):
        """Copy of this prior with a given location and scale.

        Parameters
        ----------
        location : float or array-like of shape (d,)
            Population median.
        scale : float or array-like of shape (d,), > 0
            Mean absolute deviation from the median, for all coordinates or for each.

        Returns
        -------
        LaplacePrior
        """
        return type(self)(location, scale)

    def log_prob(self, theta):
        """Log density of parameter vectors under a known prior.

        Parameters
        ----------
        theta : array-like of shape (n_clients, d)
            One parameter vector per row.

        Returns
        -------
        ndarray of shape (n_clients,), in nats
        """
        theta = check_array(theta, dtype=float)
        location, scale = self._known(theta.shape[1])
        return -np.sum(np.abs(theta - location) / scale + np.log(2 * scale), axis=1)

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
        location, scale = self._known(max(np.size(self.location), np.size(self.scale)))
        rng = check_random_state(random_state)
        return rng.laplace(location, scale, size=(n_samples, len(location)))

    def prox(self, theta, step):
        r"""Proximal map of the negative log density, for proximal steps towards the MAP.

        .. math:: \arg\min_v \frac{1}{2 \eta} |v - \theta|^2 + \sum_j |v_j - \mu_j| / b_j.

        Parameters
        ----------
        theta : ndarray of shape (n_clients, d)
            Points to pull towards the location.
        step : float or ndarray of shape (n_clients, 1) or (n_clients, d), > 0
            Step size :math:`\eta`.

        Returns
        -------
        ndarray of shape (n_clients, d)
            Points whose deviations from the location have shrunk by step / scale, down to 0.
        """
        location, scale = self._known(theta.shape[1])
        deviations = theta - location
        return location + np.sign(deviations) * np.maximum(np.abs(deviations) - step / scale, 0.0)

    def _known(self, d):
        location, scale = self.known_location(d), self.known_scale(d)
        if location is None or scale is None:
            raise ValueError(
                "this LaplacePrior is not known yet; give location and scale, or fit it."
            )
        return location, scale
