"""The client id as a column of X."""

from inspect import signature
from numbers import Integral
from typing import TYPE_CHECKING, Any, Self

import pandas as pd
from sklearn import config_context
from sklearn.base import clone, is_classifier, is_regressor
from sklearn.feature_selection import RFECV
from sklearn.linear_model import RANSACRegressor
from sklearn.utils import InputTags, check_array, get_tags

from pfl_sklearn._clients import check_same_ids, split_client_column, split_columns
from pfl_sklearn._columns import validate_data
from pfl_sklearn._compat import (
    BaseEstimator,
    HasMethods,
    MetaEstimatorMixin,
    available_if,
    fit_context,
    with_callbacks,
)
from pfl_sklearn._delegation import DelegationMixin
from pfl_sklearn._fitted import COLUMNS, FittedMixin
from pfl_sklearn._parameters import parameter, with_parameters
from pfl_sklearn._typing import Floats, TableLike
from pfl_sklearn._unwrap import (
    Wraps,
    feature_names_of,
    final_estimator,
    inner_has,
    is_search,
    model_has,
    predicting_estimator,
    takes_groups,
    transform_for_model,
)
from pfl_sklearn.privacy import PrivacyReport
from pfl_sklearn.privacy._pipeline_report import report_of_fits

if TYPE_CHECKING:
    from pfl_sklearn._compat import CallbackSupportMixin
else:
    from sklearn.callback import CallbackSupportMixin

# The inner estimator checks the other columns; they may hold strings or missing values, or be
# sparse.
_ANY_VALUES = {"dtype": None, "accept_sparse": True, "ensure_all_finite": False}


