"""Stacks and selectors in folds that go forward in time: what learns from what, and is tested."""

import re

import numpy as np
import pandas as pd
import polars as pl
import pytest
from sklearn.base import BaseEstimator, RegressorMixin, clone
from sklearn.dummy import DummyRegressor
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.tree import DecisionTreeRegressor

from pfl_sklearn import (
    ClientSelector,
    ClientTimeSeriesSplit,
    PersonalizedLinearRegression,
    PersonalizedLogisticRegression,
    PersonalizedStackingClassifier,
    PersonalizedStackingRegressor,
    UnseenClientsWarning,
)
from pfl_sklearn._parallel import BatchMapper
from pfl_sklearn.compose import _out_of_fold
from pfl_sklearn.compose._client_mixtures import CandidateErrors, client_weights, population_mean
from pfl_sklearn.compose._client_rows import TableRows
from pfl_sklearn.compose._inner_estimators import InnerEstimator
from pfl_sklearn.priors import DirichletPrior, GaussianPrior


def final(**params):
    """Personalized line with known variances, which takes no iterations."""
    params = {"prior": GaussianPrior(covariance=1.0), "noise_variance": 0.1} | params
    return PersonalizedLinearRegression(unseen="population", **params)


class Tree(RegressorMixin, BaseEstimator):
    """Tree that sees no time, which it could not continue, and counts how often it was fitted."""

    n_fits = 0

    def fit(self, X, y):
        type(self).n_fits += 1
        self.tree_ = DecisionTreeRegressor(min_samples_leaf=5).fit(np.asarray(X)[:, :1], y)
        return self

    def predict(self, X):
        return self.tree_.predict(np.asarray(X)[:, :1])


def series(sizes=(24,) * 12, seed=0, noise=0.3):
    """Rows of each client in order of time: a common step, and slopes of the client's own."""
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    time = np.concatenate([np.arange(size) for size in sizes]) / 10
    a = rng.uniform(-2, 2, size=len(groups))
    slopes = rng.normal(size=len(sizes))[groups]
    y = 3.0 * (a > 0.3) + slopes * time + noise * rng.normal(size=len(groups))
    return pd.DataFrame({"a": a, "time": time}), y, groups


def by_hand(bases, X, y, groups, folds):
    """Out-of-fold predictions, NaN for rows that are never tested."""
    outside = pd.DataFrame(np.nan, index=range(len(y)), columns=list(bases))
    for train, test in folds:
        for name, base in bases.items():
            takes_ids = isinstance(base, PersonalizedLinearRegression)
            ids = [{"groups": groups[rows]} if takes_ids else {} for rows in (train, test)]
            fitted = clone(base).fit(X.iloc[train], y[train], **ids[0])
            outside.loc[test, name] = fitted.predict(X.iloc[test], **ids[1])
    return outside


def test_rows_that_are_tested():
    """Means of training rows say which these were; a gap of one step is left out."""
    y = 2.0 ** np.arange(12)
    groups = np.repeat([0, 1], [9, 3])
    folds = list(ClientTimeSeriesSplit(2, gap=1).split(y[:, None], groups=groups))
    table = TableRows(np.zeros((12, 1)), y, groups, None)
    mean = InnerEstimator("mean", DummyRegressor(), None)
    (found,), _ = _out_of_fold.out_of_fold([(mean, (table, None))], folds, BatchMapper(1, 1))
    early, late = y[[0, 1, 9]].mean(), y[[0, 1, 2, 3, 4, 9]].mean()
    np.testing.assert_allclose(found, [early] * 3 + [late] * 3 + [late], rtol=1e-12)
    seen = _out_of_fold.tested_rows(folds, groups)
    assert seen.rows.tolist() == [3, 4, 5, 6, 7, 8, 11]
    ((train, test),) = seen.folds
    assert (seen.rows[train].tolist(), seen.rows[test].tolist()) == ([3, 4], [6, 7, 8, 11])
    assert seen.rows[seen.scored].tolist() == [6, 7, 8, 11]
    assert [each.tolist() for each in seen.tests] == [[0, 1, 2, 3]]
    assert seen.go_forward
    assert seen.of(table).y.tolist() == y[seen.rows].tolist()


