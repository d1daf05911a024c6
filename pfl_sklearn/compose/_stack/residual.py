"""What a personalized model leaves, predicted from the features by an estimator without clients."""

from typing import Any, Self

import numpy as np
from sklearn.base import clone
from sklearn.dummy import DummyRegressor
from sklearn.utils.validation import check_is_fitted

from pfl_sklearn._compat import BaseEstimator, HasMethods, MetaEstimatorMixin, fit_context
from pfl_sklearn._parameters import UNSEEN, parameter, with_parameters
from pfl_sklearn._typing import Floats, TableLike
from pfl_sklearn.base import ClientMixin, ClientRegressorMixin
from pfl_sklearn.compose._client_rows import (
    as_groups,
    check_responses,
    fitted_to,
    read_client_rows,
    row_ids,
    rows_to_predict,
)
from pfl_sklearn.compose._inner_estimators import (
    InnerEstimator,
    fit_inner,
    lost_guarantees,
    of_client,
    outputs,
)
from pfl_sklearn.privacy import PrivacyReport

_SMALLEST_SHARE = 1e-6  # of the noise in a residual, which rounding errors may turn into 0


@with_parameters
class ResidualRegressor(ClientRegressorMixin, ClientMixin, MetaEstimatorMixin, BaseEstimator):
    """Personalized model, and an estimator without clients of what that leaves.

    Boosted trees over a line of each client's own: the line continues trends and knows clients of
    few rows, the trees find what is common to all and not a line.

    Parameters
    ----------
    estimator : PersonalizedLinearRegression
        Personalized model, fitted without privacy.
    residual_estimator : estimator
        Regressor of the residuals.
    unseen : {"warn", "population", "error"}, default="warn"
        What to do about clients that ``fit`` did not see.

    Attributes
    ----------
    estimator_, residual_estimator_ : estimator
        Fitted to the responses, and to the residuals of rows left out.
    clients_ : ndarray of shape (n_clients,)
        Sorted ids of the clients.
    n_samples_per_client_ : ndarray of shape (n_clients,)
        Rows of each client.
    privacy_ : PrivacyReport
        ``epsilon`` is infinite: nothing protects the fit.

    Notes
    -----
    Of its own rows the personalized model leaves too little. So each residual is what is left by
    the fit without its row, given the variances: e / (1 - h), where h is the leverage of the row,
    the variance of its mean response over that of the noise. Where clients have too few rows for
    variances by maximum likelihood, the intercept alone varies, and where each has one row the mean
    stands in for the line.
    """

    estimator: Any = parameter(ranges=[HasMethods(["fit", "predict"])], kw_only=False)
    residual_estimator: Any = parameter(ranges=[HasMethods(["fit", "predict"])], kw_only=False)
    unseen: str = UNSEEN

    _population_attributes = ("estimator_", "residual_estimator_")
    _client_attributes = ("n_samples_per_client_",)

    @fit_context(prefer_skip_nested_validation=False)
    def fit(
        self, X: TableLike, y: TableLike, *, groups: TableLike = None, sample_weight: Any = None
    ) -> Self:
        """Fit the personalized model, and the other to its residuals out of fold.

        Parameters
        ----------
        X : dataframe or array-like of shape (n_rows, d)
            Features, as both estimators take them.
        y : array-like of shape (n_rows,)
            Responses.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; None: all rows are one client's.
        sample_weight : array-like of shape (n_rows,), default=None
            Weights of the rows. Both estimators must take them.

        Returns
        -------
        self
        """
        table = read_client_rows(self, X, y, groups, sample_weight, has_classes=False)
        check_responses(self, table)
        personal, residuals = self._personal_and_rest(table)
        left = table._replace(y=residuals)
        rest = fit_inner(InnerEstimator("residual_estimator", self.residual_estimator, None), left)
        report = PrivacyReport.unprotected(
            "ResidualRegressor has no private fit"
            + lost_guarantees([self.estimator, self.residual_estimator]),
            not_released=("clients_", "estimator_", "residual_estimator_"),
            n_clients=len(table.clients.ids),
        )
        attributes = {"estimator_": personal, "residual_estimator_": rest, "privacy_": report}
        self._set_fitted({**fitted_to(self, X, table.clients, groups), **attributes})
        return self

    def _personal_and_rest(self, table):
        """Fitted personalized model, and what it leaves (n,) of rows left out."""
        if len(table.y) == len(table.clients.ids):  # nothing tells clients from noise
            mean = InnerEstimator("estimator", DummyRegressor(), None)
            return fit_inner(mean, table), table.y - np.average(table.y, weights=table.weights)
        line = fit_inner(InnerEstimator("estimator", self.estimator, None), table)
        if np.isnan(line.log_likelihood_):  # posterior means, whose variances make no leverages
            level = clone(self.estimator).set_params(random="intercept")
            line = fit_inner(InnerEstimator("estimator", level, None), table)
        return line, _left_out_residuals(line, table)

    def predict(self, X: TableLike, *, groups: TableLike = None) -> Floats:
        """Response of every row's client; for new clients that of the population.

        Parameters
        ----------
        X : dataframe or array-like of shape (n_rows, d)
            As in ``fit``.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.

        Returns
        -------
        ndarray of shape (n_rows,)
        """
        check_is_fitted(self)
        X, codes = rows_to_predict(self, X, groups)
        ids = row_ids(self, groups, codes)
        fitted = {"estimator": self.estimator_, "residual_estimator": self.residual_estimator_}
        return np.sum(
            [outputs(InnerEstimator(*pair, None), X, ids) for pair in fitted.items()], axis=0
        )

    def for_client(self, client_id: Any) -> Self:
        """Model of one client alone, with the common estimator of residuals as it is.

        Parameters
        ----------
        client_id : int, str, ...
            One of ``clients_``.

        Returns
        -------
        estimator
            Fitted estimator of the same class, with ``clients_ == [client_id]``.
        """
        model = super().for_client(client_id)
        inner = {"estimator_": of_client(self.estimator_, client_id)}
        model._set_fitted(inner, dropped=())
        return model


def _left_out_residuals(fitted, table):
    """Residuals (n,) of rows by the fit to all others, given the variances."""
    mean, std = fitted.predict(table.X, groups=as_groups(table.ids), return_std=True)
    row_weights = 1.0 if table.weights is None else table.weights
    # No more rows than coefficients: each is fitted by itself alone, and leaves no noise.
    exact = not fitted.noise_variance_ > 0
    leverages = 1.0 if exact else row_weights * std**2 / fitted.noise_variance_
    return (table.y - mean) / np.maximum(1 - leverages, _SMALLEST_SHARE)
