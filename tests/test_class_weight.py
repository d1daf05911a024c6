"""Weights of classes are weights of their rows."""

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.utils.class_weight import compute_sample_weight

from pfl_sklearn import PersonalizedLogisticRegression, PersonalizedStackingClassifier
from tests.helpers.slow import slow

rng = np.random.default_rng(0)
GROUPS = np.repeat(np.arange(12), 30)
X = rng.normal(size=(360, 2))
ODDS = X[:, 0] + rng.normal(size=12)[GROUPS] - 1.5
Y = np.where(rng.random(360) < 1 / (1 + np.exp(-ODDS)), "sick", "healthy")
BASE = [("line", LogisticRegression())]
MODELS = [
    PersonalizedLogisticRegression(random="intercept"),
    PersonalizedStackingClassifier(BASE, cv=3, random_state=0),
]


def as_weights(class_weight, y=Y):
    return compute_sample_weight(class_weight, y)


WEIGHTS = ["balanced", {"sick": 3.0}, {"sick": 2, "healthy": 0.5}]


@pytest.mark.parametrize(
    ("model", "class_weight"),
    [*((MODELS[0], each) for each in WEIGHTS), *slow([(MODELS[1], WEIGHTS[2])])],
    ids=lambda each: type(each).__name__,
)
def test_they_are_weights_of_rows(model, class_weight):
    own = clone(model).set_params(class_weight=class_weight).fit(X, Y, groups=GROUPS)
    same = model.fit(X, Y, groups=GROUPS, sample_weight=as_weights(class_weight))
    for method in ("predict", "predict_proba"):
        predicted = getattr(own, method)(X, groups=GROUPS)
        np.testing.assert_array_equal(predicted, getattr(same, method)(X, groups=GROUPS))
    plain = clone(model).fit(X, Y, groups=GROUPS).predict_proba(X, groups=GROUPS)
    assert np.abs(own.predict_proba(X, groups=GROUPS) - plain).mean() > 0.02


@pytest.mark.parametrize(
    "model", [MODELS[0], *slow(MODELS[1:])], ids=lambda model: type(model).__name__
)
def test_they_multiply_those_of_rows(model):
    """Balanced are sums of weights, and a row of weight 0 is absent."""
    weights = rng.integers(0, 3, 360) * 0.5
    some = weights > 0
    balanced = clone(model).set_params(class_weight="balanced")
    own = balanced.fit(X, Y, groups=GROUPS, sample_weight=weights)
    sums = {label: weights[label == Y].sum() for label in np.unique(Y)}
    times = weights[some] * [weights.sum() / (2 * sums[label]) for label in Y[some]]
    same = model.fit(X[some], Y[some], groups=GROUPS[some], sample_weight=times)
    np.testing.assert_allclose(
        own.predict_proba(X, groups=GROUPS), same.predict_proba(X, groups=GROUPS), rtol=1e-9
    )


def test_a_weight_moves_the_intercept_by_its_logarithm():
    rng = np.random.default_rng(1)
    groups, x = np.repeat(np.arange(200), 40), rng.normal(size=(8000, 1))
    odds = x[:, 0] + 0.5 * rng.normal(size=200)[groups] - 1
    y = rng.random(8000) < 1 / (1 + np.exp(-odds))
    model = PersonalizedLogisticRegression(random="intercept")
    plain = clone(model).fit(x, y, groups=groups)
    heavier = model.set_params(class_weight={True: 4}).fit(x, y, groups=groups)
    shift = heavier.population_intercept_ - plain.population_intercept_
    assert shift == pytest.approx(np.log(4), abs=0.1)
    np.testing.assert_allclose(heavier.population_coef_, plain.population_coef_, rtol=0.06)


@pytest.mark.parametrize("class_weight", ["balanced", {"sick": 3.0}])
def test_a_private_fit_refuses_them(class_weight):
    model = PersonalizedLogisticRegression(
        epsilon=1.0, feature_bound=2.0, max_rows_per_client=30, class_weight=class_weight
    )
    with pytest.raises(ValueError, match=r"class_weight=.* epsilon is finite"):
        model.fit(X, Y, groups=GROUPS)


@pytest.mark.parametrize(
    ("estimators", "class_weight", "message"),
    [
        (BASE, {"sick": 1.0, "healthy": -1.0}, "[Nn]egative"),
        (BASE, "even", r"class_weight.*'balanced'.*'even'"),
        ([("near", KNeighborsClassifier())], "balanced", r"'near'.*does not take it"),
    ],
)
def test_wrong_weights(estimators, class_weight, message):
    for model in MODELS if estimators is BASE else MODELS[1:]:
        wrong = clone(model).set_params(class_weight=class_weight)
        if estimators is not BASE:
            wrong.set_params(estimators=estimators)
        with pytest.raises(ValueError, match=message):
            wrong.fit(X, Y, groups=GROUPS)


def test_classes_that_a_fold_lacks_are_no_error():
    weights = {"sick": 2.0, "gone": 5.0}
    model = clone(MODELS[0]).set_params(class_weight=weights).fit(X, Y, groups=GROUPS)
    same = clone(MODELS[0]).fit(X, Y, groups=GROUPS, sample_weight=np.where(Y == "sick", 2.0, 1.0))
    np.testing.assert_array_equal(model.coef_, same.coef_)
