"""Columns of many levels: groupings of personalized models, and features of boosted trees."""

from typing import Any, NamedTuple, Self

import narwhals as nw
import numpy as np
import pandas as pd
from sklearn.base import clone, is_classifier
from sklearn.utils import check_random_state

from pfl_sklearn._columns import column_labels
from pfl_sklearn._compat import BaseEstimator, HasMethods, MetaEstimatorMixin, fit_context
from pfl_sklearn._parameters import UNSEEN, parameter, with_parameters
from pfl_sklearn._typing import Floats, Integers, RandomState, TableLike
from pfl_sklearn.base import ClientMixin
from pfl_sklearn.compose._client_feature import (
    ClientAsFeature,
    suits_category,
    takes_categories,
    target_means,
)
from pfl_sklearn.compose._client_rows import (
    client_attributes,
    read_client_rows,
    row_ids,
    rows_to_predict,
)
from pfl_sklearn.compose._inner_estimators import (
    InnerEstimator,
    SettledGroupings,
    adds_noise,
    fit_inner,
    library_of,
    model_of_client,
    predict_inner,
    unprotected_report,
)
from pfl_sklearn.compose._named_estimators import OutputsMixin
from pfl_sklearn.linear_model._grouping_columns import resolve_groupings
from pfl_sklearn.priors._resolve import resolve_prior


def many_level_columns(X):
    """Names of the columns of a data frame that models with ``groupings="auto"`` group by."""
    return list(resolve_groupings(X, "auto")[0].labels)


def takes_groupings(estimator, classes=None):
    """Whether a model groups rows by columns of many levels, as a private one does not.

    `classes` (K,) are None for responses; of more than two classes no model has groupings.
    """
    if classes is not None and len(classes) > 2:
        return False
    params = estimator.get_params(deep=False) if hasattr(estimator, "get_params") else {}
    groupings = params.get("groupings")
    if not (isinstance(groupings, str) and groupings == "auto") or adds_noise(estimator):
        return False
    try:
        estimator._check_groupings(resolve_prior(estimator))
    except ValueError:  # as of a mixture prior
        return False
    return True


def with_levels(estimator, names, classes=None):
    """Estimator that takes tables whose columns `names` have many levels, unless it cannot."""
    if not names:
        return estimator
    if takes_groupings(estimator, classes):
        # By name, because in the rows of a fold a column may have fewer levels, or too many.
        return clone(estimator).set_params(groupings=SettledGroupings(names))
    if hasattr(estimator, "residual_estimator"):
        line = with_levels(estimator.estimator, names, classes)
        # Target means would leak: those of other rows' residuals without themselves hold the row's
        # own target.
        trees = TreesOfLevels(estimator.residual_estimator, tuple(names), use_targets=False)
        return clone(estimator).set_params(estimator=line, residual_estimator=trees)
    if takes_categories(_trees(estimator)):
        return TreesOfLevels(estimator, tuple(names))
    return estimator


def _trees(estimator):
    """The trees inside of, or that are, an estimator."""
    return estimator.estimator if isinstance(estimator, ClientAsFeature) else estimator


class _LevelFeature(NamedTuple):
    """A column of many levels as trees take it: its levels, and their target means if needed."""

    name: str
    levels: pd.Index
    # Of each level, of missing values, and of an unknown level; None: a category.
    means: Floats | None

    def codes(self, values):
        """Positions (n,) of the levels; behind them missing values, and -1 for unknown levels."""
        codes = self.levels.get_indexer(pd.Index(np.asarray(values, dtype=object)))
        return np.where(pd.isna(values), len(self.levels), codes)

    def columns(self, codes, library):
        """Columns by name of rows with these codes (n,)."""
        if self.means is not None:
            return _named(self.name, self.means[codes])
        present: Integers = np.where(codes < len(self.levels), codes, -1)
        if library == "catboost":  # it refuses missing values in a category
            return {self.name: present}
        kinds = pd.CategoricalDtype(list(range(len(self.levels))))
        return {self.name: pd.Categorical.from_codes(present, dtype=kinds)}


def _named(name, means):
    """Columns of target means (n, k), of which classes have several."""
    ends = [""] if means.shape[1] == 1 else [f": {k}" for k in range(means.shape[1])]
    return {name + end: values for end, values in zip(ends, means.T, strict=True)}


