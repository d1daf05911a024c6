"""The client of each row as one more feature of an estimator that knows no clients."""

import itertools
import math
from numbers import Integral
from typing import Any, Self

import narwhals as nw
import numpy as np
import pandas as pd
from sklearn import config_context
from sklearn.base import ClassifierMixin, RegressorMixin, clone, is_classifier
from sklearn.model_selection import KFold
from sklearn.preprocessing import TargetEncoder
from sklearn.utils import check_random_state, get_tags
from sklearn.utils.validation import check_is_fitted

from pfl_sklearn._clients import row_counts
from pfl_sklearn._columns import column_labels
from pfl_sklearn._compat import (
    BaseEstimator,
    HasMethods,
    MetaEstimatorMixin,
    StrOptions,
    available_if,
    fit_context,
)
from pfl_sklearn._parameters import UNSEEN, parameter, with_parameters
from pfl_sklearn._typing import Floats, RandomState, TableLike
from pfl_sklearn._unwrap import Wraps, final_estimator, inner_has
from pfl_sklearn.base import ClientMixin, client_values
from pfl_sklearn.compose._client_rows import fitted_to, read_client_rows, rows_to_predict
from pfl_sklearn.compose._inner_estimators import (
    check_takes_weights,
    library_of,
    lost_guarantees,
    of_kind,
    with_accepted_names,
)
from pfl_sklearn.metrics._responses import Responses
from pfl_sklearn.privacy import PrivacyReport

# Of a category that scikit-learn's histogram gradient boosting splits on; it ignores smaller ones.
# With 4 rows per client the squared errors of LightGBM and CatBoost on airfares were 4.7 and 1.9
# times as large by categories as by targets; with 10 or more they were mostly smaller.
_FEWEST_ROWS = 10


