"""Callbacks see the phases of a fit of many fits, and change nothing."""

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.callback import ProgressBar
from sklearn.linear_model import LinearRegression, Ridge
from sklearn.pipeline import make_pipeline

from pfl_sklearn import (
    ClientColumn,
    ClientSelector,
    GaussianMean,
    PersonalizedLinearRegression,
    PersonalizedStackingRegressor,
)
from pfl_sklearn.priors import DirichletPrior, GaussianPrior
from tests.helpers.callbacks import Watch

rng = np.random.default_rng(0)
GROUPS, X = np.repeat(np.arange(6), 20), rng.normal(size=(120, 2))
Y = X[:, 0] + rng.normal(size=6)[GROUPS] + rng.normal(size=120)
BASES = [("line", LinearRegression()), ("ridge", Ridge())]
FINAL = PersonalizedLinearRegression(GaussianPrior(covariance=1.0), noise_variance=1.0)
STACK = PersonalizedStackingRegressor(BASES, FINAL, cv=3, random_state=0)
SELECTOR = ClientSelector(BASES, cv=3, random_state=0)


def fits_by_phase(watch):
    """Numbers of fits in each phase, in order."""
    phases = [tasks[1] for tasks in watch.ended if len(tasks) == 3]
    return {name: phases.count(name) for name in dict.fromkeys(phases)}


def same_fit(first, second):
    np.testing.assert_array_equal(first.predict(X, groups=GROUPS), second.predict(X, groups=GROUPS))
    pd.testing.assert_frame_equal(first.losses_, second.losses_)


def test_callbacks_see_each_fit_of_a_selector():
    """Each candidate is fitted k (k + 3) / 2 + 1 times in k folds."""
    watch = Watch()
    model = clone(SELECTOR).set_callbacks(watch).fit(X, Y, groups=GROUPS)
    expected = {"known-clients": 6, "new-clients": 6, "concentration": 6, "final-fits": 2}
    assert fits_by_phase(watch) == expected
    assert watch.ended[-2:] == [("fit",), "setup"]
    same_fit(model, clone(SELECTOR).fit(X, Y, groups=GROUPS))
    assert not hasattr(model, "_callback_fit_ctx")


def test_a_given_prior_has_no_phases():
    watch, prior = Watch(), DirichletPrior([0.5, 0.5], 3.0)
    clone(SELECTOR).set_params(prior=prior).set_callbacks(watch).fit(X, Y, groups=GROUPS)
    assert fits_by_phase(watch) == {"known-clients": 6, "final-fits": 2}


@pytest.mark.slow
def test_callbacks_see_each_fit_of_a_stack():
    watch = Watch()
    whole = clone(STACK).set_params(fallback=False).set_callbacks(watch)
    whole.fit(X, Y, groups=GROUPS)
    assert fits_by_phase(watch) == {"known-clients": 6, "new-clients": 6, "final-fits": 2}
    watch = Watch()
    model = clone(STACK).set_callbacks(watch).fit(X, Y, groups=GROUPS)
    same_fit(model, clone(STACK).fit(X, Y, groups=GROUPS))
    found = fits_by_phase(watch)
    # Three folds of both bases and the final estimator alone; for new clients of two plain models.
    assert found["known-clients"] >= 9
    assert found["new-clients"] >= 15
    watch = Watch()
    clone(STACK).set_callbacks(watch).fit(X, Y, groups=np.zeros(120))
    assert "new-clients" not in fits_by_phase(watch)


@pytest.mark.slow
def test_fits_of_workers_are_one_task():
    watch = Watch()
    model = clone(SELECTOR).set_params(n_jobs=2).set_callbacks(watch).fit(X, Y, groups=GROUPS)
    same_fit(model, clone(SELECTOR).fit(X, Y, groups=GROUPS))
    assert {tasks[2] for tasks in watch.ended if len(tasks) == 3} == {"parallel-fits"}


@pytest.mark.filterwarnings("ignore:The estimator .* does not support callbacks")
def test_callbacks_of_a_wrapper_reach_the_phases():
    rows = np.column_stack([GROUPS, X])
    pipeline = make_pipeline("passthrough", GaussianMean())
    for inside, task in ((clone(SELECTOR), "final-fits"), (pipeline, "fit-final-estimator")):
        watch = Watch()
        model = ClientColumn(inside, 0).set_callbacks(watch).fit(rows, Y)
        assert any(tasks[:3] == ("fit", "fit", task) for tasks in watch.ended)
        assert not hasattr(model, "_callback_fit_ctx")
        assert not hasattr(model.estimator_, "_parent_callback_ctx")


def test_callbacks_end_with_a_fit_that_fails():
    watch = Watch()
    with pytest.raises(ValueError, match="failed in one of the folds"):
        clone(SELECTOR).set_callbacks(watch).fit(np.full((120, 2), np.nan), Y, groups=GROUPS)
    assert watch.ended[-1:] == ["fit"]


def test_a_progress_bar(capsys):
    pytest.importorskip("rich")
    clone(SELECTOR).set_callbacks(ProgressBar()).fit(X, Y, groups=GROUPS)
    assert "final-fits" in capsys.readouterr().out
