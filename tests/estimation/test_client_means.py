"""What estimators of one mean per client share."""

import numpy as np
import pytest

from pfl_sklearn.estimation import BernoulliMean, GaussianMean
from pfl_sklearn.online import CollaborativeMean

X, GROUPS = np.zeros((8, 2)), np.repeat(["a", "b", "c", "d"], 2)
Y = np.array([0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0])
every_mean = pytest.mark.parametrize("kind", [GaussianMean, BernoulliMean, CollaborativeMean])


@every_mean
@pytest.mark.parametrize("level", ["wide", None, 0.0, 1.0, np.nan])
def test_levels_that_are_no_probability_are_refused(kind, level):
    model = kind().fit(X, Y, groups=GROUPS)
    for method in (model.credible_interval, model.summary):
        with pytest.raises(ValueError, match=rf"level must be a number in \(0, 1\); got {level!r}"):
            method(level)


@every_mean
def test_a_fit_that_fails_at_the_end_leaves_the_last_one(kind, monkeypatch):
    model = kind().fit(X, Y, groups=GROUPS)
    before = dict(vars(model))

    def interrupt(self, *args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(model), "_set_fitted", interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.fit(X[:6, :1], Y[:6], groups=GROUPS[:6])
    assert vars(model) == before


def test_another_prior_leaves_nothing_of_the_last_one():
    model = GaussianMean("discrete").fit(X, Y + np.repeat([0, 9], 4), groups=GROUPS)
    assert hasattr(model, "responsibilities_")
    model.set_params(prior="gaussian").fit(X, Y, groups=GROUPS)
    assert not hasattr(model, "responsibilities_")
    fresh = GaussianMean().fit(X, Y, groups=GROUPS)
    assert vars(model).keys() == vars(fresh).keys()