@with_parameters
class ClientAsFeature(ClientMixin, MetaEstimatorMixin, BaseEstimator):
    """Estimator that gets the client of each row as one more feature, behind the others.

    It makes estimators that know no clients, such as boosted trees, learn what is special about
    each of them.

    Parameters
    ----------
    estimator : estimator
        A classifier or regressor.
    encoding : {"auto", "category", "target"}, default="auto"
        What the estimator gets.

        - "category": the position of the client in ``clients_``, declared as a category to
          LightGBM, to CatBoost, or by a parameter `categorical_features`, as scikit-learn's
          histogram gradient boosting has, which takes up to `max_bins` clients (255).
        - "target": the client's mean target, shrunk to that of all rows, or its share of each
          class, by :class:`~sklearn.preprocessing.TargetEncoder`. Rows of ``fit`` get means of
          other rows of their client, so that the estimator does not take its own target for a
          feature.
        - "auto": "category" for LightGBM, CatBoost and, if it takes so many clients,
          scikit-learn's histogram gradient boosting, if at least half of the rows are of clients
          with 10 or more; else "target". scikit-learn's ignores categories of fewer rows, and the
          other two did worse with them.
    unseen : {"warn", "population", "error"}, default="warn"
        What to do about clients that ``fit`` did not see. They count as missing in a category, and
        get the mean of all rows for a target. "warn" warns if at least half of the rows are
        theirs.
    random_state : int, RandomState instance or None, default=None
        Seed of the folds that rows of ``fit`` are encoded in.

    Attributes
    ----------
    estimator_ : estimator
        Fitted clone of `estimator`.
    clients_ : ndarray of shape (n_clients,)
        Sorted ids of the clients.
    n_samples_per_client_ : ndarray of shape (n_clients,)
        Rows of each client.
    classes_ : ndarray of shape (n_classes,)
        Class labels, if `estimator` is a classifier.
    n_features_in_ : int
        Number of columns of `X`.
    feature_names_in_ : ndarray of shape (`n_features_in_`,)
        Names of the columns of `X`, if it has any.
    privacy_ : PrivacyReport
        ``epsilon`` is infinite: nothing protects the fit.

    Notes
    -----
    Trees memorize features that are constant within a client, too, such as its size. Their errors
    for new clients are then far larger than for known ones; cross-validate both.

    ``for_client`` keeps that client's encoding alone. The estimator was fitted to all clients, and
    what it learned of the others stays in it.

    Examples
    --------
    >>> from sklearn.ensemble import HistGradientBoostingRegressor
    >>> from pfl_sklearn.compose import ClientAsFeature
    >>> from pfl_sklearn.datasets import load_radon
    >>> homes = load_radon("MN").frame
    >>> model = ClientAsFeature(HistGradientBoostingRegressor(max_iter=20))
    >>> model = model.fit(homes[["floor"]], homes["log_radon"], groups=homes["county"])
    >>> model.predict(homes[["floor"]][:1], groups=["HENNEPIN"]).round(1)
    array([0.8])
    """

    estimator: Any = parameter(ranges=[HasMethods(["fit", "predict"])], kw_only=False)
    encoding: str = parameter(
        default="auto", ranges=[StrOptions({"auto", "category", "target"})], kw_only=False
    )
    unseen: str = UNSEEN
    random_state: RandomState = parameter(default=None, ranges=["random_state"])

    _wraps = Wraps("estimator", "estimator_", fits_once=False)
    _population_attributes = ("estimator_", "_unseen_column")
    _client_attributes = ("_columns", "n_samples_per_client_")
    _state_attributes = ("_encoded",)

    @fit_context(prefer_skip_nested_validation=False)
    def fit(
        self, X: TableLike, y: TableLike, *, groups: TableLike = None, sample_weight: Any = None
    ) -> Self:
        """Fit a clone of the estimator to the features and the client of each row.

        Parameters
        ----------
        X : dataframe or array-like of shape (n_rows, d)
            Features, as the estimator takes them.
        y : array-like of shape (n_rows,)
            Targets or class labels.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; None: all rows are one client's.
        sample_weight : array-like of shape (n_rows,), default=None
            Weights of the rows, for an estimator that takes them. They do not count in the
            encoding.

        Returns
        -------
        self
        """
        fitted, has_classes = clone(self.estimator), is_classifier(self.estimator)
        if sample_weight is not None:
            check_takes_weights(fitted, "estimator")
        table = read_client_rows(self, X, y, groups, sample_weight, has_classes)
        weights = {} if table.weights is None else {"sample_weight": table.weights}
        clients = table.clients
        encoded = self._encoding_for(fitted, row_counts(clients.codes, len(clients.ids)))
        if encoded == "category":
            rows, columns, unseen = _client_positions(clients)
            _declare_category(fitted, table.X)
        else:
            rng = check_random_state(self.random_state)
            rows, columns, unseen = _target_means(clients, table.y, has_classes, rng)
        fitted.fit(_with_column(fitted, encoded, table.X, rows), table.y, **weights)
        attributes = {
            **fitted_to(self, X, clients, groups),
            "estimator_": fitted,
            "_columns": columns,
            "_unseen_column": unseen,
            "_encoded": encoded,
            "privacy_": PrivacyReport.unprotected(
                "ClientAsFeature has no private fit" + lost_guarantees([self.estimator]),
                not_released=("estimator_", "clients_", "n_samples_per_client_"),
                n_clients=len(clients.ids),
            ),
        }
        self._set_fitted(attributes)
        return self

    def _encoding_for(self, estimator, sizes):
        """Encoding of clients (m,) of these rows for this estimator, as asked or as suits it."""
        n_clients = len(sizes)
        name, params = type(estimator).__name__, estimator.get_params(deep=False)
        library, declared = library_of(estimator), "categorical_features" in params
        native = declared or library is not None
        # What other packages mean by such a parameter is for the user to know, who asks for it.
        in_bins = declared and type(estimator).__module__.startswith("sklearn.")
        most = params["max_bins"] if in_bins else math.inf  # a category takes a bin of its own
        if self.encoding == "auto":
            split_on = sizes[sizes >= _FEWEST_ROWS].sum()
            knows = in_bins or library is not None
            suits = knows and n_clients <= most and 2 * split_on >= sizes.sum()
            return "category" if suits else "target"
        if self.encoding == "category" and not native:
            raise ValueError(
                f"encoding='category' needs LightGBM, CatBoost or an estimator with a parameter "
                f"categorical_features; {name} has none. Take encoding='target'."
            )
        if self.encoding == "category" and n_clients > most:
            raise ValueError(
                f"encoding='category' got {n_clients} clients, and {name} takes at most "
                f"max_bins={most} categories. Take encoding='target'."
            )
        return self.encoding

    @available_if(inner_has("predict"))
    def predict(self, X: TableLike, *, groups: TableLike = None) -> np.ndarray:
        """Predict with the fitted estimator.

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
        rows = self._with_clients(X, groups)  # says first that nothing is fitted yet
        return np.ravel(self.estimator_.predict(rows))  # CatBoost gives a column of several classes

    @available_if(inner_has("predict_proba"))
    def predict_proba(self, X: TableLike, *, groups: TableLike = None) -> Floats:
        """Class probabilities from the fitted estimator.

        Parameters
        ----------
        X : dataframe or array-like of shape (n_rows, d)
            As in ``fit``.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.

        Returns
        -------
        ndarray of shape (n_rows, n_classes)
        """
        rows = self._with_clients(X, groups)  # says first that nothing is fitted yet
        return self.estimator_.predict_proba(rows)

    @available_if(inner_has("score"))
    def score(
        self, X: TableLike, y: TableLike, *, groups: TableLike = None, sample_weight: Any = None
    ) -> float:
        """Score of the predictions, as the estimator's own ``score`` computes it.

        Parameters
        ----------
        X : dataframe or array-like of shape (n_rows, d)
            As in ``fit``.
        y : array-like of shape (n_rows,)
            True values.
        groups : array-like of shape (n_rows,), default=None
            Client id of every row; needed if ``fit`` saw several clients.
        sample_weight : array-like of shape (n_rows,), default=None
            Weights of the rows in the score.

        Returns
        -------
        float
        """
        check_is_fitted(self)
        weights = {} if sample_weight is None else {"sample_weight": sample_weight}
        core = final_estimator(self.estimator_)
        # CatBoost's own asks for its internals.
        own_score = _default_score(self) if library_of(core) == "catboost" else type(core).score
        return own_score(Responses(self, X, groups), X, y, **weights)

    @property
    def classes_(self) -> np.ndarray:
        """Class labels, if the estimator is a classifier."""
        return self.estimator_.classes_

    def _with_clients(self, X, groups):
        """`X` with the encoded client of every row as further columns."""
        rows, codes = rows_to_predict(self, X, groups)
        columns = getattr(self, "_columns", None)  # a released model has none
        values = client_values(columns, self._unseen_column, codes)
        return _with_column(self.estimator_, self._encoded, rows, values)

    def __sklearn_tags__(self):
        inner = get_tags(self.estimator)
        tags = of_kind(super().__sklearn_tags__(), inner)
        tags.target_tags.required = True
        tags.input_tags.allow_nan = inner.input_tags.allow_nan
        return tags


def _default_score(estimator):
    """scikit-learn's own score of a classifier or of a regressor."""
    return (ClassifierMixin if is_classifier(estimator) else RegressorMixin).score


