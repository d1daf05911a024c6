"""A client's recent targets as a feature, and as a part of stacks that forecast."""

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.linear_model import Ridge

from pfl_sklearn import (
    ClientTimeSeriesSplit,
    PersonalizedLinearRegression,
    PersonalizedLogisticRegression,
    PersonalizedStackingRegressor,
)
from pfl_sklearn.compose._stack.recent import RecentTargets


def drifting(n_clients=40, n_rows=12, seed=0):
    """Rows of clients whose intercepts are random walks."""
    rng = np.random.default_rng(seed)
    intercepts = rng.normal(size=(n_clients, n_rows)).cumsum(axis=1).ravel()
    X = pd.DataFrame({"a": rng.normal(size=n_clients * n_rows)})
    y = X["a"].to_numpy() + intercepts + 0.3 * rng.normal(size=len(X))
    return X, y, np.repeat(np.arange(n_clients), n_rows)


def means_by_hand(values, groups):
    """Shrunk means before each row and behind all of a client, row by row."""
    overall, before, last = values.mean(), [], {}

    def discounted(rows):
        weights = 0.5 ** np.arange(len(rows))[::-1]
        return (overall + weights @ np.array(rows)) / (1 + weights.sum())

    for k, client in enumerate(groups):
        past = [values[j] for j in range(k) if groups[j] == client]
        before.append(discounted(past))
        last[client] = discounted([*past, values[k]])
    return np.array(before), last


def test_means_of_earlier_targets_are_a_column():
    X, y, _ = drifting(4, 10)
    groups = np.random.default_rng(1).permutation(np.repeat([3, 5, 8, 9], [10, 4, 1, 25]))
    intercept = PersonalizedLinearRegression(random="intercept", unseen="population")
    model = RecentTargets(intercept, unseen="population").fit(X, y, groups=groups)
    before, last = means_by_hand(y, groups)
    peer = intercept.fit(X.assign(recent=before), y, groups=groups)
    np.testing.assert_allclose(model.estimator_.coef_, peer.coef_, rtol=1e-9)
    to_predict = X[:5].assign(recent=[last[3], last[5], last[8], last[9], y.mean()])
    ids = [3, 5, 8, 9, 77]
    expected = peer.predict(to_predict, groups=ids)
    np.testing.assert_allclose(model.predict(X[:5], groups=ids), expected, rtol=1e-9)
    alone = model.for_client(5)
    np.testing.assert_allclose(alone.predict(X[1:2]), expected[1:2], rtol=1e-9)
    assert not {y[0], before[1]} & set(np.ravel(alone._last))
    assert alone._last.shape == (1, 1)


def test_each_class_but_the_first_has_a_column():
    X, y, groups = drifting(12, 8)
    labels = np.array(["down", "same", "up"])[np.searchsorted([-1, 1], y)]
    intercept = PersonalizedLogisticRegression(random="intercept")
    X = X.assign(recent_targets_=X["a"] ** 2)  # a name that columns may not get
    model = RecentTargets(intercept).fit(X, labels, groups=groups)
    columns = {}
    for label in ("same", "up"):
        columns[label], _ = means_by_hand((labels == label).astype(float), groups)
    peer = intercept.fit(X.assign(**columns), labels, groups=groups)
    np.testing.assert_allclose(model.estimator_.coef_, peer.coef_, rtol=1e-9)
    probabilities = model.predict_proba(X, groups=groups)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1.0)
    found = model.predict(X, groups=groups)
    np.testing.assert_array_equal(found, model.classes_[probabilities.argmax(axis=1)])


@pytest.mark.slow
def test_forecasts_of_intercepts_that_drift():
    X, y, groups = drifting(15, 12, seed=3)
    past = np.arange(len(y)) % 12 < 10
    bases, cv = [("line", Ridge())], ClientTimeSeriesSplit(3)
    model = PersonalizedStackingRegressor(bases, cv=cv, random_state=0)
    model.fit(X[past], y[past], groups=groups[past])
    assert model.weights_.loc["recent_targets", "known"] > 0.5
    assert "recent_targets" not in model.losses_["new"].dropna()
    assert model.final_estimator_.summary().loc["fixed"]["estimate"]["recent_targets"] > 0.3
    future = (groups == 3) & ~past
    alone = model.for_client(3).predict(X[future])
    np.testing.assert_array_equal(alone, model.predict(X[future], groups=groups[future]))
    line = PersonalizedLinearRegression().fit(X[past], y[past], groups=groups[past])
    new, ids = (X[~past], y[~past]), groups[~past]
    score, without = (each.score(*new, groups=ids) for each in (model, line))
    assert score - without > 0.02


@pytest.mark.slow
def test_recent_targets_are_in_order_of_a_column_of_time():
    X, y, groups = drifting(10, 9)
    X["day"] = np.tile(np.arange(9.0), 10)
    cv = ClientTimeSeriesSplit(3, time_column="day")
    model = PersonalizedStackingRegressor([("line", Ridge())], cv=cv, random_state=0)
    losses = model.fit(X, y, groups=groups).losses_["known"]
    order = np.random.default_rng(0).permutation(len(y))
    again = clone(model).fit(X.iloc[order], y[order], groups=groups[order])
    np.testing.assert_allclose(again.losses_["known"], losses, rtol=1e-6)
    assert losses["recent_targets"] < 0.8 * losses["final_estimator"]
    intercept = PersonalizedLinearRegression(random="intercept", noise_variance=1.0)
    given = clone(model).set_params(final_estimator=intercept)
    assert "recent_targets" not in given.fit(X, y, groups=groups).losses_.index
