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
from sklearn.utils.validation import validate_data

from pfl_sklearn._clients import check_same_ids, split_client_column, split_columns
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
    rows_of_model,
    takes_groups,
)
from pfl_sklearn.privacy import PrivacyReport
from pfl_sklearn.privacy._pipeline_report import report_of_fits

if TYPE_CHECKING:
    from pfl_sklearn._compat import CallbackSupportMixin
else:
    from sklearn.callback import CallbackSupportMixin

# The inner estimator checks the other columns, whose values may be words, missing or sparse.
_ANY_VALUES = {"dtype": None, "accept_sparse": True, "ensure_all_finite": False}


@with_parameters
class ClientColumn(
    FittedMixin, DelegationMixin, CallbackSupportMixin, MetaEstimatorMixin, BaseEstimator
):
    """Estimator whose client ids are a column of `X`.

    It takes the column out of `X` and passes it to `estimator` as routed ``groups``. It needs no
    configuration. It also works where scikit-learn cannot route groups to ``predict``: string
    scorers, ``cross_val_predict``, ``permutation_importance``, ``partial_dependence``, ``predict``
    of a search, and inside calibration, stacking, voting and the like.

    Parameters
    ----------
    estimator : estimator
        A client-aware estimator, or a pipeline or search around one. Of scikit-learn's other
        meta-estimators, only those are possible that hand metadata on to ``predict``, such as
        ``TransformedTargetRegressor`` and ``BaggingRegressor``. Put the column inside the others,
        as in ``MultiOutputRegressor(ClientColumn(...))``.
    column : str or int
        The column of ids: a name (data frames) or a position. Floats, whole or fractional, are
        compared exactly.
    exposure, offset : str, int or None, default=None
        Columns to pass on under these names, to ``fit``, to predictions and to ``score``: the
        exposure of counts, and a known part of the predictors.

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

    Raises
    ------
    ValueError
        If nothing inside `estimator` reads client ids, or if `estimator` does not hand them on to
        all that needs them.

    Notes
    -----
    `estimator` checks the other columns of `X`. Extra keyword arguments such as ``sample_weight``
    are routed to `estimator`, whose steps must request them. Callbacks of scikit-learn that
    propagate (such as ``ProgressBar``) reach `estimator`.

    The methods and fitted attributes are those of the model at the end of pipelines and searches,
    such as ``coef_``, which has no entry for the column of ids. What fits a model otherwise
    (``partial_fit``, ``fit_statistics``, ``fit_counts``) is not handed on. ``release`` and
    ``for_client`` return a pipeline if there are steps before the model, and what they return takes
    rows without the column of ids. ``release`` refuses steps that were fitted on the same data.

    An estimator whose own ``score`` takes no groups is scored by its predictions, which take them.

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

        Returns
        -------
        self
        """
        fitted = clone(self.estimator)
        with config_context(enable_metadata_routing=True):
            _check_ids_are_read(fitted, self.column)
        alone = getattr(fitted, "_intercept_alone", False)
        if not hasattr(X, "columns"):
            # The ids and, as a rule, at least one feature.
            least = 1 if alone else 2
            X = check_array(X, **_ANY_VALUES, ensure_min_features=least, estimator=self)
        rest, params = self._split(X, params)
        if not (rest.shape[1] or alone or get_tags(fitted).no_validation):
            raise ValueError(
                f"X has no column but {self.column!r}, the client ids; expected features for "
                f"{type(fitted).__name__}."
            )
        context = self._init_callback_context(max_subtasks=1)
        context.call_on_fit_task_begin(estimator=self, X=X, y=y)
        inner = context.subcontext(task_name="fit-estimator")
        with config_context(enable_metadata_routing=True), inner.propagate_callback_context(fitted):
            inner.call_on_fit_task_begin(estimator=self, X=rest, y=y)
            fitted.fit(rest, y, **params)
            inner.call_on_fit_task_end(estimator=self, X=rest, y=y)
        context.call_on_fit_task_end(estimator=self, X=X, y=y)
        self._set_fitted({**self._columns_of(X), "estimator_": fitted})
        return self

    def __getattr__(self, name: str) -> Any:
        """Fitted attribute of the model, such as ``coef_``; those of the rows are our own."""
        own = name in (*COLUMNS, "estimator_")
        published = name.endswith("_") and not name.startswith("_") and not own
        if published and not hasattr(type(self), name) and hasattr(self, "estimator_"):
            return getattr(final_estimator(self.estimator_), name)
        return self.__getattribute__(name)  # whose error says more than a new one

    @available_if(model_has("summary"))
    def summary(self, **params: Any) -> pd.DataFrame:
        """Table of the fitted model, by its own ``summary``.

        Parameters
        ----------
        **params : dict
            What the model's ``summary`` takes. A linear model gets the names of its features, if
            the steps before it give any.

        Returns
        -------
        DataFrame
        """
        return self._of_model("summary", params)

    @available_if(model_has("coef_table"))
    def coef_table(self, **params: Any) -> pd.DataFrame:
        """Table of the clients' coefficients or means, by the fitted model's own ``coef_table``.

        Parameters
        ----------
        **params : dict
            What the model's ``coef_table`` takes. A linear model gets the names of its features, if
            the steps before it give any.

        Returns
        -------
        DataFrame
        """
        return self._of_model("coef_table", params)

    @available_if(model_has("conf_int"))
    def conf_int(self, level: float = 0.95, **params: Any) -> pd.DataFrame:
        """Intervals of the population's parameters, by the fitted model's own ``conf_int``.

        Parameters
        ----------
        level : float in (0, 1), default=0.95
            Confidence level.
        **params : dict
            What the model's ``conf_int`` takes besides. It gets the names of its features, if the
            steps before it give any.

        Returns
        -------
        DataFrame
        """
        return self._of_model("conf_int", {"level": level, **params})

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

    @available_if(model_has("predict_interval"))
    def predict_interval(self, X: TableLike, **params: Any) -> tuple[Floats, Floats]:
        """Intervals of predictions for rows, by the fitted model's own ``predict_interval``.

        Parameters
        ----------
        X : array-like of n_rows rows
            As in ``fit``.
        **params : dict
            What the model's ``predict_interval`` takes besides, such as ``level``.

        Returns
        -------
        lower, upper : ndarrays with rows first
        """
        return self._with_rows("predict_interval", X, **params)

    @available_if(model_has("personalize"))
    def personalize(self, X: TableLike, y: TableLike, **params: Any) -> Self:
        """Give clients their own part of the fitted model, by its own ``personalize``.

        Parameters
        ----------
        X : array-like of n_rows rows
            As in ``fit``.
        y : array-like of n_rows rows
            Targets, as in ``fit``.
        **params : dict
            What the model's ``personalize`` takes besides.

        Returns
        -------
        self
        """
        self._with_rows("personalize", X, y, **params)
        return self

    def _with_rows(self, name, X, *y, **params):
        """Result of a method of the fitted model, which gets rows as the steps before make them."""
        fitted = self._fitted
        X, params = self._handed_on(X, params)
        X = rows_of_model(fitted, X, params["groups"])
        return getattr(final_estimator(fitted), name)(X, *y, **params)

    def _of_model(self, name: str, params: dict[str, Any]) -> pd.DataFrame:
        """Table by a method of the fitted model, which is told the names of its features."""
        method = getattr(final_estimator(self._fitted), name)
        if "feature_names" in signature(method).parameters:
            params = {"feature_names": feature_names_of(self.estimator_), **params}
        return method(**params)

    @available_if(inner_has("set_output"))
    def set_output(self, *, transform: str | None = None) -> Self:
        """Set the container that the estimator's steps hand on, by its own ``set_output``.

        With "pandas" or "polars", the steps of a pipeline name the columns that its model gets.

        Parameters
        ----------
        transform : {"default", "pandas", "polars"} or None, default=None
            The container; None changes nothing.

        Returns
        -------
        self
        """
        for estimator in (self.estimator, getattr(self, "estimator_", self.estimator)):
            estimator.set_output(transform=transform)
        return self

    @property
    def privacy_(self) -> PrivacyReport:
        """Privacy report of the fitted estimator, with the steps around it.

        As for the estimator itself, it is about the fit: if a search chose it, a warning says so.
        """
        fitted = self._fitted  # outside of the try: a NotFittedError is a ValueError, too
        try:
            return report_of_fits(fitted)
        except ValueError as error:  # it reads client ids, but is not of this package
            raise AttributeError(str(error)) from error

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        # The ids may be strings, but not missing.
        tags.input_tags = InputTags(string=True, sparse=tags.input_tags.sparse)
        return tags

    def _handed_on(self, X, params):
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
                raise ValueError(f"{name}= is column {column!r} of X here; give only one of them.")
        ids = split_client_column(X, self.column)[1]
        check_same_ids(params.get("groups"), ids, self.column)
        rest, (_, *values) = split_columns(X, {"client": self.column, **columns})
        return rest, {**params, "groups": ids, **dict(zip(columns, values, strict=True))}


