"""Fits that a search scores or chooses: their reports say what no epsilon covers."""

import dataclasses
import math
import pickle
import warnings

import pytest
import sklearn
from joblib import parallel_config
from sklearn.base import clone
from sklearn.ensemble import BaggingRegressor
from sklearn.experimental import enable_halving_search_cv  # noqa: F401
from sklearn.model_selection import (
    FixedThresholdClassifier,
    GridSearchCV,
    HalvingGridSearchCV,
    RandomizedSearchCV,
    cross_validate,
)
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

from pfl_sklearn import (
    BernoulliMean,
    ClientColumn,
    GaussianMean,
    PersonalizedLinearRegression,
    PPSGDRegressor,
    PrivacyWarning,
    privacy_of,
)
from pfl_sklearn.metrics import ClientScorer
from pfl_sklearn.model_selection import ClientKFold, PrivateSelectCV
from pfl_sklearn.priors import GaussianPrior
from pfl_sklearn.privacy import PrivacyReport
from pfl_sklearn.privacy._report import inherit_warnings
from tests.helpers.private_searches import FOLDS, GROUPS, MEAN, TABLE, X, Y, column, fitted, grid
from tests.helpers.slow import slow

CHOSEN = "A search chose the parameters of this fit by scores without noise"
SCORED = "A search scored this fit without noise"
ROUNDS = PPSGDRegressor(n_rounds=4, epsilon=1.0, clip_norm=1.0, learning_rate=0.1)
KNOWN = GaussianPrior(mean=0.0, covariance=1.0)
LABELS = (Y > 0).astype(int)
TWICE = {"epsilon": 1.0, "expected_trials": 2}
OPTIONS = {**FOLDS, "random_state": 0}


def caveats(report):
    """Which of the two caveats a report holds."""
    return [name for name in (CHOSEN, SCORED) if any(name in text for text in report.warnings)]


def quietly(function, *args, **params):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        return function(*args, **params)


# The model that a search chose.


@pytest.mark.slow
def test_the_chosen_model_says_so():
    with parallel_config(backend="loky", n_jobs=2):
        best = fitted(grid()).best_estimator_
    report = best.privacy_
    assert report.epsilon == 1.0
    assert caveats(report) == [CHOSEN]
    assert "PrivateSelectCV" in report.warnings[-1]
    assert PrivacyReport.from_dict(report.to_dict()) == report


@pytest.mark.parametrize(
    "search",
    [
        GridSearchCV(column(), {}, **FOLDS),
        RandomizedSearchCV(column(), {"estimator__clip_norm": [1.0, 2.0]}, n_iter=2, **OPTIONS),
        HalvingGridSearchCV(column(), {"estimator__clip_norm": [1.0, 2.0]}, factor=2, **OPTIONS),
        GridSearchCV(make_pipeline(FunctionTransformer(), column()), {}, **FOLDS),
        column(grid()),
        GridSearchCV(GridSearchCV(column(), {}, **FOLDS), {}, **FOLDS),
    ],
    ids=["grid", "random", "halving", "pipeline", "around", "nested"],
)
def test_as_a_whole_the_chosen_model_leaks_like_its_search(search):
    found = fitted(search, data=TABLE, groups=None)
    search_itself = privacy_of(found)
    while not isinstance(found, GaussianMean):
        leaks = privacy_of(found)
        assert leaks.epsilon == math.inf
        assert caveats(leaks) == [CHOSEN]
        assert leaks.released == ()
        assert len(leaks.warnings) == len(set(leaks.warnings))
        assert caveats(getattr(found, "privacy_", leaks)) == [CHOSEN]
        found = next(
            getattr(found, name)
            for name in ("best_estimator_", "estimator_", "_final_estimator")
            if hasattr(found, name)
        )
    assert (found.privacy_.epsilon, privacy_of(found).epsilon) == (1.0, math.inf)
    assert "cv_results_" in search_itself.warnings[-1]
    for again in (pickle.loads(pickle.dumps(found)), found.release(), found.for_client(3)):
        assert (again.privacy_.epsilon, caveats(again.privacy_)) == (1.0, [CHOSEN])
        assert privacy_of(again).epsilon == math.inf


EARLIER = "A search chose the parameters of this fit in words of an earlier version."


def test_models_stored_with_other_words_are_still_chosen_ones():
    best = fitted(grid()).best_estimator_
    report = dataclasses.replace(best.privacy_, warnings=(EARLIER,))
    best._set_fitted({"privacy_": report}, dropped=())
    assert privacy_of(best).epsilon == math.inf
    fresh = dataclasses.replace(best.privacy_, warnings=())
    assert inherit_warnings(best.privacy_, fresh).warnings == (EARLIER,)


def test_a_chosen_model_that_releases_nothing_was_chosen_nevertheless():
    known = MEAN.__sklearn_clone__().set_params(prior=KNOWN)
    best = fitted(grid(known)).best_estimator_
    assert (best.privacy_.epsilon, caveats(best.privacy_)) == (0.0, [CHOSEN])
    assert privacy_of(best).epsilon == math.inf


LINE = PersonalizedLinearRegression(
    GaussianPrior(covariance=1.0),
    noise_variance=1.0,
    epsilon=1.0,
    feature_bound=3.0,
    target_bound=3.0,
)


