"""The client as one more feature of an estimator that knows no clients."""

import numpy as np
import pandas as pd
import polars as pl
import pytest
from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestRegressor
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.metrics import r2_score
from sklearn.model_selection import KFold, cross_val_predict
from sklearn.neighbors import KNeighborsRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler, TargetEncoder

from pfl_sklearn.compose import ClientAsFeature, ClientColumn
from pfl_sklearn.model_selection import ClientKFold


def table(n_clients=6, seed=0):
    """Two columns, responses, and clients by name, of unequal size."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(n_clients, size=40 * n_clients)
    X = rng.normal(size=(len(codes), 2))
    y = X[:, 0] * (codes % 2) + codes + 0.1 * rng.normal(size=len(codes))
    return X, y, np.array([f"site {k}" for k in range(n_clients)])[codes]


def boosting(**params):
    return HistGradientBoostingRegressor(max_iter=20, min_samples_leaf=5, **params)


def test_a_category_is_the_position_of_the_client():
    X, y, groups = table()
    model = ClientAsFeature(boosting()).fit(X, y, groups=groups)
    codes = np.searchsorted(model.clients_, groups)
    peer = boosting(categorical_features=[2]).fit(np.column_stack([X, codes]), y)
    expected = peer.predict(np.column_stack([X, codes]))
    np.testing.assert_array_equal(model.predict(X, groups=groups), expected)
    missing = peer.predict(np.column_stack([X[:5], np.full(5, np.nan)]))
    model.set_params(unseen="population")
    np.testing.assert_array_equal(model.predict(X[:5], groups=["elsewhere"] * 5), missing)


def test_a_target_is_encoded_out_of_fold():
    X, y, groups = table()
    model = ClientAsFeature(LinearRegression(), random_state=3).fit(X, y, groups=groups)
    codes = np.searchsorted(model.clients_, groups)[:, None]
    folds = KFold(5, shuffle=True, random_state=np.random.RandomState(3))
    encoder = TargetEncoder(cv=folds)
    peer = LinearRegression().fit(np.column_stack([X, encoder.fit_transform(codes, y)]), y)
    expected = peer.predict(np.column_stack([X, encoder.transform(codes)]))
    np.testing.assert_allclose(model.predict(X, groups=groups), expected, rtol=1e-12)
    model.set_params(unseen="population")
    unseen = peer.predict(np.column_stack([X[:3], np.full(3, y.mean())]))
    np.testing.assert_allclose(model.predict(X[:3], groups=["x"] * 3), unseen, rtol=1e-12)


def test_shares_of_several_classes():
    X, y, groups = table()
    labels = np.digitize(y, [1, 3])
    model = ClientAsFeature(LogisticRegression(), random_state=0).fit(X, labels, groups=groups)
    assert model.estimator_.n_features_in_ == 2 + 3
    np.testing.assert_array_equal(model.classes_, [0, 1, 2])
    assert model.score(X, labels, groups=groups) > 0.7
    found = model.predict_proba(X, groups=groups)
    np.testing.assert_allclose(found.sum(axis=1), 1)


def test_encodings_by_default():
    X, y, groups = table()
    many = np.arange(len(y)) % 120 * 3 + np.arange(len(y)) % 3
    assert ClientAsFeature(boosting()).fit(X, y, groups=groups)._encoding == "category"
    X, y, many = np.tile(X, (30, 1))[:2560], np.tile(y, 30)[:2560], np.arange(2560) % 256
    assert ClientAsFeature(boosting()).fit(X, y, groups=many)._encoding == "target"
    assert ClientAsFeature(boosting()).fit(X, y, groups=many % 255)._encoding == "category"
    few = np.arange(2560) // 9  # rows of a client, which make no category of trees
    rows = few < 250
    encoded = ClientAsFeature(boosting()).fit(X[rows], y[rows], groups=few[rows])._encoding
    assert encoded == "target"
    forest = ClientAsFeature(RandomForestRegressor(5)).fit(X, y, groups=many % 6)
    assert forest._encoding == "target"


def test_counts_are_no_classes():
    X, y, groups = table()
    model = ClientAsFeature(LinearRegression(), random_state=0).fit(X, y.round(), groups=groups)
    assert model.estimator_.n_features_in_ == 3


def test_as_many_categories_as_bins():
    X, y, groups = table()
    model = ClientAsFeature(boosting(max_bins=5), random_state=0)
    assert model.fit(X, y, groups=groups)._encoding == "target"
    model.set_params(encoding="category")
    with pytest.raises(ValueError, match=r"got 6 clients, .* at most max_bins=5 categories"):
        model.fit(X, y, groups=groups)


def frames(X):
    """The same rows in several containers, with a category of their own."""
    words = np.where(X[:, 1] > 0, "a", "b").tolist()
    kind = pd.Categorical(words)
    frame = pd.DataFrame({"first": X[:, 0], "kind": kind})
    yield frame, {}
    yield frame.set_axis([0, 1], axis=1), {}
    yield pl.DataFrame({"first": X[:, 0], "kind": pl.Series(words, dtype=pl.Categorical)}), {}
    numbers = np.column_stack([X[:, 0], kind.codes])
    for given in ([1], [False, True], np.array([1])):
        yield numbers, {"categorical_features": given}
    named = pd.DataFrame(numbers, columns=["first", "kind"])
    for given in (["kind"], [1], [False, True]):
        yield named, {"categorical_features": given}


@pytest.mark.slow
def test_categories_of_the_rows_stay_categories():
    X, y, groups = table()
    found = []
    for rows, params in frames(X):
        model = ClientAsFeature(boosting(**params)).fit(rows, y, groups=groups)
        found.append(model.predict(rows, groups=groups))
        np.testing.assert_array_equal(model.estimator_.is_categorical_, [False, True, True])
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=1e-12)


def test_a_column_may_have_the_name():
    X, y, groups = table()
    rows = pd.DataFrame(X, columns=["client", "other"])
    model = ClientAsFeature(boosting()).fit(rows, y, groups=groups)
    names = model.estimator_.feature_names_in_.tolist()
    assert names == ["client", "other", "client_"]
    assert model.feature_names_in_.tolist() == ["client", "other"]


def test_inside_a_client_column():
    X, y, groups = table()
    rows = pd.DataFrame(X, columns=["a", "b"]).assign(site=groups)
    model = ClientColumn(ClientAsFeature(boosting()), "site")
    found = cross_val_predict(model, rows, y, cv=ClientKFold(3, client_column="site"))
    assert np.mean((found - y) ** 2) < 0.2 * y.var()


def test_weights_reach_the_estimator():
    X, y, groups = table()
    weights = np.random.default_rng(0).integers(0, 3, len(y))
    model = ClientAsFeature(LinearRegression(), random_state=0)
    some = weights > 0
    first = model.fit(X, y, groups=groups, sample_weight=weights).predict(X, groups=groups)
    again = model.fit(X[some], y[some], groups=groups[some], sample_weight=weights[some])
    np.testing.assert_allclose(again.predict(X, groups=groups), first)
    without = model.fit(X[some], y[some], groups=groups[some]).predict(X, groups=groups)
    assert np.abs(without - first).max() > 1e-6
    with pytest.raises(ValueError, match=r"'estimator' \(KNeighborsRegressor\) does not take it"):
        ClientAsFeature(KNeighborsRegressor()).fit(X, y, groups=groups, sample_weight=weights)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (
            {"estimator": LinearRegression(), "encoding": "category"},
            r"encoding='category' needs .* categorical_features; LinearRegression has none",
        ),
        ({"estimator": boosting(), "encoding": "one_hot"}, "'encoding' parameter"),
        ({"estimator": 3}, "'estimator' parameter"),
    ],
)
def test_bad_parameters(params, words):
    X, y, groups = table()
    with pytest.raises(ValueError, match=words):
        ClientAsFeature(**params).fit(X, y, groups=groups)


def test_score_of_a_pipeline():
    X, y, groups = table()
    pipeline = make_pipeline(StandardScaler(), LinearRegression())
    model = ClientAsFeature(pipeline, random_state=0).fit(X, y, groups=groups)
    found = model.score(X, y, groups=groups)
    np.testing.assert_allclose(found, r2_score(y, model.predict(X, groups=groups)), rtol=1e-12)
