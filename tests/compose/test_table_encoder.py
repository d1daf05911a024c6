"""TableEncoder: strings, booleans and missing values as numbers, under the same names."""

import datetime
import math
import re
import warnings

import narwhals as nw
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st
from numpy.testing import assert_allclose
from sklearn.base import clone
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

from pfl_sklearn import (
    ClientColumn,
    PersonalizedLinearRegression,
    PersonalizedLogisticRegression,
    PersonalizedPoissonRegression,
    PPSGDClassifier,
    privacy_of,
)
from pfl_sklearn.compose import PersonalizedStackingRegressor, TableEncoder
from pfl_sklearn.priors import GaussianPrior

RANDOM = ["intercept", "experience"]
SPECIFIED = {"levels": {"degree": ["BA", "MA", "PhD"]}, "medians": {"age": 40.0}}


def people(n_rows=240, seed=0):
    """Rows of six counties with strings, booleans and missing values, and their incomes."""
    rng = np.random.default_rng(seed)
    table = pd.DataFrame(
        {
            "county": rng.choice(list("abcdef"), n_rows),
            "experience": rng.normal(size=n_rows),
            "degree": rng.choice(["BA", "MA", "PhD"], n_rows),
            "married": rng.random(n_rows) < 0.5,
            "age": np.where(rng.random(n_rows) < 0.1, np.nan, rng.normal(40, 9, n_rows)),
        }
    )
    county = table["county"].map(dict(zip("abcdef", rng.normal(size=6), strict=True)))
    slopes = 1 + county * 0.5
    y = county + slopes * table["experience"] + (table["degree"] == "MA") + rng.normal(size=n_rows)
    return table, y


@parametrize_with_checks([TableEncoder(min_rows=1, unsupported="drop", many_levels="pass")])
def test_sklearn_checks(estimator, check):
    check(estimator)


# Columns whose levels are the clients -----------------------------------------------------------


def clinics():
    """Rows of eight clinics: names, codes and numbers of them, countries, and an income of each."""
    clinic = np.random.default_rng(0).permutation(np.repeat(np.arange(8), 30))
    names = np.array([f"clinic {k}" for k in range(8)])
    table = pd.DataFrame(
        {
            "clinic": names[clinic],
            "code": pd.Categorical(names[::-1][clinic]),
            "country": np.array(["uk", "fr"])[clinic % 2],
            "number": 7 * clinic,
            "income": np.sqrt(1.0 + clinic),
        }
    )
    return table, clinic


@pytest.mark.parametrize("many_levels", ["merge", "pass"])
@pytest.mark.parametrize("frame", [pd.DataFrame, pl.DataFrame, pa.Table.from_pandas])
def test_columns_whose_levels_are_the_clients(frame, many_levels):
    table, clinic = clinics()
    encoder = TableEncoder(many_levels=many_levels, max_levels=5)
    with pytest.warns(UserWarning, match=r"'clinic' \(its levels are the clients\); 'code' \(its"):
        encoder.fit(frame(table), groups=clinic)
    assert list(encoder.dropped_) == ["clinic", "code"]
    # Numbers with a value for each client may be predictors.
    names = ["country_uk", "number", "income"]
    assert list(encoder.get_feature_names_out()) == names
    assert encoder.transform(frame(table)).shape == (240, 3)


def test_columns_that_only_nearly_have_the_clients_as_levels():
    table, clinic = clinics()
    moved = table.assign(clinic=np.where(np.arange(len(table)) < 200, table["clinic"], "clinic 0"))
    for rows in (moved, table.assign(clinic=table["clinic"].where(clinic % 2 == 0))):
        with pytest.warns(UserWarning, match=r"columns of X: 'code' \(its levels"):
            TableEncoder().fit(rows, groups=clinic)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encoder = TableEncoder().fit(table, groups=np.arange(len(table)) % 7)
        assert encoder.dropped_ == {}
        assert TableEncoder().fit(table).dropped_ == {}


def test_dates_of_clients_stay_as_numbers():
    days = np.repeat([f"2024-01-{k:02d}" for k in range(1, 13)], 20)
    for dates in (days, pd.to_datetime(days)):
        encoder = TableEncoder().fit(pd.DataFrame({"day": dates}), groups=days)
        assert list(encoder.get_feature_names_out()) == ["day"]


def test_given_levels_stay_whoever_the_clients_are():
    table, clinic = clinics()
    levels = {"clinic": [f"clinic {k}" for k in range(8)]}
    with pytest.warns(UserWarning, match="'code'"):
        assert list(TableEncoder(levels=levels).fit(table, groups=clinic).dropped_) == ["code"]
    rows = table[["clinic", "income"]]
    specified = TableEncoder(levels=levels, medians={})
    encoded = clone(specified).fit(rows, groups=clinic).transform(rows)
    pd.testing.assert_frame_equal(encoded, specified.fit(rows).transform(rows))


