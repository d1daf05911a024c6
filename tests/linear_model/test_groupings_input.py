"""Columns that group rows: how they are read, and what is refused."""

import copy
import math
import pickle
import warnings

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from scipy.sparse import csr_array
from sklearn.base import clone
from sklearn.compose import make_column_transformer
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from pfl_sklearn import (
    ClientColumn,
    PersonalizedLinearRegression,
    PersonalizedLogisticRegression,
    PersonalizedPoissonRegression,
    SingleClientWarning,
)
from pfl_sklearn.base import UnseenClientsWarning
from pfl_sklearn.linear_model._mixed._groupings import _fit
from pfl_sklearn.priors import GaussianMixturePrior, GaussianPrior, GroupingPrior, LaplacePrior
from pfl_sklearn.privacy import PrivacyLedger, privacy_of
from pfl_sklearn.statistics import ClientStatistics
from tests.helpers.interruption import states_at_lines

N, N_MOVIES = 240, 40
rng = np.random.default_rng(0)
USERS, MOVIES = rng.integers(12, size=N), np.tile(np.arange(N_MOVIES), N // N_MOVIES)
TITLES, AGE = np.array([f"movie {k:02d}" for k in MOVIES]), rng.normal(size=N)
STARS = AGE + rng.normal(size=12)[USERS] + rng.normal(size=N_MOVIES)[MOVIES] + rng.normal(size=N)
TABLE = pd.DataFrame({"age": AGE, "movie": TITLES})
BY_MOVIE = PersonalizedLinearRegression(random="intercept", groupings=["movie"])
BOUNDS = {"epsilon": 1.0, "feature_bound": 3.0, "target_bound": 5.0, "random_state": 0}
LINK_BOUNDS = {"epsilon": 1.0, "feature_bound": 3.0, "max_rows_per_client": 20}


def fit(X, groupings="auto", y=STARS, groups=USERS, **params):
    params = {"random": "intercept", "groupings": groupings, **params}
    return PersonalizedLinearRegression(**params).fit(X, y, groups=groups)


def with_movies(values):
    return TABLE.assign(movie=values)


@pytest.fixture(scope="module")
def fitted():
    return fit(TABLE)


# Reading ------------------------------------------------------------------------------------------

POLARS = pl.DataFrame({"age": AGE, "movie": TITLES})
ENUM = pl.Enum(sorted(set(TITLES)))
ARROW = pa.table({"age": AGE, "movie": TITLES})
CODED = pa.table({"age": AGE, "movie": pa.array(TITLES).dictionary_encode()})
CONTAINERS = {
    "objects": (with_movies(TITLES.astype(object)), "auto"),
    "category": (with_movies(pd.Categorical(TITLES)), "auto"),
    "polars": (POLARS, "auto"),
    "polars categorical": (POLARS.with_columns(pl.col("movie").cast(pl.Categorical)), "auto"),
    "polars enum": (POLARS.with_columns(pl.col("movie").cast(ENUM)), "auto"),
    "pyarrow": (ARROW, "auto"),
    "pyarrow dictionary": (CODED, "auto"),
    "position": (TABLE, 1),
    "array of objects": (np.column_stack([AGE.astype(object), TITLES]), [1]),
    "array of floats": (np.column_stack([AGE, MOVIES]), [1]),
    "lists": ([list(row) for row in zip(AGE, TITLES, strict=True)], [1]),
    "integers": (with_movies(MOVIES), "movie"),
    "Int64": (with_movies(pd.array(MOVIES, dtype="Int64")), "movie"),
    "fractions": (with_movies(MOVIES / 7), ("movie",)),
}


@pytest.mark.parametrize(("X", "groupings"), CONTAINERS.values(), ids=CONTAINERS)
def test_every_container_gives_the_same_fit(fitted, X, groupings):
    model = fit(X, groupings)
    np.testing.assert_array_equal(model.intercept_, fitted.intercept_)
    expected = fitted.predict(TABLE, groups=USERS)
    np.testing.assert_array_equal(model.predict(X, groups=USERS), expected)
    assert len(model.levels_[next(iter(model.groupings_))]) == N_MOVIES


def test_names_and_positions_lead_to_names(fitted):
    for groupings in ([1], {"movie": GroupingPrior()}, np.array(["movie"])):
        assert list(fit(TABLE, groupings).groupings_) == list(fitted.levels_) == ["movie"]


@pytest.mark.parametrize("labels", [[2, 0, 1], [1, 2, 0], [0, 1, 2]], ids=str)
def test_integer_labels_are_names_and_not_positions(fitted, labels):
    X = TABLE.assign(movie=MOVIES, kind=MOVIES % 3).set_axis(labels, axis=1)
    model = fit(X, [labels[1], labels[2]])
    assert [len(levels) for levels in model.levels_.values()] == [N_MOVIES, 3]
    named = X.set_axis(["age", "movie", "kind"], axis=1)
    expected = fit(named, ["movie", "kind"])
    np.testing.assert_array_equal(model.coef_, expected.coef_)
    np.testing.assert_array_equal(
        model.predict(X, groups=USERS), expected.predict(named, groups=USERS)
    )


def test_one_coefficient_varies_by_its_index():
    models = [fit(TABLE, {"movie": GroupingPrior(random)}) for random in (0, [0], "age")]
    for model in models[:2]:
        np.testing.assert_array_equal(model._levels[0].effects, models[2]._levels[0].effects)


@pytest.mark.parametrize("values", [MOVIES > 20, MOVIES % 7 - 3.5], ids=["booleans", "floats"])
def test_named_columns_group_by_value(values):
    model = fit(with_movies(values), "movie")
    np.testing.assert_array_equal(model.levels_["movie"], np.unique(values))


def test_named_strings_may_read_as_numbers():
    model = fit(with_movies(NUMBERS), "movie")
    np.testing.assert_array_equal(model.levels_["movie"], np.unique(NUMBERS))


def test_auto_takes_many_levels_with_two_rows_each():
    many, few = [f"m{k}" for k in np.arange(N) % 120], [f"m{k}" for k in np.arange(N) % 121]
    for values in (many, TITLES.astype("U8")[MOVIES % 11]):
        assert list(fit(with_movies(values)).levels_) == ["movie"]
    for values in (few, TITLES.astype("U8")[MOVIES % 10]):
        with pytest.raises(ValueError, match=r"'movie' of X holds strings.*TableEncoder"):
            fit(with_movies(values))
    # Objects that are numbers are numbers, and so are integers.
    for dtype in (object, int):
        assert fit(with_movies(MOVIES.astype(dtype))).levels_ == {}


def test_rows_without_weight_are_absent(fitted):
    extra = pd.DataFrame({"age": np.zeros(300), "movie": [f"new {k}" for k in range(300)]})
    weights = np.repeat([1.0, 0.0], [N, 300])
    X, y = pd.concat([TABLE, extra]), np.append(STARS, np.ones(300))
    model = clone(BY_MOVIE).set_params(groupings="auto")
    model.fit(X, y, groups=np.append(USERS, np.arange(300)), sample_weight=weights)
    np.testing.assert_array_equal(model.levels_["movie"], fitted.levels_["movie"])
    np.testing.assert_allclose(model.intercept_, fitted.intercept_, rtol=1e-12)


def test_unknown_levels_and_missing_values_have_the_variance_of_a_level(fitted):
    known = TABLE[:1]
    for value in ("new", None):
        mean, std = fitted.predict(known.assign(movie=[value]), groups=USERS[:1], return_std=True)
        effect = fitted._levels[0].effects[fitted.levels_["movie"] == TITLES[0]][0, 0]
        np.testing.assert_allclose(mean, fitted.predict(known, groups=USERS[:1]) - effect)
        assert std**2 > fitted.groupings_["movie"].covariance[0, 0]


def test_missing_values_in_fit_have_no_effect():
    missing = np.arange(N) % 5 == 0
    tables = [
        with_movies(np.where(missing, None, TITLES)),
        with_movies(np.where(missing, np.nan, MOVIES)),
    ]
    models = [fit(X, "movie") for X in tables]
    np.testing.assert_array_equal(models[0].intercept_, models[1].intercept_)
    assert models[0]._levels[0].n_rows.sum() == N - missing.sum()


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ("one", "it has 1 level"),
        (None, "it has no level"),
        (np.array([f"of {k}" for k in USERS]), "its levels are the clients"),
    ],
    ids=["one level", "no level", "clients"],
)
def test_a_column_without_effects_is_left_out_for_good(values, reason):
    X = with_movies(values)
    with pytest.warns(UserWarning, match=f"column 'movie' is left out, because {reason}"):
        model = fit(X, "movie")
    plain = fit(TABLE[["age"]])
    assert model.levels_ == {}
    assert not hasattr(model, "groupings_")
    np.testing.assert_array_equal(
        model.predict(TABLE, groups=USERS), plain.predict(TABLE[["age"]], groups=USERS)
    )


