"""Columns of many levels in stacks and selectors: groupings, and features of trees."""

import pickle

import numpy as np
import pandas as pd
import polars as pl
import pytest
from sklearn.base import clone
from sklearn.dummy import DummyRegressor
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LinearRegression, Ridge
from sklearn.utils import estimator_html_repr

from pfl_sklearn import PersonalizedLinearRegression, PersonalizedLogisticRegression
from pfl_sklearn.compose import (
    ClientAsFeature,
    ClientSelector,
    PersonalizedStackingClassifier,
    PersonalizedStackingRegressor,
    TableEncoder,
)
from pfl_sklearn.compose._client_rows import TableRows
from pfl_sklearn.compose._inner_estimators import InnerEstimator, SettledGroupings, fit_inner
from pfl_sklearn.compose._many_levels import TreesOfLevels, with_levels
from pfl_sklearn.compose._stack.boosting import default_estimators
from pfl_sklearn.compose._stack.choice import _plain_models
from pfl_sklearn.compose._stack.final_rows import passed_levels
from pfl_sklearn.priors import GaussianPrior, LaplacePrior
from tests.helpers.slow import slow


def table(n_levels=40, n_rows=6, sd=2.0, seed=0):
    """Frame of a number, a short and a long column of strings; responses; 8 clients."""
    rng = np.random.default_rng(seed)
    level = rng.permutation(np.tile(np.arange(n_levels), n_rows))
    n, client = len(level), rng.integers(0, 8, len(level))
    x, effects = rng.normal(size=n), sd * rng.normal(size=n_levels)
    y = x + effects[level] + rng.normal(size=8)[client] + 0.3 * rng.normal(size=n)
    kinds = rng.choice(["high", "low"], n)
    X = pd.DataFrame({"x": x, "kind": kinds, "item": [f"{100 + each}" for each in level]})
    return X, y, np.array([f"client {each}" for each in client])


def stack(estimators=None, *args, **params):
    """Stack with two folds and without a choice, by default on a constant."""
    estimators = [("constant", DummyRegressor())] if estimators is None else estimators
    return PersonalizedStackingRegressor(
        estimators, *args, **{"cv": 2, "fallback": False, "random_state": 0, **params}
    )


def few_trees(**params):
    return HistGradientBoostingRegressor(max_iter=10, random_state=0, **params)


def errors_of(model, X, y, groups):
    return float(np.mean((model.predict(X, groups=groups) - y) ** 2))


# Groupings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [None, np.nan])
def test_the_final_model_groups_by_the_column(missing):
    X, y, groups = table()
    model = stack().fit(X, y, groups=groups)
    final = model.final_estimator_
    assert list(final.groupings_) == ["item"]
    assert list(final.coef_names_) == ["constant", "x", "kind_low"]
    assert errors_of(model, X, y, groups) < 0.15  # the noise has 0.09
    rows = X[:2].assign(item=[missing, "never seen"], x=0.0, kind="low")
    both = model.predict(rows, groups=groups[[0, 0]])
    assert both[0] == both[1]
    every = pd.DataFrame({"x": 0.0, "kind": "low", "item": X["item"].unique()})
    at_levels = model.predict(every, groups=np.repeat(groups[:1], len(every)))
    assert both[0] == pytest.approx(np.mean(at_levels), abs=0.01)  # an effect of 0


@pytest.mark.parametrize("estimators", [None, [("constant", DummyRegressor())]])
def test_the_names_of_the_clients_are_no_column(estimators):
    X, y, groups = table()
    named, model = X.assign(name=np.char.add("of ", groups)), stack()
    if estimators is None:
        few = {"hgb__max_iter": 5, "hgb_client": "drop", "hgb_residual": "drop"}
        model = stack().set_params(estimators=None, **few)
    plain = clone(model).fit(X, y, groups=groups)
    with pytest.warns(UserWarning, match=r"out columns of X: 'name' \(its levels are the clients"):
        model.fit(named, y, groups=groups)
    np.testing.assert_array_equal(
        model.predict(named, groups=groups), plain.predict(X, groups=groups)
    )


@pytest.mark.parametrize("kind", ["polars", *slow(["array", "category", "numbers"])])
def test_other_tables_group_alike(kind):
    X, y, groups = table()
    expected = stack().fit(X, y, groups=groups).predict(X[:9], groups=groups[:9])
    rows, tolerance = X, 1e-9
    if kind == "polars":
        rows = pl.from_pandas(X)
    elif kind == "array":
        rows = X.to_numpy(dtype=object)
    elif kind == "category":
        rows = X.astype({"item": "category"})
    else:
        rows = X.astype({"item": int})
    predicted = stack().fit(rows, y, groups=groups).predict(rows[:9], groups=groups[:9])
    if kind == "numbers":  # they stay numbers
        assert np.abs(predicted - expected).max() > 0.5
    else:
        np.testing.assert_allclose(predicted, expected, rtol=tolerance)