def test_folds_before_which_clients_have_one_tested_row_are_not_scored():
    folds = list(ClientTimeSeriesSplit(4).split(np.zeros((9, 1)), groups=np.repeat([0, 1], [5, 4])))
    seen = _out_of_fold.tested_rows(folds, np.repeat([0, 1], [5, 4]))
    assert seen.rows.tolist() == [1, 2, 3, 4, 6, 7, 8]
    assert [seen.rows[test].tolist() for _, test in seen.folds] == [[3, 7], [4, 8]]
    assert [seen.rows[train].tolist() for train, _ in seen.folds] == [[1, 2, 6], [1, 2, 3, 6, 7]]


def test_a_partition_tests_all():
    folds = [(np.array([3, 2]), np.array([1, 0])), (np.array([1, 0]), np.array([2, 3]))]
    seen = _out_of_fold.tested_rows(folds, np.zeros(4, dtype=int))
    assert not seen.go_forward
    for pair, expected in zip(seen.folds, folds, strict=True):
        np.testing.assert_array_equal(pair, expected)
    np.testing.assert_array_equal(seen.rows, np.arange(4))
    np.testing.assert_array_equal(seen.scored, np.arange(4))


# Stacks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gap", [0, 1])
def test_the_final_estimator_learns_from_tested_rows(gap):
    X, y, groups = series()
    cv = ClientTimeSeriesSplit(4, gap=gap)
    bases = {"trees": Tree(), "own": final()}
    model = PersonalizedStackingRegressor(list(bases.items()), final(), cv=cv, fallback=False)
    model.set_params(unseen="population").fit(X, y, groups=groups)
    outside = by_hand(bases, X, y, groups, list(cv.split(X, groups=groups)))
    rows = np.flatnonzero(outside["trees"].notna())
    assert len(rows) == 12 * 19  # of 24 the first five are never tested
    peer = final().fit(outside.join(X).iloc[rows], y[rows], groups=groups[rows])
    np.testing.assert_allclose(model.final_estimator_.coef_, peer.coef_, rtol=1e-7, atol=1e-9)
    full = pd.DataFrame(  # base estimators are fitted to all rows
        {
            "trees": Tree().fit(X, y).predict(X),
            "own": final().fit(X, y, groups=groups).predict(X, groups=groups),
        }
    )
    expected = peer.predict(full.join(X), groups=groups)
    np.testing.assert_allclose(model.predict(X, groups=groups), expected, rtol=1e-7)


@pytest.mark.parametrize("noise", [0.1, pytest.param(2.0, marks=pytest.mark.slow)])
def test_the_loss_of_the_stack_is_of_rows_later_than_all_it_saw(noise):
    X, y, groups = series(noise=noise)
    bases = {"trees": Tree(), "own": final()}
    cv = ClientTimeSeriesSplit(4)
    model = PersonalizedStackingRegressor(list(bases.items()), final(), cv=cv)
    model.fit(X, y, groups=groups)
    folds = list(cv.split(X, groups=groups))
    outside = by_hand(bases | {"final_estimator": final()}, X, y, groups, folds)
    beside = outside[["trees", "own"]].join(X)
    losses = ((outside - y[:, None]) ** 2).assign(stack=np.nan)
    for train, test in folds[1:]:
        earlier = train[outside["trees"].notna()[train]]
        last = final().fit(beside.iloc[earlier], y[earlier], groups=groups[earlier])
        found = last.predict(beside.iloc[test], groups=groups[test])
        losses.loc[test, "stack"] = (found - y[test]) ** 2
    tests = [test for _, test in folds[1:]]
    means = losses.iloc[np.concatenate(tests)].mean()
    found = model.losses_["known"]
    np.testing.assert_allclose(found[means.index], means, rtol=1e-6)
    assert ("stack" in model.parts_["known"]) == (noise < 1)


def test_testing_the_stack_takes_no_more_fits():
    X, y, groups = series((24,), noise=0.1)  # with one client there are no others to leave out
    for fallback in (True, False):
        Tree.n_fits = 0
        bases = [("trees", Tree())]
        model = PersonalizedStackingRegressor(bases, final(), cv="time", fallback=fallback)
        model.fit(X, y, groups=groups)
        assert Tree.n_fits == 5 + ("trees" in model.named_estimators_)


