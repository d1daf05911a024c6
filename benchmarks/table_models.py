"""What tables.py compares: estimators of this package, and what a user would take instead.

Every model has ``fit(X, y, groups)`` and ``outputs(X, groups)``, which gives responses (n,) or the
probabilities of classes (n, K). Clients that a model did not see have id -1.
"""

import numpy as np
from sklearn.compose import make_column_transformer
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from table_peers import (
    BOOSTING,
    MERF,
    ROUNDS,
    CatBoost,
    CatBoostTuned,
    GPBoostBoosting,
    GPBoostMixed,
    LightGBM,
    MixedLM,
    NotPossibleError,
    OneHot,
    as_categories,
    as_numbers,
    further_ids,
    target_encoder,
)

from pfl_sklearn import PersonalizedLinearRegression, PersonalizedLogisticRegression
from pfl_sklearn.compose import (
    ClientAsFeature,
    ClientColumn,
    PersonalizedStackingClassifier,
    PersonalizedStackingRegressor,
    TableEncoder,
)

SMALLEST = 1e-6  # probability in a loss
MOST_CATEGORIES = 255  # that scikit-learn's boosted trees take


def losses(found, y, has_classes):
    """Squared errors (n,), or minus log probabilities of the true classes."""
    if not has_classes:
        return (found - y) ** 2
    return -np.log(np.clip(found[np.arange(len(y)), y], SMALLEST, 1 - SMALLEST))


class Ours:
    """An estimator of this package, as it comes."""

    grid = ({},)

    def __init__(self, estimator, has_classes):
        self.estimator, self.has_classes = estimator, has_classes

    def fit(self, X, y, groups):
        self.estimator.fit(X, y, groups=groups)
        return self

    def outputs(self, X, groups):
        if not self.has_classes:
            return self.estimator.predict(X, groups=groups)
        return self.estimator.predict_proba(X, groups=groups)


class Encoded(Ours):
    """An estimator of this package behind a TableEncoder, which leaves numbers as they are.

    Further ids of the rows are its groupings, where it takes them.
    """

    def fit(self, X, y, groups):
        encoder, ids = TableEncoder(), further_ids(X)
        if ids and not (self.has_classes and y.max() > 1):  # groupings go with two classes
            self.estimator.set_params(groupings=ids)
            encoder = make_column_transformer(
                (encoder, X.columns.drop(ids)),
                ("passthrough", ids),
                verbose_feature_names_out=False,
            ).set_output(transform="pandas")
        model = make_pipeline(encoder, self.estimator)
        self.model = ClientColumn(model, column="client").fit(X.assign(client=groups), y)
        return self

    def outputs(self, X, groups):
        rows = X.assign(client=groups)
        if not self.has_classes:
            return self.model.predict(rows)
        return self.model.predict_proba(rows)


def random_intercept(has_classes):
    kind = PersonalizedLogisticRegression if has_classes else PersonalizedLinearRegression
    return Encoded(kind(random="intercept", unseen="population"), has_classes)


def default(has_classes):
    kind = PersonalizedLogisticRegression if has_classes else PersonalizedLinearRegression
    return Encoded(kind(unseen="population"), has_classes)


def stacking(has_classes, cv=5):
    kind = PersonalizedStackingClassifier if has_classes else PersonalizedStackingRegressor
    return Ours(kind(cv=cv, unseen="population", random_state=0), has_classes)


class TreesWithClient(Ours):
    """scikit-learn's boosted trees with the client as a feature, and strings as categories."""

    def fit(self, X, y, groups):
        self.columns = as_tree_columns()
        return super().fit(self.columns.fit_transform(as_categories(X), y), y, groups)

    def outputs(self, X, groups):
        return super().outputs(self.columns.transform(as_categories(X)), groups)


class Trees(TreesWithClient):
    """Tuned ones, with the client as a category or its encoded target."""

    grid = BOOSTING

    def __init__(self, encoding, has_classes, **params):
        kind = HistGradientBoostingClassifier if has_classes else HistGradientBoostingRegressor
        boosting = kind(max_iter=ROUNDS, early_stopping=True, random_state=0, **params)
        model = ClientAsFeature(boosting, encoding, unseen="population", random_state=0)
        super().__init__(model, has_classes)
        self.encoding = encoding

    def fit(self, X, y, groups):
        if self.encoding == "category" and len(np.unique(groups)) > MOST_CATEGORIES:
            raise NotPossibleError(f"more than {MOST_CATEGORIES} clients")
        return super().fit(X, y, groups)


