"""Columns of client means: values, containers, pipelines, and effects within clients."""

import numpy as np
import pandas as pd
import polars as pl
import pytest
import sklearn
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline

from pfl_sklearn import GaussianMean, PersonalizedLinearRegression
from pfl_sklearn.compose import ClientColumn, ClientMeans
from pfl_sklearn.model_selection import ClientKFold
from pfl_sklearn.priors import GaussianPrior

RNG = np.random.default_rng(0)
GROUPS = np.repeat(["a", "b", "c", "d"], [1, 2, 5, 9])
X = pd.DataFrame({"age": RNG.normal(40, 9, 17), "dose": RNG.normal(size=17)})


def test_means_are_those_of_the_rows():
    found = ClientMeans(shrink=False).fit_transform(X, groups=GROUPS)
    expected = X.groupby(GROUPS).transform("mean").add_suffix("_client_mean")
    pd.testing.assert_frame_equal(found, pd.concat([X, expected], axis=1))


def test_means_of_few_rows_are_shrunk():
    model = ClientMeans(["age"]).fit(X, groups=GROUPS)
    prior = GaussianPrior(covariance_type="diag")
    expected = GaussianMean(prior, uncertainty="plug_in").fit(X, X["age"], groups=GROUPS)
    assert_allclose(model.means_[:, 0], expected.means_)
    assert model.population_means_ == pytest.approx(expected.population_mean_)
    alone = ClientMeans().fit(X[:3], groups=["a", "b", "c"])  # nothing to estimate a spread from
    assert_array_equal(alone.means_, X[:3])


def test_new_clients_get_the_population():
    model = ClientMeans().fit(X, groups=GROUPS)
    added = model.transform(X[:2], groups=["a", "new"])[["age_client_mean", "dose_client_mean"]]
    assert_allclose(added, [model.means_[0], model.population_means_])


def test_containers():
    model = ClientMeans(shrink=False)
    frame = model.fit_transform(X, groups=GROUPS)
    array = clone(model).fit_transform(X.to_numpy(), groups=GROUPS)
    assert isinstance(array, np.ndarray)
    assert_allclose(array, frame)
    other = clone(model).fit_transform(pl.from_pandas(X), groups=pl.Series(GROUPS))
    assert isinstance(other, pl.DataFrame)
    assert other.columns == list(frame.columns)
    assert_allclose(other.to_numpy(), frame)
    named = clone(model).set_output(transform="pandas").fit_transform(X.to_numpy(), groups=GROUPS)
    assert list(named.columns) == ["x0", "x1", "x0_client_mean", "x1_client_mean"]
    some = ClientMeans(["dose", 0]).fit_transform(X, groups=GROUPS)
    assert list(some.columns) == ["age", "dose", "dose_client_mean", "age_client_mean"]


def draw(seed, m=40, n=6):
    """A predictor that goes with the clients' own level; its effect within clients is 1."""
    rng = np.random.default_rng(seed)
    client, level = np.repeat(np.arange(m), n), rng.normal(size=m)
    x = 0.8 * level[client] + rng.normal(size=m * n)
    y = x + level[client] + 0.6 * rng.normal(size=m)[client] + rng.normal(size=m * n)
    return pd.DataFrame({"x": x, "client": client}), y


def pipeline(**params):
    model = PersonalizedLinearRegression(random="intercept", uncertainty="plug_in")
    return ClientColumn(make_pipeline(ClientMeans(**params), model), column="client")


def test_the_effect_within_clients_is_that_of_fixed_effects():
    table, y = draw(0)
    model = pipeline(shrink=False).fit(table, y)
    within = table["x"] - table.groupby("client")["x"].transform("mean")
    found = model.contrast({"x": 1})["estimate"].iloc[0]
    assert found == pytest.approx(within @ y / (within @ within), rel=1e-6)
    assert "x_client_mean" in model.summary().loc["fixed"].index
    known = model.predict(table)
    assert np.corrcoef(known, y)[0, 1] > 0.8


@pytest.mark.slow
def test_intervals_cover_the_effect_within():
    hits = {True: [], False: []}
    for seed in range(100):
        table, y = draw(seed)
        plain = PersonalizedLinearRegression(random="intercept", uncertainty="plug_in")
        for with_means, model in (
            (True, pipeline()),
            (False, ClientColumn(plain, column="client")),
        ):
            row = model.fit(table, y).contrast({"x": 1}).iloc[0]
            hits[with_means].append(row["lower"] <= 1 <= row["upper"])
    assert np.mean(hits[True]) > 0.89
    assert np.mean(hits[False]) < 0.8


@pytest.mark.slow
def test_in_a_search_and_with_routing():
    table, y = draw(0)
    search = GridSearchCV(
        pipeline(),
        {"estimator__clientmeans__shrink": [False, True]},
        cv=ClientKFold(3, client_column="client"),
    ).fit(table, y)
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    with sklearn.config_context(enable_metadata_routing=True):
        inner = pipeline().estimator.fit(table[["x"]], y, groups=table["client"])
        assert_allclose(
            inner.predict(table[["x"]], groups=table["client"]),
            pipeline().fit(table, y).predict(table),
        )


@pytest.mark.parametrize(
    ("params", "data", "groups", "message"),
    [
        ({}, X, None, "ClientMeans needs groups"),
        ({"columns": ["weight"]}, X, GROUPS, r"columns holds 'weight'; expected .* among \['age'"),
        ({"columns": [2]}, X.to_numpy(), GROUPS, "columns holds 2; expected .* from 0 to 1"),
        ({}, X.assign(age=np.nan), GROUPS, "contains NaN"),
        ({}, X.assign(age="old"), GROUPS, "could not convert string"),
        ({}, X, GROUPS[:3], "groups"),
    ],
)
def test_input_that_does_not_fit(params, data, groups, message):
    with pytest.raises(ValueError, match=message):
        ClientMeans(**params).fit(data, groups=groups)


def test_other_columns_than_those_of_fit():
    model = ClientMeans().fit(X, groups=GROUPS)
    with pytest.raises(ValueError, match="feature names"):
        model.transform(X[["dose", "age"]], groups=GROUPS)
    with pytest.raises(ValueError, match="ids"):
        model.transform(X, groups=np.arange(17))
