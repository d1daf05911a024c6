"""A personalized line, and trees or another estimator without clients for its residuals."""

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
    client_attributes,
    read_client_rows,
    row_ids,
    rows_to_predict,
)
from pfl_sklearn.compose._inner_estimators import (
    InnerEstimator,
    fit_inner,
    model_of_client,
    predict_inner,
    unprotected_report,
)

_SMALLEST_SHARE = 1e-6  # lower bound of 1 - leverage, which rounding errors may make 0
# The same with groupings: of thousands of levels, variances are those of some hundred draws.
_SMALLEST_SHARE_OF_DRAWS = 0.1


@with_parameters
class ResidualRegressor(ClientRegressorMixin, ClientMixin, MetaEstimatorMixin, BaseEstimator):
    """Personalized line, and an estimator without clients for its residuals.

    The line of each client continues trends and suits clients with few rows. Trees find what is
    common to all clients and not linear. Residuals of the fitted rows would be too small. So each
    row has the residual of the fit without it, given the variances: e / (1 - h), where the leverage
    h is the variance of the row's mean response over that of the noise. If clients have too few
    rows for variances by maximum likelihood, only the intercept varies; if each has one row, the
    mean replaces the line.
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
        """Fit the personalized model, and the other estimator to its leave-one-out residuals."""
        table = read_client_rows(self, X, y, groups, sample_weight, has_classes=False)
        check_responses(self, table)
        personal, residuals = self._fit_personal(table)
        inner = InnerEstimator("residual_estimator", self.residual_estimator, None)
        estimators = [self.estimator, self.residual_estimator]
        attributes = {
            **client_attributes(self, X, table.clients, groups),
            "estimator_": personal,
            "residual_estimator_": fit_inner(inner, table._replace(y=residuals)),
            "privacy_": unprotected_report(self, estimators, len(table.clients.ids)),
        }
        self._set_fitted(attributes)
        return self

    def _fit_personal(self, table):
        """Fitted personalized model, and leave-one-out residuals (n,)."""
        if len(table.y) == len(table.clients.ids):  # clients and noise cannot be distinguished
            mean = InnerEstimator("estimator", DummyRegressor(), None)
            return fit_inner(mean, table), table.y - np.average(table.y, weights=table.weights)
        line = fit_inner(InnerEstimator("estimator", self.estimator, None), table)
        has_levels = bool(getattr(line, "groupings_", ()))  # whose variances maximize a likelihood
        # Otherwise variances may be posterior means, which give no leverages.
        if not has_levels and np.isnan(line.log_likelihood_):
            intercept = clone(self.estimator).set_params(random="intercept")
            line = fit_inner(InnerEstimator("estimator", intercept, None), table)
        return line, _left_out_residuals(line, table)

    def predict(self, X: TableLike, *, groups: TableLike = None) -> Floats:
        """Response of every row's client; for new clients that of the population."""
        check_is_fitted(self)
        X, codes = rows_to_predict(self, X, groups)
        ids = row_ids(self, groups, codes)
        fitted = {"estimator": self.estimator_, "residual_estimator": self.residual_estimator_}
        return np.sum(
            [predict_inner(InnerEstimator(*pair, None), X, ids) for pair in fitted.items()], axis=0
        )

    def for_client(self, client_id: Any) -> Self:
        """Model of one client alone, with the common estimator of residuals."""
        model = super().for_client(client_id)
        model._set_fitted({"estimator_": model_of_client(self.estimator_, client_id)}, dropped=())
        return model


def _left_out_residuals(fitted, table):
    """Residuals (n,) of rows by the fit to all others, given the variances."""
    mean, std = fitted.predict(table.X, groups=as_groups(table.ids), return_std=True)
    row_weights = 1.0 if table.weights is None else table.weights
    # With no more rows than coefficients every row is fitted exactly.
    exact = not fitted.noise_variance_ > 0
    leverages = 1.0 if exact else row_weights * std**2 / fitted.noise_variance_
    has_levels = bool(getattr(fitted, "groupings_", ()))
    smallest = _SMALLEST_SHARE_OF_DRAWS if has_levels else _SMALLEST_SHARE
    return (table.y - mean) / np.maximum(1 - leverages, smallest)