def _client_positions(clients):
    """Positions of the clients: of rows (n, 1), by client (m, 1), and for one without rows (1,)."""
    columns = np.arange(len(clients.ids), dtype=float)[:, None]
    # As missing, an unseen client goes where most rows of a tree's node went.
    return columns[clients.codes], columns, np.full(1, np.nan)


def _target_means(clients, y, has_classes, rng):
    """Shrunken mean targets, or shares of classes: of rows, by client, for one without rows."""
    encoder = TargetEncoder(
        target_type="auto" if has_classes else "continuous",  # counts are no classes
        # Five folds are TargetEncoder's default; a fold needs a row.
        cv=KFold(min(5, len(y)), shuffle=True, random_state=rng),
    )
    with config_context(enable_metadata_routing=False):  # else it demands groups of its own
        # By other folds: means with a row's own target would give that away.
        rows = encoder.fit_transform(clients.codes[:, None], y)
    columns = encoder.transform(np.arange(len(clients.ids))[:, None])
    # Shrinkage to the end: what a client without rows would get.
    return rows, columns, np.ravel(encoder.target_mean_)


def _with_column(estimator, encoded, X, values):
    """`X` with the encoded clients (n, k) on the right, as this estimator takes them."""
    X, library = with_accepted_names(estimator, X), library_of(estimator)
    if library is None or encoded == "target":
        return _beside(X, values)
    # Arrays have one type, but CatBoost takes no float for a category, and LightGBM knows it by
    # the type of a column.
    is_frame = hasattr(X, "columns")
    X = nw.from_native(X).to_pandas() if is_frame else pd.DataFrame(X).add_prefix("x")
    positions = np.nan_to_num(values[:, 0], nan=-1).astype(int)  # -1: no client of the fit
    column = pd.Categorical(positions) if library == "lightgbm" else positions
    return X.assign(**{_new_names(X, 1)[0]: column})


def _beside(X, columns):
    """`X` with further columns (n, k) of numbers on the right."""
    if not hasattr(X, "columns"):
        return np.column_stack([X, columns])
    frame, added = nw.from_native(X, eager_only=True), []
    for name, values in zip(_new_names(X, columns.shape[1]), columns.T, strict=True):
        backend = frame.implementation
        added.append(nw.new_series(name, values, nw.Float64, backend=backend))
    return frame.with_columns(added).to_native()


def _new_names(X, n_names):
    """As many column names that the frame does not have yet."""
    free = (f"client{'_' * k}" for k in itertools.count())
    return list(itertools.islice((name for name in free if name not in column_labels(X)), n_names))


def _declare_category(estimator, X):
    """Tell the estimator that the column behind those of `X` is a category."""
    library = library_of(estimator)
    if library == "catboost":
        own = estimator.get_params().get("cat_features")
        # A tuple, as scikit-learn cannot clone it with a list.
        estimator.set_params(cat_features=(*(() if own is None else own), X.shape[1]))
    elif library is None:  # LightGBM sees the type of the column
        estimator.set_params(categorical_features=_categorical_features(estimator, X))


def _categorical_features(estimator, X):
    """Categorical features that the estimator asks for, and the column of the clients."""
    categorical = estimator.get_params(deep=False)["categorical_features"]
    is_frame = hasattr(X, "columns")
    if isinstance(categorical, str):  # by the types of a frame's columns
        kinds = nw.from_native(X, eager_only=True).schema.values() if is_frame else ()
        categorical = [kind in (nw.Categorical, nw.Enum) for kind in kinds]
    features = np.asarray([] if categorical is None else categorical)
    features = np.flatnonzero(features) if features.dtype == bool else features
    if not is_frame:
        return [*features, X.shape[1]]
    names = column_labels(
        X
    )  # a list may not mix names and positions, and the new column has a name
    named = [names[each] if isinstance(each, Integral) else each for each in features]
    return [*named, *_new_names(X, 1)]
