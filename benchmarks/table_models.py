"""What tables.py compares: estimators of this package, and what a user would take instead.

Every model has ``fit(X, y, groups)`` and ``outputs(X, groups)``, which gives responses or the
probability of the second class. Clients that a model did not see have id -1.
"""

import copy

import numpy as np
import pandas as pd
from sklearn.compose import make_column_transformer
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from pfl_sklearn import PersonalizedLinearRegression, PersonalizedLogisticRegression
from pfl_sklearn.compose import (
    ClientAsFeature,
    ClientSelector,
    PersonalizedStackingClassifier,
    PersonalizedStackingRegressor,
)

SMALLEST = 1e-6  # probability in a loss
_BOOSTING = [
    {"learning_rate": rate, "max_depth": depth} for rate in (0.03, 0.1) for depth in (3, 6)
]
_ROUNDS = 500  # of boosting, at most
_STOP = 20  # of them without a gain
_PENALTIES = [{"penalty": 10.0**k} for k in range(-2, 3)]


class NotPossibleError(Exception):
    """A model that does not take such a table."""


def losses(found, y, has_classes):
    """Squared errors (n,), or minus log probabilities of the true classes."""
    if not has_classes:
        return (found - y) ** 2
    chances = np.clip(found, SMALLEST, 1 - SMALLEST)
    return -np.log(np.where(y == 1, chances, 1 - chances))


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
        return self.estimator.predict_proba(X, groups=groups)[:, 1]

    def of_candidates(self, X, groups):
        """Outputs of the selector's candidates alone, by name; none of other estimators."""
        model, found = self.estimator, {}
        for k, name in enumerate(getattr(model, "named_estimators_", {})):
            if not hasattr(model, "weights_"):
                break
            alone = copy.copy(model)
            alone.weights_ = np.eye(model.weights_.shape[1])[np.full(len(model.clients_), k)]
            alone.new_weights_ = alone.weights_[0]
            found[name] = Ours(alone, self.has_classes).outputs(X, groups)
        return found


def random_intercept(has_classes):
    kind = PersonalizedLogisticRegression if has_classes else PersonalizedLinearRegression
    return Ours(kind(random="intercept", unseen="population"), has_classes)


def default(has_classes):
    kind = PersonalizedLogisticRegression if has_classes else PersonalizedLinearRegression
    return Ours(kind(unseen="population"), has_classes)


def stacking(has_classes):
    kind = PersonalizedStackingClassifier if has_classes else PersonalizedStackingRegressor
    return Ours(kind(unseen="population", random_state=0), has_classes)


def selector(has_classes):
    """A model without clients, a personalized one and a stack; three folds, to save time."""
    if has_classes:
        linear, stack = LogisticRegression(max_iter=500), PersonalizedStackingClassifier
        personal = PersonalizedLogisticRegression(random="all", unseen="population")
    else:
        linear, stack = LinearRegression(), PersonalizedStackingRegressor
        personal = PersonalizedLinearRegression(unseen="population")
    candidates = [
        ("population", make_pipeline(StandardScaler(), linear)),
        ("personal", personal),
        ("stack", stack(fallback=False, unseen="population", random_state=0)),
    ]
    model = ClientSelector(candidates, cv=3, unseen="population", random_state=0)
    return Ours(model, has_classes)


class Trees:
    """scikit-learn's boosted trees, with the client as a category or its encoded target."""

    grid = _BOOSTING

    def __init__(self, encoding, has_classes, **params):
        kind = HistGradientBoostingClassifier if has_classes else HistGradientBoostingRegressor
        boosting = kind(max_iter=_ROUNDS, early_stopping=True, random_state=0, **params)
        self.model = ClientAsFeature(boosting, encoding, unseen="population", random_state=0)
        self.has_classes, self.encoding = has_classes, encoding

    def fit(self, X, y, groups):
        if self.encoding == "category" and len(np.unique(groups)) > 255:
            raise NotPossibleError("more than 255 clients")
        self.model.fit(X, y, groups=groups)
        return self

    def outputs(self, X, groups):
        if not self.has_classes:
            return self.model.predict(X, groups=groups)
        return self.model.predict_proba(X, groups=groups)[:, 1]


