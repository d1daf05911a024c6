"""Fitted attributes are set in one step, and a report vouches for the values it was set with."""

import copy
import dataclasses
import json
import math
import pickle
import warnings
from itertools import cycle

import joblib
import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LinearRegression
from sklearn.pipeline import make_pipeline

from pfl_sklearn import ClientColumn, privacy_of
from pfl_sklearn.compose import (
    ClientAsFeature,
    ClientSelector,
    PersonalizedStackingRegressor,
    TableEncoder,
)
from pfl_sklearn.compose._stack.recent import RecentTargets
from pfl_sklearn.compose._stack.residual import ResidualRegressor
from pfl_sklearn.estimation import BernoulliMean, GaussianMean, PoissonMean
from pfl_sklearn.linear_model import (
    PersonalizedLinearRegression,
    PersonalizedLogisticRegression,
    PersonalizedPoissonRegression,
    PPSGDRegressor,
)
from pfl_sklearn.model_selection import PrivateSelectCV
from pfl_sklearn.priors import DirichletPrior
from pfl_sklearn.privacy import PrivacyReport
from pfl_sklearn.statistics import ClientStatistics
from tests.helpers.interruption import interrupt_at_line, states_at_lines

pytestmark = pytest.mark.filterwarnings("ignore::pfl_sklearn.PrivacyWarning")

BOUNDS = {"feature_bound": 2.0, "target_bound": 4.0}
NOISE = {"epsilon": 1.0, "delta": 1e-6, "random_state": 0}
LINE = PersonalizedLinearRegression(random="intercept", **BOUNDS, **NOISE)
MEAN = GaussianMean(noise_variance=1.0, clip_norm=3.0, **NOISE)
FOREIGN = r"privacy_ of this {}\b.* not the report of its fitted values"
rng = np.random.default_rng(0)
GROUPS = np.repeat(np.arange(20), 4)
X = rng.normal(size=(80, 2))
CENTRES = 0.5 * X[:, 0] + rng.normal(size=20)[GROUPS]
Y = CENTRES + 0.3 * rng.normal(size=80)
TARGETS = {
    LINE: Y,
    PersonalizedLogisticRegression(feature_bound=2.0, rows_cap=4, n_rounds=3, **NOISE): Y > 0,
    PersonalizedPoissonRegression(
        feature_bound=2.0, rows_cap=4, n_rounds=3, rate_range=(0.1, 10.0), **NOISE
    ): rng.poisson(np.exp(CENTRES)),
    MEAN: Y,
    BernoulliMean(**NOISE | {"delta": 0.0}): Y > 0,
    PoissonMean(cap=40, **NOISE | {"delta": 0.0}): rng.poisson(np.exp(CENTRES)),
}


def of_statistics(model, y):
    statistics = ClientStatistics.from_rows(X, y, groups=GROUPS, **BOUNDS)
    return model.fit_statistics(statistics)


def of_rows(model, y):
    return model.fit(X, y, groups=GROUPS)


def bits(model):
    """All that a released model holds, the report among it."""
    attributes = {name: getattr(model, name) for name in model._population_attributes}
    return joblib.hash([model.privacy_, model.predict(X, groups=GROUPS), *attributes.values()])


# Lines from the end of fit: what is computed last, and before and after the attributes are set.
PLACES = (1, 2, 3, 6, 12, 25, 60)