def test_one_client_has_no_variance_between_clients():
    with pytest.warns(SingleClientWarning):
        model = clone(BY_MOVIE).fit(TABLE, STARS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mean, std = model.predict(TABLE, return_std=True)
    assert np.corrcoef(mean, STARS)[0, 1] > 0.7
    assert (std > 0).all()


@pytest.mark.parametrize("n_features", [29, 40])
def test_as_many_features_as_rows_fit_exactly(n_features):
    noise = np.random.default_rng(1).normal(size=(30, n_features))
    X = pd.DataFrame(noise).add_prefix("x").assign(movie=MOVIES[:30] % 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = fit(X, "movie", STARS[:30], USERS[:30])
    assert any("fit all 30 rows exactly" in str(each.message) for each in caught)
    np.testing.assert_allclose(model.predict(X, groups=USERS[:30]), STARS[:30], atol=1e-6)


# Refusals -----------------------------------------------------------------------------------------

NUMBERS, DATES = MOVIES.astype(str), [f"2024-01-{k % 31 + 1:02d}" for k in range(N)]
DAYS = pd.to_datetime("2024-01-01") + pd.to_timedelta(MOVIES, "D")
SLOPES = GroupingPrior(["intercept", "age"])
REFUSED = {
    "unknown": (TABLE, ["state"], "groupings names 'state', which is no column of X.*'movie'"),
    "out of range": (TABLE, [2], "names 2, which is no column"),
    "list in a list": (TABLE, [["movie"]], r"names or indices of columns; got \['movie'\]"),
    "mask": (TABLE, [False, True], "names False"),
    "array": (np.zeros((N, 2)), ["movie"], "names 'movie'.*2 columns and no names"),
    "prefix": (TABLE.add_prefix("text__"), ["movie"], "'movie'.*calls it 'text__movie'"),
    "twice": (TABLE, ["movie", "movie"], "names 'movie' twice"),
    "name and index": (TABLE, ["movie", 1], "twice"),
    "two of a name": (TABLE.set_axis(["movie", "movie"], axis=1), "auto", "2 columns.*'movie'"),
    "no prior": (TABLE, {"movie": "diag"}, "GroupingPrior for 'movie'; got 'diag'"),
    "bad prior": (TABLE, {"movie": GroupingPrior(covariance_type="x")}, "covariance_type"),
    "infinite": (TABLE, {"movie": GroupingPrior(covariance=math.inf)}, "'movie'.*finite; got inf"),
    "random": (TABLE, {"movie": GroupingPrior("movie")}, r"'movie': random holds.*\['age'\]"),
    "numbers": (with_movies(NUMBERS), "auto", "strings that read as numbers, such as '0'"),
    "dates": (with_movies(DATES), "auto", "strings that read as dates, such as '2024-01-01'"),
    "named dates": (with_movies(DATES), "movie", "strings that read as dates"),
    "times": (with_movies(DAYS), "movie", "'movie' of X holds dates or times"),
    "categories": (with_movies(pd.Categorical(DAYS)), "movie", "holds dates or times"),
    "lists": (with_movies([[k] for k in MOVIES]), "movie", "holds mixed values.*cannot be levels"),
    "arrays": (POLARS.with_columns(movie=[[k] for k in MOVIES]), "movie", "cannot be levels"),
    "large floats": (with_movies(MOVIES + 2.0**60), "movie", r"floats beyond 2\*\*53"),
    "rows": (with_movies(np.arange(N)), "movie", rf"'movie' has as many levels as rows \({N}\)"),
    "copies": (
        TABLE.assign(title=MOVIES),
        ["movie", "title"],
        "'movie' and 'title' group the rows",
    ),
    "client": (TABLE.rename(columns={"movie": "client"}), "auto", "called 'client'.*rename"),
    "slopes": (with_movies("one"), {"movie": GroupingPrior("age")}, "'movie'.*at least 2 levels"),
    "full": (
        with_movies(MOVIES > 20).assign(z=AGE**2),
        {"movie": GroupingPrior("all", "full")},
        "2 levels and 3 coefficients",
    ),
    "one dimension": (AGE, [0], "Expected 2D array, got 1D"),
}


@pytest.mark.parametrize(("X", "groupings", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_group_is_refused_in_one_sentence(X, groupings, message):
    model = PersonalizedLinearRegression(random="intercept", groupings=groupings)
    with pytest.raises(ValueError, match=message) as caught:
        model.fit(X, STARS, groups=USERS)
    assert "\n" not in str(caught.value)
    with pytest.raises(NotFittedError):
        model.predict(X)


DESCENT = {
    "prior": GaussianPrior(covariance_type="spherical"),
    "solver": "gd",
    "variance_floor": 0.1,
}
PRINTED = {"prior": GaussianMixturePrior(), "method": "printed", "noise_variance": 1.0}


@pytest.mark.parametrize(
    ("covariance", "expected"),
    [
        (2.0, np.diag([2.0, 2.0])),
        ([2.0, 0.0], np.diag([2.0, 0.0])),
        ([[2.0, 1.0], [1.0, 3.0]], np.array([[2.0, 1.0], [1.0, 3.0]])),
        (None, None),
    ],
    ids=["number", "vector", "matrix", "unknown"],
)
def test_a_prior_of_levels_gives_its_covariance_as_a_matrix(covariance, expected):
    np.testing.assert_array_equal(
        GroupingPrior(covariance=covariance).known_covariance(2), expected
    )


@pytest.mark.parametrize("covariance", [-1.0, [1.0, math.inf], [[1.0, 2.0], [2.0, 1.0]], [1.0] * 3])
def test_a_prior_of_levels_refuses_what_is_no_covariance(covariance):
    with pytest.raises(ValueError, match=r"^covariance of GroupingPrior"):
        GroupingPrior(covariance=covariance).known_covariance(2)


def test_a_categorical_declares_labels():
    model = fit(with_movies(pd.Categorical(NUMBERS)))
    assert set(model.levels_["movie"]) == set(NUMBERS)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"prior": LaplacePrior()}, "GaussianPrior.*got LaplacePrior"),
        ({"prior": "discrete"}, "GaussianPrior.*got DiscretePrior"),
        ({"prior": GaussianPrior(covariance_type="low_rank")}, "not of low rank"),
        ({"prior": GaussianPrior(covariance=math.inf)}, "finite variances; got covariance=inf"),
        ({**DESCENT, "random": "all"}, "solver='gd'"),
        ({**PRINTED, "random": "all"}, "got GaussianMixturePrior"),
    ],
    ids=["laplace", "discrete", "low rank", "infinite", "gradient descent", "printed"],
)
def test_fits_that_take_no_groupings(params, message):
    with pytest.raises(ValueError, match=f"groupings .*{message}"):
        fit(TABLE, **params)
    assert fit(TABLE[["age"]], **params).levels_ == {}  # there "auto" finds none


