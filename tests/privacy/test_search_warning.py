"""The warning of a search over private models: once, at the caller's line, whatever runs it."""

import warnings

import pytest
import sklearn
from joblib import parallel_config
from joblib.externals.loky import get_reusable_executor
from sklearn.ensemble import BaggingRegressor
from sklearn.experimental import enable_halving_search_cv  # noqa: F401
from sklearn.model_selection import (
    GridSearchCV,
    HalvingGridSearchCV,
    HalvingRandomSearchCV,
    LeaveOneOut,
    RandomizedSearchCV,
    cross_val_score,
    cross_validate,
)
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

from pfl_sklearn import ClientColumn, GaussianMean, PrivacyWarning
from pfl_sklearn.model_selection import ClientKFold, PrivateSelectCV
from pfl_sklearn.priors import GaussianPrior
from tests.helpers.private_searches import (
    FOLDS,
    GROUPS,
    MEAN,
    TABLE,
    X,
    Y,
    by_hand,
    column,
    fitted,
    grid,
)


def caught(search, **options):
    """Privacy warnings of a search."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        fitted(search, quiet=False, **options)
    return [str(one.message) for one in found if issubclass(one.category, PrivacyWarning)]


def one_warning(search, **options):
    found = caught(search, **options)
    assert len(found) == 1
    return found[0]


def test_a_search_warns_once_of_what_it_costs():
    text = one_warning(grid())
    assert "16 times" in text
    assert f"epsilon = {by_hand(16):.4g} at delta" in text
    for way_out in ("PrivateSelectCV", "search_cost", "ledger=", "not protected at all"):
        assert way_out in text
    seeded = caught(grid(MEAN.__sklearn_clone__().set_params(random_state=0)))[0]
    assert "epsilon = inf at delta" in seeded
    assert "random_state gives all of its fits the same noise" in seeded
    assert "15 times" in one_warning(grid(refit=False))
    assert "16 times" in one_warning(grid())  # every search by itself


@pytest.mark.parametrize("how", ["pipeline", "inside", "around", "column in a pipeline"])
def test_the_warning_passes_wrappers(how):
    pipeline = make_pipeline(FunctionTransformer(), MEAN)
    params = {"gaussianmean__clip_norm": [1.0, 2.0]}
    folds = ClientKFold(5, client_column=0, random_state=0)
    search, data, groups = {
        "pipeline": (grid(pipeline, params), X, GROUPS),
        "inside": (grid(ClientColumn(pipeline, 0), {}, cv=folds), TABLE, None),
        "around": (ClientColumn(grid(pipeline, params), 0), TABLE, None),
        "column in a pipeline": (
            grid(make_pipeline(FunctionTransformer(), ClientColumn(MEAN, 0)), {}, cv=folds),
            TABLE,
            None,
        ),
    }[how]
    assert "GridSearchCV fits this private GaussianMean" in one_warning(
        search, data=data, groups=groups
    )


def test_halving_and_nested_searches():
    halving = HalvingGridSearchCV(
        ClientColumn(MEAN, 0),
        {"estimator__clip_norm": [1.0, 2.0, 3.0, 4.0]},
        cv=3,
        scoring="neg_mean_squared_error",
        min_resources=60,
        factor=2,
    )
    assert "at least 13 times" in one_warning(halving, data=TABLE, groups=None)
    folds = ClientKFold(2, client_column=0, random_state=0)
    inner = GridSearchCV(ClientColumn(MEAN, 0), {}, cv=folds, scoring="r2")
    outer = GridSearchCV(inner, {"estimator__estimator__clip_norm": [1.0, 2.0]}, cv=folds)
    assert f"{3 * 5} times" in one_warning(outer, data=TABLE, groups=None)


@pytest.mark.parametrize(
    "estimator",
    [
        GaussianMean(),
        GaussianMean(
            GaussianPrior(mean=0.0, covariance=1.0), noise_variance=1.0, epsilon=1.0, clip_norm=1.0
        ),
    ],
    ids=["no privacy", "nothing is released"],
)
def test_no_warning_where_nothing_is_spent(estimator):
    assert caught(grid(estimator)) == []


def test_no_warning_outside_a_search():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MEAN.fit(X, Y, groups=GROUPS)
        make_pipeline(FunctionTransformer(), ClientColumn(MEAN, 0)).fit(TABLE, Y)
        cross_val_score(ClientColumn(MEAN, 0), TABLE, Y, cv=ClientKFold(2, client_column=0))


# One warning, whatever runs the fits.


@pytest.fixture
def standard_error(capfd):
    """What workers write to their standard error: the workers are new, so that it is seen."""
    get_reusable_executor().shutdown(wait=True)
    yield lambda: capfd.readouterr().err
    get_reusable_executor().shutdown(wait=True)


def recorded(search, X, y, **params):
    """Privacy warnings of a search that is fitted right here, and the line of the fit."""
    with (
        sklearn.config_context(enable_metadata_routing=True),
        warnings.catch_warnings(record=True) as found,
    ):
        warnings.simplefilter("always")
        search.fit(X, y, **params)
    line = recorded.__code__.co_firstlineno + 7
    return [one for one in found if issubclass(one.category, PrivacyWarning)], line


@pytest.mark.parametrize("refit", [True, False])
@pytest.mark.parametrize(
    "backend", ["sequential", "threading", pytest.param("loky", marks=pytest.mark.slow)]
)
def test_it_warns_the_caller_once_whatever_runs_the_fits(backend, refit, standard_error):
    with parallel_config(backend=backend, n_jobs=2):
        (found,), line = recorded(grid(refit=refit), X, Y, groups=GROUPS)
    assert f"{15 + refit} times" in str(found.message)
    assert (found.filename, found.lineno) == (__file__, line)
    assert "PrivacyWarning" not in standard_error()


@pytest.mark.parametrize("backend", ["threading", pytest.param("loky", marks=pytest.mark.slow)])
def test_nested_searches_warn_once_for_all(backend, standard_error):
    inner = GridSearchCV(column(), {}, **FOLDS)
    outer = GridSearchCV(inner, {"estimator__estimator__clip_norm": [1.0, 2.0]}, **FOLDS)
    with parallel_config(backend=backend, n_jobs=2):
        (found,), line = recorded(outer, TABLE, Y)
    assert f"{3 * 5} times" in str(found.message)
    assert (found.filename, found.lineno) == (__file__, line)
    assert "PrivacyWarning" not in standard_error()


def test_around_a_wrapper_it_is_the_callers_line_too():
    for search in (column(grid()), make_pipeline(FunctionTransformer(), column(grid()))):
        (found,), line = recorded(search, TABLE, Y)
        assert (found.filename, found.lineno) == (__file__, line)


def test_a_search_that_is_fitted_again_warns_again():
    search = grid()
    for _ in range(2):
        assert "16 times" in one_warning(search)


def test_it_comes_before_the_first_fit():
    """So a filter that makes it an error stops the search; it is no failed fit."""
    with (
        sklearn.config_context(enable_metadata_routing=True),
        warnings.catch_warnings(),
        pytest.raises(PrivacyWarning, match="16 times"),
    ):
        warnings.simplefilter("error")
        grid().fit(X, Y, groups=GROUPS)


def test_privacy_that_only_the_candidates_ask_for():
    """The search does not look at whether its own estimator could be fitted."""
    open_fit = GaussianMean(noise_variance=1.0)
    params = {"clip_norm": [3.0], "epsilon": [1.0, 1.0]}
    assert "11 times on the same clients. One fit spends epsilon = 1;" in one_warning(
        grid(open_fit, params)
    )
    with_refused = {"epsilon": [1.0], "clip_norm": [None, 3.0]}
    assert "epsilon = 1;" in one_warning(grid(open_fit, with_refused, error_score=0.0, refit=False))


def test_random_searches():
    draws = {"estimator__clip_norm": [1.0, 2.0, 3.0, 4.0]}
    options = {
        "cv": ClientKFold(5, client_column=0, random_state=0),
        "scoring": "r2",
        "random_state": 0,
    }
    random = RandomizedSearchCV(column(), draws, n_iter=3, **options)
    assert " 16 times" in one_warning(random, data=TABLE, groups=None)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        random.set_params(n_iter=10).fit(TABLE, Y)
    assert [" 21 times" in str(one.message) for one in found] == [True, False]
    assert "total space of parameters 4" in str(found[1].message)  # scikit-learn's own
    halving = HalvingRandomSearchCV(column(), draws, n_candidates=4, factor=2, **options)
    assert "at least 21 times" in one_warning(halving, data=TABLE, groups=None)


def test_an_inner_search_whose_splits_follow_from_the_data():
    inner = GridSearchCV(column(), {}, cv=LeaveOneOut(), scoring="neg_mean_squared_error")
    outer = GridSearchCV(inner, {}, **FOLDS)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        outer.fit(TABLE[:12], Y[:12])
    (text,) = [str(one.message) for one in found if "GridSearchCV fits" in str(one.message)]
    assert f"at least {3 * 2} times" in text


def test_cost_that_no_delta_is_left_for():
    select = PrivateSelectCV(
        MEAN, {"clip_norm": [1.0]}, epsilon=2.0, expected_trials=2, holdout=(X, Y)
    )
    text = one_warning(grid(select, {}, cv=ClientKFold(2, random_state=0)))
    assert "GridSearchCV fits this private PrivateSelectCV 3 times" in text
    assert "epsilon = inf at delta = 1e-05" in text
    assert "(their deltas add up to more)" in text


def test_clones_outside_a_search_are_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grid().__sklearn_clone__()
        MEAN.__sklearn_clone__()
        fitted(grid())  # which ignores its own warning
        grid().__sklearn_clone__()


def test_a_search_inside_a_validation_warns():
    """It is nobody's candidate, so it answers for itself, in every fold."""
    search = GridSearchCV(column(), {"estimator__clip_norm": [1.0]}, **FOLDS)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        cross_validate(search, TABLE, Y, cv=FOLDS["cv"], scoring="r2")
    assert ["3 times" in str(one.message) for one in found] == [True, True]
    assert all(one.filename == __file__ for one in found)


def test_what_others_fit_inside_a_search_is_not_counted():
    """How often bagging fits its estimator, nobody states."""
    bagging = BaggingRegressor(column(), n_estimators=2)
    search = GridSearchCV(bagging, {}, cv=2, scoring="neg_mean_squared_error")
    found = caught(search, data=TABLE, groups=None)
    assert not [text for text in found if "fits this private" in text]