def trees_alone(has_classes):
    """Boosted trees without the client, as the stack has them."""
    kind = HistGradientBoostingClassifier if has_classes else HistGradientBoostingRegressor
    return NoClients(kind(random_state=0), has_classes)


def trees_with_client(has_classes):
    """Boosted trees with the client as a feature, as the stack has them."""
    kind = HistGradientBoostingClassifier if has_classes else HistGradientBoostingRegressor
    model = ClientAsFeature(kind(random_state=0), unseen="population", random_state=0)
    return Ours(model, has_classes)


def pooled(has_classes):
    """A linear model without clients, as the stack has it for new ones."""
    linear = LogisticRegression() if has_classes else LinearRegression()
    return NoClients(make_pipeline(StandardScaler(), linear), has_classes)


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
        return self.estimator.predict_proba(X)[:, 1]


class OneHot:
    """Ridge or penalized logistic regression of standardized columns and one column per client."""

    grid = _PENALTIES

    def __init__(self, has_classes, penalty=1.0):
        self.has_classes = has_classes
        linear = LogisticRegression(C=1 / penalty, max_iter=500) if has_classes else Ridge(penalty)
        columns = make_column_transformer(
            (OneHotEncoder(handle_unknown="ignore"), ["client"]), remainder=StandardScaler()
        )
        self.model = make_pipeline(columns, linear)

    def fit(self, X, y, groups):
        self.model.fit(X.assign(client=groups), y)
        return self

    def outputs(self, X, groups):
        rows = X.assign(client=groups)
        if not self.has_classes:
            return self.model.predict(rows)
        return self.model.predict_proba(rows)[:, 1]


class MixedLM:
    """statsmodels' mixed model with a random intercept, fitted by REML."""

    grid = ({},)

    def __init__(self, has_classes):
        if has_classes:
            raise NotPossibleError("no mixed model of classes by likelihood")

    def fit(self, X, y, groups):
        import statsmodels.api as sm

        self.columns = _Columns(X)
        fits = []
        for method in ("bfgs", "lbfgs", "cg", "powell"):  # each of them may stop at a variance of 0
            result = sm.MixedLM(y, self.columns.of(X), groups).fit(method=method)
            if np.isfinite(result.llf) and result.cov_re[0, 0] > 0:
                fits.append(result)
        if not fits:
            raise NotPossibleError("every optimizer stops at a variance of 0")
        best = max(fits, key=lambda result: result.llf)
        self.fixed, self.random = best.fe_params, best.random_effects
        return self

    def outputs(self, X, groups):
        own = [float(np.ravel(self.random.get(each, 0.0))[0]) for each in groups]
        return self.columns.of(X) @ self.fixed + np.array(own)


class GPBoostMixed:
    """GPBoost's generalized linear mixed model with a random intercept."""

    grid = ({},)

    def __init__(self, has_classes):
        self.has_classes = has_classes

    def fit(self, X, y, groups):
        import gpboost

        self.columns = _Columns(X)
        self.model = gpboost.GPModel(group_data=groups, likelihood=_likelihood(self.has_classes))
        self.model.fit(y=y.astype(float), X=self.columns.of(X))
        return self

    def outputs(self, X, groups):
        rows = self.columns.of(X)
        return self.model.predict(group_data_pred=groups, X_pred=rows, predict_response=True)["mu"]