@pytest.mark.parametrize(
    ("model", "y"),
    [
        (ROUNDS, Y),
        (ROUNDS.__sklearn_clone__().set_params(alpha=0.0), Y),
        (LINE, Y),
        (BernoulliMean(epsilon=1.0, mechanism="two_bit"), LABELS),
        (PrivateSelectCV(MEAN, {"clip_norm": [1.0]}, holdout=(X, Y), **TWICE), Y),
        (PrivateSelectCV(column(), {}, client_column=0, holdout=(TABLE, Y), **TWICE), Y),
    ],
    ids=["rounds", "local rounds", "moments", "reports", "selection", "selection in a column"],
)
def test_every_private_estimator_says_so(model, y):
    in_column = not (isinstance(model, PrivateSelectCV) and model.client_column == 0)
    model = ClientColumn(model, 0) if in_column else model
    search = GridSearchCV(model, {}, cv=FOLDS["cv"], scoring="neg_mean_squared_error")
    best = quietly(search.fit, TABLE, y).best_estimator_
    inner = best.estimator_ if in_column else best
    assert (inner.privacy_.epsilon <= 1.0, caveats(inner.privacy_)) == (True, [CHOSEN])
    assert privacy_of(best).epsilon == math.inf


def test_rounds_that_go_on_from_a_chosen_model_were_chosen_too():
    search = GridSearchCV(
        ROUNDS, {"alpha": [0.1]}, cv=ClientKFold(2), scoring=ClientScorer("neg_mean_squared_error")
    )
    best = fitted(search).best_estimator_
    for more in (
        lambda model: model.partial_fit(X, Y, groups=GROUPS),
        lambda model: model.set_params(warm_start=True, n_rounds=60).fit(X, Y, groups=GROUPS),
    ):
        quietly(more, best)
        assert (math.isfinite(best.privacy_.epsilon), caveats(best.privacy_)) == (True, [CHOSEN])
        assert privacy_of(best).epsilon == math.inf
    best.set_params(warm_start=False).fit(X, Y, groups=GROUPS)
    assert best.privacy_.warnings == ()
    assert privacy_of(best).epsilon == pytest.approx(1.0)


# Models that were fitted to be scored.


class Seen:
    """Score that notes the reports of what it scores."""

    def __init__(self):
        self.reports = []

    def __call__(self, model, X, y):
        self.reports.append(privacy_of(model))
        return 0.0


@pytest.mark.parametrize("model", [column(), make_pipeline(FunctionTransformer(), column())])
def test_models_that_a_search_scores_say_so(model):
    seen = Seen()
    search = GridSearchCV(model, {}, cv=FOLDS["cv"], scoring=seen, refit=False)
    assert warnings_of(search) == []
    assert [(each.epsilon, caveats(each)) for each in seen.reports] == [(1.0, [SCORED])] * 2


# The warning of the choice.


def warnings_of(search, data=TABLE, groups=None):
    """Privacy warnings of a search that is fitted right here."""
    with (
        sklearn.config_context(enable_metadata_routing=True),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        search.fit(data, Y, **({} if groups is None else {"groups": groups}))
    caught = [each for each in caught if issubclass(each.category, PrivacyWarning)]
    line = warnings_of.__code__.co_firstlineno + 7
    assert all((each.filename, each.lineno) == (__file__, line) for each in caught)
    return [str(each.message) for each in caught]


@pytest.mark.parametrize(
    ("search", "backend"),
    [
        (GridSearchCV(column(), {}, **FOLDS), "threading"),
        (column(grid()), "threading"),
        *slow(
            [
                (make_pipeline(FunctionTransformer(), column(grid())), "loky"),
                (
                    GridSearchCV(make_pipeline(FunctionTransformer(), column()), {}, **FOLDS),
                    "threading",
                ),
                (GridSearchCV(GridSearchCV(column(), {}, **FOLDS), {}, **FOLDS), "loky"),
            ]
        ),
    ],
    ids=["column", "around", "around in a pipeline", "pipeline", "nested"],
)
def test_a_search_warns_once_at_the_callers_line(search, backend):
    with parallel_config(backend=backend, n_jobs=2):
        (text,) = warnings_of(search)
    assert text.startswith(CHOSEN)
    for way_out in ("search_cost(search)", "PrivateSelectCV", "not the fits before it"):
        assert way_out in text


def test_the_chosen_fit_tells_of_its_other_weaknesses_too():
    (text,) = warnings_of(grid(MEAN.__sklearn_clone__().set_params(random_state=0)), X, GROUPS)
    assert text.startswith("random_state was given")
    assert CHOSEN in text


# What is neither.


def test_other_fits_say_nothing():
    alone = fitted(clone(MEAN))
    assert alone.privacy_.warnings == ()
    select = PrivateSelectCV(MEAN, {"clip_norm": [1.0, 2.0]}, holdout=(X, Y), **TWICE)
    for model in (fitted(select), fitted(make_pipeline(FunctionTransformer(), select))):
        assert (privacy_of(model).epsilon, privacy_of(model).warnings) == (1.0, ())
    bagged = quietly(BaggingRegressor(column(), n_estimators=1).fit, TABLE, Y)
    assert caveats(bagged.estimators_[0].estimator_.privacy_) == []
    threshold = FixedThresholdClassifier(
        ClientColumn(BernoulliMean(epsilon=1.0, mechanism="two_bit"), 0)
    )
    assert caveats(threshold.fit(TABLE, LABELS).estimator_.privacy_) == []


def test_without_privacy_there_is_nothing_to_add():
    best = fitted(grid(GaussianMean())).best_estimator_
    assert best.privacy_.warnings == ("epsilon=inf was asked for.",)


@pytest.mark.parametrize(
    "estimator", [GaussianMean(), MEAN.__sklearn_clone__().set_params(prior=KNOWN)]
)
def test_no_warning_where_nothing_is_spent(estimator):
    assert warnings_of(grid(estimator), X, GROUPS) == []


def test_no_warning_outside_a_search():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_pipeline(FunctionTransformer(), column()).fit(TABLE, Y)
        found = cross_validate(column(), TABLE, Y, return_estimator=True, **FOLDS)["estimator"]
    assert [caveats(privacy_of(model)) for model in found] == [[], []]  # it says nothing of itself
