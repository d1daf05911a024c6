"""Influence of clients against fits without their rows, and refusals."""

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from pfl_sklearn.compose import ClientColumn
from pfl_sklearn.linear_model import PersonalizedLinearRegression, PersonalizedLogisticRegression
from pfl_sklearn.priors import GaussianPrior
from tests.helpers.three_responses import draw


def table(weighted=False, seed=0):
    rng = np.random.default_rng(seed)
    codes = np.repeat(np.arange(9), rng.integers(1, 8, 9))
    x = rng.normal(size=(len(codes), 2)) + 3
    x = np.column_stack([x, rng.normal(size=9)[codes]])
    effects = np.array([1, 2]) + rng.normal(size=(9, 2))
    y = effects[codes, 0] + x[:, 0] * effects[codes, 1] + x[:, 1] + rng.normal(size=len(codes))
    weights = rng.uniform(0.5, 2, len(codes)) if weighted else None
    return x, y, codes, weights


@pytest.mark.slow_but_first
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("method", ["reml", "ml"])
def test_estimates_are_those_of_fits_without_the_client(weighted, method):
    x, y, codes, weights = table(weighted)
    options = {"random": ["intercept", 0], "method": method, "uncertainty": "plug_in"}
    model = PersonalizedLinearRegression(**options).fit(x, y, groups=codes, sample_weight=weights)
    found = model.influence(x, y, groups=codes, sample_weight=weights)
    assert found["cooks_distance"].is_monotonic_decreasing
    prior = GaussianPrior(covariance=model._between[:2, :2], centered=False)
    beta = np.r_[model.population_intercept_, model.population_coef_]
    for client, row in found.iterrows():
        rest = codes != client
        less = PersonalizedLinearRegression(
            prior, noise_variance=model.noise_variance_, **options
        ).fit(
            x[rest],
            y[rest],
            groups=codes[rest],
            sample_weight=None if weights is None else weights[rest],
        )
        estimates = np.r_[less.population_intercept_, less.population_coef_]
        assert_allclose(row.iloc[2:], estimates, rtol=1e-8)
        change = beta - estimates
        cook = change @ np.linalg.solve(model._errors.estimable_covariance(False), change) / 4
        assert_allclose(row["cooks_distance"], cook, rtol=1e-6)
        assert row["n_rows"] == np.sum(codes == client)


def test_a_client_that_alone_informs_on_a_coefficient():
    x, y, codes, _ = table()
    x = np.column_stack([x, np.where(codes == 2, x[:, 1] - 3, 0.0)])
    model = PersonalizedLinearRegression(random="intercept").fit(x, y, groups=codes)
    found = model.influence(x, y, groups=codes)
    assert found.isna().any(axis=1).sum() == 1
    assert found.loc[2].isna().sum() == 6


def test_columns_far_from_zero():
    """Years and their squares: what the slopes would be does not depend on the origin."""
    rng = np.random.default_rng(0)
    codes, year = np.repeat(np.arange(8), 8), rng.integers(0, 10, 64).astype(float)
    y = 1 + 0.5 * (year + year**2) + rng.normal(size=8)[codes] + rng.normal(size=64)
    found = []
    for shift in (0, 2015):
        X = np.column_stack([year + shift, (year + shift) ** 2])
        model = PersonalizedLinearRegression(random="intercept").fit(X, y, groups=codes)
        found.append(model.influence(X, y, groups=codes))
    names = ["cooks_distance", "x1"]
    assert_allclose(found[0][names], found[1].loc[found[0].index, names], rtol=1e-3)
    assert found[0]["x1"].std() > 1e-3


def test_names_that_are_taken():
    x, y, codes, _ = table()
    frame = pd.DataFrame(x, columns=["n_rows", "b", "c"])
    model = PersonalizedLinearRegression(random="intercept").fit(frame, y, groups=codes)
    with pytest.raises(ValueError, match="two columns of the table would be called 'n_rows'"):
        model.influence(frame, y, groups=codes)
    renamed = model.influence(frame, y, groups=codes, feature_names=["a", "b", "c"])
    assert renamed.columns.tolist() == ["n_rows", "cooks_distance", "intercept", "a", "b", "c"]


def test_in_a_pipeline_with_names():
    x, y, codes, _ = table()
    frame = pd.DataFrame(x, columns=["dose", "age", "beds"]).assign(site=codes)
    linear = PersonalizedLinearRegression(random="intercept")
    model = ClientColumn(make_pipeline(StandardScaler(), linear), "site").fit(frame, y)
    found = model.influence(frame, y)
    assert found.columns.tolist()[2:] == ["intercept", "dose", "age", "beds"]
    plain = PersonalizedLinearRegression(random="intercept").fit(x, y, groups=codes)
    own = plain.influence(x, y, groups=codes)
    assert_allclose(found["cooks_distance"], own["cooks_distance"], rtol=1e-4)
    assert_allclose(found["dose"] / frame["dose"].std(ddof=0), own["x0"], rtol=1e-4)


def fit_of(kind):
    x, y, codes, _ = draw("linear", np.random.default_rng(0))
    if kind == "one client":
        return PersonalizedLinearRegression().fit(x, y, groups=np.zeros(len(y)))
    if kind == "groupings":
        both = np.column_stack([x, codes % 7])
        model = PersonalizedLinearRegression(groupings=[1], random="intercept")
        return model.fit(both, y, groups=codes)
    known = {"noise_variance": 1.0}
    bounds = {"epsilon": 4.0, "feature_bound": 4.0, "target_bound": 6.0}
    model = {
        "known mean": PersonalizedLinearRegression(GaussianPrior([0.0, 0.0], 1.0), **known),
        "no pooling": PersonalizedLinearRegression(GaussianPrior(covariance=np.inf)),
        "private": PersonalizedLinearRegression(GaussianPrior(covariance=0.5), **known, **bounds),
        "one of the clients": PersonalizedLinearRegression(random="intercept"),
    }[kind].fit(x, y, groups=codes)
    return model.for_client(3) if kind == "one of the clients" else model


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("one client", "several clients"),
        ("groupings", "a single grouping of the rows"),
        ("known mean", "clients that share an estimated population"),
        ("no pooling", "clients that share an estimated population"),
        ("private", "a fit without privacy"),
        ("one of the clients", "the fit of all clients"),
    ],
)
def test_models_without_influences(kind, message):
    with pytest.raises(ValueError, match=f"influence needs {message}"):
        fit_of(kind).influence(np.zeros((1, 1)), [0.0], groups=[0])


def test_classes_have_no_influences():
    assert not hasattr(PersonalizedLogisticRegression(), "influence")
    assert not hasattr(ClientColumn(PersonalizedLogisticRegression(), "site"), "influence")


def test_other_rows_than_those_of_fit():
    x, y, codes, _ = table()
    model = PersonalizedLinearRegression(random="intercept").fit(x, y, groups=codes)
    for rows in ((x[:-1], y[:-1], codes[:-1]), (x, y + x[:, 0], codes)):
        with pytest.raises(
            ValueError, match="influence needs the X, y, groups and sample_weight of fit"
        ):
            model.influence(*rows[:2], groups=rows[2])