def test_a_client_column_hands_the_ids_on():
    table, clinic = clinics()
    y = np.random.default_rng(1).normal(size=len(table)) + clinic
    line = PersonalizedLinearRegression(random="intercept")
    model = ClientColumn(make_pipeline(TableEncoder(), line), "clinic")
    table = table.drop(columns="income")
    with pytest.warns(UserWarning, match=r"'code' \(its levels are the clients\)"):
        model.fit(table, y)
    plain = ClientColumn(make_pipeline(TableEncoder(), line), "clinic")
    plain.fit(table.drop(columns="code"), y)
    np.testing.assert_array_equal(model.predict(table), plain.predict(table.drop(columns="code")))


def test_an_encoder_alone_makes_no_estimator_aware_of_clients():
    table, clinic = clinics()
    with pytest.raises(ValueError, match="Nothing inside Pipeline reads client ids"):
        ClientColumn(make_pipeline(TableEncoder(), Ridge()), "clinic").fit(table, clinic)


# What columns become ------------------------------------------------------------------------------


def test_every_kind_of_column():
    table = pd.DataFrame(
        {
            "n": [1, 2, 3, 4],
            "partial": [1.0, np.nan, 3.0, 8.0],
            "flag": [True, False, True, True],
            "word": ["b", "a", None, "b"],
            "size": pd.Categorical(["S", "L", "S", "M"], ["S", "M", "L"], ordered=True),
            "maybe": pd.array([True, None, False, True], dtype="boolean"),
            "count": pd.array([1, None, 5, 9], dtype="Int64"),
            "zip": pd.Categorical([10, 9, 10, 9]),
        },
        index=[7, 5, 3, 1],
    )
    found = TableEncoder(min_rows=1).fit_transform(table)
    expected = pd.DataFrame(
        {
            "n": [1, 2, 3, 4],
            "partial": [1, 3, 3, 8],
            "partial_missing": [0, 1, 0, 0],
            "flag": [1, 0, 1, 1],
            "word_b": [1, 0, 0, 1],
            "word_missing": [0, 0, 1, 0],
            "size_M": [0, 0, 0, 1],
            "size_L": [0, 1, 0, 0],
            "maybe": [1, 1, 0, 1],
            "maybe_missing": [0, 1, 0, 0],
            "count": [1, 5, 5, 9],
            "count_missing": [0, 1, 0, 0],
            "zip_10": [1, 0, 1, 0],
        },
        index=[7, 5, 3, 1],
        dtype=float,
    )
    pd.testing.assert_frame_equal(found, expected)


def strings(**counts):
    return pd.DataFrame({"w": [level for level, n in counts.items() for _ in range(n)]})


def test_rare_levels_are_one_together_with_unseen_ones():
    encoder = TableEncoder(min_rows=10).fit(strings(a=12, b=10, c=6, d=5))
    assert encoder.get_feature_names_out().tolist() == ["w_b", "w_other"]
    found = encoder.transform(pd.DataFrame({"w": ["a", "b", "c", "new", None]}))
    np.testing.assert_array_equal(found, [[0, 0], [1, 0], [0, 1], [0, 1], [0, 1]])


def test_an_unseen_level_without_others_is_the_average_row():
    encoder = TableEncoder(min_rows=10).fit(strings(a=30, b=10, c=9))
    assert encoder.get_feature_names_out().tolist() == ["w_b"]  # of c there are too few
    np.testing.assert_allclose(encoder.transform(pd.DataFrame({"w": ["new", "c"]})), 0.25)


def test_the_most_frequent_levels_are_kept_with_a_warning():
    encoder = TableEncoder(min_rows=2, max_levels=2)
    message = r"max_levels=2 levels .*: 'w' \(4 levels; 40\.0 % of the rows are merged\); raise"
    with pytest.raises(UserWarning, match=message):
        encoder.fit(strings(a=2, b=3, c=2, d=2, rare=1))
    assert not hasattr(encoder, "n_features_in_")
    with pytest.warns(UserWarning, match=message):
        encoder.fit(strings(a=2, b=3, c=2, d=2, rare=1))
    assert encoder.get_feature_names_out().tolist() == ["w_b", "w_other"]


def test_given_levels_are_never_too_many():
    encoder = TableEncoder(max_levels=2, min_rows=1, levels={"w": list("abc")}, many_levels="pass")
    names = encoder.fit(strings(a=2, b=2, c=2)).get_feature_names_out().tolist()
    assert names == ["w_b", "w_c"]


def test_few_missing_values_are_filled_without_an_indicator():
    table = pd.DataFrame({"a": [1.0, 2.0, 4.0, np.nan], "b": [1.0, 2.0, 3.0, 4.0]})
    encoder = TableEncoder(min_rows=2).fit(table)
    found = encoder.transform(pd.DataFrame({"a": [np.nan], "b": [np.nan]}))
    np.testing.assert_array_equal(found, [[2.0, 2.5]])  # b had no gap in fit


def test_names_that_come_twice():
    table = strings(a=10, other=10, rare=5, few=5).assign(w_other=1.0)
    names = TableEncoder().fit(table).get_feature_names_out().tolist()
    assert names == ["w_other", "w_other_", "w_other__"]