@pytest.mark.slow
def test_what_is_handed_out_predicts_alike():
    X, y, groups = table()
    X = X.drop(columns="kind")
    model = stack([("trees", ClientAsFeature(few_trees()))]).fit(X, y, groups=groups)
    rows = groups == "client 1"
    expected = model.predict(X[rows], groups=groups[rows])
    for other in (pickle.loads(pickle.dumps(model)), model.for_client("client 1")):
        np.testing.assert_allclose(other.predict(X[rows], groups=groups[rows]), expected)
    assert "within" in str(model.summary())
    assert "trees" in estimator_html_repr(model)


@pytest.mark.slow
def test_columns_that_group_alike_in_a_fold_are_no_error():
    X, y, groups = table()
    titles = "title " + X["item"]
    titles[X.index[:1]] = "another"  # a fold without this row has the same groups twice
    model = stack(cv=3, fallback=True).fit(X.assign(title=titles), y, groups=groups)
    assert model.losses_.loc["final_estimator", "known"] < 0.3
    same = X.assign(title="title " + X["item"])
    assert list(stack().fit(same, y, groups=groups).final_estimator_.groupings_) == ["item"]


@pytest.mark.slow
def test_forecasts_group_by_the_column():
    X, y, groups = table()
    model = stack(cv="time", fallback=True).fit(X, y, groups=groups)
    assert model.losses_.loc["recent_targets", "known"] < 0.3 * np.var(y)


@pytest.mark.slow
def test_parts_of_the_rows_may_have_other_numbers_of_levels():
    # 31 levels of 62 rows: each fold lacks some of them, or has half as many rows as levels.
    X, y, groups = table(31, 2)
    groups = np.where(np.arange(len(y)) % 2, "one", "two")
    model = stack(cv=3, fallback=True).fit(X, y, groups=groups)
    assert "final_estimator" in model.losses_.index
    selector = ClientSelector([("line", PersonalizedLinearRegression(random="intercept"))], cv=3)
    selector.fit(X.drop(columns="kind"), y, groups=groups)
    assert list(selector.named_estimators_["line"].groupings_) == ["item"]


def test_levels_that_cannot_group_rows_have_no_effects():
    X, y, groups = table(8, 10)
    X = X.drop(columns="kind").assign(same="again " + X["item"], row=np.arange(len(y)).astype(str))
    line = PersonalizedLinearRegression(groupings=SettledGroupings(["item", "same", "row"]))
    fitted = fit_inner(InnerEstimator("line", line, None), TableRows(X, y, groups, None))
    assert list(fitted.groupings_) == ["item"]
    alone = PersonalizedLinearRegression(groupings=["item"]).fit(X[["x", "item"]], y, groups=groups)
    np.testing.assert_allclose(
        fitted.predict(X, groups=groups), alone.predict(X[["x", "item"]], groups=groups)
    )


@pytest.mark.parametrize(
    "final",
    [
        Ridge(),
        PersonalizedLinearRegression(groupings=None),
        PersonalizedLinearRegression(LaplacePrior()),
        PersonalizedLinearRegression(GaussianPrior(covariance=np.inf), random="intercept"),
    ],
)
def test_models_without_groupings_get_merged_levels(final):
    X, y, groups = table(40, 10)
    with pytest.warns(UserWarning, match=r"merges levels .* 'item' \(40 levels"):
        model = stack(None, final).fit(X, y, groups=groups)
    names = list(model.final_estimator_.feature_names_in_)
    assert names[1:3] == ["x", "kind_low"]
    assert sum(name.startswith("item_") for name in names) == 30  # 29 levels and "other"


def test_a_given_encoder_may_pass_levels_on():
    X, y, groups = table(8, 10)
    encoder = TableEncoder(max_levels=5, many_levels="pass")
    model = stack(passthrough=encoder).fit(X, y, groups=groups)
    assert list(model.final_estimator_.groupings_) == ["item"]
    with pytest.raises(ValueError, match=r"hands on column 'item' as it is.* many_levels='merge'"):
        stack(None, Ridge(), passthrough=encoder).fit(X, y, groups=groups)


