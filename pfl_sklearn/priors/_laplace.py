"""Laplace population prior."""

from __future__ import annotations

from numbers import Real
from typing import Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.utils import check_array

from pfl_sklearn._parameters import POSITIVE, parameter, with_parameters
from pfl_sklearn._typing import Floats, TableLike
from pfl_sklearn.priors._prior import Prior, known_vector


@with_parameters
class LaplacePrior(Prior):
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

    Notes
    -----
    Case 2 of Section 3 of Ozkara et al. (2023). For m clients the constant of the negative log
    density is :math:`m d \log 2b`; they print :math:`m \log 2b`. There is no conjugate posterior.

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn.priors import LaplacePrior
    >>> prior = LaplacePrior(location=[0.0, 1.0], scale=0.5)
    >>> prior.prox(np.array([[0.3, 4.0]]), step=0.5)
    array([[0., 3.]])
    """

    _estimated = ("location", "scale")

    location: ArrayLike | None = parameter(
        default=None, ranges=[Real, "array-like", None], kw_only=False
    )
    scale: ArrayLike | None = parameter(
        default=None,
        ranges=[POSITIVE, "array-like", None],
        kw_only=False,
    )

    def known_location(self, d: int) -> Floats | None:
        """Given location (d,), or None if it is to be estimated.

        Parameters
        ----------
        d : int
            Number of coordinates.
        """
        return known_vector(f"location of {type(self).__name__}", self.location, d)

    def known_scale(self, d: int) -> Floats | None:
        """Given scale (d,), finite and above 0, or None if it is to be estimated.

        Parameters
        ----------
        d : int
            Number of coordinates.
        """
        name = f"scale of {type(self).__name__}"
        return known_vector(name, self.scale, d, "finite and above 0")

    def fit(self, theta: TableLike) -> Self:
        """Fit the prior by maximum likelihood to parameters observed without noise.

        The location is the median of every coordinate. The scale is the mean absolute deviation
        from it over all clients and coordinates.

        Parameters
        ----------
        theta : array-like of shape (n_clients, d)
            One parameter vector per client.

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
        if self.scale is not None:  # checked, and kept in the form in which it was given
            self.known_scale(d)
            return self.with_values(location, self.scale)
        # One scale for all coordinates: the paper's prior, and the likelihood of a coordinate in
        # which clients are equal would have no maximum.
        scale = float(np.mean(np.abs(theta - location)))
        if scale == 0:
            raise ValueError("theta does not vary, so no scale of a LaplacePrior fits it.")
        return self.with_values(location, scale)

    def with_values(self, location: ArrayLike, scale: ArrayLike) -> Self:
        """Copy of this prior with a given location and scale.

        Parameters
        ----------
        location, scale : float or array-like
            As in the constructor.
        """
        return type(self)(location, scale)

    def _log_prob(self, theta):
        location, scale = self._location_and_scale(theta.shape[1])
        return -np.sum(np.abs(theta - location) / scale + np.log(2 * scale), axis=1)

    def _draw(self, n_samples, rng):
        d = max(map(np.size, self._require_known()))
        return rng.laplace(*self._location_and_scale(d), size=(n_samples, d))

    def prox(self, theta: Floats, step: float | Floats) -> Floats:
        r"""Proximal map of the negative log density, for proximal steps towards the MAP.

        .. math:: \arg\min_v \frac{1}{2 \eta} |v - \theta|^2 + \sum_j |v_j - \mu_j| / b_j.

        Parameters
        ----------
        theta : ndarray of shape (n_clients, d)
            Points to pull towards the location.
        step : float or ndarray of shape (n_clients, 1) or (n_clients, d), > 0
            Step size :math:`\eta`.
        """
        location, scale = self._location_and_scale(theta.shape[1])
        deviations = theta - location
        return location + np.sign(deviations) * np.maximum(np.abs(deviations) - step / scale, 0.0)

    def _location_and_scale(self, d):
        """Location (d,) and scale (d,) of a known prior."""
        self._require_known()
        return self.known_location(d), self.known_scale(d)