def as_tree_columns():
    """Transformer of categories to targets, where there are more than the trees take."""

    def many(X):
        counts = X.select_dtypes("category").nunique()
        return list(counts.index[counts > MOST_CATEGORIES])

    return make_column_transformer(
        (target_encoder(), many), remainder="passthrough", verbose_feature_names_out=False
    ).set_output(transform="pandas")


def trees_alone(has_classes):
    """scikit-learn's boosted trees without the client, at default parameters."""
    kind = HistGradientBoostingClassifier if has_classes else HistGradientBoostingRegressor
    columns = FunctionTransformer(as_categories), as_tree_columns()
    return NoClients(make_pipeline(*columns, kind(random_state=0)), has_classes)


def trees_with_client(has_classes):
    """scikit-learn's boosted trees with the client as a feature, at default parameters."""
    kind = HistGradientBoostingClassifier if has_classes else HistGradientBoostingRegressor
    model = ClientAsFeature(kind(random_state=0), unseen="population", random_state=0)
    return TreesWithClient(model, has_classes)


def pooled(has_classes):
    """Ridge or logistic regression without clients, at default parameters."""
    linear = LogisticRegression() if has_classes else Ridge()
    return NoClients(make_pipeline(as_numbers(scaled=True), linear), has_classes)


def mean(has_classes):
    kind = DummyClassifier(strategy="prior") if has_classes else DummyRegressor()
    return NoClients(kind, has_classes)


class NoClients(Ours):
    """An estimator that gets no client ids."""

    def fit(self, X, y, groups):
        self.estimator.fit(X, y)
        return self

    def outputs(self, X, groups):
        if not self.has_classes:
            return self.estimator.predict(X)
        return self.estimator.predict_proba(X)


METHODS = {
    "random intercept": (random_intercept, {}),
    "default": (default, {}),
    "stacking": (stacking, {}),
    "MixedLM": (MixedLM, {}),
    "GPBoost mixed": (GPBoostMixed, {}),
    "GPBoost boosting": (GPBoostBoosting, {}),
    "CatBoost": (CatBoost, {}),
    "CatBoost tuned": (CatBoostTuned, {}),
    "LightGBM tuned": (LightGBM, {}),
    "trees, target": (Trees, {"encoding": "target"}),
    "trees, category": (Trees, {"encoding": "category"}),
    "one-hot linear": (OneHot, {}),
    "merf": (MERF, {}),
    "hgb": (trees_alone, {}),
    "hgb_client": (trees_with_client, {}),
    "pooled": (pooled, {}),
    "mean": (mean, {}),
}
PLAIN = {  # at default parameters
    "hgb": "trees without the client",
    "hgb_client": "trees with the client",
    "pooled": "linear model without clients",
    "mean": "mean",
}
FOR_NEW = ("pooled", "mean")  # what everybody could have for new clients
OURS = ("random intercept", "default", "stacking")


def tuned_fit(name, has_classes, table, folds, given=None):
    """Model with the setting of its grid that does best in the folds, fitted to all rows."""
    make, fixed = METHODS[name]
    fixed = {**fixed, **(given or {})}
    grid = getattr(make, "grid", ({},))
    if len(grid) == 1:
        return make(**fixed, has_classes=has_classes).fit(*table), {}
    best = None
    for setting in grid:
        loss, more = _cross_validated(make, fixed | setting, has_classes, table, folds)
        if best is None or loss < best[0]:
            best = loss, setting, more
    _, setting, more = best
    return make(**fixed, **setting, has_classes=has_classes).fit(*table, **more), setting | more


def _cross_validated(make, given, has_classes, table, folds):
    X, y, groups = table
    model = make(**given, has_classes=has_classes)
    if hasattr(model, "tuned"):
        return model.tuned(X, y, groups, folds)
    found = []
    for train, test in folds:
        model = make(**given, has_classes=has_classes)
        model.fit(X.iloc[train], y[train], groups[train])
        found.append(losses(model.outputs(X.iloc[test], groups[test]), y[test], has_classes))
    return np.concatenate(found).mean(), {}
