"""Prior of the effects of a grouping's levels."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real

import numpy as np
from numpy.typing import ArrayLike

from pfl_sklearn._compat import BaseEstimator, StrOptions
from pfl_sklearn._parameters import parameter, with_parameters
from pfl_sklearn._typing import Floats
from pfl_sklearn.priors._gaussian import GaussianPrior


@with_parameters
class GroupingPrior(BaseEstimator):
    r"""Gaussian distribution of the effects of the levels of a grouping column.

    .. math:: b_l \sim N(0, S), \qquad l = 1, \dots, L.

    A value of `groupings` in :class:`~pfl_sklearn.linear_model.PersonalizedLinearRegression` and in
    the logistic and Poisson regressions.

    Parameters
    ----------
    random : "intercept", "all", the name or index of a feature, or a list, default="intercept"
        The q coefficients that vary by level; a list holds names or indices of features, and
        "intercept". Features are the columns of X that are not groupings.
    covariance_type : {"diag", "full"}, default="diag"
        Shape of an estimated covariance. "full" needs at least q levels.
    covariance : float, >= 0, or array-like of shape (q,) or (q, q), default=None
        Covariance :math:`S`, with the intercept first and then the features in the order of X. A
        number stands for that variance of every coefficient, a vector for a diagonal. None:
        estimated.
    centered : bool, default=True
        Whether the shape of an estimated covariance refers to columns centred at their (weighted)
        means over all rows, where the intercept varies, as for
        :class:`~pfl_sklearn.priors.GaussianPrior`. False: to the columns as they are, as in lme4.

    Raises
    ------
    ValueError
        In the fit: for unknown names in `random`, and a covariance that is infinite, of another
        shape, or not symmetric and positive semi-definite.

    Examples
    --------
    >>> from pfl_sklearn.linear_model import PersonalizedLinearRegression
    >>> from pfl_sklearn.priors import GroupingPrior
    >>> by_state = GroupingPrior(random=["intercept", "age"], covariance_type="full")
    >>> model = PersonalizedLinearRegression(groupings={"state": by_state})
    """

    random: str | int | Sequence[str | int] = parameter(
        default="intercept", ranges=[str, Integral, "array-like"], kw_only=False
    )
    covariance_type: str = parameter(
        default="diag", ranges=[StrOptions({"diag", "full"})], kw_only=False
    )
    covariance: ArrayLike | None = parameter(
        default=None, ranges=[Real, "array-like", None], kw_only=False
    )
    centered: bool = parameter(default=True, ranges=["boolean"], kw_only=False)

    def known_covariance(self, q: int) -> Floats | None:
        """Given covariance as a matrix (q, q), or None if it is to be estimated.

        Parameters
        ----------
        q : int
            Number of coefficients that vary by level.

        Raises
        ------
        ValueError
            If the covariance is not finite, symmetric and positive semi-definite.
        """
        try:
            covariance = GaussianPrior(covariance=self.covariance).known_covariance(q)
        except ValueError as error:
            message = str(error).replace("GaussianPrior", type(self).__name__)
            raise ValueError(message) from None
        if covariance is not None and np.isinf(covariance).any():
            raise ValueError(
                f"covariance of GroupingPrior must be finite; got {self.covariance!r}."
            )
        return covariance