def test_the_pooled_line_merges_levels():
    X, y, _ = table(40, 10)
    X = X.drop(columns="kind").astype({"item": "category"})
    pooled = _plain_models(None, X)[0].estimator.fit(X, y)
    assert pooled[-1].coef_.shape == (32,)  # 30 levels, "other", x
    unseen = X[:2].assign(item=pd.Categorical(["never seen", None]))
    assert np.isfinite(pooled.predict(unseen)).all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Regressor", "Classifier"])
def test_stacks_are_not_worse_than_the_plain_model(kind):
    X, y, groups = table(100, 30, sd=1.0)
    half = len(y) // 2
    plain = PersonalizedLinearRegression(groupings=["item"])
    model = PersonalizedStackingRegressor(random_state=0)
    if kind == "Classifier":
        y = y > 0
        plain = PersonalizedLogisticRegression(groupings=["item"], random="intercept")
        model = PersonalizedStackingClassifier(random_state=0)
    numbers = X.drop(columns="kind")
    plain.fit(numbers[:half], y[:half], groups=groups[:half])
    model.fit(X[:half], y[:half], groups=groups[:half])

    def loss(fitted, rows):
        if kind == "Regressor":
            return errors_of(fitted, rows, y[half:], groups[half:])
        chances = fitted.predict_proba(rows, groups=groups[half:])
        return -np.log(chances[np.arange(half), y[half:].astype(int)]).mean()

    assert loss(model, X[half:]) < loss(plain, numbers[half:]) + 0.002


# Trees --------------------------------------------------------------------------------------------


def encoded(X, y, trees=None, **params):
    """Fitted TreesOfLevels of the column item, and the columns that its trees get in the fit."""
    seen = {}

    class Recorder(type(trees or few_trees())):
        def fit(self, X, y, sample_weight=None):
            seen["X"] = X
            return super().fit(X, y, sample_weight=sample_weight)

    Recorder.__module__ = type(trees or few_trees()).__module__
    given = (trees or few_trees()).get_params()
    model = TreesOfLevels(Recorder(**given), ("item",), random_state=0, **params)
    groups = np.zeros(len(y), dtype=int)
    return model.fit(X, y, groups=groups), seen["X"]


def test_trees_get_categories():
    X, y, _ = table(40, 12)
    X.loc[:20, "item"] = None
    model, rows = encoded(X[["x", "item"]], y)
    assert model.estimator_.is_categorical_.tolist() == [False, True]
    assert rows["item"].isna().sum() == 21
    assert len(rows["item"].cat.categories) == 40
    unseen = X[:2].assign(item=["never seen", None])[["x", "item"]].assign(x=0.0)
    first, second = model.predict(unseen, groups=[0, 0])
    assert first == second


@pytest.mark.parametrize(("n_levels", "n_rows"), [(256, 10), (40, 6)])
def test_trees_get_targets_of_levels_too_many_or_too_rare(n_levels, n_rows):
    X, y, _ = table(n_levels, n_rows)
    X.loc[: 2 * n_rows, "item"] = None
    model, rows = encoded(X[["x", "item"]], y)
    assert model.estimator_.is_categorical_ is None
    means = y.mean() + 0 * y
    for item in X["item"].dropna().unique():
        means[X["item"] == item] = y[X["item"] == item].mean()
    assert np.corrcoef(rows["item"], means)[0, 1] > 0.9
    assert rows["item"].groupby(X["item"]).nunique().max() > 1  # by fold
    (feature,) = model._features
    codes = feature.codes(pd.Series(["never seen", None, X["item"].iloc[-1]]))
    unseen, missing, known = feature.columns(codes, None)["item"]
    assert unseen == pytest.approx(y.mean())
    assert missing == pytest.approx(y[X["item"].isna()].mean(), abs=0.3)
    assert known == pytest.approx(y[X["item"] == X["item"].iloc[-1]].mean(), abs=0.5)


def test_no_target_is_a_feature_of_its_own_row():
    X, _, _ = table(100, 2)
    y = np.random.default_rng(1).normal(size=len(X))
    _, rows = encoded(X[["item"]], y)
    assert np.corrcoef(rows["item"], y)[0, 1] < 0.1  # means of all rows have 0.7


def test_classes_have_a_column_each():
    X, y, groups = table(40, 6)
    labels = np.array(["a", "b", "c"])[np.digitize(y, [-1.0, 1.0])]
    trees = HistGradientBoostingClassifier(max_iter=5, random_state=0)
    model = TreesOfLevels(trees, ("item",), random_state=0)
    model.fit(X[["x", "item"]], labels, groups=groups)
    assert model.estimator_.n_features_in_ == 4
    chances = model.predict_proba(X[["x", "item"]], groups=groups)
    assert np.mean(model.classes_[chances.argmax(axis=1)] == labels) > 0.7


