"""Pictures in notebooks: branches by name, before and after the fit."""

import re

import numpy as np
import pytest
from sklearn.ensemble import StackingClassifier, StackingRegressor, VotingRegressor
from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils import estimator_html_repr

from pfl_sklearn import (
    ClientAsFeature,
    ClientColumn,
    ClientSelector,
    PersonalizedStackingClassifier,
    PersonalizedStackingRegressor,
)

rng = np.random.default_rng(0)
GROUPS, X = np.repeat(np.arange(4), 10), rng.normal(size=(40, 2))
Y, LABELS = X[:, 0] + rng.normal(size=40), np.tile([0, 1], 20)
BASES = [("line", LinearRegression()), ("ridge", make_pipeline(StandardScaler(), Ridge()))]
BASES_OF_CLASSES, FEW = [("a", LogisticRegression())], {"cv": 2, "fallback": False}


def shape_of(estimator):
    """Classes of the blocks and the words of an estimator's picture, without its own name."""
    page = re.sub(r"<(style|script).*?</\1>", "", estimator_html_repr(estimator), flags=re.S)
    blocks = re.findall(r'class="(sk-(?:serial|parallel|parallel-item|item))"', page)
    labels = re.findall(r"<label[^>]*>(?:<div>)*([^<]+)", page)
    return blocks, [name for name in labels if name != type(estimator).__name__]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (
            PersonalizedStackingRegressor(BASES, LinearRegression(), **FEW),
            StackingRegressor(BASES, LinearRegression()),
        ),
        (
            PersonalizedStackingRegressor([*BASES, ("out", "drop")], Ridge(), **FEW),
            StackingRegressor([*BASES, ("out", "drop")], Ridge()),
        ),
        (
            PersonalizedStackingClassifier(BASES_OF_CLASSES, LogisticRegression(), **FEW),
            StackingClassifier(BASES_OF_CLASSES, LogisticRegression()),
        ),
        (ClientSelector(BASES, cv=3), VotingRegressor(BASES)),
    ],
)
def test_pictures_are_those_of_scikit_learn(ours, theirs):
    assert shape_of(ours) == shape_of(theirs)
    y = LABELS if isinstance(ours, PersonalizedStackingClassifier) else Y
    assert shape_of(ours.fit(X, y, groups=GROUPS)) == shape_of(theirs)


@pytest.mark.parametrize("kind", ["Regressor", "Classifier"])
def test_default_estimators_are_shown(kind):
    ours = {
        "Regressor": (PersonalizedStackingRegressor(), "PersonalizedLinearRegression"),
        "Classifier": (PersonalizedStackingClassifier(), "PersonalizedLogisticRegression"),
    }
    stack, final = ours[kind]
    boosting = f"HistGradientBoosting{kind}"
    _, words = shape_of(stack)
    branches = ["hgb", boosting, "hgb_client", f"estimator: {boosting}", boosting]
    if kind == "Regressor":
        line = "PersonalizedLinearRegression"
        branches += ["hgb_residual", f"estimator: {line}", line]
        branches += [f"residual_estimator: {boosting}", boosting]
    assert words == [*branches, "final_estimator", final]


def test_wrappers_show_what_is_inside():
    pipeline = make_pipeline(StandardScaler(), Ridge())
    for wrapper in (ClientColumn(pipeline, 0), ClientAsFeature(pipeline)):
        assert shape_of(wrapper)[1] == ["estimator: Pipeline", "StandardScaler", "Ridge"]


def test_a_wrong_list_has_a_picture_too():
    assert shape_of(ClientSelector([])) == (["sk-parallel"], [])
    assert shape_of(ClientSelector([("line", Ridge()), "ridge"]))[1] == ["line", "Ridge"]
