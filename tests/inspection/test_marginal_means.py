"""Marginal means: combinations by hand, encoders and wrappers, Tukey's test, and bad input."""

import numpy as np
import pandas as pd
import polars as pl
import pytest
from numpy.testing import assert_allclose
from scipy import stats
from sklearn.base import clone
from sklearn.compose import TransformedTargetRegressor, make_column_transformer
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LinearRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, PolynomialFeatures

from pfl_sklearn.compose import ClientColumn
from pfl_sklearn.inspection import marginal_means
from pfl_sklearn.inspection._marginal_means import _adjusted, _critical_values
from pfl_sklearn.linear_model import (
    NotEstimableWarning,
    PersonalizedLinearRegression,
    PersonalizedLogisticRegression,
    PersonalizedPoissonRegression,
)
from pfl_sklearn.priors import GaussianPrior

INTERCEPT = PersonalizedLinearRegression(random="intercept")


def table():
    rng = np.random.default_rng(0)
    site, drug = np.repeat(np.arange(12), 10), rng.choice(["a", "b", "c"], 120, p=[0.5, 0.3, 0.2])
    frame = pd.DataFrame({"site": site, "drug": drug, "age": rng.normal(50, 9, size=120)})
    y = (drug == "b") - 0.5 * (drug == "c") + frame["age"] / 20 + rng.normal(size=12)[site]
    return frame, (y + rng.normal(size=120)).to_numpy()


FRAME, Y = table()
FEATURES = pd.get_dummies(FRAME["drug"], dtype=float)[["b", "c"]].assign(age=FRAME["age"])


def encoded(model=INTERCEPT, **options):
    encoder = OneHotEncoder(sparse_output=False, **({"drop": "first"} | options))
    columns = make_column_transformer((encoder, ["drug"]), remainder="passthrough")
    return ClientColumn(make_pipeline(columns, model), "site")


MODEL = encoded().fit(FRAME, Y)
BY_HAND = clone(INTERCEPT).fit(FEATURES, Y, groups=FRAME["site"])
MEAN = {"intercept": 1, "age": FRAME["age"].mean()}
COMBINATIONS = {"a": MEAN, "b": {**MEAN, "b": 1}, "c": {**MEAN, "c": 1}}
DIFFERENCES = {"b - a": {"b": 1}, "c - a": {"c": 1}, "c - b": {"c": 1, "b": -1}}


@pytest.mark.parametrize("df", ["auto", "kenward_roger", "normal"])
def test_means_and_differences_are_contrasts(df):
    found = marginal_means(MODEL, FRAME, "drug", df=df, level=0.9)
    expected = BY_HAND.contrast(COMBINATIONS, df=df, level=0.9)[:3]
    assert (found.index.name, list(found.columns)) == ("drug", list(expected.columns))
    pd.testing.assert_frame_equal(found, expected, check_names=False, rtol=1e-6)
    found = marginal_means(MODEL, FRAME, "drug", pairs=True, adjust="none", df=df)
    expected = BY_HAND.contrast(DIFFERENCES, df=df)[:3]
    pd.testing.assert_frame_equal(found, expected, check_names=False, rtol=1e-6)


def test_numbers_weights_and_columns_held_fixed():
    weights = np.arange(120.0) % 3
    options = {"values": [40, 55.5], "sample_weight": weights}
    found = marginal_means(MODEL, FRAME, "age", **options)["estimate"]
    shares = np.average(FEATURES[["b", "c"]], axis=0, weights=weights)
    (*drugs, slope), start = BY_HAND.population_coef_, BY_HAND.population_intercept_
    assert_allclose(found, start + shares @ drugs + slope * found.index, rtol=1e-6)
    found = marginal_means(MODEL, FRAME, "age", at={"drug": "b"}, **options)["estimate"]
    assert_allclose(found, start + drugs[0] + slope * found.index, rtol=1e-6)


def test_coding_changes_nothing():
    with pytest.warns(NotEstimableWarning):
        model = encoded(drop=None, handle_unknown="ignore").fit(FRAME, Y)
    expected = marginal_means(MODEL, FRAME, "drug")
    assert_allclose(marginal_means(model, FRAME, "drug"), expected, rtol=1e-4)
    with pytest.raises(ValueError, match=r"do not determine 'd', because in all of them"):
        marginal_means(model, FRAME, "drug", values=["a", "d"])