@with_parameters
class TreesOfLevels(OutputsMixin, ClientMixin, MetaEstimatorMixin, BaseEstimator):
    """Boosted trees that get columns of many levels as categories, or else as target means.

    Each column is encoded as :class:`~pfl_sklearn.compose.ClientAsFeature` encodes the clients.
    Without `use_targets`, columns that cannot be categories are constant.
    """

    estimator: Any = parameter(ranges=[HasMethods(["fit", "predict"])], kw_only=False)
    columns: tuple[str, ...] = parameter(ranges=[tuple], kw_only=False)
    use_targets: bool = parameter(default=True, ranges=["boolean"])
    unseen: str = UNSEEN
    random_state: RandomState = parameter(default=None, ranges=["random_state"])

    _population_attributes = ("estimator_", "_features")
    _client_attributes = ("n_samples_per_client_",)
    _state_attributes = ("classes_",)

    @fit_context(prefer_skip_nested_validation=False)
    def fit(
        self, X: TableLike, y: TableLike, *, groups: TableLike = None, sample_weight: Any = None
    ) -> Self:
        """Encode the columns, and fit the trees to all of them."""
        has_classes = is_classifier(self.estimator)
        table = read_client_rows(self, X, y, groups, sample_weight, has_classes)
        classes = np.unique(table.y) if has_classes else None
        trees, rng = clone(self.estimator), check_random_state(self.random_state)
        core, frame = _trees(trees), _as_pandas(table.X)
        y = table.y if self.use_targets else None
        encoded = [_encoded(frame[name], core, y, has_classes, rng) for name in self.columns]
        features = [feature for feature, _ in encoded]
        rows = _with_columns(frame, self.columns, [columns for _, columns in encoded])
        _declare_categories(core, features, rows)
        inner = InnerEstimator("estimator", trees, classes)
        clients = table.clients
        attributes = {
            **client_attributes(self, X, clients, groups, classes),
            "estimator_": fit_inner(inner, table._replace(X=rows)),
            "_features": features,
            "privacy_": unprotected_report(self, [self.estimator], len(clients.ids)),
        }
        self._set_fitted(attributes)
        return self

    def _outputs(self, X, groups):
        X, codes = rows_to_predict(self, X, groups)
        frame, library = _as_pandas(X), library_of(_trees(self.estimator))
        encoded = [
            feature.columns(feature.codes(frame[feature.name]), library)
            for feature in self._features
        ]
        rows = _with_columns(frame, self.columns, encoded)
        fitted = InnerEstimator("estimator", self.estimator_, getattr(self, "classes_", None))
        return predict_inner(fitted, rows, row_ids(self, groups, codes))

    def for_client(self, client_id: Any) -> Self:
        """Trees as one client alone gets them."""
        model = super().for_client(client_id)
        model._set_fitted({"estimator_": model_of_client(self.estimator_, client_id)}, dropped=())
        return model


def _as_pandas(X):
    """A data frame of any library as one of pandas."""
    return X if hasattr(X, "iloc") else nw.from_native(X, eager_only=True).to_pandas()


def _encoded(values, trees, y, has_classes, rng):
    """_LevelFeature of a column (n,) for these trees, and its columns in the rows of the fit."""
    levels = pd.Index(np.asarray(values.dropna().unique(), dtype=object))
    feature = _LevelFeature(values.name, levels, None)
    codes = feature.codes(values)
    sizes = np.bincount(codes, minlength=len(levels) + 1)
    if suits_category(trees, sizes[:-1]):
        return feature, feature.columns(codes, library_of(trees))
    if y is None:
        feature = feature._replace(means=np.zeros((len(levels) + 2, 1)))
        return feature, feature.columns(codes, None)
    # Missing values have a mean of their own.
    rows, means, unseen = target_means(codes, len(levels) + 1, y, has_classes, rng)
    return feature._replace(means=np.vstack([means, unseen])), _named(values.name, rows)


def _with_columns(frame, names, encoded):
    """A frame whose columns `names` are replaced by others, in dicts, behind the rest."""
    made = pd.DataFrame(
        {k: v for columns in encoded for k, v in columns.items()}, index=frame.index
    )
    return pd.concat([frame.drop(columns=list(names)), made], axis=1)


def _declare_categories(trees, features, rows):
    """Declare categories to CatBoost; others see the types of the columns."""
    if library_of(trees) != "catboost":
        return
    names = [feature.name for feature in features if feature.means is None]
    # A tuple, because scikit-learn cannot clone it with a list.
    trees.set_params(cat_features=tuple(map(column_labels(rows).index, names)))