@pytest.mark.parametrize(("n_rows", "n_splits"), [(6, 4), (7, 5)])
def test_short_series_have_fewer_splits(n_rows, n_splits):
    X, y, groups = series((n_rows,) * 6)
    bases = [("line", Ridge())]
    model = PersonalizedStackingRegressor(bases, final(), cv="time", fallback=False)
    model.set_params(random_state=0)
    given = clone(model).set_params(cv=ClientTimeSeriesSplit(n_splits))
    found, expected = (stack.fit(X, y, groups=groups) for stack in (model, given))
    np.testing.assert_array_equal(found.final_estimator_.coef_, expected.final_estimator_.coef_)
    assert found.folds_ == expected.folds_ == "forward in time"
    if n_rows < 7:  # with five splits, the first fold would have one row of each client
        clone(model).set_params(fallback=True).fit(X, y, groups=groups)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("cv", "n_rows", "reason"),
    [
        ("time", 5, "cv='time' needs a client with 6 rows, and the longest has 5"),
        (ClientTimeSeriesSplit(1), 20, "at least 3 splits are needed, and cv=.* has 1"),
        (ClientTimeSeriesSplit(2), 20, "at least 3 splits are needed, and cv=.* has 2"),
    ],
    ids=str,
)
def test_few_origins_are_replaced_by_folds_inside_clients(cv, n_rows, reason):
    X, y, groups = series((n_rows,) * 6)
    for model in (
        PersonalizedStackingRegressor([("line", Ridge())], final(), random_state=0),
        ClientSelector([("line", Ridge()), ("mean", DummyRegressor())], random_state=0),
    ):
        with pytest.warns(UserWarning, match=f"Folds inside clients replace .*: {reason}") as told:
            found = clone(model).set_params(cv=cv).fit(X, y, groups=groups)
        assert len(told) == 1
        assert re.search(f"inside clients, because {reason}", found.folds_)
        expected = clone(model).fit(X, y, groups=groups)
        assert expected.folds_ == "inside clients"
        pd.testing.assert_frame_equal(found.losses_, expected.losses_)


def test_a_mean_is_no_forecast():
    X, y, groups = series((12,) * 6)
    model = PersonalizedStackingRegressor([("line", Ridge())], final(), cv="time", random_state=0)
    losses = model.fit(X, y + 5.0 * np.arange(len(y)), groups=groups).losses_
    assert np.isnan(losses.loc["mean", "known"])
    assert np.isfinite(losses.loc["mean", "new"])


@pytest.mark.slow
def test_cv_time_is_a_splitter_of_rows_in_their_order():
    X, y, groups = series((12, 30, 1, 2, 7))
    model = ClientSelector([("line", Ridge()), ("mean", DummyRegressor())], random_state=0)
    splits = list(ClientTimeSeriesSplit(5).split(X, groups=groups))
    fits = [clone(model).set_params(cv=cv) for cv in ("time", ClientTimeSeriesSplit(5), splits)]
    first, *others = (each.fit(X, y, groups=groups) for each in fits)
    for other in others:
        pd.testing.assert_frame_equal(other.losses_, first.losses_)
        np.testing.assert_array_equal(other.weights_, first.weights_)
    order = np.random.default_rng(0).permutation(len(y))
    by_column = model.set_params(cv=ClientTimeSeriesSplit(5, time_column="time"))
    for table in (X.iloc[order], pl.from_pandas(X.iloc[order])):
        by_column.fit(table, y[order], groups=groups[order])
        expected = first.losses_["known"]
        np.testing.assert_allclose(by_column.losses_["known"], expected, rtol=1e-9)


@pytest.mark.slow
def test_known_clients_of_which_nothing_is_tested():
    X, y, groups = series((24, 24, 24, 1, 1), noise=0.1)
    bases = [("own", final())]
    for fallback in (False, True):
        model = PersonalizedStackingRegressor(bases, final(), cv="time", fallback=fallback)
        model.set_params(unseen="error").fit(X, y, groups=groups)
        assert model.clients_.tolist() == [0, 1, 2, 3, 4]
        assert model.n_samples_per_client_.tolist() == [24, 24, 24, 1, 1]
        found = model.predict(X[-2:], groups=groups[-2:])  # no warning, no error
        assert np.isfinite(found).all()
        alone = model.for_client(3)
        assert alone.clients_.tolist() == [3]
        np.testing.assert_allclose(alone.predict(X[-2:-1]), found[:1], rtol=1e-9)


