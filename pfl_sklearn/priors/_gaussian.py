"""Gaussian population prior."""

from __future__ import annotations

from numbers import Real
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.utils import check_array

from pfl_sklearn._compat import StrOptions
from pfl_sklearn._parameters import AT_LEAST_ONE, parameter, with_parameters
from pfl_sklearn._typing import Floats, TableLike
from pfl_sklearn.priors import _normal as normal
from pfl_sklearn.priors._prior import Prior, known_vector


@with_parameters
class GaussianPrior(Prior):
    r"""Gaussian distribution of the clients' parameters.

    .. math:: \theta_i \sim N(\mu, S), \qquad i = 1, \dots, m.

    Parameters
    ----------
    mean : float or array-like of shape (d,), default=None
        Population mean :math:`\mu`. None: estimated.
    covariance : float, array-like of shape (d,) or (d, d), default=None
        Population covariance :math:`S`. A number stands for that variance in every coordinate, a
        vector for a diagonal. With infinity every client keeps its own estimate. None: estimated.
    covariance_type : {"spherical", "diag", "full", "low_rank"} or None, default=None
        Shape of an estimated covariance. None is "diag" for regressions (and for :meth:`fit`), and
        "spherical" for :class:`~pfl_sklearn.estimation.GaussianMean`, whose outputs have one unit.

        - "spherical": one variance for all coordinates;
        - "diag": one variance for each coordinate;
        - "full": any covariance;
        - "low_rank": :math:`B B^\top + \rho I` with `rank` columns in B, so that clients differ in
          a few directions.
    rank : int, >= 1, or None, default=None
        Number of columns of B for "low_rank"; None is 1. With d - 1 or more, the covariance is
        full.
    centered : bool, default=True
        For regressions whose intercept varies: whether the shape of an estimated covariance refers
        to columns centred at their (weighted) means over all rows. Results then do not depend on
        the origin of a feature (but still on the reference category of a factor); in the units of
        the data, intercept and slopes are correlated. A known covariance is always in these units,
        and "full" is the same either way.

    Notes
    -----
    This is the population model of Sections 2.1 and 3 of Ozkara et al. (2023). "low_rank" is the
    common representation of their Appendix J with a ridge :math:`\rho`, which makes it a density.
    It is fitted as probabilistic principal components (Tipping and Bishop, 1999).

    References
    ----------
    Tipping, M. E. and Bishop, C. M. (1999). Probabilistic principal component analysis. JRSS B.

    Examples
    --------
    >>> import numpy as np
    >>> from pfl_sklearn.priors import GaussianPrior
    >>> prior = GaussianPrior(mean=[0.0], covariance=1.0)
    >>> mean, variance = prior.posterior(np.array([[2.0]]), np.array([[1.0]]))
    >>> float(mean[0, 0]), float(variance[0, 0])
    (1.0, 0.5)
    """

    _estimated = ("mean", "covariance")

    mean: ArrayLike | None = parameter(
        default=None, ranges=[Real, "array-like", None], kw_only=False
    )
    covariance: ArrayLike | None = parameter(
        default=None, ranges=[Real, "array-like", None], kw_only=False
    )
    covariance_type: str | None = parameter(
        default=None,
        ranges=[StrOptions({"spherical", "diag", "full", "low_rank"}), None],
        kw_only=False,
    )
    rank: int | None = parameter(default=None, ranges=[AT_LEAST_ONE, None], kw_only=False)
    centered: bool = parameter(default=True, ranges=["boolean"], kw_only=False)

    def known_mean(self, d: int) -> Floats | None:
        """Given mean (d,), or None if it is to be estimated.

        Parameters
        ----------
        d : int
            Number of coordinates.
        """
        return known_vector(f"mean of {type(self).__name__}", self.mean, d)

    def known_variances(self, d: int) -> Floats | None:
        """Variances (d,) of the given covariance, which must be diagonal; None if it is not given.

        Parameters
        ----------
        d : int
            Number of coordinates.

        Raises
        ------
        ValueError
            If the covariance has another shape, negative entries, or entries off the diagonal.
        """
        if self.covariance is None:
            return None
        covariance = np.asarray(self.covariance, dtype=float)
        if covariance.shape == (d, d) and d > 1:  # (1, 1) is a number
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

    def known_covariance(self, d: int) -> Floats | None:
        """Given covariance as a matrix (d, d), or None if it is to be estimated.

        Parameters
        ----------
        d : int
            Number of coordinates.

        Raises
        ------
        ValueError
            If the covariance is not symmetric and positive semi-definite, or is infinite in some
            coordinates but not in all.
        """
        covariance = self._as_given(d)
        if covariance is None or covariance.ndim == 2:
            return covariance
        return normal.check_covariance("covariance of GaussianPrior", np.diag(covariance))

    def fit(self, theta: TableLike) -> Self:
        """Fit the prior by maximum likelihood to parameters observed without noise.

        Parameters
        ----------
        theta : array-like of shape (n_clients, d)
            One parameter vector per client.
        """
        self._validate_params()
        theta = check_array(theta, dtype=float)
        d = theta.shape[1]
        mean = self.known_mean(d)
        mean = theta.mean(axis=0) if mean is None else mean
        if self.covariance is not None:  # checked
            return self.with_values(mean, normal.diagonal_or_matrix(self._as_given(d)))
        deviations = theta - mean  # from a known mean, if there is one
        if self.covariance_type in ("spherical", "diag", None):
            variances = np.mean(deviations**2, axis=0)
            spherical = self.covariance_type == "spherical"
            return self.with_values(mean, np.full(d, variances.mean()) if spherical else variances)
        scatter = deviations.T @ deviations / len(theta)
        full = self.covariance_type == "full"
        return self.with_values(mean, scatter if full else probabilistic_pca(scatter, self.rank))

    def with_values(self, mean: ArrayLike, covariance: ArrayLike) -> Self:
        """Copy of this prior with a given mean and covariance.

        Parameters
        ----------
        mean, covariance : float or array-like
            As in the constructor.
        """
        covariance = np.asarray(covariance)
        matrix = np.diag(covariance) if covariance.ndim == 1 else covariance
        return type(self)(mean, matrix, self.covariance_type, self.rank, self.centered)

    def moments(self) -> tuple[Floats, Floats]:
        """Mean (d,) and covariance (d, d) of a known prior."""
        # Unchecked: the fitted covariance of a single client is NaN.
        mean, covariance = (np.array(value, dtype=float) for value in self._require_known())
        d = self._n_coordinates()
        if covariance.ndim < 2:
            covariance = np.diag(np.broadcast_to(covariance, (d,)))
        return np.broadcast_to(mean, (d,)).copy(), covariance

    def _log_prob(self, theta):
        mean, covariance = self._mean_and_covariance(theta.shape[1])
        # Without noise a singular covariance has no density.
        values = covariance if covariance.ndim == 1 else np.linalg.eigvalsh(covariance)
        if not (values > 0).all() or np.isinf(values).any():
            raise ValueError(
                "this GaussianPrior has no density: its covariance must be finite and positive "
                f"definite; got {self.covariance!r}."
            )
        return normal.log_density(mean, covariance, theta, np.zeros((len(theta), 1)))

    def _draw(self, n_samples, rng):
        d = self._n_coordinates()
        return normal.draw(*self._mean_and_covariance(d), rng.standard_normal((n_samples, d)))

    def posterior(self, estimates: Floats, sampling_variances: Floats) -> tuple[Floats, Floats]:
        r"""Posterior of the clients' parameters given unbiased Gaussian estimates of them.

        With :math:`A_i = S (S + V_i)^{-1}` the mean is :math:`A_i \bar x_i + (I - A_i) \mu` and
        the covariance :math:`A_i V_i`.

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
        estimates, sampling = normal.check_sampling(estimates, sampling_variances)
        return normal.condition(*self._mean_and_covariance(estimates.shape[1]), estimates, sampling)

    def _n_coordinates(self):
        """Number of coordinates of a known prior: 1 if both parameters are numbers."""
        mean, covariance = self._require_known()
        return max(np.size(mean), len(np.atleast_1d(covariance)))

    def _mean_and_covariance(self, d: int) -> tuple[Any, Any]:
        """Mean (d,) and covariance of a known prior: (d,) if diagonal, else (d, d)."""
        self._require_known()
        return self.known_mean(d), normal.diagonal_or_matrix(self._as_given(d))

    def _as_given(self, d: int) -> Any:
        """Given covariance, checked: a matrix (d, d) if it is one, else variances (d,), or None."""
        covariance: Any = self.covariance
        if np.shape(covariance) == (d, d) and d > 1:
            matrix = np.asarray(covariance, dtype=float)
            return normal.check_covariance("covariance of GaussianPrior", matrix)
        return self.known_variances(d)


def probabilistic_pca(scatter: Floats, rank: int | None = None) -> Floats:
    """Closest B B' + ridge I in likelihood to a covariance (d, d): principal components."""
    # The ridge is the mean of the eigenvalues that B leaves out.
    d, rank = len(scatter), 1 if rank is None else rank
    if rank >= d:  # a rank of d - 1 leaves a ridge of the last eigenvalue: full as well
        return scatter
    values, vectors = np.linalg.eigh(scatter)  # ascending
    ridge = max(values[: d - rank].mean(), 0.0)  # rounding may leave it below 0
    excess = values[d - rank :] - ridge
    leading = vectors[:, d - rank :]
    return (leading * excess) @ leading.T + ridge * np.eye(d)
