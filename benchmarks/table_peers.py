"""What a user would take instead of this package: models of others, as tables.py compares them.

Strings and missing values of a table go to CatBoost and LightGBM as they are, and to the others by
scikit-learn's one-hot columns and medians. Further ids of the rows, such as the movie of a rating,
get random effects where a package has several, and their encoded targets where columns are dense.
The packages are imported when they are needed.
"""

import importlib

import numpy as np
import pandas as pd
from sklearn.compose import make_column_selector, make_column_transformer
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler, TargetEncoder

BOOSTING = [{"learning_rate": rate, "max_depth": depth} for rate in (0.03, 0.1) for depth in (3, 6)]
_CAT_BOOSTING = [
    {"learning_rate": rate, "depth": depth} for rate in (0.03, 0.1) for depth in (4, 6)
]
ROUNDS = 500  # of boosting, at most
_CAT_ROUNDS = 1000  # of CatBoost by default, and at most
_STOP = 20  # of them without a gain
_PENALTIES = [{"penalty": 10.0**k} for k in range(-2, 3)]
SECOND_ID = "second id"  # column of a table
_FEW_LEVELS = 10  # of a column that is no further id
_MANY_LEVELS = 1000  # of further ids, for GPBoost


class NotPossibleError(Exception):
    """A model that does not take such a table, or whose package is not installed."""


PACKAGES = {
    "MixedLM": "statsmodels.api",
    "GPBoost mixed": "gpboost",
    "GPBoost boosting": "gpboost",
    "CatBoost": "catboost",
    "CatBoost tuned": "catboost",
    "LightGBM tuned": "lightgbm",
    "merf": "merf",
}


def load(method):
    """Import the package of a method, so that its time is not that of a fit."""
    if method in PACKAGES:
        try:
            importlib.import_module(PACKAGES[method])
        except ModuleNotFoundError as error:
            package = PACKAGES[method].partition(".")[0]
            raise NotPossibleError(f"{method} needs {package}: pip install {package}") from error


def further_ids(X):
    """Names of the second id, if there is one, and of columns of strings with many levels."""
    strings = X.select_dtypes(exclude="number")
    return [name for name in strings if name == SECOND_ID or X[name].nunique() > _FEW_LEVELS]


def target_encoder():
    """Encoder of levels as shrunken mean targets, of other rows in the fit."""
    return TargetEncoder(target_type="continuous", random_state=0)


def as_numbers(scaled=False):
    """Transformer of strings to one-hot columns, and of missing values to medians.

    Numbers stay in order. One-hot columns are sparse if scaled; else further ids become targets.
    """
    number = make_column_selector(dtype_include="number")
    string = make_column_selector(dtype_exclude="number")
    median = SimpleImputer(strategy="median", keep_empty_features=True)
    one_hot = OneHotEncoder(handle_unknown="ignore", sparse_output=scaled)
    if scaled:
        return make_column_transformer(
            (make_pipeline(median, StandardScaler()), number), (one_hot, string)
        )
    columns = make_column_transformer(
        (median, number),
        (one_hot, lambda X: [name for name in string(X) if name not in further_ids(X)]),
        (target_encoder(), further_ids),
    )
    return columns.set_output(transform="pandas")


def as_categories(X, client=None):
    """A frame with strings as categories, and the clients (n,) as one more if given."""
    X = X if client is None else X.assign(client=client)
    words = [name for name, kind in X.dtypes.items() if not pd.api.types.is_numeric_dtype(kind)]
    return X.astype(dict.fromkeys(words, "category"))


class OneHot:
    """Ridge or penalized logistic regression of standardized columns and one column per client."""

    grid = _PENALTIES

    def __init__(self, has_classes, penalty=1.0):
        self.has_classes = has_classes
        linear = LogisticRegression(C=1 / penalty, max_iter=500) if has_classes else Ridge(penalty)
        self.model = make_pipeline(as_numbers(scaled=True), linear)

    def fit(self, X, y, groups):
        self.model.fit(X.assign(client=groups.astype(str)), y)
        return self

    def outputs(self, X, groups):
        rows = X.assign(client=groups.astype(str))
        if not self.has_classes:
            return self.model.predict(rows)
        return self.model.predict_proba(rows)


