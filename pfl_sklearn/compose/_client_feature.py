"""The client of each row as one more feature of an estimator that is not client-aware."""

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
from pfl_sklearn.compose._client_rows import (
    client_attributes,
    read_client_rows,
    rows_to_predict,
)
from pfl_sklearn.compose._inner_estimators import (
    check_takes_weights,
    library_of,
    unprotected_report,
    with_accepted_names,
    with_kind_of,
)
from pfl_sklearn.metrics._responses import Responses

# Rows that a category needs before scikit-learn's histogram gradient boosting splits on it. With 4
# rows per client the squared errors of LightGBM and CatBoost on airfares were 4.7 and 1.9 times as
# large by categories as by targets; with 10 or more they were mostly smaller.
_FEWEST_ROWS_OF_CATEGORY = 10


@with_parameters
class ClientAsFeature(ClientMixin, MetaEstimatorMixin, BaseEstimator):
    """Estimator that gets the client of each row as one more feature, behind the others.

    With it, estimators that are not client-aware, such as boosted trees, learn differences between
    clients.

    Parameters
    ----------
    estimator : estimator
        A classifier or regressor.
    encoding : {"auto", "category", "target"}, default="auto"
        How the client is encoded.

        - "category": the position of the client in ``clients_``, declared as a category to
          LightGBM, to CatBoost, or by a parameter `categorical_features`, as scikit-learn's
          histogram gradient boosting has; that takes up to `max_bins` clients (255).
        - "target": the client's mean target, shrunk to that of all rows, or its share of each
          class, by :class:`~sklearn.preprocessing.TargetEncoder`. Rows of ``fit`` get means of
          other rows of their client, so that no row's own target becomes a feature.
        - "auto": "category" for LightGBM, CatBoost and, if there are few enough clients,
          scikit-learn's histogram gradient boosting, provided that at least half of the rows belong
          to clients with 10 rows or more; otherwise "target".
    unseen : {"warn", "population", "error"}, default="warn"
        What to do about clients that ``fit`` did not see. They are missing as a category, and get
        the mean of all rows as a target. "warn" warns if they have at least half of the rows.
    random_state : int, RandomState instance or None, default=None
        Seed of the folds in which rows of ``fit`` are encoded.

    Attributes
    ----------
    estimator_ : estimator
        Fitted clone of `estimator`.
    clients_ : ndarray of shape (n_clients,)
        Sorted client ids.
    n_samples_per_client_ : ndarray of shape (n_clients,)
        Rows of each client.
    classes_ : ndarray of shape (n_classes,)
        Class labels, if `estimator` is a classifier.
    n_features_in_, feature_names_in_ : int, and ndarray of str
        Number of columns of `X`, and their names, if it has any.
    privacy_ : PrivacyReport
        ``epsilon`` is infinite: nothing protects the fit.

    Notes
    -----
    Trees also memorize features that are constant within a client, such as its size. Their errors
    for new clients are then far larger than for known ones; cross-validate both.

    ``for_client`` keeps only that client's encoding. The estimator was fitted to all clients, and
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
    _state_attributes = ("_encoding",)

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
        """
        fitted, has_classes = clone(self.estimator), is_classifier(self.estimator)
        if sample_weight is not None:
            check_takes_weights(fitted, "estimator")
        table = read_client_rows(self, X, y, groups, sample_weight, has_classes)
        weights = {} if table.weights is None else {"sample_weight": table.weights}
        clients = table.clients
        encoding = self._encoding_for(fitted, row_counts(clients.codes, len(clients.ids)))
        if encoding == "category":
            rows, columns, unseen = _client_positions(clients)
            _declare_category(fitted, table.X)
        else:
            rng = check_random_state(self.random_state)
            rows, columns, unseen = target_means(
                clients.codes, len(clients.ids), table.y, has_classes, rng
            )
        fitted.fit(_with_client_columns(fitted, encoding, table.X, rows), table.y, **weights)
        attributes = {
            **client_attributes(self, X, clients, groups),
            "estimator_": fitted,
            "_columns": columns,
            "_unseen_column": unseen,
            "_encoding": encoding,
            "privacy_": unprotected_report(self, [self.estimator], len(clients.ids)),
        }
        self._set_fitted(attributes)
        return self

    def _encoding_for(self, estimator, sizes):
        """Encoding for this estimator and clients with these numbers of rows (m,)."""
        if self.encoding == "auto":
            return "category" if suits_category(estimator, sizes) else "target"
        most = _most_categories(estimator)
        declares = "categorical_features" in estimator.get_params(deep=False)
        if self.encoding == "category" and not (declares or library_of(estimator) is not None):
            raise ValueError(
                f"encoding='category' needs LightGBM, CatBoost or an estimator with a parameter "
                f"categorical_features; {type(estimator).__name__} has none. Take "
                "encoding='target'."
            )
        if self.encoding == "category" and len(sizes) > most:
            raise ValueError(
                f"encoding='category' got {len(sizes)} clients, and {type(estimator).__name__} "
                f"takes at most max_bins={most} categories. Take encoding='target'."
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
        rows = self._with_clients(X, groups)  # raises NotFittedError before estimator_ is read
        return np.ravel(self.estimator_.predict(rows))  # CatBoost returns labels as a column

    @available_if(inner_has("predict_proba"))
    def predict_proba(self, X: TableLike, *, groups: TableLike = None) -> Floats:
        """Class probabilities from the fitted estimator, of shape (n_rows, n_classes).

        Parameters
        ----------
        X, groups : object
            As in :meth:`predict`.
        """
        rows = self._with_clients(X, groups)  # raises NotFittedError before estimator_ is read
        return self.estimator_.predict_proba(rows)

    @available_if(inner_has("score"))
    def score(
        self, X: TableLike, y: TableLike, *, groups: TableLike = None, sample_weight: Any = None
    ) -> float:
        """Score of the predictions, as the estimator's own ``score`` computes it.

        Parameters
        ----------
        X, y, groups : object
            As in :meth:`fit`; `groups` is needed if it saw several clients.
        sample_weight : array-like of shape (n_rows,), default=None
            Weights of the rows in the score.
        """
        check_is_fitted(self)
        weights = {} if sample_weight is None else {"sample_weight": sample_weight}
        core = final_estimator(self.estimator_)
        score = type(core).score
        if library_of(core) == "catboost":  # its own reads internals that Responses lacks
            score = (ClassifierMixin if is_classifier(self) else RegressorMixin).score
        return score(Responses(self, X, groups), X, y, **weights)

    @property
    def classes_(self) -> np.ndarray:
        """Class labels, if the estimator is a classifier."""
        return self.estimator_.classes_

    def _with_clients(self, X, groups):
        """`X` with the encoded client of every row as further columns."""
        rows, codes = rows_to_predict(self, X, groups)
        columns = getattr(self, "_columns", None)  # a released model has none
        values = client_values(columns, self._unseen_column, codes)
        return _with_client_columns(self.estimator_, self._encoding, rows, values)

    def __sklearn_tags__(self):
        inner = get_tags(self.estimator)
        tags = with_kind_of(super().__sklearn_tags__(), inner)
        tags.target_tags.required = True
        tags.input_tags.allow_nan = inner.input_tags.allow_nan
        return tags


def suits_category(estimator, sizes):
    """Whether an estimator can use levels with these numbers of rows (m,) as categories."""
    n_split = sizes[sizes >= _FEWEST_ROWS_OF_CATEGORY].sum()
    is_known = _is_sklearn_boosting(estimator) or library_of(estimator) is not None
    return is_known and len(sizes) <= _most_categories(estimator) and 2 * n_split >= sizes.sum()


def _most_categories(estimator):
    """Largest number of categories: scikit-learn gives each a bin of its own."""
    params = estimator.get_params(deep=False)
    return params["max_bins"] if _is_sklearn_boosting(estimator) else math.inf


def _is_sklearn_boosting(estimator):
    # In other packages a parameter of this name may mean something else: only on request.
    is_sklearn = type(estimator).__module__.startswith("sklearn.")
    return is_sklearn and "categorical_features" in estimator.get_params(deep=False)


def takes_categories(estimator):
    """Whether an estimator is boosting whose categories are those of the columns' types."""
    if not hasattr(estimator, "get_params"):
        return False
    params = estimator.get_params(deep=False)
    if library_of(estimator) == "catboost":  # unless the user names the categories
        return params.get("cat_features") is None
    from_dtype = _is_sklearn_boosting(estimator) and isinstance(params["categorical_features"], str)
    return from_dtype or library_of(estimator) == "lightgbm"


def _client_positions(clients):
    """Positions of the clients: by row (n, 1), by client (m, 1), and for an unseen one (1,)."""
    columns = np.arange(len(clients.ids), dtype=float)[:, None]
    # Missing, so that an unseen client goes where most rows of a tree's node went.
    return columns[clients.codes], columns, np.full(1, np.nan)


def target_means(codes, n_levels, y, has_classes, rng):
    """Shrunken mean targets, or shares of classes: by row, by level, and for an unseen level.

    Levels, such as clients, have the codes 0, 1, ..., `n_levels` - 1.
    """
    encoder = TargetEncoder(
        target_type="auto" if has_classes else "continuous",  # counts are not classes
        # Five folds are TargetEncoder's default; a fold needs a row.
        cv=KFold(min(5, len(y)), shuffle=True, random_state=rng),
    )
    with config_context(enable_metadata_routing=False):  # else it demands groups of its own
        # From other folds: a mean that includes a row's own target would leak it.
        rows = encoder.fit_transform(codes[:, None], y)
    columns = encoder.transform(np.arange(n_levels)[:, None])
    # Full shrinkage: what a level without rows gets.
    return rows, columns, np.ravel(encoder.target_mean_)


def _with_client_columns(estimator, encoding, X, values):
    """`X` with the encoded clients (n, k) on the right, as this estimator takes them."""
    X, library = with_accepted_names(estimator, X), library_of(estimator)
    if library is None or encoding == "target":
        return _with_numbers(X, values)
    # An array has one type, but CatBoost refuses floats as categories, and LightGBM recognizes a
    # category by the type of its column.
    is_frame = hasattr(X, "columns")
    X = nw.from_native(X).to_pandas() if is_frame else pd.DataFrame(X).add_prefix("x")
    positions = np.nan_to_num(values[:, 0], nan=-1).astype(int)  # -1: no client of the fit
    column = pd.Categorical(positions) if library == "lightgbm" else positions
    return X.assign(**{_new_names(X, 1)[0]: column})


def _with_numbers(X, columns):
    """`X` with further columns (n, k) of numbers on the right."""
    if not hasattr(X, "columns"):
        return np.column_stack([X, columns])
    frame = nw.from_native(X, eager_only=True)
    added = [
        nw.new_series(name, values, nw.Float64, backend=frame.implementation)
        for name, values in zip(_new_names(X, columns.shape[1]), columns.T, strict=True)
    ]
    return frame.with_columns(added).to_native()


def _new_names(X, n_names):
    """`n_names` column names that the frame does not have yet."""
    free = (f"client{'_' * k}" for k in itertools.count())
    return list(itertools.islice((name for name in free if name not in column_labels(X)), n_names))


def _declare_category(estimator, X):
    """Declare the column behind those of `X` as a category, by the estimator's parameters."""
    library = library_of(estimator)
    if library == "catboost":
        features = estimator.get_params().get("cat_features")
        # A tuple, because scikit-learn cannot clone it with a list.
        estimator.set_params(cat_features=(*(() if features is None else features), X.shape[1]))
    elif library is None:  # LightGBM sees the type of the column
        estimator.set_params(categorical_features=_categorical_features(estimator, X))


def _categorical_features(estimator, X):
    """The estimator's own categorical features, and the column of the clients."""
    categorical = estimator.get_params(deep=False)["categorical_features"]
    is_frame = hasattr(X, "columns")
    if isinstance(categorical, str):  # by the types of a frame's columns
        kinds = nw.from_native(X, eager_only=True).schema.values() if is_frame else ()
        categorical = [kind in (nw.Categorical, nw.Enum) for kind in kinds]
    features = np.asarray([] if categorical is None else categorical)
    features = np.flatnonzero(features) if features.dtype == bool else features
    if not is_frame:
        return [*features, X.shape[1]]
    names = column_labels(X)
    # By name, like the new column: such a list may not mix names and positions.
    named = [names[feature] if isinstance(feature, Integral) else feature for feature in features]
    return [*named, *_new_names(X, 1)]
