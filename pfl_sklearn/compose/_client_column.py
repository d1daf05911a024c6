"""The client id as a column of X."""

from inspect import signature
from numbers import Integral

from sklearn import config_context
from sklearn.base import BaseEstimator, MetaEstimatorMixin, clone
from sklearn.callback import CallbackSupportMixin, with_callbacks
from sklearn.utils import InputTags, check_array
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted, validate_data

from pfl_sklearn._clients import same_ids, split_client_column
from pfl_sklearn._compat import HasMethods, fit_context, num_samples
from pfl_sklearn._delegation import DelegationMixin
from pfl_sklearn._nesting import Wraps, feature_names_of, innermost_estimator
from pfl_sklearn.privacy import privacy_of


def _innermost_has(method):
    """Check for ``available_if``: the estimator at the bottom of all nesting has a method."""

    def check(self):
        getattr(innermost_estimator(getattr(self, "estimator_", self.estimator)), method)
        return True

    return check


class ClientColumn(DelegationMixin, CallbackSupportMixin, MetaEstimatorMixin, BaseEstimator):
    """Estimator whose client ids are a column of `X`.

    It takes the column out of `X` and passes it to `estimator` as routed ``groups``. It needs no
    configuration. It also works where scikit-learn cannot route groups to ``predict``: string
    scorers, ``cross_val_predict``, ``permutation_importance``, ``partial_dependence``, calibration,
    stacking, and ``predict`` of a search.

    Parameters
    ----------
    estimator : estimator
        A client-aware estimator, or a pipeline or search around one.
    column : str or int
        The column of ids: a name (data frames) or a position. Floats, whole or fractional, are
        compared exactly.

    Attributes
    ----------
    estimator_ : estimator
        Fitted clone of `estimator`.
    clients_ : ndarray of shape (n_clients,)
        Sorted ids of its clients.
    classes_ : ndarray of shape (n_classes,)
        Class labels, if `estimator` is a classifier.
    privacy_ : PrivacyReport
        Report of `estimator_` as a whole, including its other steps; see
        :func:`~pfl_sklearn.privacy.privacy_of`.
    n_features_in_ : int
        Number of columns of `X`, including the ids.
    feature_names_in_ : ndarray of shape (`n_features_in_`,)
        Names of the columns of `X`, if it has any.

    Notes
    -----
    `estimator` checks the other columns of `X`. Extra keyword arguments such as ``sample_weight``
    are routed to `estimator`, whose steps must request them. Callbacks of scikit-learn that
    propagate (such as ``ProgressBar``) reach `estimator`.

    ``summary``, ``release`` and ``for_client`` are available if `estimator` has them; ``summary``
    also if the last step of a pipeline does. What the last two return takes rows without the column
    of ids.

    Examples
    --------
    >>> import pandas as pd
    >>> from pfl_sklearn.compose import ClientColumn
    >>> from pfl_sklearn.estimation import GaussianMean
    >>> table = pd.DataFrame({"clinic": ["a", "a", "b", "b"], "age": [40, 50, 60, 70]})
    >>> model = ClientColumn(GaussianMean(), "clinic").fit(table, [1.0, 3.0, 5.0, 7.0])
    >>> model.predict(table).round(2)
    array([2.25, 2.25, 5.75, 5.75])
    """

    _wraps = Wraps("estimator", "estimator_", fits_once=True)

    _parameter_constraints = {
        "estimator": [HasMethods(["fit"])],
        "column": [str, Integral],
    }

    def __init__(self, estimator, column):
        self.estimator = estimator
        self.column = column

    @with_callbacks
    @fit_context(prefer_skip_nested_validation=False)
    def fit(self, X, y=None, **params):
        """Fit a clone of the estimator to the other columns.

        Parameters
        ----------
        X : dataframe, ndarray or sparse matrix of shape (n_rows, n_columns)
            Features and ids.
        y : array-like of shape (n_rows,), default=None
            Targets, as the estimator's ``fit`` takes them.
        **params : dict
            Routed to the estimator. You may pass ``groups`` if it equals the column.

        Returns
        -------
        self
        """
        if not hasattr(X, "columns"):
            X = check_array(
                X,
                dtype=None,
                accept_sparse=True,
                ensure_all_finite=False,
                ensure_min_features=2,
                estimator=self,
            )
        rest, params = self._split(X, params)
        context = self._init_callback_context(max_subtasks=1)
        context.call_on_fit_task_begin(estimator=self, X=X, y=y)
        fitted = clone(self.estimator)
        inner = context.subcontext(task_name="fit-estimator")
        with config_context(enable_metadata_routing=True), inner.propagate_callback_context(fitted):
            inner.call_on_fit_task_begin(estimator=self, X=rest, y=y)
            fitted.fit(rest, y, **params)
            inner.call_on_fit_task_end(estimator=self, X=rest, y=y)
        context.call_on_fit_task_end(estimator=self, X=X, y=y)
        validate_data(self, X, skip_check_array=True)
        self.estimator_ = fitted
        return self

    @available_if(_innermost_has("summary"))
    def summary(self, **params):
        """Table of the fitted estimator, by its own ``summary``; of a pipeline, its last step's.

        Parameters
        ----------
        **params : dict
            What the estimator's ``summary`` takes. A linear model gets the names of its features,
            if the steps before it give any.

        Returns
        -------
        DataFrame
        """
        check_is_fitted(self)
        summary = innermost_estimator(self.estimator_).summary
        if "feature_names" in signature(summary).parameters:
            params = {"feature_names": feature_names_of(self.estimator_), **params}
        return summary(**params)

    @property
    def privacy_(self):
        """Privacy report of the fitted estimator as a whole, its other steps included."""
        if not hasattr(innermost_estimator(self.estimator_), "privacy_"):
            raise AttributeError(f"{type(self.estimator_).__name__} has no privacy report.")
        return privacy_of(self.estimator_)

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        # The ids may be strings, but not missing.
        tags.input_tags = InputTags(string=True, sparse=tags.input_tags.sparse)
        return tags

    def _handed_on(self, X, params):
        """The other columns, checked, and the parameters with the ids as groups."""
        if hasattr(X, "columns"):
            validate_data(self, X, reset=False, skip_check_array=True)
        else:
            X = validate_data(
                self, X, reset=False, dtype=None, accept_sparse=True, ensure_all_finite=False
            )
        return self._split(X, params)

    def _split(self, X, params):
        """The other columns, and the parameters with the column as groups."""
        rest, ids = split_client_column(X, self.column)
        given = params.get("groups")
        if given is not None and not same_ids(given, ids, num_samples(X)):
            raise ValueError(
                f"groups= differs from column {self.column!r} of X; give only one of them."
            )
        return rest, {**params, "groups": ids}