def test_sparse_tables_and_clients_of_one_row_are_refused():
    with pytest.raises(TypeError, match="dense X; got a sparse csr_array"):
        fit(csr_array(np.column_stack([AGE, MOVIES])), [1])
    with pytest.raises(ValueError, match=f"each of the {N} clients has one row"):
        fit(TABLE, groups=np.arange(N))


def test_more_effects_than_memory(monkeypatch):
    monkeypatch.setattr(_fit, "MOST_DENSE", N_MOVIES - 1)
    monkeypatch.setattr(_fit, "_BYTES_PER_EFFECT", 2**50)
    message = r"by 'movie' have 40 effects.* about \d+ GB of memory; this machine has \d+ GB"
    with pytest.raises(ValueError, match=message):
        fit(TABLE)


@pytest.mark.parametrize(
    ("X", "message"),
    [
        (TABLE[["age"]], "X lacks column 'movie', which grouped the rows in fit"),
        (with_movies(MOVIES), "'movie' holds number ids .such as 0.*string ids"),
        (with_movies(DAYS), "'movie' of X holds dates"),
        (TABLE.assign(age=np.where(AGE > 0, AGE, np.nan)), "'age' of X has missing values"),
    ],
)
def test_predict_refuses_other_columns(fitted, X, message):
    with pytest.raises(ValueError, match=message):
        fitted.predict(X, groups=USERS)