class MixedLM:
    """statsmodels' mixed model with a random intercept, fitted by REML.

    Levels of a second id that hold whole clients have one as well. Crossed ones would make all rows
    one group, whose covariance is dense.
    """

    grid = ({},)

    def __init__(self, has_classes):
        if has_classes:
            raise NotPossibleError("no mixed model of classes by likelihood")

    def fit(self, X, y, groups):
        import statsmodels.api as sm

        self.ids = further_ids(X)
        outer, effects = self._outer(X, groups), {}
        if self.ids:
            if pd.Series(outer).groupby(groups).nunique().max() > 1:
                raise NotPossibleError("no crossed random effects of so many rows")
            effects = {"exog_re": np.ones(len(y)), "exog_vc": _clients_within(outer, groups)}
        self.columns, fits = _Columns(X.drop(columns=self.ids)), []
        for method in ("bfgs", "lbfgs", "cg", "powell"):  # each of them may stop at a variance of 0
            model = sm.MixedLM(y, self.columns.of(X), outer, **effects)
            result = model.fit(method=method)
            if np.isfinite(result.llf) and min(*result.cov_re.ravel(), *result.vcomp) > 0:
                fits.append(result)
        if not fits:
            raise NotPossibleError("every optimizer stops at a variance of 0")
        best = max(fits, key=lambda result: result.llf)
        self.fixed = best.fe_params
        # The first effect of a group is its own, and the others are those of clients in it.
        self.random = {level: effects.iloc[0] for level, effects in best.random_effects.items()}
        for effects in best.random_effects.values():
            self.random |= effects.iloc[1:].to_dict()
        return self

    def outputs(self, X, groups):
        means = self.columns.of(X) @ self.fixed
        means += [self.random.get(level, 0.0) for level in self._outer(X, groups)]
        if self.ids:
            means += [self.random.get(f"client[{client}]", 0.0) for client in groups]
        return means

    def _outer(self, X, groups):
        """Levels (n,) of the outermost random intercept."""
        return X[self.ids[0]].to_numpy() if self.ids else groups


class GPBoostMixed:
    """GPBoost's generalized linear mixed model: random intercepts of clients and further ids."""

    grid = ({},)

    def __init__(self, has_classes):
        self.has_classes = has_classes

    def fit(self, X, y, groups):
        self.ids = further_ids(X)
        self.columns = _Columns(X.drop(columns=self.ids))
        self.model = _gp_model(_all_ids(X, groups, self.ids), self.has_classes)
        self.model.fit(y=y.astype(float), X=self.columns.of(X))
        return self

    def outputs(self, X, groups):
        rows, levels = self.columns.of(X), _all_ids(X, groups, self.ids)
        found = self.model.predict(group_data_pred=levels, X_pred=rows, predict_response=True)["mu"]
        return _of_both(found) if self.has_classes else found