def test_steps_may_multiply_columns():
    X = FRAME[["site", "age"]].assign(treated=1.0 - (FRAME["drug"] == "a"))
    products = PolynomialFeatures(interaction_only=True, include_bias=False)
    model = ClientColumn(make_pipeline(products, INTERCEPT), "site").fit(X, Y)
    found = marginal_means(model, X, "treated", pairs=True)
    assert_allclose(found, model.contrast([0, 0, 1, X["age"].mean()]), rtol=1e-6)


def test_one_client_has_the_analysis_of_variance():
    groups = np.random.default_rng(1).normal([[0.0], [1.0], [1.5], [0.2]], 1.0, size=(4, 9))
    X = pd.DataFrame({"site": 1, "drug": np.repeat(["a", "b", "c", "d"], 9)})
    model = encoded().fit(X, groups.ravel())
    found = marginal_means(model, X, "drug", pairs=True)
    expected, (first, second) = stats.tukey_hsd(*groups), np.triu_indices(4, 1)
    bounds = expected.confidence_interval()
    assert found["df"].tolist() == [32.0] * 6
    assert_allclose(found["estimate"], expected.statistic[second, first], rtol=1e-9)
    assert_allclose(found["p_value"], expected.pvalue[second, first], rtol=1e-6)
    assert_allclose(found["lower"], bounds.low[second, first], rtol=1e-6)
    assert_allclose(found["upper"], bounds.high[second, first], rtol=1e-6)


def test_the_range_of_two_means_is_their_difference():
    found = marginal_means(MODEL, FRAME, "drug", values=["c", "b"], pairs=True)
    assert_allclose(_adjusted(found, 2, 0.95), found, rtol=1e-9)
    assert_allclose(found, BY_HAND.contrast({"b": 1, "c": -1}), rtol=1e-6)


def test_critical_values_at_many_degrees_of_freedom(monkeypatch):
    """They are interpolated; the quantiles of two means have a closed form, which is faster."""

    class RangeOfTwo:
        @staticmethod
        def ppf(level, k, df):
            return np.sqrt(2) * stats.t.ppf(0.5 + level / 2, df)

    monkeypatch.setattr("pfl_sklearn.inspection._marginal_means.studentized_range", RangeOfTwo)
    dfs = np.append(np.geomspace(3, 3000, 40), np.inf)
    assert_allclose(_critical_values(0.95, 2, dfs), RangeOfTwo.ppf(0.95, 2, dfs), rtol=1e-7)


@pytest.mark.parametrize(
    ("convert", "values"),
    [
        (pl.from_pandas, None),
        (lambda X: pl.from_pandas(X).with_columns(pl.col("drug").cast(pl.Categorical)), None),
        (lambda X: X.astype({"drug": "category"}), None),
        (lambda X: X[X["drug"] != "b"], ["a", "b", "c"]),
        (lambda X: X.astype({"drug": "category"})[X["drug"] != "b"], ["a", "b", "c"]),
    ],
    ids=["polars", "polars categories", "categories", "value not in X", "category not in X"],
)
def test_frames(convert, values):
    X = convert(FRAME)
    at = {"age": float(FRAME["age"][0])}
    found = marginal_means(MODEL, X, "drug", values=values, at=at)
    expected = marginal_means(MODEL, FRAME, "drug", at=at)
    pd.testing.assert_frame_equal(found, expected, check_index_type=False)


def test_values_are_in_the_order_of_categories_without_missing_ones():
    kinds = pd.Categorical(FRAME["drug"].where(FRAME.index > 0), ["c", "a", "b"])
    found = marginal_means(MODEL, FRAME.assign(drug=kinds), "drug")
    assert found.index.tolist() == ["c", "a", "b"]


def test_wrappers():
    expected = marginal_means(MODEL, FRAME, "drug")
    pd.testing.assert_frame_equal(marginal_means(FrozenEstimator(MODEL), FRAME, "drug"), expected)
    logs = TransformedTargetRegressor(MODEL, func=np.log, inverse_func=np.exp)
    logs.fit(FRAME, np.exp(Y))
    pd.testing.assert_frame_equal(marginal_means(logs, FRAME, "drug"), expected)