# Privacy ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "estimator",
    [
        PersonalizedLinearRegression(**BOUNDS),
        PersonalizedLogisticRegression(**LINK_BOUNDS),
        PersonalizedPoissonRegression(rate_range=(0.1, 2.0), **LINK_BOUNDS),
    ],
)
def test_private_fits_refuse_groupings_before_they_charge_or_read(estimator, tmp_path):
    ledger = PrivacyLedger(tmp_path / "ledger.jsonl")
    unread = with_movies(None).assign(age=object())  # whose values no check would pass
    model = clone(estimator).set_params(groupings=["movie"], ledger=ledger)
    with pytest.raises(ValueError, match=r"groupings=.*finite epsilon.*two units"):
        model.fit(unread, STARS, groups=USERS)
    assert not ledger.entries


def test_private_fits_choose_no_columns_by_their_values():
    with pytest.raises(ValueError, match=r"'movie' of X holds strings.*TableEncoder"):
        fit(TABLE, **BOUNDS)


@pytest.mark.parametrize("method", ["fit_statistics", "partial_fit"])
def test_statistics_know_no_levels(method):
    rows = (TABLE[["age"]], STARS)
    if method == "fit_statistics":
        rows = (ClientStatistics.from_rows(*rows, groups=USERS),)
    more = {} if method == "fit_statistics" else {"groups": USERS}
    with pytest.raises(ValueError, match=r"groupings=\['movie'\] needs the rows at once"):
        getattr(clone(BY_MOVIE), method)(*rows, **more)
    model = getattr(PersonalizedLinearRegression(random="intercept"), method)(*rows, **more)
    assert model.levels_ == {}


