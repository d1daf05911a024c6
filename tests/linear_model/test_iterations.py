"""Callbacks see the iterations of a search for variances, and change nothing."""

import pickle

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone

from pfl_sklearn import (
    ClientColumn,
    PersonalizedLogisticRegression,
    PersonalizedPoissonRegression,
)
from tests.helpers.callbacks import Watch

rng = np.random.default_rng(0)
GROUPS, X = np.repeat(np.arange(12), 20), rng.normal(size=(240, 2))
MEANS = X[:, 0] + rng.normal(size=12)[GROUPS]
LABELS, COUNTS = (MEANS + rng.logistic(size=240) > 0).astype(int), rng.poisson(np.exp(MEANS / 2))
MOVIES = pd.DataFrame({"x": X[:, 0], "movie": [f"m{k}" for k in np.arange(240) % 15]})
ITERATION = ("fit", "iteration")


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("model", "rows", "y"),
    [
        (PersonalizedLogisticRegression(random="intercept"), X, LABELS),
        (PersonalizedLogisticRegression(), X, LABELS),
        (PersonalizedLogisticRegression(random="intercept"), MOVIES, LABELS),
        (PersonalizedPoissonRegression(random="intercept"), X, COUNTS),
    ],
    ids=["intercept", "auto", "groupings", "counts"],
)
def test_each_iteration_is_a_task(model, rows, y):
    watch = Watch()
    watched = clone(model).set_callbacks(watch).fit(rows, y, groups=GROUPS)
    assert watch.ended.count(ITERATION) >= watched.n_iter_ > 0
    assert set(watch.ended) == {ITERATION, ("fit",), "setup"}
    assert watch.ended[-2:] == [("fit",), "setup"]
    plain = clone(model).fit(rows, y, groups=GROUPS)
    for predictions in (watched, pickle.loads(pickle.dumps(watched)).set_callbacks()):
        np.testing.assert_array_equal(
            predictions.predict(rows, groups=GROUPS), plain.predict(rows, groups=GROUPS)
        )
    watched.conf_int()
    assert watch.ended[-1] == "setup"  # errors that are computed later are no part of the fit
    assert not hasattr(watched, "_callback_fit_ctx")


def test_callbacks_of_a_wrapper_see_them():
    watch, table = Watch(), np.column_stack([GROUPS, X])
    model = ClientColumn(PersonalizedLogisticRegression(random="intercept"), 0)
    model.set_callbacks(watch).fit(table, LABELS)
    assert ("fit", "fit", "iteration") in watch.ended


def test_a_fit_that_fails_ends_its_callbacks():
    watch = Watch()
    with pytest.raises(ValueError, match="NaN"):
        model = PersonalizedLogisticRegression().set_callbacks(watch)
        model.fit(np.full((240, 2), np.nan), LABELS, groups=GROUPS)
    assert watch.ended[-1:] == ["fit"]
    # The next fit, without callbacks, counts for none.
    PersonalizedLogisticRegression(random="intercept").fit(X, LABELS, groups=GROUPS)
    assert watch.ended[-1:] == ["fit"]
