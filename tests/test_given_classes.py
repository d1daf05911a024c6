"""Classes that are given beforehand: no row decides which there are."""

import warnings

import numpy as np
import pytest
from sklearn.base import clone

from pfl_sklearn import (
    BernoulliMean,
    ClientStatistics,
    PersonalizedLogisticRegression,
    PPSGDClassifier,
    PrivacyWarning,
    neural_network,
)
from pfl_sklearn.privacy import PrivacyLedger
from tests.helpers.registry import WITHOUT_TORCH

RNG = np.random.default_rng(0)
GROUPS = np.repeat(np.arange(30), 8)
X = RNG.uniform(-1, 1, (240, 2))
Y = np.where(RNG.random(240) < 0.5, "no", "yes")
SEEDED = {"random_state": 0, "epsilon": 2.0}
ROUNDS = {"n_rounds": 2, "clip_norm": 1.0, **SEEDED}
CLASSIFIERS = {
    "proportions": BernoulliMean(**SEEDED),
    "logistic": PersonalizedLogisticRegression(
        feature_bound=1.5, max_rows_per_client=8, n_rounds=4, **SEEDED
    ),
    "ppsgd": PPSGDClassifier(learning_rate=0.1, **ROUNDS),
}
if not WITHOUT_TORCH:
    CLASSIFIERS["net"] = neural_network.FedAvgClassifier(local_steps=1, **ROUNDS)
every_classifier = pytest.mark.parametrize("name", CLASSIFIERS)


def fit(name, y, classes=None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)  # of the seed
        return clone(CLASSIFIERS[name]).set_params(classes=classes).fit(X, y, groups=GROUPS)


@every_classifier
def test_a_class_without_rows_is_a_class(name):
    model = fit(name, np.full(240, "no"), classes=["yes", "no"])
    assert model.classes_.tolist() == ["no", "yes"]
    assert model.predict_proba(X, groups=GROUPS).shape == (240, 2)
    assert any("classes are the user's" in text for text in model.privacy_.assumptions)


@every_classifier
def test_one_row_of_another_class_is_refused_without_its_label(name):
    y = Y.astype(object)
    y[17] = "secret"
    with pytest.raises(ValueError, match="not one of the") as refused:
        fit(name, y, classes=["no", "yes"])
    assert "secret" not in str(refused.value)


@every_classifier
def test_given_classes_change_nothing_else(name):
    given, seen = fit(name, Y, classes=["no", "yes"]), fit(name, Y)
    np.testing.assert_array_equal(
        given.predict_proba(X, groups=GROUPS), seen.predict_proba(X, groups=GROUPS)
    )
    assert any("public" in text and "class" in text for text in seen.privacy_.assumptions)


@every_classifier
@pytest.mark.parametrize("classes", [["no"], [["no", "yes"]], [0.0, np.nan], ["no", None]])
def test_classes_that_are_none_cost_nothing(name, classes, tmp_path):
    ledger = PrivacyLedger(tmp_path / "ledger")
    model = clone(CLASSIFIERS[name]).set_params(classes=classes, ledger=ledger)
    with pytest.raises(ValueError, match="classes must list"):
        model.fit(X, Y, groups=GROUPS)
    assert ledger.entries == []


def test_without_privacy():
    logistic = PersonalizedLogisticRegression(classes=["maybe", "no", "yes"])
    with pytest.raises(ValueError, match="no row is of the class 'maybe'"):
        logistic.fit(X, Y, groups=GROUPS)
    counts = BernoulliMean(classes=["no", "yes"]).fit_counts([0, 3], [4, 4])
    assert counts.classes_.tolist() == ["no", "yes"]
    again = BernoulliMean(classes=["no", "yes"])
    assert again.partial_fit(X, np.full(240, "no"), groups=GROUPS).classes_.tolist() == [
        "no",
        "yes",
    ]
    statistics = ClientStatistics.from_rows(X, (Y == "yes").astype(float), groups=GROUPS)
    assert again.fit_statistics(statistics).classes_.tolist() == ["no", "yes"]
    ppsgd = PPSGDClassifier(classes=["no", "yes"], n_rounds=2)
    with pytest.raises(ValueError, match="but the PPSGDClassifier has classes="):
        ppsgd.partial_fit(X, Y, classes=["no", "maybe"], groups=GROUPS)
    assert ppsgd.partial_fit(X, Y, groups=GROUPS).classes_.tolist() == ["no", "yes"]