def test_the_report_says_that_rows_belong_to_two_units(fitted):
    report = privacy_of(fitted)
    assert math.isinf(report.epsilon)
    assert "a client and a level of 'movie'" in " ".join(report.assumptions)
    assert "levels" in str(report)
    assert not fit(TABLE[["age"]]).privacy_.assumptions
    with pytest.raises(ValueError, match=r"release.*groupings_.*epsilon is infinite"):
        fitted.release()


def test_the_report_says_what_a_client_learns_of_levels(fitted):
    own = fitted.for_client(3)
    assert own._levels[0].n_rows.sum() == N
    errors = own._posterior_of_levels.posterior.plug_in.inverse_root[:N_MOVIES]
    assert np.count_nonzero(errors @ errors.T) > N_MOVIES
    note = " ".join(privacy_of(own).assumptions)
    assert "numbers of rows" in note
    assert "joint errors" in note


# Copies and refits --------------------------------------------------------------------------------


def test_models_of_a_client_keep_the_levels(fitted):
    rows = USERS == 3
    expected = fitted.predict(TABLE[rows], groups=USERS[rows], return_std=True)
    for model in (fitted, pickle.loads(pickle.dumps(fitted)), copy.deepcopy(fitted)):
        own = model.for_client(3)
        np.testing.assert_allclose(own.predict(TABLE[rows], return_std=True), expected, rtol=1e-12)
        assert own.groupings_["movie"].covariance == fitted.groupings_["movie"].covariance
        lower, upper = own.predict_interval(TABLE[rows])
        np.testing.assert_allclose((lower + upper) / 2, expected[0])