@pytest.mark.slow
def test_classes():
    X, y, groups = series(noise=0.5)
    label = np.where(y > np.median(y), "up", "down")
    bases = [("line", LogisticRegression())]
    last = PersonalizedLogisticRegression(GaussianPrior(covariance=1.0), random="intercept")
    model = PersonalizedStackingClassifier(bases, last, cv="time", random_state=0)
    model.fit(X, label, groups=groups)
    losses = model.losses_["known"].dropna()
    assert (losses.drop("pooled") < np.log(2)).all()
    assert model.score(X, label, groups=groups) > 0.75
    mixed = ClientSelector([*bases, ("other", LogisticRegression(C=1e-6))], cv=model.cv)
    mixed.fit(X, label, groups=groups)
    assert mixed.weights_[:, 0].mean() > 0.7


@pytest.mark.slow
def test_rows_without_weight_are_no_steps():
    X, y, groups = series((14, 14, 3), noise=0.1)
    weights = np.where(np.arange(len(y)) % 4 == 1, 0.0, 2.0)
    kept, cv = np.flatnonzero(weights), ClientTimeSeriesSplit(3)
    for model in (
        PersonalizedStackingRegressor([("line", Ridge())], final(), cv=cv),
        ClientSelector([("line", Ridge()), ("mean", DummyRegressor())], cv=cv),
    ):
        model.fit(X, y, groups=groups, sample_weight=weights)
        losses = model.losses_
        model.fit(X.iloc[kept], y[kept], groups=groups[kept], sample_weight=weights[kept])
        pd.testing.assert_frame_equal(model.losses_, losses)


@pytest.mark.slow
def test_new_clients_get_the_population():
    X, y, groups = series((12,) * 6)
    cv = ClientTimeSeriesSplit(3)
    model = PersonalizedStackingRegressor([("line", Ridge())], final(), cv=cv, random_state=0)
    model.fit(X, y, groups=groups)
    with pytest.warns(UnseenClientsWarning):
        assert np.isfinite(model.predict(X[:3], groups=[99] * 3)).all()
    # They are seen in folds of whole clients, whatever the order of rows.
    random = clone(model).set_params(cv=3).fit(X, y, groups=groups)
    expected = random.losses_["new"]
    np.testing.assert_allclose(model.losses_.loc[expected.index, "new"], expected, rtol=1e-12)


# Selectors ----------------------------------------------------------------------------------------


class Shifted(RegressorMixin, BaseEstimator):
    """Mean of the training responses, plus a shift."""

    n_fits = 0

    def __init__(self, shift=0.0):
        self.shift = shift

    def fit(self, X, y):
        type(self).n_fits += 1
        self.n_features_in_ = np.shape(X)[1]
        self.mean_ = np.mean(y)
        return self

    def predict(self, X):
        return np.full(len(X), self.mean_ + self.shift)


def test_weights_come_from_tested_rows():
    X, y, groups = series((24, 24, 24, 1, 3))
    prior = DirichletPrior([0.6, 0.4], 2.0)
    candidates = [("low", Shifted(-1.0)), ("high", Shifted(1.0))]
    model = ClientSelector(candidates, cv="time", prior=prior, unseen="error")
    model.fit(X, y, groups=groups)
    assert model.clients_.tolist() == [0, 1, 2, 3, 4]
    np.testing.assert_allclose(model.weights_[3], [0.6, 0.4], rtol=1e-12)  # never tested
    folds = list(ClientTimeSeriesSplit(5).split(X, groups=groups))
    outside = by_hand(dict(candidates), X, y, groups, folds)
    judged = np.concatenate([test for _, test in folds[1:]])
    expected = ((outside - y[:, None]) ** 2).iloc[judged].mean()
    np.testing.assert_allclose(model.losses_["known"], expected, rtol=1e-12)
    alone = model.for_client(3)
    expected = model.predict(X.iloc[72:73], groups=[3])
    np.testing.assert_allclose(alone.predict(X.iloc[72:73]), expected, rtol=1e-12)
    # Rows that are trained on in all folds change the predictions, but not the weights.
    first = np.flatnonzero(outside["low"].isna())
    shifted = y.copy()
    shifted[first] = y[first].mean()  # so the means are what they were
    again = clone(model).fit(X, shifted, groups=groups)
    np.testing.assert_allclose(again.weights_, model.weights_, atol=1e-8)