def test_frames_of_other_libraries_and_arrays():
    table, _ = people()
    frame = pl.DataFrame({name: table[name].to_list() for name in table})
    expected = TableEncoder().fit_transform(table)
    found = TableEncoder().fit_transform(frame)
    assert isinstance(found, pl.DataFrame)
    assert found.columns == list(expected)
    np.testing.assert_array_equal(found.to_numpy(), expected)
    encoder = TableEncoder()
    np.testing.assert_array_equal(encoder.fit_transform(table.to_numpy(dtype=object)), expected)
    assert encoder.get_feature_names_out()[:2].tolist() == ["x0_b", "x0_c"]
    asked = TableEncoder().set_output(transform="polars").fit_transform(table)
    assert asked.columns == list(expected)
    back = TableEncoder().set_output(transform="pandas").fit_transform(frame)
    pd.testing.assert_frame_equal(back, expected)


@pytest.mark.parametrize("kind", [pd.DataFrame, pl.DataFrame])
def test_rows_of_missing_values_only(kind):
    encoder = TableEncoder(min_rows=1).fit(kind({"n": [1.0, 3.0], "w": ["a", "b"]}))
    found = encoder.transform(kind({"n": [None], "w": [None]}))
    np.testing.assert_array_equal(found, [[2.0, 0.5]])


def test_ordered_categories_of_numbers():
    table = pd.DataFrame({"dose": pd.Categorical([10, 5, 20], [20, 10, 5], ordered=True)})
    encoder = TableEncoder(min_rows=1).fit(table)
    assert encoder.get_feature_names_out().tolist() == ["dose_10", "dose_5"]
    np.testing.assert_array_equal(encoder.transform(table), [[1, 0], [0, 1], [0, 0]])


@st.composite
def mixed_frames(draw):
    """Two frames of the same columns, the second with new levels and missing values."""
    n = draw(st.integers(2, 30))
    kinds = {
        "number": st.one_of(st.none(), st.floats(-1e6, 1e6)),
        "flag": st.one_of(st.none(), st.booleans()),
        "word": st.one_of(st.none(), st.sampled_from(["a", "b", "other", "missing", "a_b"])),
    }
    new = {**kinds, "word": st.one_of(st.none(), st.text(max_size=3))}
    columns = draw(st.lists(st.sampled_from(sorted(kinds)), min_size=1, max_size=5))
    names = draw(st.permutations(["w", "w_a", "w_other", "w_missing", "x"]))[: len(columns)]
    dtypes = {"number": float, "flag": "boolean", "word": object}

    def frame(of, n):
        rows = {
            name: pd.Series(draw(st.lists(of[kind], min_size=n, max_size=n)), dtype=dtypes[kind])
            for name, kind in zip(names, columns, strict=True)
        }
        return pd.DataFrame(rows)

    return frame(kinds, n), frame(new, draw(st.integers(1, 5)))


@settings(deadline=None, max_examples=10)
@given(mixed_frames(), st.integers(1, 4))
@pytest.mark.filterwarnings("ignore:TableEncoder leaves out")
def test_any_table_becomes_finite_numbers_under_the_same_names(frames, min_rows):
    encoder = TableEncoder(min_rows=min_rows).fit(frames[0])
    names = encoder.get_feature_names_out().tolist()
    assert len(set(names)) == len(names)
    for frame in frames:
        found = encoder.transform(frame)
        assert found.columns.tolist() == names
        assert len(found) == len(frame)
        assert np.isfinite(found.to_numpy()).all()


# Columns that are passed on -----------------------------------------------------------------------

PASS = TableEncoder(many_levels="pass")
LIBRARIES = {
    "pandas": pd.DataFrame,
    "category": lambda cells: pd.DataFrame(cells).astype({"state": "category"}),
    "polars": pl.DataFrame,
    "pyarrow": pa.table,
}


def states(kind="pandas", n_rows=1200):
    """Rows of people in 51 states, one of which is missing, and a response with state effects."""
    table, y = people(n_rows)
    rng = np.random.default_rng(1)
    codes = rng.integers(51, size=n_rows)
    names = [f"s{code}" for code in codes]
    columns = {name: table[name].to_list() for name in ("county", "experience")}
    cells = {**columns, "state": [None, *names[1:]], "degree": table["degree"].to_list()}
    return LIBRARIES[kind](cells), y.to_numpy() + 3 * rng.normal(size=51)[codes]


@pytest.mark.parametrize("kind", LIBRARIES)
def test_a_column_of_many_levels_is_passed_on_as_it_is(kind):
    table, _ = states(kind)
    output = clone(PASS).fit_transform(table)
    assert type(output) is type(table)
    frame, passed = nw.from_native(output), nw.from_native(table)["state"]
    assert frame.columns[-4:] == ["experience", "state", "degree_MA", "degree_PhD"]
    assert frame["state"].dtype == passed.dtype
    assert frame["state"].to_list()[1:] == passed.to_list()[1:]
    assert frame["state"].is_null().to_list() == passed.is_null().to_list()
    rest = nw.from_native(table).drop("state").to_native()
    encoded = nw.from_native(TableEncoder().fit_transform(rest))
    np.testing.assert_array_equal(frame.drop("state").to_numpy(), encoded.to_numpy())
    alone = nw.from_native(table).select("state").to_native()
    assert nw.from_native(clone(PASS).fit_transform(alone)).shape == (1200, 1)


