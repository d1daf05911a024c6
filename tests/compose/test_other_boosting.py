"""LightGBM and CatBoost as base estimators, by name and as others give them."""

import pickle
import sys

import numpy as np
import pandas as pd
import polars as pl
import pytest
from sklearn.base import clone, is_regressor
from sklearn.metrics import r2_score
from sklearn.utils import estimator_html_repr

from pfl_sklearn import PersonalizedLogisticRegression
from pfl_sklearn.compose import (
    ClientAsFeature,
    PersonalizedStackingClassifier,
    PersonalizedStackingRegressor,
)
from pfl_sklearn.compose._many_levels import with_levels

LIBRARIES = ["lightgbm", "catboost"]


def table(n_clients=6, names=("a", "b c"), seed=0):
    """Frame of two columns, responses with a step, and clients by name."""
    rng = np.random.default_rng(seed)
    codes = rng.permutation(np.arange(40 * n_clients) % n_clients)
    X = rng.normal(size=(len(codes), 2))
    y = 2.0 * (X[:, 0] > 0) * (codes % 2) + codes + 0.1 * rng.normal(size=len(codes))
    groups = np.array([f"site {k}" for k in codes])
    return pd.DataFrame(X, columns=names), y, groups


def trees(library, kind="Regressor", **params):
    """A few trees of a library, which is skipped if missing, on one thread."""
    module = pytest.importorskip(library, reason=f"{library} is missing; the extra boosting has it")
    if library == "lightgbm":
        few = {"n_estimators": 20, "verbosity": -1, "n_jobs": 1}
        return getattr(module, f"LGBM{kind}")(**few, **params)
    few = {"iterations": 20, "verbose": 0, "thread_count": 1, "allow_writing_files": False}
    return getattr(module, f"CatBoost{kind}")(**few, **params)


def stack(kind, estimators, **params):
    """Stack of this kind with three folds."""
    if kind == "Regressor":
        return PersonalizedStackingRegressor(estimators, cv=3, random_state=0, **params)
    final = PersonalizedLogisticRegression(random="intercept")
    return PersonalizedStackingClassifier(estimators, final, cv=3, random_state=0, **params)