def test_models_of_a_client_hold_no_views_of_the_others(fitted):
    own = fitted.for_client(3)
    for posterior in (own._posterior_of_levels.posterior, own._errors.averaged):
        for array in (posterior.plug_in.whitening, posterior.coefficients):
            assert array.size == 0
            assert array.base is None or array.base.size == 0


def test_a_population_model_knows_levels_and_no_clients(fitted):
    model = fitted._population_copy()
    assert not hasattr(model, "clients_")
    with pytest.warns(UnseenClientsWarning):
        expected = fitted.predict(TABLE, groups=USERS + 100, return_std=True)
    np.testing.assert_allclose(model.predict(TABLE, return_std=True), expected, rtol=1e-12)


def test_a_refit_forgets_groupings_and_a_failed_one_keeps_them(fitted):
    model = copy.deepcopy(fitted)
    before = pickle.dumps(vars(model))
    for X, error in [(with_movies(DAYS), "dates"), (TABLE.assign(age=np.nan), "missing")]:
        with pytest.raises(ValueError, match=error):
            model.set_params(groupings="movie").fit(X, STARS, groups=USERS)
    with pytest.raises(UserWarning, match="left out"):  # warnings are errors here
        model.fit(with_movies("one"), STARS, groups=USERS)
    assert pickle.dumps(vars(model.set_params(groupings="auto"))) == before
    model.fit(TABLE[["age"]], STARS, groups=USERS)
    plain = fit(TABLE[["age"]])
    assert vars(model).keys() == vars(plain).keys()
    assert model.levels_ == {}


def test_an_interrupted_refit_leaves_one_fit_or_the_other(fitted):
    model = copy.deepcopy(fitted)
    states = states_at_lines(model, lambda: model.fit(TABLE[["age"]], STARS, groups=USERS))
    assert ["groupings_" in state for state in states] == [True, False]


# Tools --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_searches_try_whole_values():
    table = TABLE.assign(user=USERS)
    values = ["movie", {"movie": GroupingPrior(covariance=1e-6)}, {"movie": SLOPES}]
    model = ClientColumn(make_pipeline(clone(BY_MOVIE)), "user")
    grid = {"estimator__personalizedlinearregression__groupings": values}
    search = GridSearchCV(model, grid, cv=2, error_score="raise").fit(table, STARS)
    scores = search.cv_results_["mean_test_score"]
    assert scores[0] > scores[1] + 0.1
    assert (cross_validate(search.best_estimator_, table, STARS, cv=2)["test_score"] > 0.2).all()
    with pytest.raises(ValueError, match=r"groupings__.* cannot be set"):
        clone(BY_MOVIE).set_params(groupings__random="age")


def test_steps_may_rename_columns():
    steps = make_column_transformer((StandardScaler(), ["age"]), remainder="passthrough")
    model = make_pipeline(steps.set_output(transform="pandas"), clone(BY_MOVIE))
    with pytest.raises(ValueError, match="calls it 'remainder__movie'"):
        ClientColumn(model, "user").fit(TABLE.assign(user=USERS), STARS)