@pytest.mark.parametrize(
    ("estimator", "fit"),
    [*((one, of_rows) for one in TARGETS), (LINE, of_statistics), (MEAN, of_statistics)],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_no_exact_fit_is_released_under_an_earlier_report(estimator, fit):
    y = TARGETS[estimator]
    private = fit(clone(estimator), y)
    before = bits(private.release())
    exact = fit(clone(estimator).set_params(epsilon=math.inf), y)
    n_new = 0
    for place, error in zip(PLACES, cycle([KeyboardInterrupt, MemoryError]), strict=False):
        model = copy.deepcopy(private).set_params(epsilon=math.inf)
        fitted = dict(vars(model))

        def refit(model=model, fitted=fitted):
            model.__dict__ = dict(fitted)
            fit(model, y)

        interrupt_at_line(refit, place, error)
        if math.isinf(model.privacy_.epsilon):
            n_new += 1
            assert vars(model).keys() == vars(exact).keys()
            with pytest.raises(ValueError, match=r"release.*epsilon"):
                model.release()
        else:
            assert bits(model.release()) == before
            assert vars(model) == fitted
    assert 0 < n_new < len(PLACES)


def test_a_second_private_fit_is_not_released_under_the_report_of_the_first():
    first = of_rows(clone(LINE), Y)
    second = clone(LINE).set_params(epsilon=1000.0)
    model = copy.deepcopy(first).set_params(epsilon=1000.0)
    states = states_at_lines(model, lambda: of_rows(model, Y))
    assert [state["privacy_"].epsilon for state in states] == [1.0, 1000.0]
    assert bits(model.release()) == bits(of_rows(second, Y).release())


def frozen(model=LINE):
    return FrozenEstimator(of_rows(clone(model), Y))


def private_selector():
    prior = DirichletPrior([0.5, 0.5], 5.0)
    return ClientSelector([("a", frozen()), ("b", frozen())], prior=prior, cv=2)


def private_search():
    return PrivateSelectCV(
        GaussianMean(noise_variance=1.0, delta=1e-6, clip_norm=3.0),
        {"clip_norm": [1.0, 3.0]},
        epsilon=2.0,
        expected_trials=2,
        score_range=(-10.0, 0.0),
        random_state=0,
    )


def with_rows(model):
    return model.fit(X, Y, groups=GROUPS)


def with_column(model):
    return model.fit(np.column_stack([GROUPS, X]), Y)


def with_frame(model):
    return model.fit(pd.DataFrame(X, columns=["a", "b"]), Y, groups=GROUPS)


LINES = [("a", LinearRegression()), ("b", LinearRegression(fit_intercept=False))]


@pytest.mark.parametrize(
    ("make", "fit", "params"),
    [
        (private_selector, with_rows, {"estimators": LINES}),
        (private_search, with_rows, {"epsilon": math.inf}),
        (lambda: ClientColumn(MEAN, 0), with_column, {"estimator": GaussianMean()}),
        (lambda: ClientAsFeature(LinearRegression()), with_rows, {}),
        (lambda: RecentTargets(clone(LINE).set_params(epsilon=math.inf)), with_frame, {}),
        (
            lambda: ResidualRegressor(PersonalizedLinearRegression(), LinearRegression()),
            with_rows,
            {},
        ),
        (
            lambda: PersonalizedStackingRegressor([("line", LinearRegression())], cv=3),
            with_rows,
            {},
        ),
        (
            lambda: TableEncoder(levels={}, medians={}),
            lambda encoder: encoder.fit(pd.DataFrame(X, columns=["a", "b"])),
            {"levels": None, "medians": None},
        ),
    ],
    ids=[
        "ClientSelector",
        "PrivateSelectCV",
        "ClientColumn",
        "ClientAsFeature",
        "RecentTargets",
        "ResidualRegressor",
        "PersonalizedStackingRegressor",
        "TableEncoder",
    ],
)
def test_models_around_others_are_refitted_in_one_step(make, fit, params):
    model = fit(make()).set_params(**params)
    before = dict(vars(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        states = states_at_lines(model, lambda: fit(model))
    assert len(states) == 2
    assert states[0].items() <= before.items()
    assert all(vars(model)[name] is value for name, value in states[1].items())


# A report and its values -----------------------------------------------------------------------


def stored(model):
    return pickle.loads(pickle.dumps(model))


def stored_by_joblib(model, path):
    joblib.dump(model, path)
    return joblib.load(path)


@pytest.mark.parametrize("estimator", [*TARGETS, PPSGDRegressor(n_rounds=3, **NOISE)], ids=repr)
def test_copies_keep_the_report_of_their_values(estimator, tmp_path):
    model = of_rows(clone(estimator), TARGETS.get(estimator, Y))
    again = stored_by_joblib(model, tmp_path / "model")
    for one in (model, copy.copy(model), copy.deepcopy(model), stored(model), again):
        one.predict(X, groups=GROUPS)
        released, own = one.release(), one.for_client(3)
        for handed in (released, stored(released), released.release(), own, own.release()):
            assert handed.privacy_ == model.privacy_
            assert privacy_of(handed).epsilon == model.privacy_.epsilon
    report = PrivacyReport.from_dict(json.loads(model.privacy_.to_json()))
    model.privacy_ = report  # the same promise
    assert model.release().privacy_ == report


def check_refused(model, name):
    for act in (model.release, lambda: model.for_client(3), lambda: privacy_of(model)):
        with pytest.raises(ValueError, match=FOREIGN.format(name)):
            act()


@pytest.mark.parametrize("estimator", [*TARGETS, PPSGDRegressor(n_rounds=3, **NOISE)], ids=repr)
def test_a_report_of_another_fit_is_no_promise(estimator):
    y, name = TARGETS.get(estimator, Y), type(estimator).__name__
    private = of_rows(clone(estimator), y)
    exact = of_rows(clone(estimator).set_params(epsilon=math.inf), y)
    exact.privacy_ = private.privacy_
    check_refused(exact, name)
    check_refused(stored(exact), name)
    values = "_population" if hasattr(private, "_population") else private._population_attributes[0]
    other = copy.deepcopy(private)
    setattr(other, values, getattr(private, values) + 1e-12)
    check_refused(other, name)
    check_refused(stored(other), name)
    if hasattr(other, "personalize"):
        with pytest.raises(ValueError, match=FOREIGN.format(name)):
            other.personalize(X[:4], y[:4], groups=GROUPS[:4])
    claims = copy.deepcopy(private)
    claims.privacy_ = dataclasses.replace(private.privacy_, epsilon=0.5)
    check_refused(claims, name)


def test_a_report_around_a_model_is_of_that_model():
    exact = of_rows(clone(LINE).set_params(epsilon=math.inf), Y)
    selector = with_rows(private_selector())
    assert selector.release().release().privacy_.epsilon == privacy_of(selector).epsilon == 2.0
    assert selector.for_client(3).release().privacy_ == selector.privacy_
    selector.named_estimators_["a"] = exact
    check_refused(selector, "ClientSelector")
    search = with_rows(private_search())
    assert stored(search).release().privacy_.epsilon == privacy_of(stored(search)).epsilon == 2.0
    search.best_estimator_ = with_rows(GaussianMean(noise_variance=1.0))
    with pytest.raises(ValueError, match=FOREIGN.format("PrivateSelectCV")):
        privacy_of(search)
    column = with_column(ClientColumn(make_pipeline(MEAN), 0))
    column.estimator_[-1].population_mean_ = 0.0
    with pytest.raises(ValueError, match=FOREIGN.format("GaussianMean")):
        column.release()