class GPBoostBoosting:
    """GPBoost's boosted trees with a random intercept; the number of rounds is tuned as well.

    Responses get a variance of 1 inside clients, since the size of its steps depends on that of the
    noise: with shares of votes as they are its errors are several times as large and vary from one
    number of rounds to the next.
    """

    grid = _BOOSTING

    def __init__(self, has_classes, **params):
        depth = params.get("max_depth", 6)
        self.has_classes = has_classes
        self.params = {**params, "num_leaves": 2**depth, "verbose": -1, "num_threads": 1}

    def tuned(self, X, y, groups, folds):
        """Loss and rounds, by cross-validation with early stopping."""
        import gpboost

        found = gpboost.cv(
            params=self.params,
            train_set=gpboost.Dataset(X.to_numpy(), self._scaled(y, groups)),
            gp_model=gpboost.GPModel(group_data=groups, likelihood=_likelihood(self.has_classes)),
            num_boost_round=_ROUNDS,
            early_stopping_rounds=_STOP,
            folds=folds,
            metric="binary_logloss" if self.has_classes else "mse",
            use_gp_model_for_validation=True,
            verbose_eval=False,
        )
        (name,) = [key for key in found if key.endswith("-mean")]
        best = int(np.argmin(found[name]))
        return found[name][best], {"n_rounds": best + 1}

    def fit(self, X, y, groups, n_rounds=100):
        import gpboost

        gp_model = gpboost.GPModel(group_data=groups, likelihood=_likelihood(self.has_classes))
        rows = gpboost.Dataset(X.to_numpy(), self._scaled(y, groups))
        self.model = gpboost.train(self.params, rows, gp_model=gp_model, num_boost_round=n_rounds)
        return self

    def outputs(self, X, groups):
        found = self.model.predict(X.to_numpy(), group_data_pred=groups, pred_latent=False)
        return self.mean + self.scale * found["response_mean"]

    def _scaled(self, y, groups):
        self.mean, self.scale = 0.0, 1.0
        if not self.has_classes:
            of_client = pd.Series(y).groupby(groups)
            within = (of_client.size() - 1).clip(lower=0) @ of_client.var().fillna(0.0)
            self.mean, self.scale = y.mean(), np.sqrt(within / (len(y) - of_client.ngroups))
        return (y - self.mean) / self.scale


class MERF:
    """Boosted trees with a random intercept by the EM steps of merf."""

    grid = _BOOSTING[:2]

    def __init__(self, has_classes, **params):
        if has_classes:
            raise NotPossibleError("no classes")
        self.params = params

    def fit(self, X, y, groups):
        from merf import MERF as Peer

        boosting = HistGradientBoostingRegressor(random_state=0, **self.params)
        self.model = Peer(fixed_effects_model=boosting, max_iterations=10)
        self.model.fit(X.to_numpy(), np.ones((len(X), 1)), pd.Series(groups), y)
        return self

    def outputs(self, X, groups):
        return self.model.predict(X.to_numpy(), np.ones((len(X), 1)), pd.Series(groups))


METHODS = {
    "random intercept": (random_intercept, {}),
    "default": (default, {}),
    "stacking": (stacking, {}),
    "stacking + selector": (selector, {}),
    "MixedLM": (MixedLM, {}),
    "GPBoost mixed": (GPBoostMixed, {}),
    "GPBoost boosting": (GPBoostBoosting, {}),
    "trees, target": (Trees, {"encoding": "target"}),
    "trees, category": (Trees, {"encoding": "category"}),
    "one-hot linear": (OneHot, {}),
    "merf": (MERF, {}),
    "hgb": (trees_alone, {}),
    "hgb_client": (trees_with_client, {}),
    "pooled": (pooled, {}),
    "mean": (mean, {}),
}
PARTS = {  # of the stack, at default parameters
    "hgb": "trees of the stack, without the client",
    "hgb_client": "trees of the stack, with the client",
    "pooled": "linear model of the stack, without clients",
    "mean": "mean",
}
FOR_NEW = ("pooled", "mean")  # parts for new clients alone
OURS = ("random intercept", "default", "stacking", "stacking + selector")


def tuned_fit(name, has_classes, table, folds):
    """Model with the setting of its grid that does best in the folds, fitted to all rows."""
    make, fixed = METHODS[name]
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


def _likelihood(has_classes):
    return "bernoulli_logit" if has_classes else "gaussian"


class _Columns:
    """An intercept and standardized columns, of which none is a combination of those before it."""

    def __init__(self, X):
        self.kept, values = [], np.ones((len(X), 1))
        for name in X.columns:
            column = X[name].to_numpy(dtype=float)
            wider = np.column_stack([values, (column - column.mean()) / (column.std() or 1.0)])
            if np.linalg.matrix_rank(wider.T @ wider / len(X), tol=1e-8) > values.shape[1]:
                self.kept, values = [*self.kept, name], wider
        self.scaler = StandardScaler().fit(X[self.kept])

    def of(self, X):
        """Array (n, 1 + k) of rows."""
        return np.column_stack([np.ones(len(X)), self.scaler.transform(X[self.kept])])