@pytest.mark.parametrize("library", ["pandas", "polars"])
@pytest.mark.parametrize("kind", [*LIBRARIES, "array"])
def test_numbers_beside_a_passed_column_stay_numbers(kind, library):
    table, _ = states("pandas" if kind == "array" else kind)
    table = table.to_numpy(dtype=object) if kind == "array" else table
    encoder = clone(PASS).set_output(transform=library)
    frame = nw.from_native(encoder.fit_transform(table))
    assert frame.implementation.value == library
    assert frame.columns == encoder.get_feature_names_out().tolist()
    assert [dtype == nw.Float64 for dtype in frame.schema.values()] == [True] * 6 + [
        False,
        *[True] * 2,
    ]


def test_an_array_gives_an_array_of_objects():
    table, _ = states()
    encoder = clone(PASS)
    output = encoder.fit_transform(table.to_numpy(dtype=object))
    assert output.dtype == object
    at = encoder.get_feature_names_out().tolist().index("x2")
    assert pd.isna(output[0, at])
    assert output[1:, at].tolist() == table["state"][1:].tolist()


def test_new_rows_pass_with_any_values_under_their_index():
    table, _ = states()
    new = table[:3].assign(state=["unknown", None, 3]).set_axis([7, 7, 5])
    output = clone(PASS).fit(table).transform(new)
    pd.testing.assert_series_equal(output["state"], new["state"])


def test_levels_that_have_too_few_rows_do_not_pass():
    table = strings(**{f"id{k}": 1 for k in range(6)}, a=2, b=2)
    encoder = TableEncoder(min_rows=1, max_levels=4, many_levels="pass")
    with pytest.warns(
        UserWarning, match=r"'w' \(8 levels; 40\.0 % .* too many levels for their rows"
    ):
        encoder.fit(table)
    assert encoder.get_feature_names_out()[-1] == "w_other"
    assert encoder.fit(pd.concat([table] * 2)).get_feature_names_out().tolist() == ["w"]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("kind", LIBRARIES)
def test_a_model_with_groupings_takes_passed_columns(kind):
    table, y = states(kind)
    model = PersonalizedLinearRegression(random="intercept")
    pipeline = ClientColumn(make_pipeline(clone(PASS), model), column="county").fit(table, y)
    frame, _ = states()
    plain = ClientColumn(clone(model), column="county")
    encoded = TableEncoder().fit_transform(frame[["degree"]])
    expected = plain.fit(frame.drop(columns="degree").join(encoded), y)
    found = pipeline.predict(table)
    np.testing.assert_allclose(found, expected.predict(frame.drop(columns="degree").join(encoded)))
    assert np.std(y - found) < 1.1  # the noise has 1


@pytest.mark.slow
def test_searches_compare_merging_and_passing():
    table, y = states()
    model = make_pipeline(TableEncoder(), PersonalizedLinearRegression(random="intercept"))
    search = GridSearchCV(
        ClientColumn(model, column="county"),
        {"estimator__tableencoder__many_levels": ["merge", "pass"]},
        scoring="neg_mean_squared_error",
        cv=3,
    )
    with pytest.warns(UserWarning, match="'state' "):
        search.fit(table, y)
    merged, passed = -search.cv_results_["mean_test_score"]
    assert passed < merged / 2
    assert search.best_estimator_.score(table, y) > 0.8


@pytest.mark.parametrize(
    "model",
    [PersonalizedLinearRegression(groupings=None), PersonalizedLogisticRegression(groupings=None)],
    ids=repr,
)
def test_a_model_without_groupings_refuses_passed_columns(model):
    table, y = states()
    model = ClientColumn(make_pipeline(clone(PASS), model), column="county")
    with pytest.raises(ValueError, match="column 'state' of X holds strings, not numbers"):
        model.fit(table, y > 0)


# Before the models --------------------------------------------------------------------------------


def test_one_line_in_front_of_a_linear_model():
    table, y = people()
    line = PersonalizedLinearRegression(
        GaussianPrior(covariance=1.0), random=RANDOM, noise_variance=1.0
    )
    model = ClientColumn(make_pipeline(TableEncoder(), line), column="county").fit(table, y)
    terms = ["degree_MA", "degree_PhD", "married", "age", "age_missing"]
    fixed = model.summary().loc["fixed"].index.tolist()
    assert fixed == [*RANDOM, *terms]
    assert {*RANDOM} <= {*model.summary().loc["between"].index}
    X = TableEncoder().fit_transform(table.drop(columns="county"))
    plain = clone(line).fit(X, y, groups=table["county"])
    np.testing.assert_array_equal(model.predict(table), plain.predict(X, groups=table["county"]))
    new = table.assign(degree="none", age=np.nan)
    assert np.isfinite(model.predict(new)).all()