def test_private_fits_and_releases():
    model = PersonalizedLinearRegression(
        GaussianPrior(covariance=0.5), noise_variance=1.0, epsilon=5.0, feature_bound=6.0,
        target_bound=10.0,
    )  # fmt: skip
    model = model.fit(FEATURES[["b", "c"]], Y, groups=FRAME["site"])
    found = marginal_means(model, FEATURES[["b", "c"]], "b", pairs=True).iloc[0]
    assert found["estimate"] == pytest.approx(model.population_coef_[0])
    assert found["df"] == np.inf
    released = marginal_means(model.release(), FEATURES[["b", "c"]], "b", pairs=True).iloc[0]
    pd.testing.assert_series_equal(released, found)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    "model",
    [
        PersonalizedLinearRegression(random="intercept", groupings="nurse"),
        PersonalizedLogisticRegression(random="intercept", quadrature="laplace"),
        PersonalizedPoissonRegression(random="intercept"),
    ],
    ids=["groupings", "classes", "counts"],
)
def test_other_models(model):
    X = FRAME[["site", "age"]].assign(nurse=np.arange(120) % 7, b=FEATURES["b"])
    y = Y if type(model) is PersonalizedLinearRegression else (Y > 3).astype(int)
    model = ClientColumn(model, "site").fit(X, y)
    found = marginal_means(model, X, "b", pairs=True, adjust="none")
    assert_allclose(found, model.contrast({"b": 1}), rtol=1e-6)
    predictors = model.population_intercept_ + model.population_coef_[..., -1:] * [0, 1]
    others = X[list(model.estimator_.coef_names_)[:-1]].mean()
    predictors = predictors + model.population_coef_[..., :-1] @ others
    assert_allclose(marginal_means(model, X, "b")["estimate"], np.ravel(predictors), rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"column": "dose"}, r"column must name a feature of X, of 'drug', 'age'; got 'dose'"),
        ({"column": "site"}, r"column must name a feature of X, of 'drug', 'age'; got 'site'"),
        ({"at": {"dose": 1}}, r"at must name a feature of X, of 'age'; got 'dose'"),
        ({"at": {"drug": "a"}}, r"at must name a feature of X, of 'age'; got 'drug'"),
        ({"X": FRAME.to_numpy()}, r"X must be a data frame with column names; got ndarray"),
        ({"adjust": "holm"}, r"adjust must be one of tukey, none; got 'holm'"),
        ({"column": "age"}, r"column 'age' has 120 values; expected at most 20, or values="),
        ({"column": "age", "values": ["old"]}, r"column 'age' of type float64 cannot hold 'old'"),
        ({"values": "abc"}, r"values must be a list of at least 1 values of .*; got 'abc'"),
        ({"values": ["a"], "pairs": True}, r"at least 2 values of column 'drug'; got \['a'\]"),
        ({"values": ["a", "a"]}, r"values 'a' and 'a' of column 'drug' have the same features"),
        ({"values": ["d"]}, r"estimator takes no rows with drug='d': Found unknown categories"),
        ({"X": FRAME.astype({"drug": "category"}), "values": ["d"]}, r"cannot hold 'd'; expected"),
        ({"X": pl.from_pandas(FRAME), "values": [3]}, r"column 'drug' .* cannot hold 3"),
    ],
)
def test_bad_input(options, message):
    options = {"X": FRAME, "column": "drug", **options}
    with pytest.raises(ValueError, match=message):
        marginal_means(MODEL, **options)


def test_models_without_marginal_means():
    with pytest.raises(TypeError, match=r"or PersonalizedPoissonRegression.*got LinearRegression"):
        marginal_means(LinearRegression().fit(FEATURES, Y), FEATURES, "b")
    labels = pd.cut(Y, 3, labels=["low", "middle", "high"]).astype(str)
    model = PersonalizedLogisticRegression(random="intercept")
    model = model.fit(FEATURES, labels, groups=FRAME["site"])
    with pytest.raises(ValueError, match=r"need two classes; this Personalized\w+ has 3"):
        marginal_means(model, FEATURES, "b")
    nested = PersonalizedLinearRegression(random="intercept", groupings="drug")
    nested = nested.fit(FRAME[["drug", "age"]], Y, groups=FRAME["site"])
    with pytest.raises(
        ValueError, match=r"values 'a' and 'b' of column 'drug' .* no column of a g"
    ):
        marginal_means(nested, FRAME[["drug", "age"]], "drug")
    with pytest.raises(ValueError, match=r"takes no rows with b=0\.0: The feature names"):
        marginal_means(BY_HAND, FEATURES[["b", "age", "c"]], "b")