@with_parameters
class ClientColumn(
    FittedMixin, DelegationMixin, CallbackSupportMixin, MetaEstimatorMixin, BaseEstimator
):
    """Estimator whose client ids are a column of `X`.

    It takes that column out of `X` and passes it to `estimator` as routed ``groups``, without any
    configuration. It also works where scikit-learn cannot route groups to ``predict``: string
    scorers, ``cross_val_predict``, ``permutation_importance``, ``partial_dependence``, ``predict``
    of a search, calibration, stacking and voting.

    Parameters
    ----------
    estimator : estimator
        A client-aware estimator, or a pipeline or search around one. Another meta-estimator of
        scikit-learn must pass metadata on to ``predict``, as ``TransformedTargetRegressor`` and
        ``BaggingRegressor`` do; otherwise put the column inside it, as in
        ``MultiOutputRegressor(ClientColumn(...))``.
    column : str or int
        The column of ids: a name (data frames) or a position. Float ids are compared exactly.
    exposure, offset : str, int or None, default=None
        Columns to pass on under these names to ``fit``, predictions and ``score``: the exposure of
        counts, and a known part of the linear predictor.

    Attributes
    ----------
    estimator_ : estimator
        Fitted clone of `estimator`.
    clients_ : ndarray of shape (n_clients,)
        Sorted client ids.
    classes_ : ndarray of shape (n_classes,)
        Class labels, if `estimator` is a classifier.
    privacy_ : PrivacyReport
        Report of `estimator_` and its steps; see :func:`~pfl_sklearn.privacy.privacy_of`.
    n_features_in_ : int
        Number of columns of `X`, including the ids.
    feature_names_in_ : ndarray of shape (`n_features_in_`,)
        Names of the columns of `X`, if it has any.

    Raises
    ------
    ValueError
        If nothing inside `estimator` reads client ids, or if `estimator` does not pass them on to
        everything that needs them.

    Notes
    -----
    - `estimator` checks the other columns. Keyword arguments such as ``sample_weight`` are routed;
      the steps must request them. Callbacks that propagate reach `estimator`.
    - Methods and fitted attributes of the model at the end of pipelines and searches, such as
      ``coef_``, are available here. Other ways to fit it (``partial_fit``, ``fit_statistics``,
      ``fit_counts``) are not.
    - ``release`` and ``for_client`` return a pipeline if there are steps before the model. The
      result takes rows without the id column. ``release`` refuses steps fitted on the same data.
    - If the ``score`` of `estimator` takes no groups, its predictions are scored instead.

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

    estimator: Any = parameter(ranges=[HasMethods(["fit"])], kw_only=False)
    column: str | int = parameter(ranges=[str, Integral], kw_only=False)
    exposure: str | int | None = parameter(default=None, ranges=[str, Integral, None])
    offset: str | int | None = parameter(default=None, ranges=[str, Integral, None])

    @with_callbacks
    @fit_context(prefer_skip_nested_validation=False)
    def fit(self, X: TableLike, y: TableLike = None, **params: Any) -> Self:
        """Fit a clone of the estimator to the other columns.

        Parameters
        ----------
        X : dataframe, ndarray or sparse matrix of shape (n_rows, n_columns)
            Features and ids.
        y : array-like of shape (n_rows,), default=None
            Targets, as the estimator's ``fit`` takes them.
        **params : dict
            Routed to the estimator. You may pass ``groups`` if it equals the column.
        """
        fitted = clone(self.estimator)
        with config_context(enable_metadata_routing=True):
            _check_ids_are_read(fitted, self.column)
        intercept_only = getattr(fitted, "_intercept_alone", False)
        if not hasattr(X, "columns"):
            # The ids and, as a rule, at least one feature.
            n_columns = 1 if intercept_only else 2
            X = check_array(X, **_ANY_VALUES, ensure_min_features=n_columns, estimator=self)
        features, params = self._split(X, params)
        if not (features.shape[1] or intercept_only or get_tags(fitted).no_validation):
            raise ValueError(
                f"X has only the column {self.column!r}, the client ids; expected features for "
                f"{type(fitted).__name__}."
            )
        context = self._init_callback_context(max_subtasks=1)
        context.call_on_fit_task_begin(estimator=self, X=X, y=y)
        inner = context.subcontext(task_name="fit-estimator")
        with config_context(enable_metadata_routing=True), inner.propagate_callback_context(fitted):
            inner.call_on_fit_task_begin(estimator=self, X=features, y=y)
            fitted.fit(features, y, **params)
            inner.call_on_fit_task_end(estimator=self, X=features, y=y)
        context.call_on_fit_task_end(estimator=self, X=X, y=y)
        self._set_fitted({**self._column_attributes(X), "estimator_": fitted})
        return self

    def __getattr__(self, name: str) -> Any:
        """Fitted attribute of the model, such as ``coef_``, unless it describes columns of `X`."""
        is_of_wrapper = name.startswith("_") or name in (*COLUMNS, "estimator_")
        of_model = name.endswith("_") and not is_of_wrapper and not hasattr(type(self), name)
        if of_model and hasattr(self, "estimator_"):
            return getattr(final_estimator(self.estimator_), name)
        return self.__getattribute__(name)  # whose error says more than a new one

    @available_if(model_has("summary"))
    def summary(self, **params: Any) -> pd.DataFrame:
        """Table of the fitted model, by its own ``summary``.

        Parameters
        ----------
        **params : dict
            Arguments of the model's ``summary``. A linear model gets its feature names from the
            steps before it, if they have any.
        """
        return self._of_model("summary", params)

    @available_if(model_has("coef_table"))
    def coef_table(self, **params: Any) -> pd.DataFrame:
        """Table of the clients' coefficients or means, by the fitted model's own ``coef_table``.

        Parameters
        ----------
        **params : dict
            Arguments of the model's ``coef_table``. A linear model gets its feature names from the
            steps before it, if they have any.
        """
        return self._of_model("coef_table", params)

    @available_if(model_has("effects"))
    def effects(self, grouping: Any = None, **params: Any) -> pd.DataFrame:
        """Table of the effects of clients and levels, by the fitted model's own ``effects``.

        Parameters
        ----------
        grouping : "client" or the name of a grouping column, default=None
            Whose effects to list; None: all.
        **params : dict
            Arguments of the model's ``effects``. It gets its feature names from the steps before
            it, if they have any.
        """
        return self._of_model("effects", {"grouping": grouping, **params})

    @available_if(model_has("conf_int"))
    def conf_int(self, level: float = 0.95, **params: Any) -> pd.DataFrame:
        """Intervals of the population's parameters, by the fitted model's own ``conf_int``.

        Parameters
        ----------
        level : float in (0, 1), default=0.95
            Confidence level.
        **params : dict
            Arguments of the model's ``conf_int``. A linear model gets its feature names from the
            steps before it, if they have any.
        """
        return self._of_model("conf_int", {"level": level, **params})

    @available_if(model_has("contrast"))
    def contrast(self, weights: Any, X: TableLike = None, **params: Any) -> pd.DataFrame:
        """Tests of combinations of the population, by the fitted model's own ``contrast``.

        Parameters
        ----------
        weights : dict, DataFrame or array-like
            Weights of the coefficients.
        X : array-like of n_rows rows, default=None
            As in ``fit``, for robust errors.
        **params : dict
            Arguments of the model's ``contrast``. It gets its feature names from the steps before
            it, if they have any.
        """
        params["weights"] = weights
        if X is not None:
            X, params = self._inner_input(X, params)
            params["X"] = transform_for_model(self._fitted, X, params["groups"])
        return self._of_model("contrast", params)

    @available_if(model_has("credible_interval"))
    def credible_interval(self, level: float = 0.95) -> tuple[Floats, Floats]:
        """Intervals of the clients' parameters, by the fitted model's own ``credible_interval``.

        Parameters
        ----------
        level : float in (0, 1), default=0.95
            Posterior probability of the intervals.

        Returns
        -------
        lower, upper : ndarrays
            Clients first, in the order of ``clients_``.
        """
        return final_estimator(self._fitted).credible_interval(level)

    @available_if(model_has("benchmark"))
    def benchmark(self, total: float, *, weights: TableLike = None) -> pd.Series:
        """Clients' means that add up to a total, by the fitted model's own ``benchmark``.

        Parameters
        ----------
        total : float
            What the weighted sum of the means is to be.
        weights : Series indexed by client, or array-like of shape (n_clients,), default=None
            Weights in that sum. None: the numbers of rows (or the exposure) of the clients.
        """
        return final_estimator(self._fitted).benchmark(total, weights=weights)

    @available_if(model_has("exceedance"))
    def exceedance(self, threshold: Any, X: TableLike = None, **params: Any) -> pd.Series:
        """Probabilities that clients' means are above it, by the model's own ``exceedance``.

        Parameters
        ----------
        threshold : float, Series indexed by client, or array-like of shape (n_clients,)
            In units of the means; of regressions one number.
        X : array-like of n_rows rows, default=None
            As in ``fit``; regressions compare clients on these rows.
        **params : dict
            Other arguments of the model's ``exceedance``.
        """
        params |= self._rows_for_model(X)
        return final_estimator(self._fitted).exceedance(threshold, **params)

    @available_if(model_has("predict_interval"))
    def predict_interval(self, X: TableLike, **params: Any) -> tuple[Floats, Floats]:
        """Intervals of predictions for rows, by the fitted model's own ``predict_interval``.

        Parameters
        ----------
        X : array-like of n_rows rows
            As in ``fit``.
        **params : dict
            Other arguments of the model's ``predict_interval``, such as ``level``.

        Returns
        -------
        lower, upper : ndarrays with rows first
        """
        return self._with_rows("predict_interval", X, **params)

    @available_if(model_has("predict_total"))
    def predict_total(self, X: TableLike, **params: Any) -> pd.DataFrame:
        """Totals of predictions for rows, by the fitted model's own ``predict_total``.

        Parameters
        ----------
        X : array-like of n_rows rows
            As in ``fit``.
        **params : dict
            Other arguments of the model's ``predict_total``. `by` may also be the name of a column
            of X.
        """
        by = params.get("by")
        if isinstance(by, str):
            params["by"] = split_columns(X, {"by": by})[1][0]
        return self._with_rows("predict_total", X, **params)

    @available_if(model_has("simulate"))
    def simulate(self, X: TableLike, **params: Any) -> Any:
        """Simulated responses of rows, by the fitted model's own ``simulate``.

        Parameters
        ----------
        X : array-like of n_rows rows
            As in ``fit``.
        **params : dict
            Other arguments of the model's ``simulate``.

        Returns
        -------
        ndarray of shape (n, n_rows)
        """
        return self._with_rows("simulate", X, **params)

    @available_if(model_has("ranks"))
    def ranks(self, X: TableLike = None, **params: Any) -> pd.DataFrame:
        """Ranks of the clients with intervals, by the fitted model's own ``ranks``.

        Parameters
        ----------
        X : array-like of n_rows rows, default=None
            As in ``fit``; regressions compare clients on these rows.
        **params : dict
            Other arguments of the model's ``ranks``.
        """
        params |= self._rows_for_model(X)
        return final_estimator(self._fitted).ranks(**params)

    @available_if(model_has("influence"))
    def influence(self, X: TableLike, y: TableLike, **params: Any) -> pd.DataFrame:
        """Influence of the clients on the population, by the fitted model's own ``influence``.

        Parameters
        ----------
        X, y : array-likes of n_rows rows
            Those of ``fit``.
        **params : dict
            Other arguments of the model's ``influence``. It gets its feature names from the steps
            before it, if they have any.
        """
        params = {"feature_names": feature_names_of(self.estimator_), **params}
        return self._with_rows("influence", X, y, **params)

    @available_if(model_has("personalize"))
    def personalize(self, X: TableLike, y: TableLike, **params: Any) -> Self:
        """Give clients their own part of the fitted model, by its own ``personalize``.

        Parameters
        ----------
        X, y : array-likes of n_rows rows
            As in ``fit``.
        **params : dict
            Other arguments of the model's ``personalize``.
        """
        self._with_rows("personalize", X, y, **params)
        return self

    def _rows_for_model(self, X):
        """The argument X as the model gets it; none without rows."""
        if X is None:
            return {}
        features, inner = self._inner_input(X, {})
        return {"X": transform_for_model(self._fitted, features, inner["groups"])}

    def _with_rows(self, name, X, *y, **params):
        """Result of a method of the fitted model for rows that pass through the steps before it."""
        fitted = self._fitted
        X, params = self._inner_input(X, params)
        X = transform_for_model(fitted, X, params["groups"])
        return getattr(final_estimator(fitted), name)(X, *y, **params)

    def _of_model(self, name: str, params: dict[str, Any]) -> pd.DataFrame:
        """Table by a method of the fitted model, with feature names if the method takes them."""
        method = getattr(final_estimator(self._fitted), name)
        if "feature_names" in signature(method).parameters:
            params = {"feature_names": feature_names_of(self.estimator_), **params}
        return method(**params)

    @available_if(inner_has("set_output"))
    def set_output(self, *, transform: str | None = None) -> Self:
        """Set the container that the estimator's steps return, by its own ``set_output``.

        With "pandas" or "polars", the steps of a pipeline name the columns that its model gets.

        Parameters
        ----------
        transform : {"default", "pandas", "polars"} or None, default=None
            The container; None changes nothing.
        """
        for estimator in (self.estimator, getattr(self, "estimator_", self.estimator)):
            estimator.set_output(transform=transform)
        return self

    @property
    def privacy_(self) -> PrivacyReport:
        """Privacy report of the fitted estimator, with the steps around it.

        It covers the fit; if a search chose the estimator, a warning says so.
        """
        fitted = self._fitted  # outside the try: a NotFittedError is a ValueError, too
        try:
            return report_of_fits(fitted)
        except ValueError as error:  # an estimator of another package that reads client ids
            raise AttributeError(str(error)) from error

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        # The ids may be strings, but not missing.
        tags.input_tags = InputTags(string=True, sparse=tags.input_tags.sparse)
        return tags

    def _inner_input(self, X, params):
        """Checked features without the id column, and the parameters with the ids as ``groups``."""
        if hasattr(X, "columns"):
            validate_data(self, X, reset=False, skip_check_array=True)
        else:
            X = validate_data(self, X, reset=False, **_ANY_VALUES)
        return self._split(X, params)

    def _split(self, X, params):
        """Features without the columns, and the parameters with the ids as ``groups``."""
        others = {"exposure": self.exposure, "offset": self.offset}
        columns = {name: column for name, column in others.items() if column is not None}
        for name, column in columns.items():
            if params.get(name) is not None:
                raise ValueError(
                    f"{name}= was given, but {name} is column {column!r} of X; give one of them."
                )
        ids = split_client_column(X, self.column)[1]
        check_same_ids(params.get("groups"), ids, self.column)
        features, (_, *values) = split_columns(X, {"client": self.column, **columns})
        return features, {**params, "groups": ids, **dict(zip(columns, values, strict=True))}


def _check_ids_are_read(estimator, column):
    """Raise ValueError unless the estimator passes client ids on to everything that needs them."""
    predicting = predicting_estimator(estimator)
    # A step that reads ids in fit alone, as a TableEncoder, makes no model of clients.
    if not any(
        takes_groups(inner, "fit")
        and (takes_groups(inner, "predict") or takes_groups(inner, "transform"))
        for inner in _nested_estimators(predicting)
    ):
        raise ValueError(
            f"Nothing inside {type(estimator).__name__} reads client ids; expected a client-aware "
            "estimator, or something around one. For a model that ignores the clients, drop the "
            f"column {column!r}."
        )
    predicts = (
        hasattr(predicting, "predict") or is_classifier(predicting) or is_regressor(predicting)
    )
    # One that reads ids in fit alone would give every client the population's predictions.
    for method in ("fit", "predict") if predicts else ("fit",):
        if not takes_groups(predicting, method):
            last = final_estimator(estimator)
            raise _ids_lost(estimator if takes_groups(last, method) else last, method, column)
    for inner in _nested_estimators(estimator):
        if isinstance(inner, RANSACRegressor) and takes_groups(inner, "fit"):
            raise _ids_lost(inner, "fit", column)  # its fit predicts the inliers without ids
    _check_scoring(estimator)


def _ids_lost(estimator, method, column):
    """Error for an estimator that does not pass ids on: the column belongs inside it."""
    name = type(estimator).__name__
    return ValueError(
        f"{name}.{method} does not pass client ids on to what is inside it. Put the column inside "
        f"{name}: wrap the client-aware estimator itself as ClientColumn(..., {column!r})."
    )


def _check_scoring(estimator):
    """Raise ValueError for a search whose scorer does not pass client ids on to predict."""
    for search in _nested_estimators(estimator):
        if not (is_search(search) or isinstance(search, RFECV)):
            continue
        if takes_groups(search.estimator, "fit") and not takes_groups(search, "score"):
            way_out = ", or put the ClientColumn inside the search" if is_search(search) else ""
            raise ValueError(
                f"{type(search).__name__} inside ClientColumn got scoring={search.scoring!r}, "
                "which does not pass client ids on to predict; use a "
                f"pfl_sklearn.metrics.ClientScorer{way_out}."
            )


def _nested_estimators(estimator):
    """The estimator and all estimators among its parameters, at any depth."""
    candidates = (estimator, *estimator.get_params().values())
    return [candidate for candidate in candidates if hasattr(candidate, "fit")]
