"""What estimators hand on to the one estimator that they fit."""

import math

from sklearn import config_context
from sklearn.utils import get_tags
from sklearn.utils.metadata_routing import MetadataRouter, MethodMapping
from sklearn.utils.validation import check_is_fitted

from pfl_sklearn._compat import available_if
from pfl_sklearn._nesting import (
    final_estimator,
    hand_out,
    predicting_estimator,
    takes_groups,
)
from pfl_sklearn.metrics._client_scores import known_clients
from pfl_sklearn.metrics._responses import Responses
from pfl_sklearn.privacy._pipeline_report import report_of_fits

_ROUTED = (
    "fit",
    "predict",
    "predict_proba",
    "predict_log_proba",
    "decision_function",
    "transform",
    "score",
)
_INHERITED_TAGS = (
    "estimator_type",
    "classifier_tags",
    "regressor_tags",
    "transformer_tags",
    "target_tags",
    "input_tags",
    "non_deterministic",
    "no_validation",
)


def inner_has(method):
    """Check for ``available_if``: the fitted estimator, or else the given one, has a method."""

    def check(self):
        getattr(getattr(self, self._wraps.fitted, self.estimator), method)
        return True

    return check


def model_has(method):
    """Check for ``available_if``: the model at the end of all steps has a method."""

    def check(self):
        getattr(final_estimator(getattr(self, self._wraps.fitted, self.estimator)), method)
        return True

    return check


class DelegationMixin:
    """Mixin for an estimator with a parameter `estimator`, to whose fitted form it delegates.

    A subclass declares what it wraps in `_wraps` (see ``pfl_sklearn._nesting.Wraps``). What it does
    to the rows before they are handed on is in ``_handed_on``.
    """

    @available_if(inner_has("predict"))
    def predict(self, X, **params):
        """Predict with the fitted estimator.

        Parameters
        ----------
        X : array-like of n_rows rows
            As in ``fit``.
        **params : dict
            Routed to the estimator's ``predict``.

        Returns
        -------
        ndarray of shape (n_rows,) or (n_rows, n_outputs)
        """
        return self._call("predict", X, **params)

    @available_if(inner_has("predict_proba"))
    def predict_proba(self, X, **params):
        """Class probabilities from the fitted estimator.

        Parameters
        ----------
        X : array-like of n_rows rows
            As in ``fit``.
        **params : dict
            Routed to the estimator's ``predict_proba``.

        Returns
        -------
        ndarray of shape (n_rows, n_classes)
        """
        return self._call("predict_proba", X, **params)

    @available_if(inner_has("predict_log_proba"))
    def predict_log_proba(self, X, **params):
        """Logarithms of the class probabilities from the fitted estimator.

        Parameters
        ----------
        X : array-like of n_rows rows
            As in ``fit``.
        **params : dict
            Routed to the estimator's ``predict_log_proba``.

        Returns
        -------
        ndarray of shape (n_rows, n_classes)
        """
        return self._call("predict_log_proba", X, **params)

    @available_if(inner_has("decision_function"))
    def decision_function(self, X, **params):
        """Decision function of the fitted estimator.

        Parameters
        ----------
        X : array-like of n_rows rows
            As in ``fit``.
        **params : dict
            Routed to the estimator's ``decision_function``.

        Returns
        -------
        ndarray of shape (n_rows,) or (n_rows, n_classes)
        """
        return self._call("decision_function", X, **params)

    @available_if(inner_has("transform"))
    def transform(self, X, **params):
        """Transform the rows with the fitted estimator.

        Parameters
        ----------
        X : array-like of n_rows rows
            As in ``fit``.
        **params : dict
            Routed to the estimator's ``transform``.

        Returns
        -------
        ndarray of shape (n_rows, n_features_out)
        """
        return self._call("transform", X, **params)

    @available_if(inner_has("score"))
    def score(self, X, y=None, **params):
        """Score of the fitted estimator by its own ``score``.

        Parameters
        ----------
        X : array-like of n_rows rows
            As in ``fit``.
        y : array-like of shape (n_rows,), default=None
            True values.
        **params : dict
            Routed to the estimator's ``score``.

        Returns
        -------
        float
        """
        return self._call("score", X, y, **params)

    @available_if(model_has("release"))
    def release(self):
        """Population model of the fitted estimator: what its privacy statement covers.

        Returns
        -------
        estimator
            What the model's own ``release`` returns, safe to publish. Steps before it are included.

        Raises
        ------
        ValueError
            If nothing protects the model, or a step that was fitted on the same data.
        """
        check_is_fitted(self)
        released, report = hand_out(self._fitted, "release"), report_of_fits(self._fitted)
        if not math.isfinite(report.epsilon):
            raise ValueError(
                f"release() of this {type(self).__name__} would publish unprotected values: "
                f"{report.warnings[-1].rstrip('.')}."
            )
        return released

    @available_if(model_has("for_client"))
    def for_client(self, client_id):
        """Model of one client alone, to hand to that client.

        Steps before the model are included as they were fitted. Check what they keep of the other
        clients' rows: a ``StandardScaler`` keeps means, a ``KNNImputer`` all rows.

        Parameters
        ----------
        client_id : int, str, ...
            One of ``clients_``.

        Returns
        -------
        estimator
            What the model's own ``for_client`` returns. It takes rows without client ids.
        """
        check_is_fitted(self)
        return hand_out(self._fitted, "for_client", client_id)

    @property
    def clients_(self):
        """Sorted ids of the fitted clients."""
        fitted = self._fitted
        try:
            return known_clients(fitted)
        except ValueError as error:
            raise AttributeError(str(error)) from error

    @property
    def classes_(self):
        """Class labels of the fitted estimator."""
        return self._fitted.classes_

    def get_metadata_routing(self):
        """Routing of the metadata to the estimator.

        Returns
        -------
        MetadataRouter
        """
        mapping = MethodMapping()
        for method in _ROUTED:
            mapping.add(caller=method, callee=method)
        return MetadataRouter(owner=self).add(estimator=self.estimator, method_mapping=mapping)

    def __sklearn_is_fitted__(self):
        return hasattr(self, self._wraps.fitted)

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        inner = get_tags(self.estimator)
        for name in _INHERITED_TAGS:
            setattr(tags, name, getattr(inner, name))
        return tags

    @property
    def _fitted(self):
        """The fitted estimator."""
        check_is_fitted(self)
        return getattr(self, self._wraps.fitted)

    def _call(self, method, X, *y, **params):
        """Result of a method of the fitted estimator; a search predicts with its best one."""
        check_is_fitted(self)
        X, params = self._handed_on(X, params)
        predicting = predicting_estimator(self._fitted)
        estimator = self._fitted if method == "score" else predicting
        with config_context(enable_metadata_routing=True):
            groups = None if takes_groups(estimator, method) else params.pop("groups", None)
            if method == "score" and groups is not None:  # by predictions, which do take groups
                own_score = type(final_estimator(estimator)).score
                return own_score(Responses(predicting, X, groups), X, *y, **params)
            return getattr(estimator, method)(X, *y, **params)

    def _handed_on(self, X, params):
        """Rows and parameters as the fitted estimator takes them."""
        return X, params