def target(kind, y, words=("low", "mid", "up")):
    """Responses, or words for them, some of which are by chance."""
    if kind == "Regressor":
        return y
    noise = np.random.default_rng(1).normal(size=len(y))
    return np.array(words)[np.digitize(y + noise, [2.5, 4.5][: len(words) - 1])]


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("kind", ["Regressor", "Classifier"])
def test_a_word_stands_for_parts_of_that_library(library, kind, tmp_path, monkeypatch):
    inner = trees(library, kind)
    monkeypatch.chdir(tmp_path)
    X, y, groups = table(names=("size [m]", 'a, "b": {c}'))  # LightGBM writes names as JSON
    y = target(kind, y, ("low", "up"))
    model = stack(kind, library, fallback=False).fit(X, y, groups=groups)
    ends = ["", "_client", "_residual"][: 3 if kind == "Regressor" else 2]
    assert list(model.named_estimators_) == [library + end for end in ends]
    first, with_client = list(model.named_estimators_.values())[:2]
    assert type(first) is type(with_client.estimator_) is type(inner)
    seen = np.arange(len(y)) % 3 > 0
    found = clone(model).fit(X[seen], y[seen], groups=groups[seen])
    assert found.score(X[~seen], y[~seen], groups=groups[~seen]) > 0.75
    assert clone(model).estimators == library
    assert f"{library}_client" in estimator_html_repr(model)
    again = pickle.loads(pickle.dumps(model))
    method = "predict" if kind == "Regressor" else "predict_proba"
    predicted = getattr(model, method)(X[:20], groups=groups[:20])
    np.testing.assert_array_equal(getattr(again, method)(X[:20], groups=groups[:20]), predicted)
    shared = clone(model).set_params(n_jobs=2).fit(X, y, groups=groups)
    np.testing.assert_array_equal(getattr(shared, method)(X[:20], groups=groups[:20]), predicted)
    own = model.for_client("site 1")
    rows = groups == "site 1"
    np.testing.assert_allclose(
        getattr(own, method)(X[rows], groups=groups[rows]),
        getattr(model, method)(X[rows], groups=groups[rows]),
        rtol=1e-9,
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_words_and_gaps_of_the_table(library):
    trees(library)
    X, y, groups = table(20)
    words = np.where(np.arange(len(y)) % 3 == 0, "north: [x]", "south").astype(object)
    X = X.assign(where=words).astype({"where": "category"})
    X.loc[::7, "a"] = np.nan
    y = y + (words == "south")
    model = stack("Regressor", library).fit(X, y, groups=groups)
    assert model.losses_.loc[f"{library}_client", "known"] < 0.5 * np.var(y)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("with_client", [False, True])
@pytest.mark.parametrize("n_rows", [12, 6])
def test_columns_of_many_levels(library, with_client, n_rows):
    rng = np.random.default_rng(0)
    level = rng.permutation(np.tile(np.arange(40), n_rows))
    y = rng.normal(size=40)[level] + 0.1 * rng.normal(size=len(level))
    X = pd.DataFrame({"a [m]": rng.normal(size=len(level)), "item": [f"{k}" for k in level]})
    X.loc[:3, "item"] = None
    groups = rng.integers(0, 3, len(y))
    estimator = trees(library, min_child_samples=5) if library == "lightgbm" else trees(library)
    estimator = ClientAsFeature(estimator) if with_client else estimator
    model = with_levels(estimator, ["item"]).set_params(random_state=0).fit(X, y, groups=groups)
    assert (model._features[0].means is None) == (n_rows == 12)  # a category, or a target
    assert r2_score(y, model.predict(X, groups=groups)) > 0.3
    rows = X[:2].assign(item=["never seen", None])
    assert np.isfinite(model.predict(rows, groups=groups[:2])).all()


@pytest.mark.parametrize("library", LIBRARIES)
def test_parameters_inside_a_word(library):
    trees(library)
    model = stack("Regressor", None)
    model.set_params(estimators=library, **{f"{library}_client__estimator__max_depth": 2})
    inside = dict(model.estimators)
    assert inside[f"{library}_client"].estimator.get_params()["max_depth"] == 2
    residual = inside[f"{library}_residual"].residual_estimator
    assert residual.get_params().get("max_depth") != 2


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_missing_library(library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    model = stack("Regressor", library)
    X, y, groups = table()
    with pytest.raises(ImportError, match=rf"{library}: pip install {library}\.$"):
        model.fit(X, y, groups=groups)


def test_another_word_is_refused():
    X, y, groups = table()
    model = stack("Regressor", "xgboost")
    assert is_regressor(model)
    with pytest.raises(ValueError, match=r"'estimators' .*'xgboost' instead"):
        model.fit(X, y, groups=groups)


# LightGBM predicts the same with and without the client here.
@pytest.mark.filterwarnings("ignore:.*do not determine their predictions")
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("kind", ["Regressor", "Classifier"])
def test_a_list_of_them(library, kind):
    X, y, groups = table(names=("x [1]", "z"))
    y, weights = target(kind, y, ("low", "up")), 0.5 + (np.arange(len(y)) % 3)
    pairs = [("plain", trees(library, kind)), ("client", ClientAsFeature(trees(library, kind)))]
    model = stack(kind, pairs, fallback=False)
    model.fit(X, y, groups=groups, sample_weight=weights)
    assert model.score(X, y, groups=groups) > 0.8
    plain = model.named_estimators_["plain"]
    seed = plain.get_params().get("random_state")
    rows = X.set_axis(["x0", "x1"], axis=1) if library == "lightgbm" else X
    peer = trees(library, kind, **({} if seed is None else {"random_state": seed}))
    method = "predict" if kind == "Regressor" else "predict_proba"
    expected = getattr(peer.fit(rows, y, sample_weight=weights), method)(rows)
    np.testing.assert_array_equal(getattr(plain, method)(rows), expected)
    again = clone(model).fit(X, y, groups=groups, sample_weight=weights)
    pd.testing.assert_frame_equal(again.weights_, model.weights_)
    np.testing.assert_array_equal(again.predict(X, groups=groups), model.predict(X, groups=groups))


@pytest.mark.parametrize("rows", [np.asarray, pd.DataFrame, pl.DataFrame], ids=lambda f: f.__name__)
def test_a_client_is_a_category_of_lightgbm(rows):
    X, y, groups = table()
    model = ClientAsFeature(trees("lightgbm", random_state=0))
    model.fit(rows(X), y, groups=groups)
    codes = np.searchsorted(model.clients_, groups)
    with_codes = np.column_stack([X, codes])
    peer = trees("lightgbm", random_state=0).fit(with_codes, y, categorical_feature=[2])
    np.testing.assert_array_equal(model.predict(rows(X), groups=groups), peer.predict(with_codes))
    model.set_params(unseen="population")
    with_codes[:, 2] = np.nan
    found = model.predict(rows(X), groups=np.full(len(y), "elsewhere"))
    np.testing.assert_array_equal(found, peer.predict(with_codes))


@pytest.mark.parametrize("rows", [np.asarray, pd.DataFrame, pl.DataFrame], ids=lambda f: f.__name__)
def test_a_client_is_a_category_of_catboost(rows):
    X, y, groups = table()
    model = ClientAsFeature(trees("catboost")).fit(rows(X), y, groups=groups)
    codes = np.searchsorted(model.clients_, groups)
    frame = X.assign(client=codes)
    peer = trees("catboost", cat_features=["client"]).fit(frame, y)
    np.testing.assert_array_equal(model.predict(rows(X), groups=groups), peer.predict(frame))
    model.set_params(unseen="population")
    found = model.predict(rows(X), groups=np.full(len(y), "elsewhere"))
    np.testing.assert_array_equal(found, peer.predict(frame.assign(client=-1)))


@pytest.mark.parametrize("given", [("word",), (1,)])  # scikit-learn cannot clone lists here
def test_categories_of_catboost_stay_categories(given):
    X, y, groups = table()
    frame = pd.DataFrame({"a": X["a"], "word": np.where(X["b c"] > 0, "p", "q")})
    inner = trees("catboost", cat_features=given)
    model = ClientAsFeature(inner).fit(frame, y, groups=groups)
    assert list(model.estimator_.get_cat_feature_indices()) == [1, 2]
    assert inner.get_params()["cat_features"] == given
    clone(model.estimator_)
    assert model.score(frame, y, groups=groups) > 0.8


def test_categories_of_lightgbm_stay_categories():
    X, y, groups = table()
    frame = pd.DataFrame({"a": X["a"], "word": pd.Categorical(np.where(X["b c"] > 0, "p", "q"))})
    model = ClientAsFeature(trees("lightgbm")).fit(frame, y, groups=groups)
    assert len(model.estimator_.booster_.pandas_categorical) == 2


@pytest.mark.parametrize("library", LIBRARIES)
def test_encodings_of_clients(library):
    X, y, groups = table()
    model = ClientAsFeature(trees(library)).fit(X, y, groups=groups)
    assert model._encoding == "category"
    few = np.arange(len(y)) // 9  # rows of a client, which are better off with a target
    assert clone(model).fit(X, y, groups=few)._encoding == "target"
    model.set_params(encoding="target", random_state=0).fit(X, y, groups=groups)
    assert model._encoding == "target"
    assert model.score(X, y, groups=groups) > 0.8


@pytest.mark.parametrize("library", LIBRARIES)
def test_several_classes_of_a_client(library):
    X, y, groups = table()
    y = target("Classifier", y)
    model = ClientAsFeature(trees(library, "Classifier")).fit(X, y, groups=groups)
    assert model.predict(X, groups=groups).shape == y.shape
    assert model.score(X, y, groups=groups) > 0.8
    assert list(model.classes_) == ["low", "mid", "up"]
    own = model.for_client("site 2")
    rows = groups == "site 2"
    np.testing.assert_array_equal(
        own.predict_proba(X[rows], groups=groups[rows]),
        model.predict_proba(X[rows], groups=groups[rows]),
    )
    assert "site 1" not in str(vars(own))