@pytest.mark.parametrize(
    "model",
    [
        PersonalizedLinearRegression(),
        PersonalizedLogisticRegression(),
        PersonalizedPoissonRegression(),
        PPSGDClassifier(n_rounds=2, random_state=0),
    ],
    ids=repr,
)
def test_a_model_that_gets_strings_names_the_column_and_the_way_out(model):
    table, y = people()
    X, y = table.drop(columns="county"), (y > 0).astype(int)
    numbers = X[["experience", "married"]]
    with pytest.raises(ValueError, match=r"'degree' of X .*TableEncoder"):
        clone(model).fit(X, y, groups=table["county"])
    model = clone(model).fit(numbers, y, groups=table["county"])
    with pytest.raises(ValueError, match=r"'experience' of X .*TableEncoder"):
        model.predict(numbers.assign(experience="x"), groups=table["county"])


# Given levels and medians -------------------------------------------------------------------------


def test_given_levels_and_medians_are_taken_as_they_are():
    table, _ = people()
    X = table.drop(columns="county")
    encoder = TableEncoder(**SPECIFIED).fit(X[:1])
    names = ["experience", "degree_MA", "degree_PhD", "married", "age", "age_missing"]
    assert encoder.get_feature_names_out().tolist() == names
    new = pd.DataFrame({"experience": [1.0], "degree": [None], "married": [True], "age": [np.nan]})
    np.testing.assert_allclose(encoder.transform(new), [[1, 1 / 3, 1 / 3, 1, 40, 1]])


def test_nothing_of_the_rows_is_kept():
    """What the encoder is after any two tables of the same columns is the same."""
    first, second = (people(seed=seed)[0].drop(columns="county") for seed in (0, 1))
    second.loc[0, ["experience", "degree"]] = [np.nan, "none"]
    states = [vars(TableEncoder(**SPECIFIED).fit(each)) for each in (first, second)]
    assert repr(states[0]) == repr(states[1])


def test_levels_of_numbers():
    table = pd.DataFrame({"school": [1.0, 2.0, np.nan, 4.0]})
    encoder = TableEncoder(levels={"school": [1, 2, 4]}, medians={})
    expected = [[0, 0], [1, 0], [1 / 3, 1 / 3], [0, 1]]
    np.testing.assert_allclose(encoder.fit_transform(table), expected)


def private(encoder):
    model = PersonalizedLinearRegression(
        GaussianPrior(covariance=1.0),
        noise_variance=1.0,
        epsilon=1.0,
        feature_bound=100.0,
        target_bound=4.0,
    )
    return ClientColumn(make_pipeline(encoder, model), column="county")


def test_what_was_given_costs_no_privacy():
    table, y = people()
    report = privacy_of(private(TableEncoder(**SPECIFIED)).fit(table, y))
    assert report.epsilon == 1.0
    assert any(
        "levels, medians and dates of step 'tableencoder'" in each for each in report.assumptions
    )


@pytest.mark.parametrize(
    "options", [{}, {"many_levels": "pass"}, *({name: SPECIFIED[name]} for name in SPECIFIED)]
)
def test_what_was_learned_is_not_covered(options):
    table, y = people()
    model = private(TableEncoder(**options)).fit(table, y)
    report = privacy_of(model)
    assert report.epsilon == math.inf
    assert any("TableEncoder" in each and "levels and medians" in each for each in report.warnings)
    model.estimator_[0].set_params(**SPECIFIED)  # too late
    assert privacy_of(model).epsilon == math.inf


def test_missing_values_without_a_given_median_stay_missing():
    found = TableEncoder(levels={}, medians={}).fit_transform(pd.DataFrame({"a": [1.0, np.nan]}))
    assert np.isnan(found.to_numpy()).tolist() == [[False], [True]]