class GPBoostBoosting:
    """GPBoost's boosted trees with random intercepts of clients and further ids.

    The number of rounds is tuned as well.

    Responses get a variance of 1 inside clients, since the size of its steps depends on that of the
    noise: with shares of votes as they are its errors are several times as large and vary from one
    number of rounds to the next.
    """

    grid = BOOSTING

    def __init__(self, has_classes, **params):
        depth = params.get("max_depth", 6)
        self.has_classes = has_classes
        self.params = {**params, "num_leaves": 2**depth, "verbose": -1, "num_threads": 1}

    def tuned(self, X, y, groups, folds):
        """Loss and rounds, by cross-validation with early stopping."""
        import gpboost

        ids = further_ids(X)
        features = as_numbers().fit_transform(X.drop(columns=ids)).to_numpy()
        found = gpboost.cv(
            params=self.params,
            train_set=gpboost.Dataset(features, self._scaled(y, groups)),
            gp_model=_gp_model(_all_ids(X, groups, ids), self.has_classes),
            num_boost_round=ROUNDS,
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

        self.ids = further_ids(X)
        gp_model = _gp_model(_all_ids(X, groups, self.ids), self.has_classes)
        self.encoder = as_numbers().fit(X.drop(columns=self.ids))
        rows = gpboost.Dataset(self.encoder.transform(X).to_numpy(), self._scaled(y, groups))
        self.model = gpboost.train(self.params, rows, gp_model=gp_model, num_boost_round=n_rounds)
        return self

    def outputs(self, X, groups):
        rows, levels = self.encoder.transform(X).to_numpy(), _all_ids(X, groups, self.ids)
        found = self.model.predict(rows, group_data_pred=levels, pred_latent=False)
        found = self.mean + self.scale * found["response_mean"]
        return _of_both(found) if self.has_classes else found

    def _scaled(self, y, groups):
        self.mean, self.scale = 0.0, 1.0
        if not self.has_classes:
            of_client = pd.Series(y).groupby(groups)
            within = (of_client.size() - 1).clip(lower=0) @ of_client.var().fillna(0.0)
            self.mean, self.scale = y.mean(), np.sqrt(within / (len(y) - of_client.ngroups))
        return (y - self.mean) / self.scale


class CatBoost:
    """CatBoost at its defaults, with the client and words as categories."""

    grid = ({},)

    def __init__(self, has_classes, **params):
        fixed = {"random_seed": 0, "thread_count": 1, "verbose": False}
        self.params = {**fixed, "allow_writing_files": False, **params}
        self.has_classes = has_classes

    def fit(self, X, y, groups, n_rounds=_CAT_ROUNDS):
        self.model = self._boosting(y, n_rounds)
        self.model.fit(self._pool(X, groups, y))
        return self

    def outputs(self, X, groups):
        if not self.has_classes:
            return self.model.predict(self._pool(X, groups))
        return self.model.predict_proba(self._pool(X, groups))

    def _boosting(self, y, n_rounds):
        import catboost

        if not self.has_classes:
            return catboost.CatBoostRegressor(**self.params, n_estimators=n_rounds)
        loss = "Logloss" if y.max() == 1 else "MultiClass"
        return catboost.CatBoostClassifier(**self.params, loss_function=loss, n_estimators=n_rounds)

    def _pool(self, X, groups, y=None):
        import catboost

        rows = as_categories(X, groups.astype(str))
        words = list(rows.select_dtypes("category"))
        rows = rows.astype(dict.fromkeys(words, object)).fillna(dict.fromkeys(words, "missing"))
        return catboost.Pool(rows, y, cat_features=words)


class CatBoostTuned(CatBoost):
    """CatBoost with depth, learning rate and the number of rounds from folds."""

    grid = _CAT_BOOSTING

    def tuned(self, X, y, groups, folds):
        """Mean loss and rounds of fits to the folds, each of which stops early.

        Not by ``catboost.cv``, whose means are over fewer folds once one has stopped.
        """
        fits = []
        for train, test in folds:
            rows, held_out = (self._pool(X.iloc[k], groups[k], y[k]) for k in (train, test))
            model = self._boosting(y, _CAT_ROUNDS)
            fits.append(model.fit(rows, eval_set=held_out, early_stopping_rounds=_STOP))
        (name,) = fits[0].get_best_score()["validation"]
        loss = np.mean([each.get_best_score()["validation"][name] for each in fits])
        return loss, {"n_rounds": 1 + round(np.mean([each.get_best_iteration() for each in fits]))}


class LightGBM:
    """LightGBM with the client and words as categories; the number of rounds is tuned as well."""

    grid = BOOSTING

    def __init__(self, has_classes, **params):
        leaves = 2 ** params.get("max_depth", 6)
        self.has_classes = has_classes
        self.params = {**params, "num_leaves": leaves, "seed": 0, "verbose": -1, "num_threads": 1}

    def tuned(self, X, y, groups, folds):
        """Loss and rounds, by cross-validation with early stopping."""
        import lightgbm

        found = lightgbm.cv(
            self.params | self._kind(y),
            self._rows(X, groups, y),
            num_boost_round=ROUNDS,
            folds=folds,
            callbacks=[lightgbm.early_stopping(_STOP, verbose=False)],
        )
        (name,) = [key for key in found if key.endswith("-mean")]
        best = int(np.argmin(found[name]))
        return found[name][best], {"n_rounds": best + 1}

    def fit(self, X, y, groups, n_rounds=100):
        import lightgbm

        params = self.params | self._kind(y)
        self.model = lightgbm.train(params, self._rows(X, groups, y), n_rounds)
        return self

    def outputs(self, X, groups):
        found = self.model.predict(self._columns(X, groups))
        return _of_both(found) if self.has_classes and found.ndim == 1 else found

    def _kind(self, y):
        if not self.has_classes:
            return {"objective": "regression"}
        if y.max() == 1:
            return {"objective": "binary"}
        return {"objective": "multiclass", "num_class": int(y.max()) + 1}

    def _rows(self, X, groups, y):
        import lightgbm

        return lightgbm.Dataset(self._columns(X, groups), y, free_raw_data=False)

    def _columns(self, X, groups):
        rows = as_categories(X, pd.Categorical(groups.astype(str)))
        return rows.set_axis(range(rows.shape[1]), axis=1)  # it takes no names with a colon


class MERF:
    """Boosted trees with a random intercept by the EM steps of merf."""

    grid = BOOSTING[:2]

    def __init__(self, has_classes, **params):
        if has_classes:
            raise NotPossibleError("no classes")
        self.params = params

    def fit(self, X, y, groups):
        from merf import MERF as Peer

        boosting = HistGradientBoostingRegressor(random_state=0, **self.params)
        self.model = Peer(fixed_effects_model=boosting, max_iterations=10)
        self.encoder = as_numbers()
        rows = self.encoder.fit_transform(X, y).to_numpy()
        self.model.fit(rows, np.ones((len(X), 1)), pd.Series(groups), y)
        return self

    def outputs(self, X, groups):
        rows = self.encoder.transform(X).to_numpy()
        return self.model.predict(rows, np.ones((len(X), 1)), pd.Series(groups))


def _of_both(chances):
    """Probabilities (n, 2) of two classes from those of the second."""
    return np.column_stack([1 - chances, chances])


def _all_ids(X, groups, ids):
    """Clients (n,), or clients and further ids (n, 1 + k)."""
    # A gap, which is no string, is a level of its own.
    levels = X[ids].astype(object).fillna("missing").astype(str)
    return np.column_stack([groups.astype(str), levels]) if ids else groups


def _gp_model(levels, has_classes):
    """GPBoost's random intercepts of ids (n,) or (n, k)."""
    import gpboost

    given = {}
    # Its default is iterative for several ids, which pays on tables with thousands of levels; on
    # elections, pupils and children a factorization takes a fourth to a sixth of the time.
    if levels.ndim == 2 and sum(len(np.unique(each)) for each in levels[:, 1:].T) <= _MANY_LEVELS:
        given["matrix_inversion_method"] = "cholesky"
    likelihood = "bernoulli_logit" if has_classes else "gaussian"
    return gpboost.GPModel(group_data=levels, likelihood=likelihood, **given)


def _clients_within(outer, groups):
    """statsmodels' random effects of clients, for each level of `outer` (n,) that holds them."""
    from statsmodels.regression.mixed_linear_model import VCSpec

    dummies = [pd.get_dummies(groups[outer == level], dtype=float) for level in np.unique(outer)]
    names = [[str(client) for client in each] for each in dummies]
    return VCSpec(["client"], [names], [[each.to_numpy() for each in dummies]])


class _Columns:
    """An intercept and standardized columns, of which none is a combination of those before it."""

    def __init__(self, X):
        self.encoder = as_numbers().fit(X)
        X = self.encoder.transform(X)
        self.kept, values = [], np.ones((len(X), 1))
        for name in X.columns:
            column = X[name].to_numpy(dtype=float)
            wider = np.column_stack([values, (column - column.mean()) / (column.std() or 1.0)])
            if np.linalg.matrix_rank(wider.T @ wider / len(X), tol=1e-8) > values.shape[1]:
                self.kept, values = [*self.kept, name], wider
        self.scaler = StandardScaler().fit(X[self.kept])

    def of(self, X):
        """Array (n, 1 + k) of rows."""
        X = self.encoder.transform(X)[self.kept]
        return np.column_stack([np.ones(len(X)), self.scaler.transform(X)])