def _check_ids_are_read(estimator, column):
    """Refuse an estimator that does not hand the ids on to all that need them."""
    predicting = predicting_estimator(estimator)
    if not any(takes_groups(each, "fit") for each in _all_inside(predicting)):
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
            raise _closed(estimator if takes_groups(last, method) else last, method, column)
    for each in _all_inside(estimator):
        if isinstance(each, RANSACRegressor) and takes_groups(each, "fit"):
            raise _closed(each, "fit", column)  # its fit predicts the inliers, without ids
    _check_scoring(estimator)


def _closed(estimator, method, column):
    """Error that tells the user to put the client column inside this estimator."""
    name = type(estimator).__name__
    return ValueError(
        f"{name}.{method} hands no client ids on to what is inside it. Put the column inside "
        f"{name}: wrap the client-aware estimator itself as ClientColumn(..., {column!r})."
    )


def _check_scoring(estimator):
    """Refuse a search whose scorer does not hand client ids on to its estimator."""
    for each in _all_inside(estimator):
        scores = (is_search(each) or isinstance(each, RFECV)) and takes_groups(
            each.estimator, "fit"
        )
        if scores and not takes_groups(each, "score"):
            way_out = ", or put the ClientColumn inside the search" if is_search(each) else ""
            raise ValueError(
                f"{type(each).__name__} inside ClientColumn got scoring={each.scoring!r}, which "
                "does not hand client ids on to predict. Use a pfl_sklearn.metrics.ClientScorer"
                f"{way_out}."
            )


def _all_inside(estimator):
    """The estimator and all estimators among its parameters, at any depth."""
    return [each for each in (estimator, *estimator.get_params().values()) if hasattr(each, "fit")]