@pytest.mark.parametrize("how", ["weights", "best"])
def test_a_learned_concentration_takes_no_more_fits(how):
    X, y, groups = series()
    candidates = [("low", Shifted(-1.0)), ("high", Shifted(1.0))]
    model = ClientSelector(candidates, how=how, cv="time", random_state=0)
    Shifted.n_fits = 0
    model.fit(X, y, groups=groups)
    assert Shifted.n_fits == 2 * (5 + 5 + 1)  # forward, of whole clients, and to all rows
    folds = list(ClientTimeSeriesSplit(5).split(X, groups=groups))
    residuals = by_hand(dict(candidates), X, y, groups, folds).to_numpy() - y[:, None]

    def errors(rows):
        own = residuals[rows], False, groups[rows], np.ones(len(rows)), 12
        return CandidateErrors(*own)

    losses = []
    for train, test in folds[1:]:
        earlier = errors(train[~np.isnan(residuals[train, 0])])
        mean = population_mean(earlier, how)
        (weights,) = client_weights(earlier, how, mean, [model.prior_.concentration])
        losses.append(errors(test).losses(weights[groups[test]]))
    expected = np.mean(np.concatenate(losses))
    assert model.losses_.loc["selector", "known"] == pytest.approx(expected, rel=1e-5)
    tested = np.flatnonzero(~np.isnan(residuals[:, 0]))
    np.testing.assert_allclose(model.prior_.mean, population_mean(errors(tested), how), rtol=1e-9)


def test_one_client_is_its_own_population():
    X, y, groups = series((40,))
    model = ClientSelector([("line", Ridge()), ("mean", DummyRegressor())], cv="time")
    model.fit(X, y, groups=groups)
    np.testing.assert_allclose(
        model.losses_["new"].dropna(), model.losses_["known"].drop("selector"), rtol=1e-12
    )


# Bad input ----------------------------------------------------------------------------------------

ROWS = np.arange(60)


def lists(*cuts):
    return [(ROWS[:a], ROWS[a:b]) for a, b in cuts]


@pytest.mark.parametrize("kind", ["stack", "selector"])
@pytest.mark.parametrize(
    ("cv", "message"),
    [
        ("tim", r"cv.*'time'.*'tim'"),
        (lists((10, 20), (30, 40), (20, 30)), r"tests 30 of 60 rows never.*ClientTimeSeriesSplit"),
        (lists((10, 20), (10, 30), (30, 40)), r"tests 40 of 60 rows never or more than once"),
        ([(ROWS[:10], ROWS[a : a + 10]) for a in (10, 20, 30)], r"tests 30 of 60 rows never"),
        (lists((10, 60)), r"tests 10 of 60 rows never"),
        (lists((10, 30), (30, 60)), r"2 folds.*at least 3"),
        (ClientTimeSeriesSplit(20), r"n_splits=20\b.*\b20 steps"),
        (ClientTimeSeriesSplit(3, time_column="day"), r"time column 'day'.*\['a', 'time'\]"),
    ],
    ids=str,
)
def test_folds_that_do_not_go_forward(kind, cv, message):
    X, y, groups = series((20, 20, 20))
    bases = [("line", Ridge())]
    models = {"stack": PersonalizedStackingRegressor(bases), "selector": ClientSelector(bases)}
    with pytest.raises(ValueError, match=message):
        models[kind].set_params(cv=cv).fit(X, y, groups=groups)


def test_folds_may_start_late():
    """So that all of them have as much history as a forecast will have."""
    X, y, groups = series()
    late = list(ClientTimeSeriesSplit(7).split(X, groups=groups))[-3:]
    model = PersonalizedStackingRegressor([("trees", Tree())], final(), cv=late, random_state=0)
    model.fit(X, y, groups=groups)
    outside = by_hand({"trees": Tree()}, X, y, groups, late)["trees"]
    judged = np.concatenate([test for _, test in late[1:]])
    expected = np.mean((outside - y)[judged] ** 2)
    assert model.losses_.loc["trees", "known"] == pytest.approx(expected, rel=1e-9)