def test_trees_of_residuals_get_no_targets():
    # A row's own target is in the residuals of others without themselves.
    residual = dict(default_estimators(None, "Regressor"))["hgb_residual"]
    model = with_levels(residual, ["item"]).set_params(residual_estimator__estimator__max_iter=10)
    assert model.estimator.groupings == ("item",)
    X, y, groups = table(40, 6)
    model.fit(X[["x", "item"]], y, groups=groups)
    (feature,) = model.residual_estimator_._features
    assert not feature.means.any()
    X, y, groups = table(40, 12)
    model.fit(X[["x", "item"]], y, groups=groups)
    assert model.residual_estimator_._features[0].means is None


@pytest.mark.slow
def test_default_trees_take_weights_and_levels():
    X, y, groups = table()
    model = stack(None).set_params(
        estimators=None, hgb__max_iter=3, hgb_client__estimator__max_iter=3
    )
    model.set_params(hgb_residual__residual_estimator__max_iter=3)
    weights = np.where(np.arange(len(y)) % 3, 1.0, 0.0)
    model.fit(X, y, groups=groups, sample_weight=weights)
    kept = weights > 0
    again = model.predict(X, groups=groups)
    model.fit(X[kept], y[kept], groups=groups[kept])
    np.testing.assert_allclose(model.predict(X, groups=groups), again)
    assert all(type(base).__name__ != "Pipeline" for base in model.estimators_)


@pytest.mark.parametrize(
    "estimator",
    [few_trees(categorical_features=None), LinearRegression(), FrozenEstimator(few_trees())],
)
def test_estimators_that_know_no_levels_stay_as_they_are(estimator):
    assert with_levels(estimator, ["item"]) is estimator


@pytest.mark.slow
def test_the_final_model_of_classes_groups_by_the_column():
    X, y, groups = table()
    trees = [("trees", HistGradientBoostingClassifier(max_iter=5))]
    final = PersonalizedLogisticRegression(random="intercept")
    model = PersonalizedStackingClassifier(trees, final, cv=2, fallback=False, random_state=0)
    noise = np.random.default_rng(0).logistic(scale=2.0, size=len(y))
    model.fit(X[["x", "item"]], y > noise, groups=groups)
    assert list(model.final_estimator_.groupings_) == ["item"]


# Selectors ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_candidates_take_levels():
    X, y, groups = table(40, 12)
    X = X.drop(columns="kind")
    candidates = [
        ("line", PersonalizedLinearRegression(random="intercept")),
        ("trees", ClientAsFeature(few_trees(), random_state=0)),
    ]
    model = ClientSelector(candidates, cv=3, random_state=0).fit(X, y, groups=groups)
    assert list(model.named_estimators_["line"].groupings_) == ["item"]
    assert model.losses_.loc["line", "known"] < 0.2
    assert model.losses_.loc["trees", "known"] < 0.5 * np.var(y)
    rows = X[:3].assign(item=[None, "never seen", "100"])
    assert np.isfinite(model.predict(rows, groups=groups[:3])).all()
    own = model.for_client(groups[0])
    np.testing.assert_allclose(
        own.predict(rows[:1], groups=groups[:1]), model.predict(rows[:1], groups=groups[:1])
    )


@pytest.mark.slow_but_first
@pytest.mark.parametrize("kind", ["responses", "classes"])
def test_trees_get_levels_of_a_row_or_two(kind):
    rng = np.random.default_rng(0)
    n_mothers, groups = 120, np.repeat(np.arange(10), 20)
    mother = rng.permutation(np.repeat(np.arange(n_mothers), 2))[:200]
    effects = 3.0 * rng.normal(size=n_mothers)
    X = pd.DataFrame({"mother": mother.astype(str), "x": rng.normal(size=200)})
    y = effects[mother] + 0.3 * rng.normal(size=200)
    kinds = {"responses": PersonalizedStackingRegressor, "classes": PersonalizedStackingClassifier}
    target = y if kind == "responses" else (y > 0).astype(int)
    assert mother.size < 2 * len(np.unique(mother))
    model = kinds[kind](cv=3, random_state=0).fit(X, target, groups=groups)
    assert passed_levels(model._encoder) == ["mother"]
    assert passed_levels(model._passthrough) == (["mother"] if kind == "responses" else [])
    best = model.losses_["known"]
    assert best["mixture"] < 0.8 * best["mean"]
    assert np.isfinite(model.predict(X.assign(mother="new"), groups=groups)).all()