# Codes beyond 2**53, of which neighbours are one float.
CODES = [2**53 + 1, 2**53 + 3]
HOLDERS = {
    "pandas": lambda c: pd.DataFrame({"c": c}),
    "Int64": lambda c: pd.DataFrame({"c": pd.array(c, dtype="Int64")}),
    "objects": lambda c: pd.DataFrame({"c": pd.Series(c, dtype=object)}),
    "NumPy's objects": lambda c: pd.DataFrame(
        {"c": pd.Series([v if v is None else np.int64(v) for v in c], dtype=object)}
    ),
    "category": lambda c: pd.DataFrame({"c": pd.Categorical(c)}),
    "polars": lambda c: pl.DataFrame({"c": pl.Series(c, dtype=pl.Int64)}),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_given_levels_of_large_integers_are_matched_exactly(holder):
    make = HOLDERS[holder]
    encoder = TableEncoder(levels={"c": CODES}, medians={}).fit(make(CODES))
    found = np.asarray(encoder.transform(make([*CODES, 2**53, 2**53 + 2])))
    np.testing.assert_array_equal(found, [[0.0], [1.0], [0.5], [0.5]])
    with_gap = make([*CODES, None])
    if holder == "pandas":  # which has made floats of all integers
        for call in (encoder.fit, encoder.transform):
            with pytest.raises(ValueError, match=r"'c' holds Float64.*2\*\*53.*Int64"):
                call(with_gap)
    else:
        found = np.asarray(encoder.fit_transform(with_gap))
        np.testing.assert_array_equal(found, [[0.0], [1.0], [0.5]])


def test_learned_levels_of_large_integers_beside_a_missing_value():
    table = pd.DataFrame({"c": pd.Categorical([*CODES * 2, None])})
    found = TableEncoder(min_rows=2).fit_transform(table)
    assert list(found) == [f"c_{CODES[1]}"]
    np.testing.assert_array_equal(found, [[0.0], [1.0], [0.0], [1.0], [0.5]])


def test_an_array_of_strings_where_levels_are_numbers():
    encoder = TableEncoder(levels={"x0": [1, 2]}, medians={})
    assert encoder.fit_transform(np.array([[1], [2]])).tolist() == [[0.0], [1.0]]
    with pytest.raises(ValueError, match=r"array of strings.*'x0'.*data frame"):
        encoder.fit([[1], [2], ["secret"]])


GIVEN = {"levels": {"code": CODES, "school": [1, 2], "pain": ["none", "some"]}, "medians": {"n": 1}}
TAINTED = [None, math.nan, "secret", 7, 2**53, 2**60 + 1, 2**64, -(2**63), 0.5, True, 1e308, 5e-324]


def table_of(cells, kind):
    if kind == "list":
        return [list(row) for row in zip(*cells.values(), strict=True)]
    if kind == "objects":
        return pd.DataFrame(cells, dtype=object)
    if kind == "polars":
        types = {"code": pl.Int64, "school": pl.Int64, "pain": pl.String, "n": pl.Float64}
        return pl.DataFrame(cells, schema={**types, "b": pl.Boolean})
    return pd.DataFrame(cells)


@pytest.mark.parametrize("kind", ["pandas", "objects", "polars", "list"])
@pytest.mark.parametrize("cell", TAINTED, ids=repr)
def test_one_cell_changes_no_other_row(kind, cell):
    """Of an encoder with given levels and medians, or it refuses the whole, by type."""
    cells = {
        "code": [*CODES, CODES[0]],
        "school": [1, 2, 2],
        "pain": ["none", "some", "some"],
        "n": [3, 2**53 + 1, 0],
        "b": [True, False, True],
    }
    given = GIVEN
    if kind == "list":  # of which an array would have one type
        cells = {name: cells[name] for name in ("school", "n")}
        given = {"levels": {"x0": [1, 2]}, "medians": {"x1": 1}}
    if kind == "objects":  # numbers among objects are refused without a look at them
        cells = {name: cells[name] for name in GIVEN["levels"]}
        given = {"levels": GIVEN["levels"], "medians": {}}
    encoder = TableEncoder(**given)
    plain = np.asarray(encoder.fit_transform(table_of(cells, kind)))
    refused = []
    for name in cells:
        tainted = {**cells, name: [cell, *cells[name][1:]]}
        try:
            table = table_of(tainted, kind)
        except (TypeError, OverflowError):  # polars has types of its own
            continue
        try:
            found = np.asarray(encoder.fit_transform(table))
        except ValueError as error:
            assert re.search(r"cannot be encoded: it holds|holds Float64|array of str", str(error))
            assert "secret" not in str(error)
            refused.append(name)
            continue
        np.testing.assert_array_equal(found[1:], plain[1:])
    # Only a column that pandas or NumPy made another type of is refused.
    assert kind not in ("objects", "polars") or not refused


def test_given_levels_and_medians_drop_no_column():
    """Else one string in a column of numbers would take the column away from all clients."""
    table, y = people()
    options = {"levels": {"degree": ["BA", "MA", "PhD"]}, "medians": {"age": 40.0}}
    with pytest.raises(ValueError, match=r"unsupported='drop' does not go with both levels and"):
        private(TableEncoder(**options, unsupported="drop")).fit(table, y)
    with pytest.raises(ValueError, match=r"many_levels='pass' does not go with both levels and"):
        private(TableEncoder(**options, many_levels="pass")).fit(table, y)
    tainted = table.assign(experience=["refused", *table["experience"][1:]])
    with pytest.raises(ValueError, match="'experience' of X cannot be encoded") as caught:
        private(TableEncoder(**options)).fit(tainted, y)
    assert "drop" not in str(caught.value)
    assert "refused" not in str(caught.value)
    report = privacy_of(private(TableEncoder(**options)).fit(table, y))
    assert any("types that go with them: it refuses others" in each for each in report.assumptions)


# Dates --------------------------------------------------------------------------------------------

DAYS = pd.date_range("2020-02-01", periods=12, freq="36h")
SAME_DATES = {
    "datetimes": DAYS,
    "in a zone": DAYS.tz_localize("UTC").tz_convert("Europe/Berlin"),
    "ISO strings": DAYS.strftime("%Y-%m-%d %H:%M"),
    "objects": DAYS.to_pydatetime(),
    "pyarrow": pd.Series(DAYS).astype("timestamp[us][pyarrow]"),
    "categories": pd.Categorical(DAYS.strftime("%Y-%m-%dT%H:%M:%S")),
}


@pytest.mark.parametrize("name", SAME_DATES)
@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow"])
def test_dates_are_days_since_the_first(name, library):
    table = pd.DataFrame({"a": np.arange(12.0), "when": SAME_DATES[name]})
    if library != "pandas":
        if name in ("objects", "pyarrow"):
            table["when"] = DAYS
        table = nw.from_native(table).to_arrow()
        table = pl.from_arrow(table) if library == "polars" else table
    encoder = TableEncoder().fit(table)
    assert encoder.get_feature_names_out().tolist() == ["a", "when"]
    found = nw.from_native(encoder.transform(table)).to_numpy()
    assert_allclose(found[:, 1], 1.5 * np.arange(12))


@pytest.mark.parametrize(
    ("values", "days"),
    [
        (["1/30/2020", "2/1/2020"], [0, 2]),
        (["13/1/2020", "1/2/2020"], [0, 19]),  # the day first, because no month is the 13th
        (["1/30/20", "2/1/20"], [0, 2]),
        (["Nov 6, 2016", "Nov 8, 2016"], [0, 2]),
        (["8 November 2016", "6 November 2016"], [2, 0]),
        (["2016-11", "2016-12"], [0, 30]),
        (["2016-11-06", "2016-11-06 12:00"], [0, 0.5]),
        (["2016-11-06T00:00:00Z", "2016-11-06T00:00:00-06:00"], [0, 0.25]),
        (pd.period_range("2019-02", periods=2, freq="M"), [0, 28]),
        ([datetime.date(1200, 3, 1), datetime.date(1200, 3, 3)], [0, 2]),
        (pd.to_timedelta([36, 12], unit="h"), [1.5, 0.5]),
    ],
)
def test_formats_of_dates(values, days):
    table = pd.DataFrame({"when": pd.Series(values)})
    assert_allclose(TableEncoder().fit_transform(table)["when"], days)


@pytest.mark.parametrize(
    "values",
    [
        ["10.0.0.1", "10.0.0.2"],
        ["1.2.3", "1.12.45"],
        ["2016", "2017"],
        ["20161106", "20161107"],
        ["12-34", "11-50"],
        ["10:30", "11:30"],
        ["June", "July"],
        ["route 66", "route 7"],
        ["2016-11-06", "unknown"],
    ],
)
def test_strings_that_are_no_dates(values):
    table = pd.DataFrame({"code": pd.Series(values * 10, dtype=object)})
    assert TableEncoder().fit_transform(table).columns.tolist() == [f"code_{max(values)}"]


def test_missing_dates_and_given_origins():
    table = pd.DataFrame({"when": ["2020-01-03", None, "2020-01-11"]})
    encoded = TableEncoder(min_rows=1).fit_transform(table)
    assert_allclose(encoded, [[0, 0], [4, 1], [8, 0]])
    assert encoded.columns.tolist() == ["when", "when_missing"]
    given = TableEncoder(dates={"when": "2020-01-01"}, medians={"when": 3})
    assert_allclose(given.fit_transform(table), [[2, 0], [3, 1], [10, 0]])
    as_levels = TableEncoder(levels={"when": ["2020-01-03", "2020-01-11"]})
    assert as_levels.fit_transform(table).columns.tolist() == ["when_2020-01-11"]
    encoder = TableEncoder(min_rows=1).fit(table)
    later = pd.DataFrame({"when": pd.to_datetime(["2020-01-04", None])})
    assert_allclose(encoder.transform(later), [[1, 0], [4, 1]])
    assert_allclose(encoder.transform(pd.DataFrame({"when": [np.nan]})), [[4, 1]])
    with pytest.raises(ValueError, match="holds 'soon', which is no date; fit saw strings of the"):
        encoder.transform(pd.DataFrame({"when": ["soon"]}))
    with pytest.raises(ValueError, match="'when' of X holds numbers; fit saw dates"):
        encoder.transform(pd.DataFrame({"when": [3.0]}))


def test_a_private_fit_needs_the_origin_of_dates():
    table = pd.DataFrame({"when": ["2020-01-03", "nobody", "1/2/2020"], "a": [1.0, 2.0, 3.0]})
    private = {"levels": {}, "medians": {"when": 5.0}}
    given = TableEncoder(**private, dates={"when": datetime.date(2020, 1, 1)}).fit(table)
    assert_allclose(given.transform(table), [[2, 0, 1], [5, 1, 2], [5, 1, 3]])
    one = pd.concat([given.transform(table[k : k + 1]) for k in range(3)])
    assert_allclose(given.transform(table), one)
    with pytest.raises(ValueError, match=r"holds datetime64.*neither levels nor dates names it"):
        TableEncoder(**private).fit(pd.DataFrame({"when": DAYS}))


def test_models_and_stacks_take_dates_alike():
    rng = np.random.default_rng(0)
    when = pd.Timestamp("2020-01-01") + pd.to_timedelta(rng.integers(0, 400, 300), unit="D")
    groups = rng.integers(0, 10, 300)
    y = 5.0 * (when > "2020-06-01") + rng.normal(size=300) + groups
    tables = [pd.DataFrame({"when": when}), pd.DataFrame({"when": when.strftime("%Y-%m-%d")})]
    line = make_pipeline(TableEncoder(), PersonalizedLinearRegression(random="intercept"))
    for model in (line, PersonalizedStackingRegressor(cv=3, random_state=0)):
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            fits = [
                ClientColumn(model, column="who").fit(table.assign(who=groups), y)
                for table in tables
            ]
        first, second = (
            fit.predict(table.assign(who=groups)) for fit, table in zip(fits, tables, strict=True)
        )
        assert_allclose(first, second)
    assert np.sqrt(np.mean((first - y) ** 2)) < 1.5
    with pytest.raises(ValueError, match=r"'when' of X holds strings.*TableEncoder"):
        PersonalizedLinearRegression().fit(tables[1], y, groups=groups)
    with pytest.raises(ValueError, match=r"'when' of X holds dates or times.*TableEncoder"):
        PersonalizedLinearRegression().fit(tables[0], y, groups=groups)


# Bad input ----------------------------------------------------------------------------------------

UNSUPPORTED = {
    "times": [datetime.time(12)] * 12,
    "mixed": [1, "a"] * 6,
    "lists": [[1]] * 12,
    "infinite": [np.inf] * 12,
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_columns_that_cannot_be_encoded(name):
    table = pd.DataFrame({"a": np.arange(12.0), name: UNSUPPORTED[name]})
    with pytest.raises(ValueError, match=f"column '{name}' of X cannot be encoded"):
        TableEncoder().fit(table)
    with pytest.warns(UserWarning, match=f"leaves out columns of X: '{name}'"):
        encoder = TableEncoder(unsupported="drop").fit(table)
    assert encoder.get_feature_names_out().tolist() == ["a"]
    assert list(encoder.dropped_) == [name]


@pytest.mark.parametrize(
    "column", [[None] * 12, [np.nan] * 12, ["a"] * 12, [f"id{k}" for k in range(12)]]
)
def test_columns_that_say_nothing(column):
    table = pd.DataFrame({"a": np.arange(12.0), "b": column})
    with pytest.warns(UserWarning, match="leaves out columns of X: 'b'"):
        found = TableEncoder().fit(table).transform(table)
    assert list(found) == ["a"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": ["a"] * 12}, "'n' of X holds strings; fit saw numbers"),
        ({"w": [1.0] * 12}, "'w' of X holds numbers such as 1.0; fit saw levels such as 'a'"),
        ({"n": [np.inf] * 12}, "'n' of X has infinite values"),
        ({"n": pd.to_datetime(["2020-01-01"] * 12)}, "'n' of X holds dates; fit saw numbers"),
        ({"w": pd.to_datetime(["2020-01-01"] * 12)}, "'w' of X holds dates; fit saw strings"),
        ({"w": pd.to_timedelta([1] * 12)}, "'w' of X holds numbers such as"),
    ],
)
def test_columns_of_another_kind_than_in_fit(change, message):
    table = pd.DataFrame({"n": np.arange(12.0), "w": ["a", "b"] * 6})
    encoder = TableEncoder(min_rows=2).fit(table)
    with pytest.raises(ValueError, match=message):
        encoder.transform(table.assign(**change))


def test_two_columns_of_one_name():
    table = pd.DataFrame(np.eye(3), columns=["a", "b", "a"])
    with pytest.raises(ValueError, match="2 columns of X are called 'a'"):
        TableEncoder().fit(table)


def test_a_table_without_rows():
    with pytest.raises(ValueError, match="X has 0 rows"):
        TableEncoder().fit(pd.DataFrame({"a": pd.Series([], dtype=float)}))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"levels": {"z": ["a", "b"]}}, "levels has 'z', which is no column of X"),
        ({"dates": {"z": "2020-01-01"}}, "dates has 'z', which is no column of X"),
        ({"dates": {"w": "soon"}}, "dates has 'soon' for 'w'; expected a date"),
        ({"dates": {"w": 2020}}, "dates has 2020 for 'w'; expected a date"),
        (
            {"dates": {"w": "2020-01-01"}},
            "'w' of X .* dates names it, and it holds strings of no",
        ),
        ({"medians": {"z": 1.0}}, "medians has 'z', which is no column of X"),
        ({"levels": {"w": ["a"]}}, "levels of 'w' must be two or more"),
        ({"levels": {"w": "ab"}}, "levels of 'w' must be two or more"),
        ({"levels": {"w": ["a", None]}}, "levels of 'w' must be two or more"),
        ({"levels": {"w": ["a", "b"]}, "medians": {"w": 1.0}}, "'w' is in levels and in medians"),
        ({"medians": {"n": np.nan}}, "medians has nan for 'n'"),
        (
            {"levels": {}, "medians": {}},
            "'w' of X .* neither levels nor dates names it",
        ),
    ],
)
def test_levels_and_medians_that_fit_no_column(given, message):
    table = pd.DataFrame({"n": np.arange(12.0), "w": ["a", "b"] * 6})
    with pytest.raises(ValueError, match=message):
        TableEncoder(**given).fit(table)
