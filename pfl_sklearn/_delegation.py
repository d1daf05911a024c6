"""Methods that a wrapper passes on to the one estimator that it fits."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, Self

import numpy as np
from sklearn import config_context
from sklearn.utils import Tags, get_tags
from sklearn.utils.metadata_routing import MetadataRouter, MethodMapping
from sklearn.utils.validation import check_is_fitted

from pfl_sklearn._compat import available_if
from pfl_sklearn._typing import TableLike
from pfl_sklearn._unwrap import (
    Wraps,
    call_behind_steps,
    final_estimator,
    inner_has,
    model_has,
    predicting_estimator,
    suggest_nested_names,
    takes_groups,
)
from pfl_sklearn.metrics._client_scores import known_clients
from pfl_sklearn.metrics._responses import Responses
from pfl_sklearn.privacy._pipeline_report import report_of_fits

# Without partial_fit: every fit of a wrapper is one of a new clone.
_ROUTED = (
    "fit",
    "predict",
    "predict_proba",
    "predict_log_proba",
    "decision_function",
    "transform",
    "score",
)


class DelegationMixin:
    """Mixin for an estimator with a parameter `estimator`, to whose fitted form it delegates.

    A subclass declares what it wraps in `_wraps` (see ``pfl_sklearn._unwrap.Wraps``), and changes
    the rows that the estimator gets in ``_inner_input``.
    """

    estimator: Any
    _wraps: ClassVar[Wraps]

    def set_params(self, **params: Any) -> Self:
        """Set the parameters of this estimator.

        Parameters
        ----------
        **params : dict
            Parameters by name; those of the estimator inside as ``estimator__<parameter>``.

        Returns
        -------
        self
        """
        with suggest_nested_names(self):
            return super().set_params(**params)  # type: ignore[misc]

    @available_if(inner_has("predict"))
    def predict(self, X: TableLike, **params: Any) -> Any:
        """Predict by the fitted estimator: (n_rows,) or (n_rows, n_outputs).

        Parameters
        ----------
        X : array-like of n_rows rows
            As in ``fit``.
        **params : dict
            Routed to the same method of the estimator.
        """
        return self._call("predict", X, **params)

    @available_if(inner_has("predict_proba"))
    def predict_proba(self, X: TableLike, **params: Any) -> Any:
        """Class probabilities (n_rows, n_classes) from the fitted estimator.

        Parameters
        ----------
        X, **params : object
            As in :meth:`predict`.
        """
        return self._call("predict_proba", X, **params)

    @available_if(inner_has("predict_log_proba"))
    def predict_log_proba(self, X: TableLike, **params: Any) -> Any:
        """Logarithms (n_rows, n_classes) of the class probabilities from the fitted estimator.

        Parameters
        ----------
        X, **params : object
            As in :meth:`predict`.
        """
        return self._call("predict_log_proba", X, **params)

    @available_if(inner_has("decision_function"))
    def decision_function(self, X: TableLike, **params: Any) -> Any:
        """Decision function of the fitted estimator: (n_rows,) or (n_rows, n_classes).

        Parameters
        ----------
        X, **params : object
            As in :meth:`predict`.
        """
        return self._call("decision_function", X, **params)

    @available_if(inner_has("transform"))
    def transform(self, X: TableLike, **params: Any) -> Any:
        """Transform the rows by the fitted estimator: (n_rows, n_features_out).

        Parameters
        ----------
        X, **params : object
            As in :meth:`predict`.
        """
        return self._call("transform", X, **params)

    @available_if(inner_has("score"))
    def score(self, X: TableLike, y: TableLike = None, **params: Any) -> Any:
        """Score of the fitted estimator by its own ``score``: a float.

        Parameters
        ----------
        X, **params : object
            As in :meth:`predict`.
        y : array-like of shape (n_rows,), default=None
            True values.
        """
        return self._call("score", X, y, **params)

    @available_if(model_has("release"))
    def release(self) -> Any:
        """Population model of the fitted estimator, which its privacy statement covers.

        It is safe to publish and includes the steps before the model. Raises ValueError if nothing
        protects the model, or a step that was fitted to the same data.
        """
        released, report = call_behind_steps(self._fitted, "release"), report_of_fits(self._fitted)
        # The model may promise privacy while a step before it, fitted on the same data, does not.
        if not math.isfinite(report.epsilon):
            raise ValueError(
                f"release() of this {type(self).__name__} would publish unprotected values: "
                f"{report.warnings[-1].rstrip('.')}."
            )
        return released

    @available_if(model_has("for_client"))
    def for_client(self, client_id: Any) -> Any:
        """Model of one client alone, to hand to that client; it takes rows without client ids.

        Steps before the model are included as they were fitted. Check what they keep of the other
        clients' rows: a ``StandardScaler`` keeps means, a ``KNNImputer`` all rows.

        Parameters
        ----------
        client_id : int, str, ...
            One of ``clients_``.
        """
        return call_behind_steps(self._fitted, "for_client", client_id)

    @property
    def clients_(self) -> np.ndarray:
        """Sorted ids of the fitted clients."""
        fitted = self._fitted
        try:
            return known_clients(fitted)
        except ValueError as error:  # as of an ensemble; hasattr has to say no
            raise AttributeError(str(error)) from error

    @property
    def classes_(self) -> Any:
        """Class labels of the fitted estimator."""
        return self._fitted.classes_

    def get_metadata_routing(self) -> MetadataRouter:
        """MetadataRouter of the metadata that go to the estimator."""
        mapping = MethodMapping()
        for method in _ROUTED:
            mapping.add(caller=method, callee=method)
        return MetadataRouter(owner=self).add(estimator=self.estimator, method_mapping=mapping)

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, self._wraps.fitted)

    def __sklearn_tags__(self) -> Tags:
        # Those of the estimator inside, but for what only code of the wrapper itself can promise.
        inner: Tags = get_tags(self.estimator)
        tags = dataclasses.replace(
            inner, array_api_support=False, requires_fit=True, _skip_test=False
        )
        if hasattr(tags, "expected_failed_checks"):  # those of partial_fit, which no wrapper has
            tags.expected_failed_checks = {}
        return tags

    @property
    def _fitted(self) -> Any:
        """The fitted estimator."""
        check_is_fitted(self)
        return getattr(self, self._wraps.fitted)

    def _call(self, method, X, *y, **params):
        """Result of a method of the fitted estimator; of a search, by its best estimator."""
        fitted = self._fitted
        X, params = self._inner_input(X, params)
        # The predict of a search takes no client ids. Its score is its own, by its `scoring`.
        predicting = predicting_estimator(fitted)
        estimator = fitted if method == "score" else predicting
        with config_context(enable_metadata_routing=True):
            groups = None if takes_groups(estimator, method) else params.pop("groups", None)
            if method == "score" and groups is not None:  # by predictions, which do take groups
                own_score = type(final_estimator(estimator)).score
                return own_score(Responses(predicting, X, groups), X, *y, **params)
            return getattr(estimator, method)(X, *y, **params)

    def _inner_input(
        self, X: TableLike, params: dict[str, Any]
    ) -> tuple[TableLike, dict[str, Any]]:
        """Rows and parameters as the fitted estimator takes them."""
        return X, params
